"""Raise and clear findings over repeated diagnoses, with hysteresis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from scaletrain_cli.diagnosis.findings import Finding, Severity
from scaletrain_cli.rundir.raised_findings import SEVERITIES, finding_key

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
        present = {finding_key(each.code, each.subject): each for each in findings}
        found: list[Transition] = []
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
                        found.append(Transition("cleared", key))
                continue
            needed = 1 if is_last else _NEEDED
            worse = sum(_level(each) > _level(before) for each in looks if each is not None)
            if _level(severity) > _level(before) and worse >= needed:
                if before is None and of_code[finding.code] >= _MOST_SUBJECTS:
                    continue
                of_code[finding.code] += before is None
                self.raised[key] = finding.severity
                found.append(Transition("raised" if before is None else "worse", key, finding))
        return found


def _level(severity: str | None) -> int:
    return -1 if severity is None else SEVERITIES.index(severity)
