"""A finding about a run: what is wrong, how bad and how sure it is, its likely causes, and what to change."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.journal import SEVERITIES, finding_key

Severity = Literal["note", "warning", "error"]
Confidence = Literal["low", "medium", "high"]
_ORDER = ("error", "warning", "note", "high", "medium", "low")
# Parameters that name what a finding is about, as far as there may be several findings with one code.
_SUBJECTS = ("source", "layer", "gpu", "node", "rank")
# The rank is the one that waits longest, or grows fastest, at the moment.
_OF_ANY_RANK = ("diagnosis.data-wait", "diagnosis.memory-grows", "diagnosis.memory-grows-full")


def warning_if(serious: bool) -> Severity:
    return "warning" if serious else "note"


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


_LOOKS = 3  # diagnoses that count: present in two of them raises, absent in all of them clears
_NEEDED = 2
_MOST_SUBJECTS = 8  # raised at a time with one code: thousands of ranks may share a cause


@dataclass(frozen=True)
class Transition:
    """A finding that was raised, became worse, or was cleared. ``finding``: None if it was cleared."""

    change: Literal["raised", "worse", "cleared"]
    key: str
    finding: Finding | None = None


class Hysteresis:
    """Decides which findings are raised. ``raised``: severities of those that already are, by key."""

    def __init__(self, raised: Mapping[str, str]) -> None:
        self.raised = dict(raised)
        self._looks: dict[str, tuple[Severity | None, ...]] = dict.fromkeys(raised, ())

    def next(self, findings: Iterable[Finding], *, is_last: bool = False) -> list[Transition]:
        """Return what a diagnosis changes. ``is_last``: none follows, so that one look is enough to raise.

        A finding is raised if it is present in two of the last three diagnoses, becomes worse if two of them have a
        higher severity than the raised one, and is cleared if it is absent in three.
        """
        present = {finding_key(finding.code, finding.subject): finding for finding in findings}
        transitions: list[Transition] = []
        of_code = Counter(key.partition(" ")[0] for key in self.raised)
        for key in [*present, *(key for key in self._looks if key not in present)]:
            finding = present.get(key)
            severity = None if finding is None else finding.severity
            looks = self._looks[key] = (*self._looks.get(key, ()), severity)[-_LOOKS:]
            before = self.raised.get(key)
            if finding is None:
                if looks == (None,) * _LOOKS:
                    del self._looks[key]
                    if before is not None:
                        del self.raised[key]
                        transitions.append(Transition("cleared", key))
                continue
            needed = 1 if is_last else _NEEDED
            worse = sum(_level(look) > _level(before) for look in looks if look is not None)
            if _level(severity) > _level(before) and worse >= needed:
                if before is None and of_code[finding.code] >= _MOST_SUBJECTS:
                    continue
                of_code[finding.code] += before is None
                self.raised[key] = finding.severity
                transitions.append(Transition("raised" if before is None else "worse", key, finding))
        return transitions


def _level(severity: str | None) -> int:
    return -1 if severity is None else SEVERITIES.index(severity)
