"""One rank of a paired measurement: ``python -m engine_loops.telemetry RUN_DIR BLOCK``; rank 0 prints a line of JSON.

The engine trains a real run with its own loop. Every BLOCK steps telemetry is turned off and on in the same process:
off, on without layers, off, on with all layers in every step. What ranks send is read by another process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from engine_loops.paired import Moment, TakingTurns
from scaletrain_cli.engine.assembly import assemble
from scaletrain_cli.engine.metrics.rank_measures import RankMeasures
from scaletrain_cli.engine.process_group import Ranks
from scaletrain_cli.engine.trainer import Trainer
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.worker.heartbeat import Heartbeat
from scaletrain_cli.worker.signals import PreemptionFlag, die_with_agent
from scaletrain_cli.worker.telemetry import RankTelemetry

TURNS = ("off", "on", "off", "layers")


@dataclass
class TogglingTelemetry(TakingTurns):
    """Turns telemetry on and off between blocks; ``trainer`` is set before the first step."""

    trainer: Trainer | None = None
    blocks: list[tuple[str, Moment]] = field(default_factory=list)  # in order

    def before_step(self, step: int) -> None:
        """End a block, and begin the next one in its state of telemetry."""
        number, into = divmod(step - 1, self.block)
        if into:
            return
        if self._began is not None:
            self.blocks.append((TURNS[(number - 1) % len(TURNS)], self._now().since(self._began)))
        assert self.trainer is not None
        _set(self.trainer.measures, self.trainer, TURNS[number % len(TURNS)])
        self._began = self._start()


def _set(measures: RankMeasures, trainer: Trainer, turn: str) -> None:
    was_on, measures._enabled = measures._enabled, True
    if was_on and turn == "off":
        measures.__exit__(None, None, None)
    elif not was_on and turn != "off":
        measures.__enter__()
    measures._enabled = turn != "off"
    trainer.stepper.split = measures._split if measures._enabled else None
    trainer.stepper.measures_noise = False
    measures._layers._every = 1 if turn == "layers" else 0


def main() -> None:
    """Train to the end of the run, and print the blocks, and the steps between two measurements of layers."""
    die_with_agent()
    run, block = RunDir(Path(sys.argv[1])), int(sys.argv[2])
    record, ranks = read_record(run), Ranks.from_environment()
    trainer = assemble(run, record, ranks, 1, PreemptionFlag(), Heartbeat(None))
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    agent = subprocess.Popen(["cat"], stdin=reading, stdout=subprocess.DEVNULL)
    os.close(reading)
    trainer.measures._sender = RankTelemetry(writing)
    trainer.faults = TogglingTelemetry(block, {}, trainer.device, trainer=trainer)
    trainer.fit()
    if ranks.rank == 0:
        interval = trainer.measures._layers.interval
        print(json.dumps({"blocks": trainer.faults.blocks, "interval": interval}), flush=True)
    agent.kill()
    dist.barrier()
    os._exit(0)  # destructors of process groups wait for peers


if __name__ == "__main__":
    main()
