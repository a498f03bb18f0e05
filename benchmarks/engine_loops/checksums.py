"""One rank of a paired measurement: ``python -m engine_loops.checksums RUN_DIR``; rank 0 prints a line of JSON.

The engine trains a real run with its own loop. After it has chosen how often to check the state, each step is trained
with the sums of a check or without them, by ``TURNS``.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from engine_loops.paired import Moment, TakingTurns
from scaletrain_cli.engine.assembly import assemble
from scaletrain_cli.engine.health.state_check import StateCheck
from scaletrain_cli.engine.process_group import Ranks
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.worker.heartbeat import Heartbeat
from scaletrain_cli.worker.signals import PreemptionFlag, die_with_agent

TURNS = ("off", "on", "on", "off")
WARM_UP = 12  # steps, of which the engine measures one to choose


@dataclass
class TogglingChecks(TakingTurns):
    """Checks the state in some steps; ``check`` is set before the first one."""

    check: StateCheck | None = None
    steps: list[tuple[str, Moment]] = field(default_factory=list)  # in order
    chosen: int = 0

    def before_step(self, step: int) -> None:
        """End a step, and begin the next one."""
        assert self.check is not None
        if step <= WARM_UP:
            self.chosen = self.check.every or 0
            return
        if self._began is not None:
            self.steps.append((TURNS[(step - 2) % len(TURNS)], self._now().since(self._began)))
        turn = TURNS[(step - 1) % len(TURNS)]
        self.check.every = int(turn == "on")
        if turn == "on":
            self.check._after, self.check._next_step = self.check._sums(), step
        else:
            self.check.forget(step)
        self._began = self._start()


def main() -> None:
    """Train to the end of the run; print the time of each step, and the steps between two checks that were chosen."""
    die_with_agent()
    run = RunDir(Path(sys.argv[1]))
    record, ranks = read_record(run), Ranks.from_environment()
    trainer = assemble(run, record, ranks, 1, PreemptionFlag(), Heartbeat(None))
    turns = TogglingChecks(1, {}, trainer.context.device, check=trainer.step_sync.state_check)
    trainer.faults = turns
    trainer.fit()
    if ranks.rank == 0:
        print(json.dumps({"steps": turns.steps, "chosen": turns.chosen}), flush=True)
    dist.barrier()
    os._exit(0)  # destructors of process groups wait for peers


if __name__ == "__main__":
    main()
