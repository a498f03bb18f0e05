"""<runs root>/bad-nodes.json: nodes on which attempts failed, with evidence against the node, until it expires.

Shared by all runs of a root: writers take a lock, readers do not. The next attempt excludes them, as
far as enough nodes remain.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.documents import typed, undamaged_document, write_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import locked

_LOCK_SECONDS = 10.0
SCHEMA = "scaletrain.bad-nodes/v1"


@dataclass(frozen=True)
class BadNode:
    """The latest evidence against a node, by its name in the scheduler. Times are Unix seconds."""

    node: str
    reason: str
    message: str
    run_id: str
    attempt: int
    time: float
    expires: float


def bad_nodes_file(root: Path) -> Path:
    """Return the path of bad-nodes.json of a runs root."""
    return root / "bad-nodes.json"


def read_bad_nodes(root: Path, now: float) -> list[BadNode]:
    """Return the nodes to exclude, latest evidence first. Entries of another form are left out: users may edit them."""
    data = undamaged_document(bad_nodes_file(root))
    if data is None or data.get("schema") != SCHEMA or not isinstance(data.get("nodes"), list):
        return []
    nodes: list[BadNode] = []
    for entry in data["nodes"]:
        with contextlib.suppress(TypeError, ValueError, LookupError):
            node: BadNode = typed(BadNode, entry)
            ahead = max(0.0, node.time - now)  # evidence from a clock ahead of this one counts as new
            nodes.append(dataclasses.replace(node, time=node.time - ahead, expires=node.expires - ahead))
    return sorted((node for node in nodes if node.expires > now), key=lambda node: -node.time)


def remember_bad_nodes(root: Path, nodes: Sequence[BadNode], now: float) -> None:
    """Add evidence; newer evidence never shortens the exclusion of a node. Raises OSError."""
    with _lock(root):
        known = {node.node: node for node in read_bad_nodes(root, now)}
        for node in nodes:
            expires = max(node.expires, known.get(node.node, node).expires)
            known[node.node] = dataclasses.replace(node, expires=expires)
        _write(root, known.values())


def forget_bad_nodes(root: Path, names: Collection[str], now: float) -> list[str]:
    """Remove the named nodes, or all without names; return the names of those removed. Raises OSError."""
    with _lock(root):
        known = read_bad_nodes(root, now)
        gone = [node.node for node in known if not names or node.node in names]
        if gone:
            _write(root, [node for node in known if node.node not in gone])
    return gone


def _write(root: Path, nodes: Collection[BadNode]) -> None:
    write_document(
        bad_nodes_file(root), {"schema": SCHEMA, "nodes": [dataclasses.asdict(node) for node in nodes]}, shared=True
    )


@contextlib.contextmanager
def _lock(root: Path) -> Iterator[None]:
    # Any user with write access to the root can hold the lock, or put something else in its place: then the atomic
    # replacement is enough.
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            held.enter_context(locked(root / ".bad-nodes.lock", wait_seconds=_LOCK_SECONDS, shared=True))
        yield


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
    names, spare = [node.node for node in bad], max(0, len(set(usable)) - needed)
    still_needed = [name for name in names if name in usable and name not in pinned][spare:]
    spared = {name for name in names if name in pinned or name in still_needed}
    excluded = set(names) - spared
    reason = Reason("launch.nodes-not-excluded", {"needed": needed, "usable": len(set(usable))}) if spared else None
    return Exclusion(tuple(sorted(excluded)), tuple(sorted(spared)), reason)


def next_exclusion(
    run: RunDir, nodes: Callable[[], Mapping[str, bool]], needed: int, pinned: Collection[str] = ()
) -> Exclusion:
    """Return the exclusion of the bad nodes of a run's root; none, with the reason, if the scheduler does not answer.

    ``nodes`` asks the scheduler for its nodes, and whether the job may use each now; it is called only if there are bad
    nodes. Names that the scheduler does not know are left out: Slurm refuses a job that excludes one. The rest as for
    exclusion().
    """
    if not (bad := read_bad_nodes(run.path.parent, time.time())):
        return Exclusion()
    try:
        known = nodes()
    except SchedulerError as error:
        spared = tuple(sorted(node.node for node in bad))
        return Exclusion(spared=spared, reason=error.reason or recorded(error.message))
    usable = [name for name, is_usable in known.items() if is_usable]
    return exclusion([node for node in bad if node.node in known], usable=usable, needed=needed, pinned=pinned)
