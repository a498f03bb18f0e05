"""Which bad nodes the next attempt keeps away from: as many as leave the job room to start. Pure.

Knows node names and their evidence; neither Slurm nor where the evidence is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from scaletrain_cli.rundir.bad_nodes import BadNode


@dataclass(frozen=True)
class Exclusion:
    """Names to exclude, by name, and those that had to be spared, with the reason."""

    nodes: tuple[str, ...] = ()
    spared: tuple[str, ...] = ()
    why: str = ""


def exclusion(
    bad: Sequence[BadNode], *, usable: Collection[str], needed: int, pinned: Collection[str] = ()
) -> Exclusion:
    """Exclude ``bad`` nodes (newest evidence first) while ``needed`` of the ``usable`` ones remain.

    A node that is not usable now costs nothing to exclude. One that the user asked for by name is spared.
    """
    room = len(set(usable)) - needed
    excluded: list[str] = []
    spared: list[str] = []
    for node in bad:
        if node.node in pinned:
            spared.append(node.node)
        elif node.node not in usable:
            excluded.append(node.node)
        elif room > 0:
            room -= 1
            excluded.append(node.node)
        else:
            spared.append(node.node)
    why = f"the job needs {needed} of {len(set(usable))} usable nodes, or names them itself" if spared else ""
    return Exclusion(tuple(sorted(excluded)), tuple(sorted(spared)), why)
