"""attempts/NNNN/attempt.json: when an attempt began and ended, and why, judged by what its nodes and ranks left behind.

Knows where the evidence lies (node records, failure files); judgement weighs it, restart_policy decides what follows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.exit_classification import ExitReason, Outcome, classify_exit
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.rundir.checkpoints import Checkpoint, committed_folders, read_checkpoint
from scaletrain_cli.rundir.documents import damage_told, read_document, write_document
from scaletrain_cli.rundir.journal import last_logged_step
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import checkpoint_folder
from scaletrain_cli.safe_files import make_folder
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.worker.checkpoint_commit import open_attempt
from scaletrain_cli.worker.failures import read_failures


@dataclass(frozen=True)
class Decision:
    """What follows from an attempt's end: another attempt, or ``exit_code`` as the run's own.

    ``left_to_scheduler``: the scheduler was ending the job, and alone decides whether it brings the job back.
    """

    requeue: bool
    exit_code: int
    why: str
    left_to_scheduler: bool = False


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
    reason: ExitReason | None = None
    message: str = ""
    decision: Decision | None = None
    last_checkpoint_step: int | None = None
    last_step: int | None = None  # the last one logged
    free_of_charge: bool = False  # a node was lost, for which the scheduler brings the job back at no cost

    @property
    def may_be_followed(self) -> bool:
        """Return whether another attempt may follow by itself: only a decision that the run stops rules that out."""
        return self.decision is None or self.decision.requeue or self.decision.left_to_scheduler

    @property
    def made_progress(self) -> bool:
        """Whether it left a newer checkpoint than it found."""
        before, after = self.checkpoint_at_start, self.last_checkpoint_step
        return after is not None and (before is None or after > before)


def begin_attempt(run: RunDir, spec: RunSpec, *, scheduler: str, job_id: str, nodes: Sequence[str]) -> int:
    """Claim the next attempt's number, fence earlier ones off the checkpoints, and record its start."""
    number = run.new_attempt()
    for folder in ("nodes", "failures"):
        make_folder(run.attempt(number) / folder)
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
        free_of_charge=outcome.lost and _brings_back_after_lost_nodes(began),
    )


def _brings_back_after_lost_nodes(attempt: AttemptRecord) -> bool:
    """Return whether the scheduler restarts a job that lost a node for free; Volcano charges each restart."""
    return backend_for(attempt.scheduler).restarts_lost_nodes_free(attempt)


def close_unended(run: RunDir, spec: RunSpec) -> list[AttemptRecord]:
    """End, by their evidence, earlier attempts whose watcher vanished. Only for who knows that none still runs."""
    unended = [attempt for attempt in read_attempts(run) if attempt.ended is None]
    return [
        end_attempt(run, spec, attempt.number, attempt_outcome(run, spec, attempt.number, cancelled=False), None)
        for attempt in unended
    ]


def read_attempt(run: RunDir, number: int) -> AttemptRecord | None:
    """One attempt; None if it never got as far as a record."""
    path = run.attempt(number) / "attempt.json"
    data = read_document(path)
    with damage_told(path):
        return _from_json(data) if data is not None else None


def read_attempts(run: RunDir) -> list[AttemptRecord]:
    """Every attempt that began, in order."""
    return [attempt for number in run.attempts() if (attempt := read_attempt(run, number)) is not None]


def newest_checkpoint_step(run: RunDir, spec: RunSpec) -> int | None:
    """The step of the newest committed checkpoint, by its manifest alone; no other is read."""
    newest_first = map(read_checkpoint, reversed(committed_folders(checkpoint_folder(run, spec))))
    return next((found.step for found in newest_first if isinstance(found, Checkpoint)), None)


def attempt_outcome(
    run: RunDir, spec: RunSpec, number: int, *, cancelled: bool, launcher_exit_code: int | None = None
) -> Outcome:
    """Judge the attempt by its evidence; ``launcher_exit_code`` is what the agent or srun itself ended with."""
    attempt = read_attempt(run, number)
    return classify_exit(
        read_node_records(run, number),
        read_failures(run, number),
        spec.cluster.nodes,
        cancelled=cancelled,
        launcher_exit_code=launcher_exit_code,
        names=attempt.nodes if attempt is not None else (),
    )


def _write(run: RunDir, attempt: AttemptRecord) -> None:
    write_document(run.attempt(attempt.number) / "attempt.json", dataclasses.asdict(attempt))


def _from_json(data: dict[str, Any]) -> AttemptRecord:
    assert data["reason"] is None or data["reason"] in get_args(ExitReason), data["reason"]
    decision = Decision(**data["decision"]) if data["decision"] else None
    return AttemptRecord(**{**data, "nodes": tuple(data["nodes"]), "decision": decision})
