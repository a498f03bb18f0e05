"""Exit classification: find why an attempt ended from the records of its nodes and ranks. Pure functions.

A rank that fails breaks the connections of all other ranks, so causes must be separated from consequences.
launch/restart.py decides what follows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.node.record import NodeRecord, RankRecord
from scaletrain_cli.reasons import Reason

if TYPE_CHECKING:
    from scaletrain_cli.worker.failures import Failure

# fmt: off
ExitReason = Literal[
    "done", "preempted", "time-limit", "resize", "idle", "out-of-grace", "cancelled",
    "node", "wrong-nodes", "hardware", "hang", "communication",
    "crash", "killed", "oom", "host-oom", "nan", "spike", "disk-full", "unreadable", "data", "usage",
]
# fmt: on
# Causes that are never a consequence of another rank's failure.
_SPECIFIC: tuple[ExitReason, ...] = (
    "oom",
    "host-oom",
    "nan",
    "spike",
    "node",
    "wrong-nodes",
    "hardware",
    "disk-full",
    "unreadable",
    "data",
)
_STATED: tuple[ExitReason, ...] = (*_SPECIFIC, "hang", "communication")  # as reported; any other reason is a crash
# Why the cache of a node cannot take files of the hub; the cache of another node may be able to.
OF_THE_CACHE = ("hub.no-space", "hub.disk-full", "hub.not-writable")
_STOPPING = (ExitCode.USAGE, ExitCode.INFEASIBLE, ExitCode.SCHEDULER)
_LOST, _ENDED_WITH_JOB = "launch.nodes-lost", "launch.nodes-ended-with-job"


@dataclass(frozen=True)
class Outcome:
    """The classified end of an attempt. ``why`` names the rank or node.

    ``against``: the scheduler's names of the nodes that caused it. ``lost``: a node ended without reporting.
    """

    exit_code: int
    reason: ExitReason
    why: Reason
    against: tuple[str, ...] = ()
    lost: bool = False

    @property
    def message(self) -> str:
        """The text of ``why``."""
        return str(self.why)


@dataclass(frozen=True)
class _End:
    """The failure of a rank, or of a node that started none. The one with the least weight is the cause."""

    weight: int
    outcome: Outcome


def classify_exit(
    nodes: Sequence[NodeRecord],
    failures: Sequence[Failure],
    planned_nodes: int,
    *,
    cancelled: bool,
    launcher_exit_code: int | None = None,
    names: Sequence[str] = (),
    saves: bool = True,
    saved_step: int | None = None,
) -> Outcome:
    """Return the outcome: done, the cause of the failure, or the node that ended without reporting.

    ``saves``: a preempted rank saves its state before it ends, which is not known of a program of ``code.command``;
    ``saved_step``: of the newest checkpoint, None without one.
    ``names`` are the nodes that the scheduler allocated to the attempt, where it names them.
    """
    ended = sorted((node for node in nodes if node.ended is not None), key=lambda node: node.ended or 0.0)
    if len(ended) == planned_nodes and {node.exit_code for node in ended} == {0}:
        return Outcome(ExitCode.DONE, "done", Reason("launch.all-ranks-finished"))
    # Among equal weights min() takes the first: nodes in order, and per node the rank that failed first.
    stated = [failure for failure in failures if not failure.ranks]
    hung = [failure for failure in failures if failure.ranks]
    # The ranks of a hang are killed node by node, which breaks the connections of those that are still alive.
    waited = {view.rank for failure in hung for view in failure.ranks}
    broken = {failure.rank for failure in stated if failure.reason == "communication"} & waited
    ends = [*_failed_ends(ended, stated, broken), *([_hung_end(nodes, hung)] if hung else [])]
    cause = min(ends, key=lambda end: end.weight, default=None)
    lost = _lost_nodes(nodes, planned_nodes, launcher_exit_code, names)
    if cause is None and lost is not None and launcher_exit_code == ExitCode.DO_NOT_REQUEUE:
        # An agent with this exit code records the reason, unless the disk is full.
        outcome = Outcome(launcher_exit_code, "disk-full", Reason("launch.no-space-for-record", {"then": lost.why}))
    elif cause is None:
        code = "programs-ended" if not saves else "stopped-unsaved" if saved_step is None else "all-ranks-saved"
        why = Reason(f"launch.{code}", {"step": saved_step} if code == "all-ranks-saved" else {})
        outcome = lost or Outcome(ExitCode.PREEMPTED, "preempted", why)
    elif lost is not None and len(ended) < len(nodes) and cause.weight >= _BROKEN:
        why = Reason("launch.one-then-another", {"first": lost.why, "then": cause.outcome.why})
        outcome = dataclasses.replace(lost, why=why)
    else:
        outcome = cause.outcome
    if cancelled:
        why = Reason("launch.cancelled-with", {"end": outcome.why})
        return dataclasses.replace(outcome, reason="cancelled", why=why, against=())
    return outcome


# Weights, lowest first: certain causes, failures of the rank itself, possible consequences of another node's loss.
_CAUSE, _OWN_END, _BROKEN, _CONNECTION, _HUNG, _ENDED_BY_AGENT = range(6)


def _hung_end(nodes: Sequence[NodeRecord], failures: Sequence[Failure]) -> _End:
    """Return the hang of the attempt: ``failures`` have the ranks of each node."""
    from scaletrain_cli.launch.hang import find_hang  # verbs that only list runs need no worker

    node_of = {rank.rank + offset: node for node in nodes for rank in node.ranks for offset in range(rank.ranks)}
    views = [view for failure in failures for view in failure.ranks]
    at = {address: failure.node for failure in failures for address in failure.addresses}
    stalled = {(failure.node, at[peer]) for failure in failures for peer in failure.stalled if peer in at}
    hang = find_hang(views, {rank: node.node for rank, node in node_of.items()}, stalled)
    against = tuple(node.name for node in nodes if node.node == hang.node)
    why = Reason("launch.hung", {**failures[0].params, "finding": hang.why})
    return _End(_OWN_END if against else _HUNG, Outcome(failures[0].exit_code, "hang", why, against))


def _failed_ends(
    ended: Sequence[NodeRecord], failures: Sequence[Failure], without: Collection[int | None]
) -> Iterator[_End]:
    """Yield the failures of nodes and ranks, ``without`` some ranks."""
    for node in ended:
        if node.exit_code in (0, ExitCode.PREEMPTED):
            continue
        own = [failure for failure in failures if failure.node == node.node]
        yield from (_stated_end(node, None, failure) for failure in own if failure.rank is None)
        if not node.ranks and not any(failure.rank is None for failure in own):
            code = node.exit_code if node.exit_code is not None else int(ExitCode.CRASHED)
            why = Reason("launch.node-exited", {"node": node.node, "exit_code": code})
            yield _End(_BROKEN, Outcome(code, _exit_reason("crash", code), why))
        for rank in sorted(node.ranks, key=lambda rank: (rank.rank != node.first_failure, rank.rank)):
            if rank.exit_code in (0, ExitCode.PREEMPTED) or rank.rank in without:
                continue
            # The agent's report about a rank takes precedence over the rank's own.
            stated = [failure for failure in (*own, *failures) if rank.holds(failure.rank)]
            if stated:
                # A launcher of the user's does not report which of its ranks failed first.
                yield from (_stated_end(node, rank, failure) for failure in stated[: rank.ranks])
            elif rank.exit_code is not None or rank.rank == node.first_failure:
                yield _unstated_end(node, rank)


def _stated_end(node: NodeRecord, rank: RankRecord | None, failure: Failure) -> _End:
    code = failure.exit_code
    reason = _exit_reason(failure.reason, code)
    why = failure.why
    if rank is not None and not failure.node:
        why = Reason("launch.rank-failed", {"rank": failure.rank, "node": node.node, "failure": why})
    elif failure.node and failure.code:  # a message without a code names the node
        why = Reason("launch.node-reported", {"node": failure.node, "failure": why})
    named = reason in ("node", "wrong-nodes") or (reason == "hardware" and rank is not None)
    outcome = Outcome(code, reason, why, (node.name,) if named else ())
    if reason in _SPECIFIC:
        return _End(_CAUSE, outcome)
    return _End(_CONNECTION if reason == "communication" else _BROKEN, outcome)


def _unstated_end(node: NodeRecord, rank: RankRecord) -> _End:
    code = node.exit_code if node.exit_code is not None else int(ExitCode.CRASHED)
    who = {"rank": rank.rank, "node": node.node}
    if rank.exit_code is None:
        return _End(_OWN_END, Outcome(code, "node", Reason("launch.rank-not-killed", who), (node.name,)))
    if rank.killed_by_agent:
        return _End(_ENDED_BY_AGENT, Outcome(code, "out-of-grace", Reason("launch.rank-out-of-grace", who)))
    if rank.signal is not None:
        from_outside = rank.signal in ("SIGKILL", "SIGTERM")
        why = Reason("launch.rank-killed", who | {"signal": rank.signal})
        return _End(_OWN_END if from_outside else _BROKEN, Outcome(code, "killed" if from_outside else "crash", why))
    why = Reason("launch.rank-exited", who | {"exit_code": rank.exit_code})
    return _End(_BROKEN, Outcome(code, _exit_reason("crash", code), why))


def _lost_nodes(
    nodes: Sequence[NodeRecord], planned: int, launcher_exit_code: int | None, given: Sequence[str]
) -> Outcome | None:
    missing = [node for node in nodes if node.ended is None]
    unseen = planned - len(nodes)
    if not missing and unseen <= 0:
        return None
    if not nodes and launcher_exit_code in (*_STOPPING, ExitCode.WRONG_NODES):
        why = Reason("launch.no-agent-started", {"exit_code": launcher_exit_code})
        return Outcome(launcher_exit_code, _exit_reason("crash", launcher_exit_code), why)
    silent = sorted(set(given) - {node.name for node in nodes}) if len(given) == planned else []
    # If all nodes are lost, the job was ended from outside and no single node is to blame.
    against = (*(node.name for node in missing), *silent) if len(missing) < len(nodes) else ()
    return Outcome(ExitCode.CRASHED, "node", _why_lost(missing, silent, unseen), against, lost=True)


def _why_lost(missing: Sequence[NodeRecord], silent: Sequence[str], unseen: int) -> Reason:
    """Return the reason for lost nodes: ``missing`` reported no end; ``silent`` (named) or ``unseen`` ones no start."""
    lost = Reason(_LOST, {"nodes": [node.node for node in missing]})
    if unseen <= 0:
        return lost
    never = (
        Reason("launch.nodes-never-started", {"nodes": list(silent)})
        if silent
        else Reason("launch.unnamed-nodes-never-started", {"count": unseen})
    )
    return Reason("launch.one-and-another", {"first": lost, "second": never}) if missing else never


def cache_failure(why: Reason) -> str | None:
    """Return the code in OF_THE_CACHE in a reason or those nested in it; None if there is none."""
    if why.code in OF_THE_CACHE:
        return why.code
    nested = (cache_failure(value) for value in why.params.values() if isinstance(value, Reason))
    return next((code for code in nested if code is not None), None)


def ended_with_its_job(outcome: Outcome) -> Outcome:
    """Return the outcome for a lost node if the scheduler ended the job and reports the node as up."""
    reason: ExitReason = "cancelled" if outcome.reason == "cancelled" else "out-of-grace"
    return Outcome(outcome.exit_code, reason, _with_code(outcome.why, _LOST, _ENDED_WITH_JOB))


def _with_code(reason: Reason, before: str, after: str) -> Reason:
    """Return the reason with code ``before`` replaced by ``after``, also in nested reasons."""
    params = {
        name: _with_code(value, before, after) if isinstance(value, Reason) else value
        for name, value in reason.params.items()
    }
    return Reason(after if reason.code == before else reason.code, params)


def _exit_reason(stated: str, code: int) -> ExitReason:
    if code == ExitCode.WRONG_NODES:
        return "wrong-nodes"
    if code in _STOPPING:
        return "usage"
    return next((reason for reason in _STATED if reason == stated), "crash")
