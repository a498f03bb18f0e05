"""The exception tree and the exit codes. Every room may import this file; it imports none of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """What a process of ours tells the one that started it (documented in docs/exit-codes.md)."""

    DONE = 0
    CRASHED = 1
    USAGE = 2
    INFEASIBLE = 3
    SCHEDULER = 4
    WRONG_NODES = 5
    PREEMPTED = 75
    DO_NOT_REQUEUE = 93


@dataclass(frozen=True)
class Problem:
    """One thing wrong with an input: where it stands, what was given, what is allowed and what to do.

    ``where`` is ``file:line`` or the name of a command-line option, ``key`` the dotted key in the spec.
    """

    where: str
    key: str
    message: str
    given: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        subject = f"{self.where} {self.key}" if self.key else self.where
        text = f"{subject}: {self.message}" if self.given is None else f"{subject} = {self.given}: {self.message}"
        return f"{text} {self.hint}" if self.hint else text


class ScaletrainError(Exception):
    """Base of every error a user can cause or cure. ``problems`` lists each cause on its own line."""

    exit_code = ExitCode.CRASHED

    def __init__(self, message: str, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join([self.message, *(f"  {problem}" for problem in self.problems)])


class UsageError(ScaletrainError):
    """The command or a file that it names is wrong (exit 2)."""

    exit_code = ExitCode.USAGE


class SpecError(UsageError):
    """The run spec is wrong; carries every problem found, not just the first (exit 2)."""


class InfeasibleError(ScaletrainError):
    """The run cannot be laid out as asked: it does not fit, does not divide, or the engine cannot run it (exit 3)."""

    exit_code = ExitCode.INFEASIBLE


class SchedulerError(ScaletrainError):
    """The scheduler refused the job or cannot be reached (exit 4)."""

    exit_code = ExitCode.SCHEDULER


class SchedulerSilentError(SchedulerError):
    """The scheduler did not answer in time, so whether it took the job is not known (exit 4)."""


class WrongNodesError(ScaletrainError):
    """The nodes are not what was planned: device count, model, free memory, world size (exit 5)."""

    exit_code = ExitCode.WRONG_NODES


class PreemptedError(ScaletrainError):
    """Asked to leave before there was anything new to save (exit 75)."""

    exit_code = ExitCode.PREEMPTED


class DoNotRequeueError(ScaletrainError):
    """A verdict that a retry cannot cure (exit 93)."""

    exit_code = ExitCode.DO_NOT_REQUEUE
