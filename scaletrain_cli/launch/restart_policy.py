"""After an attempt ends: another one, or not. One pure function of the attempts so far and the spec's budgets.

Knows no scheduler: local and Slurm runs are judged alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.attempts import AttemptRecord, Decision
from scaletrain_cli.launch.judgement import Reason
from scaletrain_cli.spec.run import RestartsSpec

ATTEMPTS_WITHOUT_PROGRESS = 3
PREEMPTIONS_WITHOUT_PROGRESS = 10

_BUDGET: dict[Reason, str] = {
    "preempted": "preemption",
    "out-of-grace": "preemption",
    "node": "node",
    "wrong-nodes": "node",
    "hardware": "node",
    "hang": "node",
    "communication": "node",
    "oom": "oom",
    "host-oom": "oom",
    "crash": "crash",
    "killed": "crash",
    "unreadable": "crash",
    "nan": "crash",
    "spike": "crash",
}
_TAKEN_AWAY: tuple[Reason, ...] = ("preempted", "time-limit")
# Says nothing of the job itself: it was taken off good nodes, or never started on wrong ones.
_NEUTRAL: tuple[Reason, ...] = (*_TAKEN_AWAY, "cancelled", "wrong-nodes")


def decide(
    exit_code: int, reason: Reason, history: Sequence[AttemptRecord], restarts: RestartsSpec, cancelled: bool
) -> Decision:
    """Whether to try again. ``history`` holds all attempts that share the budgets, the one just ended last."""
    if exit_code == ExitCode.DONE:
        return Decision(False, exit_code, "the run is done")
    if cancelled or reason == "cancelled":
        return Decision(False, exit_code, "the run was cancelled")
    if exit_code in (ExitCode.USAGE, ExitCode.INFEASIBLE, ExitCode.SCHEDULER, ExitCode.DO_NOT_REQUEUE):
        return Decision(False, exit_code, f"exit code {exit_code} means that a retry cannot help")
    free = bool(history) and history[-1].free_of_charge
    stuck = attempts_without_progress(history)
    if stuck >= ATTEMPTS_WITHOUT_PROGRESS and reason not in _NEUTRAL and not free:
        why = f"{stuck} failed attempts in a row committed no checkpoint newer than the one before them"
        return Decision(False, ExitCode.DO_NOT_REQUEUE, why)
    idle = preemptions_without_progress(history)
    if idle >= PREEMPTIONS_WITHOUT_PROGRESS and (reason in _TAKEN_AWAY or free):
        why = (
            f"{idle} preempted attempts in a row committed no step: cluster.grace_seconds, the time limit or the time "
            "between preemptions is too short to start up. Ask for longer ones, then `scaletrain resume`"
        )
        return Decision(False, ExitCode.DO_NOT_REQUEUE, why)
    if reason == "time-limit":
        return Decision(True, exit_code, "time-limit: free of charge")
    name = "preemption" if free else _BUDGET.get(reason, "crash")
    allowed: int | str = getattr(restarts, name)
    used = sum(_budget_of(attempt) == name for attempt in history)
    if allowed == "unlimited" or used <= int(allowed):
        count = f"restart {used}" if allowed == "unlimited" else f"restart {used} of {allowed}"
        return Decision(True, exit_code, f"{reason}: {count} (restarts.{name})")
    # The state of a preempted run is saved, which 75 says, whoever starts it again.
    code = exit_code if exit_code == ExitCode.PREEMPTED else ExitCode.CRASHED
    return Decision(False, code, f"{reason}: restarts.{name} = {allowed} is used up")


def _budget_of(attempt: AttemptRecord) -> str | None:
    return "preemption" if attempt.free_of_charge else _BUDGET.get(attempt.reason or "node")


def is_taken_away(reason: Reason) -> bool:
    """Whether the restart after such an end costs the run nothing: its nodes were wanted for something else."""
    return reason == "time-limit" or _BUDGET.get(reason) == "preemption"


def attempts_without_progress(history: Sequence[AttemptRecord]) -> int:
    """How many of the latest attempts failed without a newer checkpoint; preempted ones neither count nor excuse."""
    counted = (attempt for attempt in _since_progress(history) if not attempt.free_of_charge)
    return sum(attempt.reason not in _NEUTRAL for attempt in counted)


def preemptions_without_progress(history: Sequence[AttemptRecord]) -> int:
    """How many of the latest attempts were taken off their nodes before they had committed a newer step."""
    return sum(attempt.reason in _TAKEN_AWAY or attempt.free_of_charge for attempt in _since_progress(history))


def _since_progress(history: Sequence[AttemptRecord]) -> Iterator[AttemptRecord]:
    return itertools.takewhile(lambda attempt: not attempt.made_progress, reversed(history))
