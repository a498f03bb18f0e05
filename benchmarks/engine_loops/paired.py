"""One rank of a paired measurement: ``python -m engine_loops.paired RUN_DIR BLOCK``; rank 0 prints a line of JSON.

The engine trains a real run with its own loop. Every BLOCK steps, at the point of a step where faults are injected, it
is paused, and each rival loop trains as many steps in the same process, so that the loops alternate.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from engine_loops.rivals import Loop, bare_deepspeed, elements_of, plain_ddp
from engine_loops.same_work import ddp_same_work, deepspeed_same_work
from scaletrain_cli.engine.assembly import assemble
from scaletrain_cli.engine.faults import Faults
from scaletrain_cli.engine.process_group import Ranks
from scaletrain_cli.log_setup import set_up_logging
from scaletrain_cli.rundir.journal import read_lines, read_metrics
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.worker.heartbeat import HEARTBEAT_VARIABLE, Heartbeat
from scaletrain_cli.worker.signals import PreemptionFlag, die_with_agent

# Relative difference of the mean loss of equal batches. In fp32 other tokens differ by more; with 16-bit weights the
# rounding differs by as much, so that the check there finds only other weights.
_ROUNDING = {"fp32": 1e-5, "bf16": 3e-3, "fp16": 3e-3}
_COMPARED_STEPS = 8  # of the loops that do the same work; later on the rounding differs by more
_RIVALS = {
    "DeepSpeed, bare": bare_deepspeed,
    "DDP, bare": plain_ddp,
    "DeepSpeed, same work": deepspeed_same_work,
    "DDP, same work": ddp_same_work,
}


class Moment(NamedTuple):
    """Seconds of the wall clock, and of this process on the processor."""

    wall: float
    processor: float

    def since(self, earlier: Moment) -> Moment:
        return Moment(self.wall - earlier.wall, self.processor - earlier.processor)


@dataclass
class TakingTurns(Faults):
    """Replaces fault injection, which is not used here."""

    block: int
    rivals: Mapping[str, Loop]
    device: torch.device
    seconds: dict[str, list[Moment]] = field(default_factory=dict)
    _began: Moment | None = None

    save_delay_seconds = 0.0

    def __post_init__(self) -> None:
        super().__init__("", 0, 1)

    def before_step(self, step: int) -> None:
        """End the engine's block, run the rivals' blocks, and start the engine's next one."""
        if (step - 1) % self.block:
            return
        if self._began is not None:
            self._add("engine", self._began)
        for name, loop in self.rivals.items():
            gc.enable()  # as in a loop without alternation
            began = self._start()
            loop.train(self.block)
            self._add(name, began)
            gc.disable()
        self._began = self._start()

    def injects_nan(self, step: int) -> bool:
        return False

    def loss_factor(self, batch: int) -> float:
        return 1.0

    def _start(self) -> Moment:
        dist.barrier()
        return self._now()

    def _now(self) -> Moment:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return Moment(time.perf_counter(), time.process_time())

    def _add(self, name: str, began: Moment) -> None:
        self.seconds.setdefault(name, []).append(self._now().since(began))


def check_same_data(first: float, elements: int, precision: str, rivals: Mapping[str, Loop]) -> None:
    """Raise RuntimeError if a rival trains another number of elements than the engine, or on other weights or tokens.

    ``first``: the engine's first loss. Any tokens give untrained weights about the logarithm of the vocabulary, so that
    only rounding may differ.
    """
    for name, loop in rivals.items():
        if loop.elements != elements:
            raise RuntimeError(f"{name} trains {loop.elements} elements and the engine {elements}")
        assert loop.first_loss is not None
        if abs(loop.first_loss / first - 1) > _ROUNDING[precision]:
            raise RuntimeError(f"{name} begins with loss {loop.first_loss} and the engine with {first}")


def check_same_work(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], precision: str) -> None:
    """Raise RuntimeError if the lines of another loop differ from the engine's in loss, gradient norm or rate.

    Only where the schedule, the clipping and the mean over the ranks are the same are the first steps alike.
    """
    for mine, other in zip(ours[:_COMPARED_STEPS], theirs[:_COMPARED_STEPS], strict=True):
        for name in ("step", "loss", "grad_norm", "learning_rate"):
            if abs(mine[name] - other[name]) > 10 * _ROUNDING[precision] * abs(mine[name]):
                raise RuntimeError(f"step {mine['step']}: {name} {other[name]}, and of the engine {mine[name]}")


def watched() -> subprocess.Popen[bytes]:
    """Start a reader of this rank's heartbeats and telemetry, which it then sends as to a node agent."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    reader = subprocess.Popen(["cat"], stdin=reading, stdout=subprocess.DEVNULL)
    os.close(reading)
    os.environ[HEARTBEAT_VARIABLE] = str(writing)
    return reader


def main() -> None:
    """Train to the end of the run, and print the seconds of each block."""
    die_with_agent()
    run, block = RunDir(Path(sys.argv[1])), int(sys.argv[2])
    record, ranks, reader = read_record(run), Ranks.from_environment(), watched()
    set_up_logging(f"rank {ranks.rank}", descriptor=1)
    trainer = assemble(run, record, ranks, 1, PreemptionFlag(), Heartbeat.from_environment(os.environ))
    rivals = {name: start(trainer) for name, start in _RIVALS.items()}
    turns = TakingTurns(block, rivals, trainer.context.device)
    trainer.faults = turns
    trainer.fit()
    if ranks.rank == 0:
        precision, ours = record.spec.training.precision, list(read_metrics(trainer.context.run))
        check_same_data(ours[0]["loss"], elements_of(trainer.composed.model), precision, rivals)
        for name in ("deepspeed", "ddp"):
            check_same_work(ours, list(read_lines(run.path / f"{name}.jsonl")), precision)
        print(json.dumps(turns.seconds), flush=True)
    reader.kill()
    dist.barrier()
    os._exit(0)  # destructors of process groups wait for peers


if __name__ == "__main__":
    main()
