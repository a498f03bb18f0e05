"""The cost of checkpoints: seconds that one blocks the loop, beside the bare copy, and the remaining speed.

One run of one rank, in which stretches with a save and stretches without take turns. Prints a table. With
``--in-memory`` the state is copied to host memory after each step of every second stretch, in place of a save.
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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from scaletrain_cli.data.prepared import prepare_run_datasets
from scaletrain_cli.engine.assembly import assemble
from scaletrain_cli.engine.checkpoint.memory_copies import MemoryCopies
from scaletrain_cli.engine.checkpoint.schedule import CheckpointSchedule
from scaletrain_cli.engine.faults import Faults
from scaletrain_cli.engine.process_group import Ranks
from scaletrain_cli.launch.attempts import begin_attempt
from scaletrain_cli.launch.node.ranks import free_port
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.reliability.durability import best_interval_steps
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import copies_folder
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.spec import RunSpec, parse_spec
from scaletrain_cli.worker.heartbeat import Heartbeat
from scaletrain_cli.worker.memory_copies import remove_copies
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
checkpoint: {{every: 1000000, keep: 1, in_memory: {in_memory}}}
"""
_BETWEEN_INTERRUPTIONS_SECONDS = 3 * 3600.0
MOST_BEYOND_COPY_SECONDS = 0.05
LARGEST_OVERHEAD = 0.01


class Stopwatch(Faults):
    """Told before each step, and does no harm; ``moments`` are those at which a stretch of ``steps`` began."""

    def __init__(self, steps: int) -> None:
        super().__init__("", 0, 1)
        self._steps = steps
        self.moments: list[float] = []

    def before_step(self, step: int) -> None:
        if (step - 1) % self._steps == 0:
            self.moments.append(time.perf_counter())


def copies_in_every_second_stretch(copies: MemoryCopies, stretch: int) -> None:
    """Have a copy made after each step of every second stretch."""
    copies.is_due = lambda step: step > 0 and step // stretch % 2 == 0  # type: ignore[method-assign]


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
    parser.add_argument("--in-memory", action="store_true", help="copies in host memory in place of saves")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCALETRAIN_RUNS"] = folder
        steps = 2 * options.stretch * (options.pairs + 1)
        kind = {"stage": options.zero_stage, "gpu": options.gpu, "in_memory": 1 if options.in_memory else "off"}
        text = _SPEC.format(steps=steps, **kind)
        spec = parse_spec(text, file="benchmark", base_dir=Path())
        saves, stretches = train_with_saves(spec, options.stretch)
        if options.in_memory:
            print_cost_of_copies(saves, stretches, options.stretch)
            return 0
        cost = cost_of_saves(saves, stretches, options.stretch)
    print("| what | measured | target |\n|---|---|---|")
    for row in cost.rows():
        print(f"| {' | '.join(row)} |")
    return int(cost.misses)


@dataclass(frozen=True)
class SaveCost:
    """The cost of saves to a run, in seconds. ``blocked_*``: beyond the copy; the others are medians."""

    bytes: int
    saves: int
    copy: float
    blocked_first: float
    blocked_worst: float  # of all but the first
    whole: float
    added: float  # to training by a save, and at least the median time that one blocked
    stretch: float
    interval: float

    @property
    def overhead(self) -> float:
        """Return the share of time that saves take at the best interval."""
        return self.added / self.interval

    @property
    def misses(self) -> bool:
        """Return True if a target is missed."""
        blocked = max(self.blocked_first, self.blocked_worst)
        return blocked > MOST_BEYOND_COPY_SECONDS or self.overhead > LARGEST_OVERHEAD

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the lines of a table: what, measured, target."""
        return [
            ("checkpoint", f"{self.bytes / 1e6:.0f} MB, {self.saves} saves", ""),
            ("copy off the device, median", f"{self.copy * 1e3:.1f} ms", ""),
            ("blocked beyond the copy, first save", f"{self.blocked_first * 1e3:.1f} ms", "<= 50 ms"),
            ("blocked beyond the copy, worst of the others", f"{self.blocked_worst * 1e3:.1f} ms", "<= 50 ms"),
            ("until it is committed, median", f"{self.whole:.2f} s", ""),
            ("added to training by a save, median of pairs", f"{self.added * 1e3:.0f} ms of {self.stretch:.2f} s", ""),
            ("best interval at an interruption every 3 h", f"{self.interval:.0f} s", ""),
            ("overhead at that interval", f"{100 * self.overhead:.2f} %", "<= 1 %"),
        ]


def train_with_saves(spec: RunSpec, stretch: int) -> tuple[list[dict[str, float]], list[float]]:
    """Train here with a save in every second stretch; return the events of all saves, and seconds of all stretches."""
    run = create_run(spec, make_plan(spec)).run
    prepare_run_datasets(spec, run.path.parent, {}, 1, lambda *_: None)
    attempt = begin_attempt(run, spec, scheduler="local", job_id="benchmark", nodes=("here",))
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(free_port("127.0.0.1"))}
    with contextlib.redirect_stdout(io.StringIO()):
        ranks = Ranks.from_environment()
        trainer = assemble(run, read_record(run), ranks, attempt, PreemptionFlag(), Heartbeat(None))
        watch = Stopwatch(stretch)
        trainer.faults = watch
        if trainer.checkpointer.copies is not None:
            copies_in_every_second_stretch(trainer.checkpointer.copies, stretch)
        else:
            trainer.step_sync.schedule = EverySecondStretch(stretch)
        trainer.fit()
    remove_copies(copies_folder(run))
    saves = [event for event in read_events(run) if event["event"] in ("checkpoint", "memory-copies")]
    return saves, [after - before for before, after in pairwise(watch.moments)]


def print_cost_of_copies(events: list[dict[str, float]], stretches: list[float], stretch: int) -> None:
    """Print what a copy in host memory after each step costs; ``stretches``: as for ``cost_of_saves``."""
    pairs = list(zip(stretches[2::2], stretches[3::2], strict=False))
    added = statistics.median(with_copies - without for with_copies, without in pairs) / stretch
    step = statistics.median(without for _, without in pairs) / stretch
    size = next(event["bytes"] for event in events if "bytes" in event)
    print("| what | measured |\n|---|---|")
    print(f"| state | {size / 1e6:.0f} MB, step of {step * 1e3:.0f} ms without copies |")
    print(f"| added to a step by a copy | {added * 1e3:.0f} ms |")
    print(f"| steps between copies at which they cost 1 % | {max(1.0, added / step / 0.01):.0f} |")


def cost_of_saves(saves: list[dict[str, float]], stretches: list[float], stretch: int) -> SaveCost:
    """Return the cost; ``stretches`` are of ``stretch`` steps, and the first has no save. At least two pairs."""
    # Stretches 0 and 1 are the run's first, without a save; from the third on every first of two has one.
    pairs = list(zip(stretches[2::2], stretches[3::2], strict=False))
    added = statistics.median(with_save - without for with_save, without in pairs)
    without = statistics.median(without for _, without in pairs)
    step = without / stretch
    measured = saves[:-1]  # the last one waits, at the end
    beyond = [save["blocked_seconds"] - save["copy_seconds"] for save in measured]
    blocked = statistics.median(save["blocked_seconds"] for save in measured)
    whole = statistics.median(save["seconds"] for save in measured)
    cost = max(added, blocked)
    interval = best_interval_steps(step, max(whole, cost), cost, 1 / _BETWEEN_INTERRUPTIONS_SECONDS) * step
    return SaveCost(
        bytes=int(saves[0]["bytes"]),
        saves=len(beyond),
        copy=statistics.median(save["copy_seconds"] for save in measured),
        blocked_first=beyond[0],
        blocked_worst=max(beyond[1:]),
        whole=whole,
        added=cost,
        stretch=without,
        interval=interval,
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # destructors of process groups wait for nothing
