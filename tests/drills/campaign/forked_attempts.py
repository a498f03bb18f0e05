"""Attempts of a real run whose ranks are forks of a process that has imported everything: a start costs no seconds.

The engine's own entry runs in each rank, so kills, signals and faults meet the real thing; only the node agent is left
out, which other drills have.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from scaletrain_cli.engine.faults import VARIABLE
from scaletrain_cli.launch.attempts import begin_attempt
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.plan import make_plan
from scaletrain_cli.rundir.checkpoints import list_checkpoints
from scaletrain_cli.rundir.journal import read_events, read_metrics
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.spec import RunSpec
from tests.drills.training_runs import Drill, differences
from tests.engine.checkpoint.whole_state import whole_state
from tests.engine.ranks import RanksFailedError, on_ranks


@dataclass
class Attempt:
    """A running attempt, into which faults are injected."""

    run: RunDir
    number: int
    world_size: int
    began_at: float = field(default_factory=time.time)
    over: threading.Event = field(default_factory=threading.Event)
    exit_codes: list[int] | None = None  # None where a rank died or failed

    def pids(self) -> list[int]:
        """Return the process ids by rank, once all ranks have begun."""
        paths = [_pid_file(self.run, self.number, rank) for rank in range(self.world_size)]
        while not all(path.exists() for path in paths) and not self.over.is_set():
            time.sleep(0.001)
        return [int(path.read_text()) for path in paths if path.exists()]

    def wait_for(self, reached: Callable[[], Any]) -> bool:
        """Return True if the condition became true before the attempt ended."""
        while not self.over.is_set():
            if reached():
                return True
            time.sleep(0.005)
        return False

    def send(self, number: int, rank: int) -> None:
        """Send a signal to one rank, if it still runs."""
        pids = self.pids()
        if rank < len(pids) and not self.over.is_set():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pids[rank], number)


@dataclass(frozen=True)
class ForkedRun:
    """A run directory, and attempts on it one after the other."""

    run: RunDir
    be_rank: Callable[[Path, int], int]

    @classmethod
    def create(cls, spec: RunSpec, be_rank: Callable[[Path, int], int] | None = None) -> ForkedRun:
        """Create a run in the runs root; ``be_rank`` replaces the entry point of the engine."""
        return cls(create_run(spec, make_plan(spec)).run, be_rank or globals()["be_rank"])

    def attempt(self, strike: Callable[[Attempt], None] = lambda attempt: None, fault: str = "") -> Attempt:
        """Run one attempt from the latest checkpoint until it ends, or a fault ends it."""
        record = read_record(self.run)
        number = begin_attempt(self.run, record.spec, scheduler="local", job_id="forked", nodes=("here",))
        attempt = Attempt(self.run, number, record.spec.world_size)
        with patch.dict(os.environ, {VARIABLE: fault, "SCALETRAIN_ATTEMPT": str(number)}):
            ranks = threading.Thread(target=self._ranks, args=(attempt,))
            ranks.start()
            strike(attempt)
            ranks.join()
        return attempt

    def _ranks(self, attempt: Attempt) -> None:
        try:
            ranks = on_ranks(attempt.world_size, self.be_rank, self.run.path, attempt.number, connected=False)
            attempt.exit_codes = ranks
        except RanksFailedError:
            pass
        finally:
            attempt.over.set()

    def attempts_to_end(self, fault: str = "") -> None:
        """Run attempts until one is done. Raises AssertionError with the log if one is neither done nor preempted."""
        while (codes := self.attempt(fault=fault).exit_codes) != [0] * read_record(self.run).spec.world_size:
            assert codes is not None, self.log()
            assert set(codes) == {75}, self.log()

    def seconds_of_first_attempt(self) -> float:
        """Return the seconds from the start of its ranks to the end of the last step."""
        began = _pid_file(self.run, 1, 0).stat().st_mtime
        return float(self.events("finished")[0]["time"]) - began

    def newest_step(self) -> int:
        """Return the step of the latest committed checkpoint; 0 without one."""
        return max((checkpoint.step for checkpoint in list_checkpoints(self.run.checkpoints)), default=0)

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Return the events of these names, oldest first."""
        return [event for event in read_events(self.run) if event["event"] in names]

    def log(self) -> str:
        """Return the end of the last attempt's log."""
        newest = self.run.attempt(self.run.attempts()[-1])
        return "\n".join(path.read_text()[-1500:] for path in sorted(newest.glob("logs/*")))


def be_rank(path: Path, number: int) -> int:
    """Run the engine's entry point with its output in the log, and return the exit code. Raises AssertionError."""
    from scaletrain_cli.engine.__main__ import main

    run, rank = RunDir(path), int(os.environ["RANK"])
    log = os.open(run.attempt(number) / f"logs/here-{rank:05}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))  # as the node agent starts it
    draft = _pid_file(run, number, rank).with_suffix(".tmp")
    draft.write_text(str(os.getpid()))
    draft.rename(_pid_file(run, number, rank))
    sys.argv = ["engine", str(path)]
    code = main()
    sys.stdout.flush()
    # The other ranks must not wait for this one: the caller kills them, as the node agent does.
    assert code in (0, 75), f"exit code {code}"
    return code


def _pid_file(run: RunDir, number: int, rank: int) -> Path:
    return run.attempt(number) / f"rank-{rank}.pid"


def strays(hurt: ForkedRun | Drill, undisturbed: ForkedRun | Drill) -> list[str]:
    """Return the differences of two finished runs, to the bit: losses by step, and values of the last checkpoint."""
    losses = [
        {line["step"]: line["loss"] for line in read_metrics(run.run) if "loss" in line} for run in (hurt, undisturbed)
    ]
    states = [whole_state(list_checkpoints(run.run.checkpoints)[-1].path) for run in (hurt, undisturbed)]
    found = [] if losses[0] == losses[1] else ["losses"]
    return found + differences(*states)
