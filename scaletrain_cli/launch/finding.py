"""The data that `scaletrain explain` reports: findings with their evidence and remedies."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scaletrain_cli.reasons import Reason


@dataclass(frozen=True)
class Evidence:
    """A quotation or an observation with its source: a command, a file of the run directory, or the scheduler.

    ``code`` and ``params`` are those of the Reason whose text is ``text``; empty for a quotation.
    """

    source: str
    text: str
    code: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def because(cls, source: str, reason: Reason) -> "Evidence":
        """Return the observation with its code and parameters."""
        return cls(source, str(reason), **reason.to_document())


@dataclass(frozen=True)
class Finding:
    """One cause. ``headline`` is a sentence without its full stop; ``actions`` are sentences or commands.

    ``needs_action``: waiting does not help. ``code`` and ``params`` are those of the Reason whose text is ``headline``.
    """

    cause: str
    headline: str
    evidence: tuple[Evidence, ...] = ()
    actions: tuple[str, ...] = ()
    needs_action: bool = False
    code: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def because(
        cls,
        cause: str,
        reason: Reason,
        evidence: tuple[Evidence, ...] = (),
        more_actions: tuple[str, ...] = (),
        *,
        needs_action: bool = False,
    ) -> "Finding":
        """Return the finding with the text, the remedies, the code and the parameters of ``reason``."""
        actions = (*reason.remedies, *more_actions)
        return cls(cause, str(reason), evidence, actions, needs_action, **reason.to_document())


@dataclass(frozen=True)
class Explanation:
    """The explanation of a run's current state. ``findings``: the most important one first."""

    run_id: str
    state: str
    findings: tuple[Finding, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Return the stable JSON object (docs/json.md)."""
        findings = [dataclasses.asdict(finding) for finding in self.findings]
        return {"schema": "scaletrain.explain/v1", "run_id": self.run_id, "state": self.state, "findings": findings}
