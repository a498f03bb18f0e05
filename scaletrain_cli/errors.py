"""Exceptions and exit codes. Every package may import this module."""

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from scaletrain_cli.reasons import Reason

# Two full stops after a word and before a space or the end; not `..` in a path, and not `...`.
_TWO_STOPS = re.compile(r"(?<=[\w)\]'\"`%])\.\.(?=\s|$)")


class ExitCode(IntEnum):
    """Exit codes of every ScaleTrain process (docs/exit-codes.md)."""

    DONE = 0
    CRASHED = 1
    USAGE = 2
    INFEASIBLE = 3
    SCHEDULER = 4
    WRONG_NODES = 5
    PREEMPTED = 75
    DO_NOT_REQUEUE = 93


def one_stop(text: str) -> str:
    """Return the text without doubled full stops, which quoted sentences of libraries and the system cause."""
    return _TWO_STOPS.sub(".", text)


def sentence(reason: Reason | str) -> str:
    """Return the text of a reason, or the given text, with a full stop at the end."""
    text = str(reason)
    return text if text.endswith((".", "!", "?", ":")) else f"{text}."


def sentences(reason: Reason) -> str:
    """Return the text and the remedies of a reason, each with a full stop at its end."""
    return " ".join([sentence(reason), *map(sentence, reason.remedies)])


def _remedy(reason: Reason) -> str | None:
    return " ".join(map(sentence, reason.remedies)) or None


class Place(str):
    """The text ``file:line`` (or ``file``), which keeps both parts for ``--json``."""

    file: str
    line: int | None

    def __new__(cls, file: str, line: int | None = None, text: str | None = None) -> "Place":
        place = super().__new__(cls, text or (file if line is None else f"{file}:{line}"))
        place.file, place.line = file, line
        return place


@dataclass(frozen=True)
class Problem:
    """One problem with an input: its location, the given value, what is allowed and how to fix it.

    ``where`` is a Place, or the name of a command-line option or of an object; ``key`` is the dotted key in the spec.
    """

    where: str
    key: str
    message: str
    given: str | None = None
    hint: str | None = None
    reason: Reason | None = None

    @classmethod
    def because(cls, where: str, key: str, reason: Reason, given: object = None) -> "Problem":
        """Return the problem whose message and hint are the text and the remedies of a reason."""
        shown = None if given is None else str(given)
        return cls(where, key, sentence(reason), shown, _remedy(reason), reason)

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", one_stop(self.message))
        object.__setattr__(self, "hint", None if self.hint is None else one_stop(self.hint))

    def __str__(self) -> str:
        subject = f"{self.where} {self.key}" if self.key else self.where
        text = f"{subject}: {self.message}" if self.given is None else f"{subject} = {self.given}: {self.message}"
        return f"{text} {self.hint}" if self.hint else text

    @property
    def subject(self) -> str:
        """The key, with its given value if there is one."""
        return self.key if self.given is None else f"{self.key} = {self.given}"

    @property
    def file(self) -> str | None:
        """Path of the file with the problem; None if it is not in a file."""
        return self.where.file if isinstance(self.where, Place) else None

    @property
    def line(self) -> int | None:
        """Line in ``file``, counted from 1; None if it is unknown."""
        return self.where.line if isinstance(self.where, Place) else None

    def to_json(self) -> dict[str, Any]:
        """Return the fields with ``file`` and ``line`` apart from ``where``; ``reason`` as ``{code, params}``."""
        return {"where": str(self.where), "file": self.file, "line": self.line, "key": self.key} | {
            "message": self.message,
            "given": self.given,
            "hint": self.hint,
            "reason": _code_of(self.reason),
        }


def _code_of(reason: Reason | None) -> dict[str, Any] | None:
    return None if reason is None else reason.to_document()


class ScaletrainError(Exception):
    """Base class of errors that a user can cause or fix. ``problems`` lists each cause on a line of its own.

    ``code`` is the stable word for its kind in ``--json`` (docs/json.md), ``reason`` the code and parameters of this
    one where it was raised with a Reason in place of a message; ``remedy`` is what to do, and ``file`` the file
    concerned, where no problem says so.
    """

    exit_code: int = ExitCode.CRASHED
    code = "failed"

    def __init__(
        self,
        message: str | Reason,
        problems: tuple[Problem, ...] = (),
        *,
        remedy: str | None = None,
        file: str | None = None,
    ) -> None:
        self.reason = message if isinstance(message, Reason) else None
        self.message = one_stop(sentence(message) if isinstance(message, Reason) else message)
        super().__init__(self.message)
        self.problems = problems
        self.remedy = remedy or (_remedy(self.reason) if self.reason is not None else None)
        self.file = file

    def explain(self, reason: Reason) -> None:
        """Replace the message by the text of ``reason``, which contains it, and add the remedies of ``reason``."""
        self.reason, self.message = reason, one_stop(sentence(reason))
        self.args = (self.message,)
        self.remedy = " ".join(filter(None, (self.remedy, _remedy(reason)))) or None

    def __str__(self) -> str:
        head = f"{self.message} {self.remedy}" if self.remedy else self.message
        return "\n".join([head, *(f"  {problem}" for problem in self.problems)])

    def to_json(self) -> dict[str, Any]:
        """Return the ``error`` object of ``--json``; key, file, line and remedy are those of the first problem."""
        first = self.problems[0] if self.problems else None
        return {
            "code": self.code,
            "key": (first.key or None) if first else None,
            "file": (first.file if first else None) or self.file,
            "line": first.line if first else None,
            "message": self.message,
            "remedy": self.remedy or (first.hint if first else None),
            "reason": _code_of(self.reason),
            "problems": [problem.to_json() for problem in self.problems],
        }


class UsageError(ScaletrainError):
    """The command or a file that it names is wrong (exit 2)."""

    exit_code = ExitCode.USAGE
    code = "usage"


class SpecError(UsageError):
    """The run spec is wrong; carries all problems found (exit 2)."""

    code = "spec"


class InfeasibleError(ScaletrainError):
    """No layout is possible: it does not fit, does not divide, or the engine does not support it (exit 3)."""

    exit_code = ExitCode.INFEASIBLE
    code = "infeasible"


class SchedulerError(ScaletrainError):
    """The scheduler rejected the job or cannot be reached (exit 4)."""

    exit_code = ExitCode.SCHEDULER
    code = "scheduler"


class SchedulerSilentError(SchedulerError):
    """The scheduler did not answer in time; the request may have been applied (exit 4)."""

    code = "scheduler-silent"


class WrongNodesError(ScaletrainError):
    """The nodes do not match the plan: device count, model, free memory, world size (exit 5)."""

    failure_reason = "wrong-nodes"
    exit_code = ExitCode.WRONG_NODES
    code = "wrong-nodes"


class PreemptedError(ScaletrainError):
    """Preempted before there was anything new to save (exit 75)."""

    exit_code = ExitCode.PREEMPTED
    code = "preempted"


class DoNotRequeueError(ScaletrainError):
    """A failure that a retry cannot fix (exit 93)."""

    exit_code = ExitCode.DO_NOT_REQUEUE
    code = "do-not-requeue"


class MissingPackageError(UsageError):
    """A package of an extra of ScaleTrain is not installed (exit 2); ``command`` installs it."""

    code = "missing-package"

    def __init__(self, what: str, command: str) -> None:
        super().__init__(f"{what} Run {command}.")
        self.what, self.command = what, command

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"message": self.what, "remedy": f"Run {self.command}."}


class DeclinedError(ScaletrainError):
    """The user declined the confirmation (exit 130)."""

    exit_code = 130
    code = "declined"
