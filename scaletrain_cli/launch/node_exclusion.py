"""Choose the bad nodes that the next attempt excludes, such that enough nodes remain. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.bad_nodes import BadNode


@dataclass(frozen=True)
class Exclusion:
    """Names of excluded nodes, and of bad nodes that cannot be excluded, with the reason."""

    nodes: tuple[str, ...] = ()
    spared: tuple[str, ...] = ()
    reason: Reason | None = None

    @property
    def why(self) -> str:
        """The text of ``reason``; empty if all bad nodes are excluded."""
        return "" if self.reason is None else str(self.reason)

    def to_event(self) -> dict[str, Any]:
        """Return the fields of the event ``nodes-excluded``."""
        document = {} if self.reason is None else self.reason.to_document()
        return {"nodes": self.nodes, "spared": self.spared, "why": self.why, **document}


def exclusion(
    bad: Sequence[BadNode], *, usable: Collection[str], needed: int, pinned: Collection[str] = ()
) -> Exclusion:
    """Return the exclusion of ``bad`` nodes (newest evidence first) while ``needed`` of the ``usable`` ones remain.

    A node that is not usable now can always be excluded. One that the spec names (``pinned``) is never excluded.
    """
    spare = len(set(usable)) - needed
    excluded: list[str] = []
    spared: list[str] = []
    for node in bad:
        if node.node in pinned:
            spared.append(node.node)
        elif node.node not in usable:
            excluded.append(node.node)
        elif spare > 0:
            spare -= 1
            excluded.append(node.node)
        else:
            spared.append(node.node)
    reason = Reason("launch.nodes-not-excluded", {"needed": needed, "usable": len(set(usable))}) if spared else None
    return Exclusion(tuple(sorted(excluded)), tuple(sorted(spared)), reason)
