"""The time from the death of a rank, or the loss of a node, to the next optimizer step, by part, often in one run.

``python benchmarks/restart.py`` trains a small network on this machine, ``--scheduler slurm`` on the nodes of the
Slurm that ``sbatch`` reaches (``slurm/dev_cluster.py`` starts one on this machine). Kills a rank by SIGKILL, the
ranks in turn, each time once the attempt has committed a checkpoint and at another step between two of them, and
prints a table of the seconds since the kill at which all nodes knew of it, the attempt had ended, the next one had
begun, its last rank had started, and its first step was done; with the requeues that Slurm counts, and the steps
lost. Target: 5 s for a step (median), without a requeue. ``--every`` sets the steps between checkpoints,
``--in-memory`` those between copies in host memory, of which a kill may lose no more.

``--lose-nodes DIR``, with the folder of a cluster of ``slurm/dev_cluster.py --netns`` of four nodes and one more for
each loss, cuts the network of a node of four instead, which a spare node replaces. Targets: noticed within 10 s, and
15 s from there.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from scaletrain_cli.launch.attempts import AttemptRecord, newest_checkpoint_step, read_attempts
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.rundir.journal import read_events, read_metrics
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record

_SIZES = {
    "tiny": "hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 128, vocab_size: 512",
    "10M": "hidden_size: 256, num_hidden_layers: 8, num_attention_heads: 4, intermediate_size: 688, vocab_size: 4096",
}
_SPEC = """
schema: scaletrain/v1
name: restart
model: {{family: llama, {size}, seq_len: 64}}
data: {{source: python-stdlib, tokenizer: {{kind: bpe, vocab_size: 512}}}}
training: {{global_batch_size: 4, micro_batch_size: 2, steps: 1000000, precision: fp32, schedule: {{name: constant}}}}
evaluation: {{every: 0}}
layout: {{zero_stage: 1}}
cluster: {cluster}
checkpoint: {{every: {every}, in_memory: {in_memory}}}
restarts: {{crash: 1000, node: 1000}}
"""
_CLUSTERS = {
    "local": "{scheduler: local, gpus_per_node: 2, gpu: cpu}",
    "slurm": "{scheduler: slurm, nodes: 2, gpus_per_node: 1, gpu: cpu, slurm: {time: 2h}}",
    "spare": "{scheduler: slurm, nodes: 4, spare_nodes: SPARE, gpus_per_node: 1, gpu: cpu, slurm: {time: 2h}}",
}
_DEV_CLUSTER = Path(__file__).parents[1] / "slurm" / "dev_cluster.py"
_GOLDEN = 0.618  # spreads the kills over the steps between two checkpoints
_PARTS = ("noticed", "attempt ended", "next one began", "ranks started", "first step", "steps lost")


def newest(run: RunDir) -> AttemptRecord:
    """Return the newest attempt, which may not have begun yet: then wait for it."""
    while not (attempts := read_attempts(run)):
        time.sleep(0.1)
    return attempts[-1]


def first_step(run: RunDir, attempt: int) -> float | None:
    """Return when the first step of an attempt was done (Unix time); None if none is."""
    lines = (line for line in read_metrics(run) if line.get("attempt") == attempt and "loss" in line)
    return next((float(line["time"]) for line in lines), None)


def hurt_and_wait(run: RunDir, kill: int, cluster: Path | None) -> list[float]:
    """Kill a rank, or cut off a node, of the newest attempt once it has saved.

    Return the seconds of each part since, and the steps lost. ``cluster``: the folder of the dev cluster of which to
    cut off a node.
    """
    before = newest(run)
    spec = read_record(run).spec
    while (saved := newest_checkpoint_step(run, spec) or 0) <= (before.checkpoint_at_start or 0):
        time.sleep(0.1)
    later = saved + int(kill * _GOLDEN % 1 * int(spec.checkpoint.every))
    while max((int(line["step"]) for line in read_metrics(run)), default=0) < later:
        time.sleep(0.01)
    pids = [rank.pid for node in read_node_records(run, before.number) for rank in node.ranks]
    began = time.time()
    control, place = [sys.executable, str(_DEV_CLUSTER)], ["--dir", str(cluster)]
    if cluster is None:
        os.kill(pids[kill % len(pids)], signal.SIGKILL)
    else:
        subprocess.run([*control, "node-down", before.nodes[-1], "--cut", *place], check=True)
    while (step := first_step(run, before.number + 1)) is None:
        time.sleep(0.1)
    if cluster is not None:  # else Slurm would wait for it at the end of the job
        subprocess.run([*control, "node-up", before.nodes[-1], *place], check=True)
    ended = next(attempt.ended for attempt in read_attempts(run) if attempt.number == before.number)
    ranks = [rank.started for node in read_node_records(run, before.number + 1) for rank in node.ranks]
    noticed = (run.attempt(before.number) / "failed").stat().st_mtime
    lost = [event["lost_steps"] for event in read_events(run) if event["event"] == "resumed"]
    moments = [moment - began for moment in (noticed, ended or began, newest(run).started, max(ranks), step)]
    return [*moments, float(lost[-1])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="Measure the time from the death of a rank to the next step.")
    parser.add_argument("--scheduler", choices=tuple(_CLUSTERS), default="local")
    parser.add_argument("--size", choices=tuple(_SIZES), default="tiny")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--in-memory", default="off")
    parser.add_argument("--lose-nodes", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        spec, program = Path(folder) / "restart.yaml", [sys.executable, "-m", "scaletrain_cli"]
        kind = "spare" if options.lose_nodes else options.scheduler
        cluster = _CLUSTERS[kind].replace("SPARE", str(options.kills))
        saves = {"every": options.every, "in_memory": options.in_memory}
        spec.write_text(_SPEC.format(size=_SIZES[options.size], cluster=cluster, **saves))
        environment = {**os.environ, "SCALETRAIN_RUNS": folder}
        submit = [*program, "submit", str(spec), "--yes", "--run-id", "restart"]
        subprocess.run(submit, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        run = RunDir(Path(folder) / "restart")
        try:
            rows = [hurt_and_wait(run, kill, options.lose_nodes) for kill in range(options.kills)]
            requeues = "none, as there is no queue"
            if kind != "local":
                job = subprocess.run(["scontrol", "show", "job", newest(run).job_id], capture_output=True, text=True)
                requeues = "".join(re.findall(r"Restarts=(\d+)", job.stdout))
        finally:
            subprocess.run([*program, "cancel", "restart", "--yes"], env=environment, stdout=subprocess.DEVNULL)
            subprocess.run([*program, "status", "restart", "--wait", "10m"], env=environment, stdout=subprocess.DEVNULL)
    print(f"{kind}, {options.size} model, {options.kills} times, requeues: {requeues}")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print("| seconds from the kill until | median | fastest | slowest |\n|---|---|---|---|")
    for part, seconds in zip(_PARTS, zip(*rows, strict=True), strict=True):
        print(f"| {part} | {statistics.median(seconds):.1f} | {min(seconds):.1f} | {max(seconds):.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
