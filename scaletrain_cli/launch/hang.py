"""Find the cause of a hang: the rank that did not enter a collective, by comparing the ranks of all nodes.

Ranks that hang wait for each other: in a collective for those of its group that have not entered it. The rank that is
waited for and waits for nobody is the cause. Pure functions.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.launch.node.heartbeats import LastBeat, furthest_behind
from scaletrain_cli.reasons import Reason
from scaletrain_cli.worker.heartbeat import PARTS
from scaletrain_cli.worker.position import Collective, RankView

_CODES_OF_STATES = {"T": "rank-stopped", "t": "rank-traced", "D": "rank-in-kernel", "R": "rank-busy"}


_Wait = tuple[RankView, Collective]


@dataclass(frozen=True)
class HangFinding:
    """The cause of a hang. ``rank``: None if no single one can be named; ``node``: None if no single one can be."""

    why: Reason
    rank: int | None = None
    node: str | None = None


def find_hang(
    views: Sequence[RankView], node_of: Mapping[int, str], stalled: Collection[tuple[str, str]] = ()
) -> HangFinding:
    """Return the cause of a hang. ``views``: of all nodes that reported; ``node_of``: the node of every rank.

    ``stalled``: pairs of nodes between which data are not acknowledged.
    """
    by_rank = {view.rank: view for view in views}
    together: dict[Any, list[_Wait]] = defaultdict(list)  # by collective: thousands of ranks may wait in one
    for view in views:
        for call in view.position.waits if view.position is not None else ():
            together[call.group, call.number, call.spans, call.number is None and view.rank].append((view, call))
    awaited: dict[int, list[_Wait]] = defaultdict(list)
    for waits in together.values():
        _, collective = waits[0]
        for rank in set(collective.ranks).difference(view.rank for view, _ in waits):
            if not _has_entered(by_rank.get(rank), collective):
                awaited[rank] += waits
    waiting = {view.rank for waits in awaited.values() for view, _ in waits}
    causes = sorted(awaited.keys() - waiting)
    # Ranks that wait only in collectives which all of their ranks have entered: the data do not arrive.
    inside = [(view, call) for waits in together.values() for view, call in waits if view.rank not in waiting]
    stuck = {view.rank for view, _ in inside}
    seen = [by_rank[rank] for rank in causes if rank in by_rank and rank not in stuck]
    if seen := seen or [view for view in views if not view.responded]:
        hang = _of_rank(_worst(seen), awaited, node_of)
        # Ranks of several nodes, as when a storage system stalls: none of the nodes is to blame.
        return dataclasses.replace(hang, node=None) if len({node_of.get(view.rank) for view in seen}) > 1 else hang
    if inside:
        return _of_network(*min(inside, key=_order), node_of, stalled)
    if causes:
        return _of_silent_nodes(causes, awaited, node_of)
    if waiting:  # for each other, as where ranks call collectives in different orders
        every = sorted((wait for waits in together.values() for wait in waits), key=_order)
        places = {view.rank: f"rank {view.rank} in the {_name(view, call)}" for view, call in every}
        return HangFinding(Reason("launch.hang-cycle", {"ranks": sorted(waiting), "places": list(places.values())}))
    behind = _worst(views)
    ahead = max(views, key=lambda view: (view.turn, view.step, view.part, -view.silent_seconds))
    if (ahead.turn, ahead.step, ahead.phase, ahead.part) == (behind.turn, behind.step, behind.phase, behind.part):
        return HangFinding(Reason("launch.hang-no-suspect", {"step": behind.step, "phase": _phase(behind)}))
    others = {"ahead": ahead.rank, "ahead_step": ahead.step, "ahead_phase": _phase(ahead)}
    last = _finding("launch.hang-behind", behind, node_of, step=behind.step, **others)
    return dataclasses.replace(last, node=None)  # it may itself wait for another one


def _has_entered(view: RankView | None, collective: Collective) -> bool:
    if view is None or view.position is None or collective.number is None:
        return False
    return view.position.entered.get(collective.group, 0) >= collective.number


def _worst(views: Sequence[RankView]) -> RankView:
    """Return a rank that did not respond, else the one with the least progress by its beats."""
    silent = [view for view in views if not view.responded]
    if silent:
        return max(silent, key=lambda view: (view.state in "TtD", view.silent_seconds))
    beats = {v.rank: LastBeat(v.step, v.phase, 0.0, -v.silent_seconds, v.turn, v.part) for v in views}
    behind = furthest_behind(beats)
    return next(view for view in views if view.rank == behind)


def _order(wait: _Wait) -> tuple[bool, float]:
    """Sort key: the wait that began first is for what the missing rank has to enter first."""
    return wait[1].number is not None, wait[1].since


def _of_rank(cause: RankView, awaited: Mapping[int, Sequence[_Wait]], node_of: Mapping[int, str]) -> HangFinding:
    if not (waits := awaited.get(cause.rank, ())):
        return _finding("launch.hang-unresponsive", cause, node_of, step=cause.step)
    view, collective = min(waits, key=_order)
    ranks = sorted(
        other.rank for other, call in waits if (call.group, call.number) == (collective.group, collective.number)
    )
    params = {"collective": _name(view, collective), "step": view.step, "waiting": ranks}
    return _finding("launch.hang-not-entered", cause, node_of, **params)


def _of_network(
    view: RankView, collective: Collective, node_of: Mapping[int, str], stalled: Collection[tuple[str, str]]
) -> HangFinding:
    """Return the finding for a collective that all ranks have entered: the node with the most stalled connections."""
    peers: dict[str, set[str]] = defaultdict(set)
    for one, other in stalled:
        peers[one].add(other)
        peers[other].add(one)
    first, *others = sorted(peers, key=lambda node: (-len(peers[node]), node)) or [""]
    params = {"collective": _name(view, collective), "step": view.step}
    if others and len(peers[first]) > len(peers[others[0]]):
        why = Reason("launch.hang-node-cut-off", {**params, "node": first, "peers": sorted(peers[first])})
        return HangFinding(why, node=first)
    nodes = sorted(peers) or sorted({node_of[rank] for rank in collective.ranks if rank in node_of})
    return HangFinding(Reason(f"launch.hang-{'link-cut' if peers else 'entered-by-all'}", {**params, "nodes": nodes}))


def _of_silent_nodes(
    causes: Sequence[int], awaited: Mapping[int, Sequence[_Wait]], node_of: Mapping[int, str]
) -> HangFinding:
    """Return the finding where the ranks that are waited for are on nodes that reported nothing."""
    nodes = sorted({node_of.get(rank, "?") for rank in causes})
    view, collective = min((wait for rank in causes for wait in awaited[rank]), key=_order)
    waiting = sorted({other.rank for rank in causes for other, _ in awaited[rank]})
    params = {"ranks": list(causes), "nodes": nodes, "collective": _name(view, collective), "step": view.step}
    why = Reason("launch.hang-silent-node", {**params, "waiting": waiting})
    return HangFinding(why, node=nodes[0] if len(nodes) == 1 else None)


def _finding(code: str, cause: RankView, node_of: Mapping[int, str], **params: object) -> HangFinding:
    node = node_of.get(cause.rank)
    details = {"rank": cause.rank, "node": node or "?", "phase": _phase(cause), "doing": _doing(cause), **params}
    # In state D, and before it has its batch, a rank may wait for a network file system rather than for its node.
    waits = cause.phase == "step" and cause.part == 0 if cause.responded else cause.state == "D"
    return HangFinding(Reason(code, details), cause.rank, None if waits else node)


def _doing(view: RankView) -> Reason:
    if not view.responded:
        return Reason(f"launch.{_CODES_OF_STATES.get(view.state, 'rank-unresponsive')}", {"state": view.state})
    if view.position is None:
        return Reason("launch.rank-without-position")
    return Reason("launch.rank-in-function", {"function": view.position.function})


def _phase(view: RankView) -> str:
    before = view.phase == "step" and view.part == 0
    return ", ".join(filter(None, (view.phase, "before its batch" if before else PARTS[view.part])))


def _name(view: RankView, collective: Collective) -> str:
    layer = view.position.layer if view.position is not None else ""
    return f"{collective.kind} {collective.purpose}" + (f" in {layer}" if layer else "")
