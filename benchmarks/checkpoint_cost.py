"""The cost of checkpoints: seconds that one blocks the loop, beside the bare copy, and the remaining speed.

One run of one rank, in which stretches with a save and stretches without take turns. Prints a table.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from scaletrain_cli.engine.assembly import assemble
from scaletrain_cli.engine.checkpoint.schedule import CheckpointSchedule
from scaletrain_cli.engine.faults import Faults
from scaletrain_cli.engine.process_group import Ranks
from scaletrain_cli.launch.attempts import begin_attempt
from scaletrain_cli.launch.node.ranks import free_port
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.reliability.durability import best_interval_steps
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.spec import RunSpec, parse_spec
from scaletrain_cli.worker.heartbeat import Heartbeat
from scaletrain_cli.worker.signals import PreemptionFlag

_SPEC = """
schema: scaletrain/v1
name: checkpoint-cost
model: {{family: llama, hidden_size: 512, num_hidden_layers: 6, num_attention_heads: 8, num_key_value_heads: 8,
        intermediate_size: 1408, vocab_size: 8192, seq_len: 64}}
data: {{source: python-stdlib, tokenizer: {{vocab_size: 8192}}}}
training: {{global_batch_size: 4, micro_batch_size: 4, steps: {steps}, precision: fp32, schedule: {{warmup_steps: 5}}}}
evaluation: {{every: 0}}
layout: {{zero_stage: {stage}}}
cluster: {{gpu: {gpu}, gpus_per_node: 1, mean_time_between_interruptions: 3h}}
checkpoint: {{every: 1000000, keep: 1}}
"""
_BETWEEN_INTERRUPTIONS_SECONDS = 3 * 3600.0
_MOST_BEYOND_COPY_SECONDS = 0.05
_LARGEST_OVERHEAD = 0.01


class Stopwatch(Faults):
    """Told before each step, and does no harm; ``moments`` are those at which a stretch of ``steps`` began."""

    def __init__(self, steps: int) -> None:
        super().__init__("", 0, 1)
        self._steps = steps
        self.moments: list[float] = []

    def before_step(self, step: int) -> None:
        if (step - 1) % self._steps == 0:
            self.moments.append(time.perf_counter())


class EverySecondStretch(CheckpointSchedule):
    """A save at the start of every second stretch."""

    def __init__(self, stretch: int) -> None:
        super().__init__(2 * stretch, 2 * stretch, None)


def main() -> int:
    """Train, and print the table; exit code 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=16, help="stretches with a save, and as many without")
    parser.add_argument("--stretch", type=int, default=12, help="steps of each")
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--gpu", default="cpu", help="cpu, or the catalogue's name of a GPU here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCALETRAIN_RUNS"] = folder
        steps = 2 * options.stretch * (options.pairs + 1)
        text = _SPEC.format(steps=steps, stage=options.zero_stage, gpu=options.gpu)
        return _report(*_train(parse_spec(text, file="benchmark", base_dir=Path()), options.stretch))


def _train(spec: RunSpec, stretch: int) -> tuple[list[dict[str, float]], list[float], int]:
    """The events of all saves, seconds of all stretches, and steps of each."""
    run = create_run(spec, make_plan(spec)).run
    attempt = begin_attempt(run, spec, scheduler="local", job_id="benchmark", nodes=("here",))
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(free_port("127.0.0.1"))}
    with contextlib.redirect_stdout(io.StringIO()):
        ranks = Ranks.from_environment()
        trainer = assemble(run, read_record(run), ranks, attempt, PreemptionFlag(), Heartbeat(None))
        watch = Stopwatch(stretch)
        trainer.faults = watch
        trainer.step_sync.schedule = EverySecondStretch(stretch)
        trainer.fit()
    saves = [event for event in read_events(run) if event["event"] == "checkpoint"]
    return saves, [after - before for before, after in pairwise(watch.moments)], stretch


def _report(saves: list[dict[str, float]], stretches: list[float], stretch: int) -> int:
    # Stretches 0 and 1 are the run's first, without a save; from the third on every first of two has one.
    pairs = list(zip(stretches[2::2], stretches[3::2], strict=False))
    added = statistics.median(with_save - without for with_save, without in pairs)
    without = statistics.median(without for _, without in pairs)
    step = without / stretch
    beyond = [save["blocked_seconds"] - save["copy_seconds"] for save in saves[:-1]]  # the last one waits, at the end
    first, later = beyond[0], beyond[1:]
    blocked = statistics.median(save["blocked_seconds"] for save in saves[:-1])
    whole = statistics.median(save["seconds"] for save in saves[:-1])
    cost = max(added, blocked)
    interval = best_interval_steps(step, max(whole, cost), cost, 1 / _BETWEEN_INTERRUPTIONS_SECONDS) * step
    overhead = cost / interval
    rows = [
        ("checkpoint", f"{saves[0]['bytes'] / 1e6:.0f} MB, {len(beyond)} saves", ""),
        ("copy off the device, median", f"{statistics.median(s['copy_seconds'] for s in saves[:-1]) * 1e3:.1f} ms", ""),
        ("blocked beyond the copy, first save", f"{first * 1e3:.1f} ms", "<= 50 ms"),
        ("blocked beyond the copy, worst of the others", f"{max(later) * 1e3:.1f} ms", "<= 50 ms"),
        ("until it is committed, median", f"{whole:.2f} s", ""),
        ("added to training by a save, median of pairs", f"{added * 1e3:.0f} ms of {without:.2f} s", ""),
        ("best interval at an interruption every 3 h", f"{interval:.0f} s", ""),
        ("overhead at that interval", f"{100 * overhead:.2f} %", "<= 1 %"),
    ]
    print("| what | measured | target |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return int(max(beyond) > _MOST_BEYOND_COPY_SECONDS or overhead > _LARGEST_OVERHEAD)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # destructors of process groups wait for nothing
