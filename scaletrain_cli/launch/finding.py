"""What is found out about a run: a cause, in words, the evidence for it, and what to do. Finds out nothing itself."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Evidence:
    """Words of somebody, and whose: a command, a file of the run directory, an event."""

    source: str
    text: str


@dataclass(frozen=True)
class Finding:
    """One cause. ``headline`` is a sentence without its full stop; ``actions`` are sentences or commands.

    ``waits_for_ever``: no patience helps, somebody has to change something.
    """

    cause: str
    headline: str
    evidence: tuple[Evidence, ...] = ()
    actions: tuple[str, ...] = ()
    waits_for_ever: bool = False


@dataclass(frozen=True)
class Explanation:
    """A run as it stands. ``findings``: the one that matters most first."""

    run_id: str
    state: str
    findings: tuple[Finding, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """The stable JSON object."""
        findings = [dataclasses.asdict(finding) for finding in self.findings]
        return {"schema": "scaletrain.explain/v1", "run_id": self.run_id, "state": self.state, "findings": findings}
