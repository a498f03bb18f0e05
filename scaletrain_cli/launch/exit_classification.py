"""Why an attempt ended, from what its nodes and ranks left behind. Pure: records and failures in, one outcome out.

One death breaks the connections of all other ranks, so the work here is to tell the cause from its consequences.
Knows no files; restart_policy decides what follows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.node.record import NodeRecord, RankRecord
from scaletrain_cli.worker.failures import Failure

# fmt: off
ExitReason = Literal[
    "done", "preempted", "time-limit", "out-of-grace", "cancelled",
    "node", "wrong-nodes", "hardware", "hang", "communication",
    "crash", "killed", "oom", "host-oom", "nan", "spike", "disk-full", "unreadable", "data", "usage",
]
# fmt: on
# What only its own evidence can show, and no other rank's death brings about.
_SPECIFIC: tuple[ExitReason, ...] = (
    "oom",
    "host-oom",
    "nan",
    "spike",
    "wrong-nodes",
    "hardware",
    "disk-full",
    "unreadable",
    "data",
)
_STATED: tuple[ExitReason, ...] = (*_SPECIFIC, "hang", "communication")  # believed as said; all else is a crash
_AGAINST_ITS_NODE: tuple[ExitReason, ...] = ("wrong-nodes", "hardware", "hang")
_STOPPING = (ExitCode.USAGE, ExitCode.INFEASIBLE, ExitCode.SCHEDULER)
_LOST = "lost without reporting an exit status"


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended; ``message`` names the rank or node and says it in words.

    ``against`` are the nodes, as the scheduler calls them, that the evidence speaks against. ``lost``: a node vanished.
    """

    exit_code: int
    reason: ExitReason
    message: str
    against: tuple[str, ...] = ()
    lost: bool = False


@dataclass(frozen=True)
class _End:
    """One rank's bad end, or a node's that started none; of several the one of least weight is the cause."""

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
) -> Outcome:
    """All nodes done, or the cause of the bad end, or a node that vanished, in words.

    ``names`` are the nodes that the scheduler gave to the attempt, where it says.
    """
    ended = sorted((node for node in nodes if node.ended is not None), key=lambda node: node.ended or 0.0)
    if len(ended) == planned_nodes and {node.exit_code for node in ended} == {0}:
        return Outcome(ExitCode.DONE, "done", "every rank finished")
    # min() keeps the order of ends among equals: node by node, and of a node the rank that failed first.
    cause = min(_bad_ends(ended, failures), key=lambda end: end.weight, default=None)
    lost = _vanished(nodes, planned_nodes, launcher_exit_code, names)
    if cause is None and lost is not None and launcher_exit_code == ExitCode.DO_NOT_REQUEUE:
        # An agent with that verdict records it, unless it cannot.
        outcome = Outcome(launcher_exit_code, "disk-full", f"no space was left for an agent's record; {lost.message}")
    elif cause is None:
        outcome = lost or Outcome(
            ExitCode.PREEMPTED, "preempted", "preempted; the ranks stopped with their state saved"
        )
    elif lost is not None and len(ended) < len(nodes) and cause.weight >= _BROKEN:
        outcome = dataclasses.replace(lost, message=f"{lost.message}; then {cause.outcome.message}")
    else:
        outcome = cause.outcome
    if cancelled:
        return dataclasses.replace(outcome, reason="cancelled", message=f"cancelled; {outcome.message}", against=())
    return outcome


# Weights: what no other death explains, then ends of its own, then what the loss of another node would explain too.
_CAUSE, _OWN_END, _BROKEN, _CONNECTION, _BEHIND, _WAITED, _ENDED_BY_AGENT = range(7)


def _bad_ends(ended: Sequence[NodeRecord], failures: Sequence[Failure]) -> Iterator[_End]:
    for node in ended:
        if node.exit_code in (0, ExitCode.PREEMPTED):
            continue
        own = [failure for failure in failures if failure.node == node.node]
        yield from (_stated_end(node, None, failure) for failure in own if failure.rank is None)
        if not node.ranks and not any(failure.rank is None for failure in own):
            code = node.exit_code if node.exit_code is not None else int(ExitCode.CRASHED)
            message = f"{node.node} ended with exit code {code}"
            yield _End(_BROKEN, Outcome(code, _reason("crash", code), message))
        for rank in sorted(node.ranks, key=lambda rank: (rank.rank != node.first_failure, rank.rank)):
            if rank.exit_code in (0, ExitCode.PREEMPTED):
                continue
            # The agent's word on a rank stands above the rank's own.
            stated = [failure for failure in (*own, *failures) if failure.rank == rank.rank]
            if stated:
                yield _stated_end(node, rank, stated[0])
            elif rank.exit_code is not None or rank.rank == node.first_failure:
                yield _unstated_end(node, rank)


def _stated_end(node: NodeRecord, rank: RankRecord | None, failure: Failure) -> _End:
    code = failure.exit_code
    reason = _reason(failure.reason, code)
    who = f"rank {rank.rank} on {node.node}: " if rank is not None and not failure.node else ""
    named = reason in _AGAINST_ITS_NODE and failure.sure and (rank is not None or reason == "wrong-nodes")
    outcome = Outcome(code, reason, f"{who}{failure.message}", (node.name,) if named else ())
    if reason in _SPECIFIC:
        return _End(_CAUSE, outcome)
    if reason == "hang":
        return _End(_WAITED if rank is None else _OWN_END if failure.sure else _BEHIND, outcome)
    return _End(_CONNECTION if reason == "communication" else _BROKEN, outcome)


def _unstated_end(node: NodeRecord, rank: RankRecord) -> _End:
    code = node.exit_code if node.exit_code is not None else int(ExitCode.CRASHED)
    who = f"rank {rank.rank} on {node.node}"
    if rank.exit_code is None:
        message = f"{who} could not be killed; the node needs attention"
        return _End(_OWN_END, Outcome(code, "node", message, (node.name,)))
    if rank.killed_by_agent:
        message = f"{who} had not saved its state when the grace period ended"
        return _End(_ENDED_BY_AGENT, Outcome(code, "out-of-grace", message))
    if rank.signal is not None:
        from_outside = rank.signal in ("SIGKILL", "SIGTERM")
        outcome = Outcome(code, "killed" if from_outside else "crash", f"{who} was ended by {rank.signal}")
        return _End(_OWN_END if from_outside else _BROKEN, outcome)
    return _End(_BROKEN, Outcome(code, _reason("crash", code), f"{who} ended with exit code {rank.exit_code}"))


def _vanished(
    nodes: Sequence[NodeRecord], planned: int, launcher_exit_code: int | None, given: Sequence[str]
) -> Outcome | None:
    missing = [node for node in nodes if node.ended is None]
    unseen = planned - len(nodes)
    if not missing and unseen <= 0:
        return None
    if not nodes and launcher_exit_code in (*_STOPPING, ExitCode.WRONG_NODES):
        return Outcome(
            launcher_exit_code, _reason("crash", launcher_exit_code), "no node agent could start; see its log"
        )
    silent = sorted(set(given) - {node.name for node in nodes}) if len(given) == planned else []
    never = f"{', '.join(silent) or unseen} that never reported"
    names = ", ".join([*(node.node for node in missing), *([never] if unseen > 0 else [])])
    # When all have gone, it was the job that was ended, and no node of it is worse than another.
    against = (*(node.name for node in missing), *silent) if len(missing) < len(nodes) else ()
    return Outcome(ExitCode.CRASHED, "node", f"{_LOST}: {names}", against, lost=True)


def ended_with_its_job(outcome: Outcome) -> Outcome:
    """Return a node's silence as what it is where its scheduler ended the job and holds the node to be up."""
    message = outcome.message.replace(_LOST, "ended with its job before it had reported an end")
    return Outcome(outcome.exit_code, "cancelled" if outcome.reason == "cancelled" else "out-of-grace", message)


def _reason(stated: str, code: int) -> ExitReason:
    if code == ExitCode.WRONG_NODES:
        return "wrong-nodes"
    if code in _STOPPING:
        return "usage"
    return next((reason for reason in _STATED if reason == stated), "crash")
