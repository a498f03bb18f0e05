"""attempts/NNNN/attempt.json: when an attempt began and ended, and why, judged by what its nodes and ranks left behind.

Knows the evidence (node records, failure files), not how it came about; restart_policy decides what follows from it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.node_record import NodeRecord, RankRecord, read_node_records
from scaletrain_cli.rundir.checkpoints import list_checkpoints
from scaletrain_cli.rundir.committing import open_attempt
from scaletrain_cli.rundir.documents import read_document, write_document
from scaletrain_cli.rundir.failures import Failure, read_failures
from scaletrain_cli.rundir.journal import last_logged_step
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import checkpoint_folder
from scaletrain_cli.spec import RunSpec

Reason = Literal[
    "done",
    "preempted",
    "crash",
    "oom",
    "nan",
    "spike",
    "wrong-nodes",
    "usage",
    "cancelled",
    "node",
    "killed",
    "out-of-grace",
]
_SPECIFIC: tuple[Reason, ...] = ("oom", "nan", "spike", "wrong-nodes")  # what a rank knows better than "crash"
_STOPPING = (ExitCode.USAGE, ExitCode.INFEASIBLE, ExitCode.SCHEDULER)


@dataclass(frozen=True)
class Decision:
    """What follows from an attempt's end: another attempt, or ``exit_code`` as the run's own."""

    requeue: bool
    exit_code: int
    why: str


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended; ``message`` names the rank or node and says it in words."""

    exit_code: int
    reason: Reason
    message: str


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt. Without ``ended`` it still runs, or whoever watched it vanished."""

    number: int
    scheduler: str
    job_id: str
    nodes: tuple[str, ...]
    started: float
    checkpoint_at_start: int | None = None  # step
    ended: float | None = None
    exit_code: int | None = None
    reason: Reason | None = None
    message: str = ""
    decision: Decision | None = None
    last_checkpoint_step: int | None = None
    last_step: int | None = None  # the last one logged

    @property
    def made_progress(self) -> bool:
        """Whether it left a newer checkpoint than it found."""
        before, after = self.checkpoint_at_start, self.last_checkpoint_step
        return after is not None and (before is None or after > before)


def begin_attempt(run: RunDir, spec: RunSpec, *, scheduler: str, job_id: str, nodes: Sequence[str]) -> int:
    """Claim the next attempt's number, fence earlier ones off the checkpoints, and record its start."""
    number = run.new_attempt()
    for folder in ("nodes", "failures"):
        (run.attempt(number) / folder).mkdir(exist_ok=True)
    open_attempt(checkpoint_folder(run, spec), number)
    newest = newest_checkpoint_step(run, spec)
    _write(run, AttemptRecord(number, scheduler, job_id, tuple(nodes), time.time(), checkpoint_at_start=newest))
    return number


def end_attempt(run: RunDir, spec: RunSpec, number: int, outcome: Outcome, decision: Decision | None) -> AttemptRecord:
    """Record how the attempt ended, what was decided, and how far the run had come."""
    began = read_attempt(run, number)
    assert began is not None, f"attempt {number} was never begun"
    ended = with_outcome(run, spec, began, outcome, decision)
    _write(run, ended)
    return ended


def revise_decision(run: RunDir, attempt: AttemptRecord, decision: Decision) -> None:
    """Replace what was decided after an attempt that has ended."""
    _write(run, dataclasses.replace(attempt, decision=decision))


def with_outcome(
    run: RunDir, spec: RunSpec, began: AttemptRecord, outcome: Outcome, decision: Decision | None = None
) -> AttemptRecord:
    """The attempt as it is once ended, without writing it: what restart_policy judges before the decision is known."""
    return dataclasses.replace(
        began,
        ended=time.time(),
        exit_code=outcome.exit_code,
        reason=outcome.reason,
        message=outcome.message,
        decision=decision,
        last_checkpoint_step=newest_checkpoint_step(run, spec),
        last_step=last_logged_step(run),
    )


def close_unended(run: RunDir, spec: RunSpec) -> list[AttemptRecord]:
    """End, by their evidence, earlier attempts whose watcher vanished. Only for who knows that none still runs."""
    unended = [attempt for attempt in read_attempts(run) if attempt.ended is None]
    return [
        end_attempt(run, spec, attempt.number, attempt_outcome(run, spec, attempt.number, cancelled=False), None)
        for attempt in unended
    ]


def read_attempt(run: RunDir, number: int) -> AttemptRecord | None:
    """One attempt; None if it never got as far as a record."""
    data = read_document(run.attempt(number) / "attempt.json")
    return _from_json(data) if data is not None else None


def read_attempts(run: RunDir) -> list[AttemptRecord]:
    """Every attempt that began, in order."""
    return [attempt for number in run.attempts() if (attempt := read_attempt(run, number)) is not None]


def newest_checkpoint_step(run: RunDir, spec: RunSpec) -> int | None:
    """The step of the newest committed checkpoint, by its manifest alone."""
    committed = list_checkpoints(checkpoint_folder(run, spec))
    return committed[-1].step if committed else None


def attempt_outcome(
    run: RunDir, spec: RunSpec, number: int, *, cancelled: bool, launcher_exit_code: int | None = None
) -> Outcome:
    """Judge the attempt by its evidence; ``launcher_exit_code`` is what the agent or srun itself ended with."""
    nodes, failures = read_node_records(run, number), read_failures(run, number)
    return judge(nodes, failures, spec.cluster.nodes, cancelled=cancelled, launcher_exit_code=launcher_exit_code)


def judge(
    nodes: Sequence[NodeRecord],
    failures: Sequence[Failure],
    planned_nodes: int,
    *,
    cancelled: bool,
    launcher_exit_code: int | None = None,
) -> Outcome:
    """Pure: all nodes done, or the first bad end, or a node that vanished, in words."""
    ended = sorted((node for node in nodes if node.ended is not None), key=lambda node: node.ended or 0.0)
    codes = [node.exit_code for node in ended]
    if len(ended) == planned_nodes and set(codes) == {0}:
        return Outcome(ExitCode.DONE, "done", "every rank finished")
    outcome, lost = _bad_end(ended, failures), _vanished(nodes, planned_nodes, launcher_exit_code)
    if outcome is None:
        outcome = lost or Outcome(
            ExitCode.PREEMPTED, "preempted", "preempted; the ranks stopped with their state saved"
        )
    elif lost is not None and len(ended) < len(nodes) and _may_be_a_consequence(outcome, ended):
        outcome = dataclasses.replace(lost, message=f"{lost.message}; then {outcome.message}")
    if cancelled:
        return dataclasses.replace(outcome, reason="cancelled", message=f"cancelled; {outcome.message}")
    return outcome


def _bad_end(ended: Sequence[NodeRecord], failures: Sequence[Failure]) -> Outcome | None:
    """The failure of the node that failed first, by what its first failing rank, or a better informed one, says."""
    failed = _first_failed(ended)
    if failed is None:
        return None
    code = failed.exit_code if failed.exit_code is not None else int(ExitCode.CRASHED)
    rank = _first_failing_rank(failed)
    own = next((failure for failure in failures if rank is not None and failure.rank == rank.rank), None)
    # A rank that hits a broken connection may end before the one whose memory ran out and broke it.
    specific = next((failure for failure in failures if failure.reason in _SPECIFIC), None)
    failure = own if own is not None and own.reason in _SPECIFIC else specific or own
    if failure is None and rank is None:  # no rank was started
        failure = next((failure for failure in failures if failure.rank is None), None)
    who = failed.node if rank is None else f"rank {rank.rank} on {failed.node}"
    if failure is not None:
        speaker = who if failure.rank is None or failure is own else f"rank {failure.rank}"
        return Outcome(code, _reason(failure.reason, code), f"{speaker}: {failure.message}")
    if rank is not None and rank.exit_code is None:
        return Outcome(code, "node", f"{who} could not be killed; the node needs attention")
    if rank is not None and rank.signal is not None:
        if rank.killed_by_agent:
            return Outcome(code, "out-of-grace", f"{who} had not saved its state when the grace period ended")
        reason: Reason = "killed" if rank.signal in ("SIGKILL", "SIGTERM") else "crash"
        return Outcome(code, reason, f"{who} was ended by {rank.signal}")
    return Outcome(code, _reason("crash", code), f"{who} ended with exit code {rank.exit_code if rank else code}")


def _may_be_a_consequence(outcome: Outcome, ended: Sequence[NodeRecord]) -> bool:
    """Whether the loss of another node explains this end: its connections broke, or its agent ended what then hung."""
    failed = _first_failed(ended)
    return outcome.reason == "crash" or (failed is not None and _was_ended_by_its_agent(failed))


def _first_failed(ended: Sequence[NodeRecord]) -> NodeRecord | None:
    """Of the nodes that failed the first one, but not one that ended its ranks because another had failed."""
    failed = [node for node in ended if node.exit_code not in (0, ExitCode.PREEMPTED)]
    return next((node for node in failed if not _was_ended_by_its_agent(node)), failed[0] if failed else None)


def _was_ended_by_its_agent(node: NodeRecord) -> bool:
    rank = _first_failing_rank(node)
    return rank is not None and rank.killed_by_agent


def _first_failing_rank(node: NodeRecord) -> RankRecord | None:
    return next((rank for rank in node.ranks if rank.rank == node.first_failure), None)


def _vanished(nodes: Sequence[NodeRecord], planned: int, launcher_exit_code: int | None) -> Outcome | None:
    missing = [node.node for node in nodes if node.ended is None]
    unseen = planned - len(nodes)
    if not missing and unseen <= 0:
        return None
    if not nodes and launcher_exit_code in (*_STOPPING, ExitCode.WRONG_NODES):
        return Outcome(
            launcher_exit_code, _reason("crash", launcher_exit_code), "no node agent could start; see its log"
        )
    names = ", ".join([*missing, *([f"{unseen} that never reported"] if unseen > 0 else [])])
    return Outcome(ExitCode.CRASHED, "node", f"lost without a word: {names}")


def _reason(stated: str, code: int) -> Reason:
    if code == ExitCode.WRONG_NODES:
        return "wrong-nodes"
    if code in _STOPPING:
        return "usage"
    return stated if stated in _SPECIFIC else "crash"


def _write(run: RunDir, attempt: AttemptRecord) -> None:
    write_document(run.attempt(attempt.number) / "attempt.json", dataclasses.asdict(attempt))


def _from_json(data: dict[str, Any]) -> AttemptRecord:
    assert data["reason"] is None or data["reason"] in get_args(Reason), data["reason"]
    decision = Decision(**data["decision"]) if data["decision"] else None
    return AttemptRecord(**{**data, "nodes": tuple(data["nodes"]), "decision": decision})
