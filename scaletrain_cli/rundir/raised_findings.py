"""Findings of a run that are raised: what the events ``finding`` and ``finding-cleared`` of events.jsonl add up to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.rundir.documents import undamaged_document, write_document
from scaletrain_cli.rundir.paths import RunDir

RAISED_EVENT, CLEARED_EVENT = "finding", "finding-cleared"
SEVERITIES = ("note", "warning", "error")


@dataclass(frozen=True)
class RaisedFinding:
    """A finding that was raised and has not been cleared.

    ``subject``: the source, rank or device that it is about; empty for the run. ``severity``: the highest since it was
    raised. ``time``: Unix seconds at which it was raised. ``attempt``, ``step``: where the evidence is from.
    """

    reason: Reason
    subject: str
    severity: str
    time: float
    attempt: int
    step: int

    @property
    def key(self) -> str:
        """The code with the subject: at most one finding with a key is raised at a time."""
        return finding_key(self.reason.code, self.subject)


def finding_key(code: str, subject: str) -> str:
    """Return the key by which findings of all attempts are compared."""
    return f"{code} {subject}".rstrip()


def raised_findings(events: Iterable[Mapping[str, Any]]) -> dict[str, RaisedFinding]:
    """Return the raised findings by key, in the order in which they were raised. ``events``: oldest first.

    A run that starts again from scratch has none. Events of another form are skipped.
    """
    found: dict[str, RaisedFinding] = {}
    for event in events:
        name = event.get("event")
        if name == "from-scratch":
            found = {}
        elif name in (RAISED_EVENT, CLEARED_EVENT):
            reason, subject = reason_from(event), str(event.get("subject") or "")
            key, severity = finding_key(reason.code, subject), str(event.get("severity"))
            if name == CLEARED_EVENT:
                found.pop(key, None)
            elif severity in SEVERITIES:
                since = found[key].time if key in found else event.get("time") or 0.0
                attempt, step = event.get("attempt") or 0, event.get("step") or 0
                found[key] = RaisedFinding(reason, subject, severity, since, attempt, step)
    return found


def mark_diagnosis(run: RunDir, attempt: int, *, is_over: bool) -> None:
    """Record that a process diagnoses the attempt, or has done so for the last time. Raises OSError."""
    write_document(_mark(run, attempt), {"is_over": is_over})


def is_diagnosed(run: RunDir, attempt: int) -> bool:
    """Return False while a process diagnoses the attempt, and True once no findings will follow."""
    found = undamaged_document(_mark(run, attempt))
    return found is None or found.get("is_over") is not False


def _mark(run: RunDir, attempt: int) -> Path:
    return run.attempt(attempt) / "diagnosis.json"
