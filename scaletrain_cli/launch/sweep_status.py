"""A sweep as one thing: how its runs stand, when all of them are over, and the end of those that are not.

Every run keeps its own life; this only goes through them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from scaletrain_cli.errors import ExitCode, ScaletrainError, UsageError
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.status import RunStatus, exit_code_of, is_over, run_statuses
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record, require_cancellable
from scaletrain_cli.rundir.sweeps import Sweep

OVER = ("finished", "failed", "cancelled")


@dataclass(frozen=True)
class Member:
    """One run of a sweep; ``status`` is None where its record is damaged, and ``error`` says how."""

    run: RunDir
    status: RunStatus | None
    error: str = ""

    @property
    def state(self) -> str:
        return self.status.state if self.status is not None else "damaged"

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen to it by itself."""
        return self.status is not None and is_over(self.run, self.status)

    def to_json(self) -> dict[str, Any]:
        """As `scaletrain status` has it."""
        if self.status is None:
            return {"run_id": self.run.run_id, "state": self.state, "error": UsageError(self.error).to_json()}
        return self.status.to_json()


@dataclass(frozen=True)
class SweepStatus:
    """All runs of a sweep that are there, in order."""

    sweep: Sweep
    members: tuple[Member, ...]

    @property
    def states(self) -> dict[str, int]:
        """How many are in each state, the most frequent first."""
        return dict(Counter(member.state for member in self.members).most_common())

    @property
    def states_in_words(self) -> str:
        """``2 queued, 1 running``."""
        return ", ".join(f"{count} {state}" for state, count in self.states.items())

    def to_json(self) -> dict[str, Any]:
        """The stable JSON object."""
        head = {"schema": "scaletrain.sweep-status/v1", "sweep": self.sweep.name, "points": self.sweep.points}
        return head | {"states": self.states, "runs": [member.to_json() for member in self.members]}


@dataclass(frozen=True)
class Stopped:
    """Run ids: of those that were told to stop, of those that were over before, and why others could not be told."""

    cancelled: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()


def look_at(sweep: Sweep) -> SweepStatus:
    """One damaged run does not hide the others."""
    return SweepStatus(sweep, tuple(_look(sweep.runs)))


def look_again(before: SweepStatus) -> SweepStatus:
    """Look only at those that may have changed: each look is a question to the scheduler."""
    changing = [member.run for member in before.members if member.state not in (*OVER, "damaged")]
    found = {member.run: member for member in _look(changing)}
    return SweepStatus(before.sweep, tuple(found.get(member.run, member) for member in before.members))


def exit_code_of_all(members: Sequence[Member]) -> int:
    """0 where all have finished; else that of the first, in order, which has not."""
    for member in members:
        code = ExitCode.CRASHED if member.status is None else exit_code_of(member.run, member.status)
        if code != ExitCode.DONE:
            return int(code)
    return int(ExitCode.DONE)


def cancel_members(members: Sequence[Member], *, force: bool = False, trust_owner: bool = False) -> Stopped:
    """The last first: none of a lane may start because the one before it is gone. Goes on where one is refused."""
    done = Stopped()
    for member in reversed(members):
        name = member.run.run_id
        if member.state in OVER:
            done = replace(done, over=(name, *done.over))
            continue
        try:
            require_cancellable(member.run, trust_owner=trust_owner)
            _cancel(member.run, force)
            done = replace(done, cancelled=(name, *done.cancelled))
        except ScaletrainError as error:
            done = replace(done, refused=((name, error.message), *done.refused))
    return done


def _look(runs: Sequence[RunDir]) -> list[Member]:
    return [
        Member(run, None, found.message) if isinstance(found, UsageError) else Member(run, found)
        for run, found in zip(runs, run_statuses(runs), strict=True)
    ]


def _cancel(run: RunDir, force: bool) -> None:
    record = read_record(run)
    backend = backend_for(record.spec.cluster.scheduler)
    backend.cancel(run, record)
    if force:
        backend.force(run, record)
