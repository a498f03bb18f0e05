"""One rank of a paired measurement: ``python -m engine_loops.paired RUN_DIR BLOCK``; rank 0 prints a line of JSON.

The engine trains a real run through its own loop. Every BLOCK steps, at the moment in a step at which faults strike, it
is held up, and each rival loop trains as many steps in the same process. So the loops take turns all the way.
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
from scaletrain_cli.engine.trainer import Trainer
from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.worker.heartbeat import Heartbeat
from scaletrain_cli.worker.signals import PreemptionFlag, die_with_agent


class Moment(NamedTuple):
    """Seconds: of the clock on the wall, and of this process on the processor."""

    wall: float
    processor: float

    def since(self, earlier: Moment) -> Moment:
        return Moment(self.wall - earlier.wall, self.processor - earlier.processor)


@dataclass
class TakingTurns(Faults):
    """Takes the place of the faults on purpose, of which there are none."""

    block: int
    rivals: Mapping[str, Loop]
    device: torch.device
    seconds: dict[str, list[Moment]] = field(default_factory=dict)
    _began: Moment | None = None

    save_delay_seconds = 0.0

    def before_step(self, step: int) -> None:
        """The engine's block ends, the rivals have theirs, the engine's next one begins."""
        if (step - 1) % self.block:
            return
        if self._began is not None:
            self._add("engine", self._began)
        for name, loop in self.rivals.items():
            gc.enable()  # as a loop that knows nothing of it would have it
            began = self._start()
            loop.train(self.block)
            self._add(name, began)
            gc.disable()
        self._began = self._start()

    def poisons_gradient(self, step: int) -> bool:
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


def _check_same_data(trainer: Trainer, rivals: Mapping[str, Loop]) -> None:
    """The engine's loss of step 1 is the mean over ranks and micro-batches, so that the rivals' are near it."""
    first = read_metrics(trainer.run)[0]["loss"]
    for name, loop in rivals.items():
        assert loop.first_loss is not None
        if abs(loop.first_loss / first - 1) > 0.02:
            raise RuntimeError(f"{name} begins with loss {loop.first_loss} and the engine with {first}")


def main() -> None:
    """Train to the end of the run; print what each block took."""
    die_with_agent()
    run, block = RunDir(Path(sys.argv[1])), int(sys.argv[2])
    record, ranks = read_record(run), Ranks.from_environment()
    trainer = assemble(run, record, ranks, 1, PreemptionFlag(), Heartbeat(None))
    rivals = {"DeepSpeed": bare_deepspeed(trainer), "DDP": plain_ddp(trainer)}
    turns = TakingTurns(block, rivals, trainer.device)
    trainer.faults = turns
    trainer.fit()
    if ranks.rank == 0:
        _check_same_data(trainer, rivals)
        print(json.dumps(turns.seconds), flush=True)
    dist.barrier()
    os._exit(0)  # destructors of process groups wait for peers


if __name__ == "__main__":
    main()
