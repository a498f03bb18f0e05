"""The cost of a mirror to training: steps while checkpoints are copied beside steps while the copy is stopped.

``python benchmarks/mirror_cost.py`` trains a small network on one core and runs the mirroring process of a run beside
it. The process copies checkpoints without a pause, which is the worst case; signals stop and continue it between
stretches of steps. Prints a table with the time of a step on the clock and on the processor, paired, with the 95 %
confidence interval of the median, and the CPU time of the process per GB. Target: 1 % of the time of a step.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.own_processes import python_command
from scaletrain_cli.plan import make_plan
from scaletrain_cli.rundir.checkpoints import FileDigest
from scaletrain_cli.rundir.mirror_state import read_mirror_state
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec import parse_spec
from scaletrain_cli.worker.checkpoint_commit import (
    HashingWriter,
    commit_checkpoint,
    open_attempt,
    remove_checkpoint,
    stage_checkpoint,
)

ALLOWED = 0.01
_TURNS = ("off", "on", "on", "off")  # a drift of the machine's speed cancels out
_SPEC = """
schema: scaletrain/v1
name: mirror-cost
model: {{family: llama, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1, intermediate_size: 8,
        vocab_size: 64, seq_len: 8}}
data: {{source: python-stdlib, tokenizer: {{kind: bpe, vocab_size: 64}}}}
training: {{global_batch_size: 4, micro_batch_size: 4, steps: 100, precision: fp32}}
cluster: {{scheduler: local, gpus_per_node: 1, gpu: cpu}}
checkpoint: {{mirror: {{to: {to}, bandwidth: {bandwidth}, keep: 1}}}}
"""


class Checkpoints:
    """Commits the same files again and again as new steps, so that the mirroring process always has one to copy."""

    def __init__(self, run: RunDir, size: int) -> None:
        self._run, self.size, self.copied = run, size, 0
        self._step = 0
        open_attempt(run.checkpoints, 1)

    def commit(self) -> None:
        """Commit the next checkpoint; its first bytes differ from those before."""
        self._step += 1
        staging = stage_checkpoint(self._run.checkpoints, 1, self._step)
        writer, draw = HashingWriter(staging / "rank-00000.safetensors"), random.Random(self._step)
        block = draw.randbytes(1 << 20)
        for _ in range(self.size >> 20):
            writer.write(block)
        files: dict[str, FileDigest] = {"rank-00000.safetensors": writer.close()}
        commit_checkpoint(self._run.checkpoints, self._step, files, world_size=1, clean=True, attempt=1)
        if self._step > 2:
            remove_checkpoint(self._run.checkpoints / f"step-{self._step - 2:08d}", 1)

    def commit_when_copied(self) -> bool:
        """Commit another checkpoint if the newest one is in the mirror; return whether it was."""
        state = read_mirror_state(self._run)
        if state is None or state.step != self._step:
            return False
        self.copied += self.size
        self.commit()
        return True


def training_step() -> Callable[[], None]:
    """Return a function that trains a small network for one step, on one core."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(8, 64, 256)

    def step() -> None:
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def stretch(step: Callable[[], None], steps: int) -> tuple[float, float]:
    """Return the seconds of a step on the clock and on the processor, the medians of a stretch."""
    walls, cpus = [], []
    for _ in range(steps):
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return statistics.median(walls), statistics.median(cpus)


def median_with_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Return the lower end, the median and the upper end of the 95 % bootstrap confidence interval of the median."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], statistics.median(values), medians[1949]


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Measure and print the table; return 1 if a step takes over 1 % more CPU time while checkpoints are copied."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="of four stretches each")
    parser.add_argument("--stretch", type=int, default=15, help="steps of a stretch")
    parser.add_argument("--bandwidth", default="100MB/s")
    parser.add_argument("--megabytes", type=int, default=256, help="of a checkpoint")
    parser.add_argument("--to", help="the mirror (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        to = options.to or f"{folder}/mirror"
        text = _SPEC.format(to=to, bandwidth=options.bandwidth)
        spec = parse_spec(text, file="mirror-cost.yaml", base_dir=Path(folder))
        made = create_run(spec, make_plan(spec), root=Path(folder) / "runs")
        checkpoints = Checkpoints(made.run, options.megabytes << 20)
        checkpoints.commit()
        command = python_command(
            "scaletrain_cli.launch.mirroring", str(made.run.path), "--parent-pid", str(os.getpid())
        )
        mirroring = subprocess.Popen(command, stdin=subprocess.PIPE)
        try:
            added, base = measured(mirroring, checkpoints, options)
            spent, copied = processor_time(mirroring.pid, checkpoints)
        finally:
            mirroring.kill()
            mirroring.wait()
    print("# What a mirror costs training\n")
    cores, load = os.cpu_count(), os.getloadavg()[1]
    print(f"Made by `python benchmarks/mirror_cost.py {' '.join(sys.argv[1:])}` on {cores} cores, load {load:.1f}.\n")
    print("| a step | without | more while a checkpoint is copied | 95 % |")
    print("|---|---:|---:|---:|")
    middles = {}
    for name in ("clock", "processor"):
        low, middles[name], high = median_with_interval(added[name])
        print(f"| {name} | {1e3 * base[name]:.2f} ms | {middles[name]:+.2%} | {low:+.2%} to {high:+.2%} |")
    rate = f"{1e9 * spent / copied:.2f} s of CPU time per GB"
    print(f"\n{copied / 1e9:.2f} GB were copied at most {options.bandwidth}: {rate} in the mirroring process,")
    print("which has the lowest priority.")
    return int(middles["processor"] > ALLOWED)


def processor_time(pid: int, checkpoints: Checkpoints) -> tuple[float, int]:
    """Return the CPU time of the process for some checkpoints, and their bytes."""
    while not checkpoints.commit_when_copied():
        time.sleep(0.1)
    began, before = cpu_seconds(pid), checkpoints.copied
    while checkpoints.copied - before < 2 * checkpoints.size:
        checkpoints.commit_when_copied()
        time.sleep(0.1)
    return cpu_seconds(pid) - began, checkpoints.copied - before


def measured(
    mirroring: subprocess.Popen[bytes], checkpoints: Checkpoints, options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return what each round added to the time of a step, as a share, and the median time of a step without."""
    step = training_step()
    stretch(step, options.stretch)
    while not checkpoints.commit_when_copied():
        time.sleep(0.1)
    added: dict[str, list[float]] = {"clock": [], "processor": []}
    without: dict[str, list[float]] = {"clock": [], "processor": []}
    for _ in range(options.rounds):
        times: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
        for turn in _TURNS:
            mirroring.send_signal(signal.SIGSTOP if turn == "off" else signal.SIGCONT)
            if turn == "on":
                checkpoints.commit_when_copied()
            times[turn].append(stretch(step, options.stretch))
        for clock, name in enumerate(added):
            off, on = (statistics.mean(pair[clock] for pair in times[turn]) for turn in ("off", "on"))
            added[name].append(on / off - 1)
            without[name].append(off)
        mirroring.send_signal(signal.SIGCONT)
    return added, {name: statistics.median(values) for name, values in without.items()}


if __name__ == "__main__":
    sys.exit(main())
