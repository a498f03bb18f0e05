"""After an attempt ends: another one, or not. One pure function of the attempts so far and the spec's budgets.

Knows no scheduler: local and Slurm runs are judged alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.attempts import AttemptRecord, Decision
from scaletrain_cli.launch.judgement import Reason
from scaletrain_cli.spec.run import RestartsSpec

ATTEMPTS_WITHOUT_PROGRESS = 3

_BUDGET: dict[Reason, str] = {
    "preempted": "preemption",
    "out-of-grace": "preemption",
    "node": "node",
    "wrong-nodes": "node",
    "oom": "oom",
    "crash": "crash",
    "killed": "crash",
    "nan": "crash",
}
# Says nothing of the job itself: it was taken off good nodes, or never started on wrong ones.
_NEUTRAL: tuple[Reason, ...] = ("preempted", "cancelled", "wrong-nodes")


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
    stuck = attempts_without_progress(history)
    if stuck >= ATTEMPTS_WITHOUT_PROGRESS and reason not in _NEUTRAL:
        why = f"{stuck} failed attempts in a row committed no checkpoint newer than the one before them"
        return Decision(False, ExitCode.DO_NOT_REQUEUE, why)
    name = _BUDGET.get(reason, "crash")
    allowed: int | str = getattr(restarts, name)
    used = sum(_BUDGET.get(attempt.reason or "node") == name for attempt in history)
    if allowed == "unlimited" or used <= int(allowed):
        count = f"restart {used}" if allowed == "unlimited" else f"restart {used} of {allowed}"
        return Decision(True, exit_code, f"{reason}: {count} (restarts.{name})")
    return Decision(False, ExitCode.CRASHED, f"{reason}: restarts.{name} = {allowed} is used up")


def attempts_without_progress(history: Sequence[AttemptRecord]) -> int:
    """How many of the latest attempts failed without a newer checkpoint; preempted ones neither count nor excuse."""
    count = 0
    for attempt in reversed(history):
        if attempt.made_progress:
            break
        count += attempt.reason not in _NEUTRAL
    return count
