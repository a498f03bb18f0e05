"""One rank of a paired measurement: ``python -m engine_loops.telemetry RUN_DIR``; rank 0 prints a line of JSON.

The engine trains a real run with its own loop. Before each step telemetry is turned on or off in the same process, by
``TURNS``. What ranks send is read by another process.
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

# Of each step in turn: on and off so that drift cancels; then with the noise scale, and with the norms of layers, too.
TURNS = (*("off", "on", "on", "off") * 5, "noise", "off", "layers", "off")
_NEVER = 1 << 60


@dataclass
class TogglingTelemetry(TakingTurns):
    """Turns telemetry on and off between steps; ``trainer`` is set before the first one."""

    trainer: Trainer | None = None
    steps: list[tuple[str, Moment]] = field(default_factory=list)  # in order
    noise_interval: int | None = None  # in steps, as the engine chose it last

    def before_step(self, step: int) -> None:
        """End a step, and begin the next one in its state of telemetry."""
        if self._began is not None:
            self.steps.append((TURNS[(step - 2) % len(TURNS)], self._now().since(self._began)))
        assert self.trainer is not None
        self._set(self.trainer.measures, self.trainer, TURNS[(step - 1) % len(TURNS)])
        self._began = self._start()

    def _set(self, measures: RankMeasures, trainer: Trainer, turn: str) -> None:
        turned_on, measures._enabled = turn != "off" and not measures._enabled, turn != "off"
        if measures._waits is not None:
            if turned_on:
                measures._waits.__enter__()
            elif turn == "off":
                measures._waits.__exit__(None, None, None)
        trainer.stepper.split = None
        trainer.stepper.measures_noise = False
        measures._layers._every = 1 if turn == "layers" else 0
        if (noise := measures._noise_steps) is not None:
            if noise._interval not in (1, _NEVER):
                self.noise_interval = noise._interval
            noise._interval = 1 if turn == "noise" else _NEVER


def main() -> None:
    """Train to the end of the run, and print the time of each step, and the steps between two measurements."""
    die_with_agent()
    run = RunDir(Path(sys.argv[1]))
    record, ranks = read_record(run), Ranks.from_environment()
    trainer = assemble(run, record, ranks, 1, PreemptionFlag(), Heartbeat(None))
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    agent = subprocess.Popen(["cat"], stdin=reading, stdout=subprocess.DEVNULL)
    os.close(reading)
    trainer.measures._sender = RankTelemetry(writing)
    if trainer.stepper.noise_scale is not None:
        trainer.stepper.noise_scale.taken = 1000  # past the first measurements, which are dense
    turns = TogglingTelemetry(1, {}, trainer.context.device, trainer=trainer)
    trainer.faults = turns
    trainer.fit()
    if ranks.rank == 0:
        intervals = {"layers": trainer.measures._layers.interval, "noise": turns.noise_interval}
        print(json.dumps({"steps": turns.steps, "intervals": intervals}), flush=True)
    agent.kill()
    dist.barrier()
    os._exit(0)  # destructors of process groups wait for peers


if __name__ == "__main__":
    main()
