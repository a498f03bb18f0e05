"""One rank of a paired measurement: ``python -m engine_loops.paired RUN_DIR BLOCK``; rank 0 prints a line of JSON.

The engine trains a real run with its own loop. Every BLOCK steps, at the point of a step where faults are injected, it
is paused, and each rival loop trains as many steps in the same process, so that the loops alternate.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from engine_loops.rivals import Loop, bare_deepspeed, plain_ddp
from scaletrain_cli.engine.assembly import assemble
from scaletrain_cli.engine.faults import Faults
from scaletrain_cli.engine.process_group import Ranks
from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.worker.heartbeat import Heartbeat
from scaletrain_cli.worker.signals import PreemptionFlag, die_with_agent

# Relative difference of the mean loss of equal batches. In fp32 other tokens differ by more; with 16-bit weights the
# rounding differs by as much, so that the check there finds only other weights.
_ROUNDING = {"fp32": 1e-5, "bf16": 3e-3, "fp16": 3e-3}


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


def check_same_data(first: float, precision: str, rivals: Mapping[str, Loop]) -> None:
    """Raise RuntimeError if a rival's first loss is not ``first``, the engine's: other weights or other tokens.

    Any tokens give untrained weights about the logarithm of the vocabulary, so that only rounding may differ.
    """
    for name, loop in rivals.items():
        assert loop.first_loss is not None
        if abs(loop.first_loss / first - 1) > _ROUNDING[precision]:
            raise RuntimeError(f"{name} begins with loss {loop.first_loss} and the engine with {first}")


def main() -> None:
    """Train to the end of the run, and print the seconds of each block."""
    die_with_agent()
    run, block = RunDir(Path(sys.argv[1])), int(sys.argv[2])
    record, ranks = read_record(run), Ranks.from_environment()
    trainer = assemble(run, record, ranks, 1, PreemptionFlag(), Heartbeat(None))
    rivals = {"DeepSpeed": bare_deepspeed(trainer), "DDP": plain_ddp(trainer)}
    turns = TakingTurns(block, rivals, trainer.device)
    trainer.faults = turns
    trainer.fit()
    if ranks.rank == 0:
        check_same_data(read_metrics(trainer.run)[0]["loss"], record.spec.training.precision, rivals)
        print(json.dumps(turns.seconds), flush=True)
    dist.barrier()
    os._exit(0)  # destructors of process groups wait for peers


if __name__ == "__main__":
    main()
