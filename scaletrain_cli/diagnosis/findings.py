"""A finding about a run: what is wrong, how bad and how sure it is, its likely causes, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from scaletrain_cli.reasons import Reason

Severity = Literal["note", "warning", "error"]
Confidence = Literal["low", "medium", "high"]
_ORDER = ("error", "warning", "note", "high", "medium", "low")
# Parameters that name what a finding is about, as far as there may be several findings with one code.
_SUBJECTS = ("source", "layer", "gpu", "node", "rank")
# The rank is the one that waits longest, or grows fastest, at the moment.
_OF_ANY_RANK = ("diagnosis.data-wait", "diagnosis.memory-grows", "diagnosis.memory-grows-full")


@dataclass(frozen=True)
class Change:
    """A change of the spec: ``key``, its location (``file:line``), its value, and another one if it can be named."""

    key: str
    place: str
    given: Any
    to: Any = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"key": self.key, "place": self.place, "given": self.given, "to": self.to}


@dataclass(frozen=True)
class Cause:
    """A likely cause, with the change of the spec that removes it, if there is one."""

    reason: Reason
    change: Change | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        change = None if self.change is None else self.change.to_json()
        return {**self.reason.to_document(), "text": str(self.reason), "change": change}


@dataclass(frozen=True)
class Finding:
    """``reason`` has the evidence as parameters; ``causes`` are ranked, the likeliest first.

    ``confidence``: high for what was counted or measured, medium for a signature whose rivals the record excludes, low
    for a correlation.
    """

    reason: Reason
    severity: Severity
    confidence: Confidence
    causes: tuple[Cause, ...] = ()

    @property
    def code(self) -> str:
        """The stable code, such as ``diagnosis.loss-diverging``."""
        return self.reason.code

    @property
    def subject(self) -> str:
        """The subject of the finding, such as ``rank 3`` or ``source web``; empty for the run as a whole."""
        params = self.reason.params
        names = () if self.code in _OF_ANY_RANK else _SUBJECTS
        return next((f"{name} {params[name]}" for name in names if isinstance(params.get(name), str | int)), "")

    @property
    def rank(self) -> tuple[int, int]:
        """The sort key: errors first, then by confidence."""
        return _ORDER.index(self.severity), _ORDER.index(self.confidence)

    def to_json(self) -> dict[str, Any]:
        """Return the stable JSON object (docs/json.md)."""
        return {
            **self.reason.to_document(),
            "severity": self.severity,
            "confidence": self.confidence,
            "text": str(self.reason),
            "causes": [cause.to_json() for cause in self.causes],
        }
