"""What a probe of the nodes found, in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scaletrain_cli.ui.messages import say
from scaletrain_cli.ui.units import bytes_text

if TYPE_CHECKING:
    from scaletrain_cli.launch.node_probe import NodeFacts


def show_probe(nodes: Sequence[NodeFacts]) -> None:
    """Say the least that every node has, and the versions, which are the same on all."""
    least = min(nodes, key=lambda node: node.free_bytes)
    names = ", ".join(node.hostname for node in nodes[:4]) + (", ..." if len(nodes) > 4 else "")
    each = [
        f"{min(node.gpus for node in nodes)} GPUs",
        f"{min(node.cores for node in nodes)} cores",
        f"{bytes_text(min(node.memory_bytes for node in nodes))} of memory",
    ]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(least.packages.items()))
    say(
        f"probed {len(nodes)} nodes ({names}): at least {', '.join(each)}; {versions}; "
        f"{bytes_text(least.free_bytes)} free in the runs root, which they share"
    )
