"""The record of an attempt, attempts/NNNN/attempt.json: its start, its end, and the exit reason with its cause.

Also the requests that its ranks stop: growth.json, to restart on more nodes, and idle.json, as they do nothing. Each is
written before the ranks are signaled: the end of the attempt is then no preemption.

This module reads and writes the records; exit_classification.py finds the cause, and restart.py makes the decision.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.exit_classification import ExitReason, Outcome, classify_exit, ended_with_its_job
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.rundir.checkpoints import Checkpoint, committed_folders, has_all_files, read_checkpoint
from scaletrain_cli.rundir.documents import read_as, reporting_damage, typed, undamaged_document, write_document
from scaletrain_cli.rundir.journal import last_logged_step, read_events, read_lines_backwards
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import checkpoint_folder
from scaletrain_cli.safe_files import make_folder
from scaletrain_cli.spec import RunSpec


@dataclass(frozen=True)
class Decision:
    """The restart decision: whether another attempt follows, or else ``exit_code`` as that of the run.

    ``code`` and ``params`` are those of the Reason whose text is ``why``.
    ``left_to_scheduler``: the scheduler was ending the job, and it alone decides whether it starts the job again.
    ``in_place``: the next attempt begins on the nodes of this one, which the job keeps.
    """

    requeue: bool
    exit_code: int
    why: str
    left_to_scheduler: bool = False
    code: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    in_place: bool = False

    @classmethod
    def because(cls, requeue: bool, exit_code: int, reason: Reason, *, left_to_scheduler: bool = False) -> Decision:
        return cls(requeue, exit_code, str(reason), left_to_scheduler, **reason.to_document())

    @property
    def reason(self) -> Reason:
        """The reason for the decision; its code is ``recorded.text`` where only the text was recorded."""
        return reason_from({"code": self.code, "params": self.params, "text": self.why})


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt. Without ``ended`` it is still running, or the process that watched it is gone.

    ``reason`` is the exit reason; ``code`` and ``params`` are those of the Reason whose text is ``message``.
    """

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
    free_of_charge: bool = False  # a node was lost, and the scheduler restarts the job for free
    lost_nodes_free: bool = False  # the scheduler requeues the job after a lost node: charged to no budget
    code: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    revision: int | None = None  # that it trains, if not the one that its job was submitted with

    @property
    def why(self) -> Reason:
        """The reason for the end; its code is ``recorded.text`` where only the text was recorded."""
        return reason_from({"code": self.code, "params": self.params, "text": self.message})

    @property
    def end(self) -> Reason:
        """The exit code and why, with the decision that followed, if there was one."""
        params = {"attempt": self.number, "exit_code": self.exit_code, "end": self.why}
        if self.decision is None:
            return Reason("launch.attempt-ended", params)
        return Reason("launch.attempt-ended-decided", params | {"decision": self.decision.reason})

    @property
    def may_be_followed(self) -> bool:
        """Return whether another attempt may follow without a resume: True unless the decision was to stop the run."""
        return self.decision is None or self.decision.requeue or self.decision.left_to_scheduler

    @property
    def made_progress(self) -> bool:
        """Return whether the attempt committed a newer checkpoint than the one it started from."""
        before, after = self.checkpoint_at_start, self.last_checkpoint_step
        return after is not None and (before is None or after > before)


def begin_attempt(
    run: RunDir,
    spec: RunSpec,
    *,
    scheduler: str,
    job_id: str,
    nodes: Sequence[str],
    revision: int | None = None,
    after: int = 0,
    lost_nodes_free: bool = False,
) -> int:
    """Claim the next attempt's number, fence earlier ones off the checkpoints, and record its start.

    ``revision``: that it trains, if it may differ from the one that its job was submitted with. ``after``: the number
    of an earlier attempt that this run directory does not have. ``lost_nodes_free``: see AttemptRecord.
    """
    from scaletrain_cli.worker.checkpoint_commit import open_attempt  # the other verbs need no worker

    number = run.new_attempt(after)
    for folder in ("nodes", "failures"):
        make_folder(run.attempt(number) / folder)
    open_attempt(checkpoint_folder(run, spec), number)
    newest = _newest_saved_step(run, spec)
    began = AttemptRecord(number, scheduler, job_id, tuple(nodes), time.time(), newest, revision=revision)
    _write(run, dataclasses.replace(began, lost_nodes_free=lost_nodes_free))
    return number


def end_attempt(run: RunDir, spec: RunSpec, number: int, outcome: Outcome, decision: Decision | None) -> AttemptRecord:
    """Record the attempt's exit reason, the restart decision and the latest steps."""
    began = read_attempt(run, number)
    assert began is not None, f"attempt {number} was never begun"
    ended = with_outcome(run, spec, began, outcome, decision)
    _write(run, ended)
    return ended


def revise_decision(run: RunDir, attempt: AttemptRecord, decision: Decision) -> None:
    """Replace the restart decision of an attempt that has ended."""
    _write(run, dataclasses.replace(attempt, decision=decision))


def with_outcome(
    run: RunDir,
    spec: RunSpec,
    began: AttemptRecord,
    outcome: Outcome,
    decision: Decision | None = None,
    ended: float | None = None,
) -> AttemptRecord:
    """Return the ended attempt without writing it: restart.decide needs it as input."""
    return dataclasses.replace(
        began,
        ended=time.time() if ended is None else ended,
        exit_code=outcome.exit_code,
        reason=outcome.reason,
        message=str(outcome.why),
        decision=decision,
        last_checkpoint_step=_newest_saved_step(run, spec),
        last_step=last_logged_step(run),
        free_of_charge=outcome.lost and began.lost_nodes_free,
        **outcome.why.to_document(),
    )


def close_unended(
    run: RunDir, spec: RunSpec, ended_with_job: Callable[[AttemptRecord], bool] = lambda _: False
) -> list[AttemptRecord]:
    """Record the end of earlier attempts that have none, from their records. None of them may still be running.

    ``ended_with_job``: whether the scheduler ended the job of an attempt, although all of its nodes work.
    """
    closed = []
    for began in read_attempts(run):
        if began.ended is None:
            outcome = attempt_outcome(run, spec, began.number, cancelled=False)
            if outcome.lost and ended_with_job(began):
                outcome = ended_with_its_job(outcome)
            ended = with_outcome(run, spec, began, outcome, ended=last_sign_of(run, began))
            _write(run, ended)
            closed.append(ended)
    return closed


def last_sign_of(run: RunDir, attempt: AttemptRecord) -> float:
    """Return the time of the last record of an attempt that recorded no end, in Unix seconds.

    The next one may begin hours later: the time until then is not the attempt's.
    """
    from scaletrain_cli.telemetry.run import read_telemetry

    number, times = attempt.number, [attempt.started]
    for node in read_node_records(run, number):
        times += [node.started, node.ended or 0.0, *(rank.ended or 0.0 for rank in node.ranks)]
    times += [event["time"] for event in read_events(run) if event.get("attempt") == number and "time" in event]
    newest = next(read_lines_backwards(run.metrics), {})
    times += [newest["time"]] if newest.get("attempt") == number and "time" in newest else []
    series = read_telemetry(run, attempt=number, newest=1, most_nodes=1).nodes.values()
    return max([*times, *(one.times[-1] for one in series if len(one.times))])


def read_attempt(run: RunDir, number: int) -> AttemptRecord | None:
    """Return one attempt; None where it has no record."""
    return read_as(AttemptRecord, run.attempt(number) / "attempt.json")


def read_attempts(run: RunDir) -> list[AttemptRecord]:
    """Return every attempt that began, in order."""
    return [attempt for number in run.attempts() if (attempt := read_attempt(run, number)) is not None]


def newest_checkpoint_step(run: RunDir, spec: RunSpec) -> int | None:
    """Return the step of the newest committed checkpoint whose files are there in full size; None where there is none.

    Manifests are read and files are looked up, but no data: damage that keeps the size of a file is found when the
    checkpoint is verified.
    """
    newest_first = map(read_checkpoint, reversed(committed_folders(checkpoint_folder(run, spec))))
    return next((entry.step for entry in newest_first if isinstance(entry, Checkpoint) and has_all_files(entry)), None)


def _newest_saved_step(run: RunDir, spec: RunSpec) -> int | None:
    """Return the step of the newest checkpoint, on disk or as a copy in the host memory of this node, unverified."""
    from scaletrain_cli.worker.memory_copies import newest_copy

    steps = (newest_checkpoint_step(run, spec), newest_copy(run) if spec.checkpoint.in_memory != "off" else None)
    return max((step for step in steps if step is not None), default=None)


def attempt_outcome(
    run: RunDir, spec: RunSpec, number: int, *, cancelled: bool, launcher_exit_code: int | None = None
) -> Outcome:
    """Classify the end of the attempt; ``launcher_exit_code`` is that of the agent or of srun itself.

    A run of this engine that recorded its end has finished, whatever ended its processes afterwards.
    """
    from scaletrain_cli.worker.failures import read_failures

    attempt, planned = read_attempt(run, number), spec.cluster.nodes
    if attempt is not None and attempt.revision is not None and attempt.nodes:
        planned = len(attempt.nodes)  # with a range, an earlier attempt may have had others than the spec now has
    outcome = classify_exit(
        read_node_records(run, number),
        read_failures(run, number),
        planned,
        cancelled=cancelled,
        launcher_exit_code=launcher_exit_code,
        names=attempt.nodes if attempt is not None else (),
        saves=spec.code.command is None,
        saved_step=newest_checkpoint_step(run, spec),
    )
    if outcome.lost and set(_lost_names(run, number, attempt)) <= signaled_nodes(run, number):
        outcome = ended_with_its_job(outcome)
    # A program of the user's may still have work after its last step: its exit code decides.
    if outcome.reason != "done" and not spec.code.own_program and _has_recorded_its_end(run, number):
        return Outcome(ExitCode.DONE, "done", Reason("launch.finished-then", {"end": outcome.why}))
    return outcome


def signaled_nodes(run: RunDir, number: int) -> set[str]:
    """Return the nodes on which a signal to save and exit arrived in attempt ``number``, by the scheduler's names."""
    signals = (event for event in read_events(run) if event["event"] == "signal")
    return {str(event.get("node")) for event in signals if event.get("attempt") == number}


def _lost_names(run: RunDir, number: int, attempt: AttemptRecord | None) -> set[str]:
    """Return the nodes that reported no end, by the scheduler's names; where it named none, an empty name."""
    nodes = read_node_records(run, number)
    names = set(attempt.nodes) if attempt is not None else set()
    ended = {node.name for node in nodes if node.ended is not None}
    return (names or {node.name for node in nodes} or {""}) - ended


def _has_recorded_its_end(run: RunDir, number: int) -> bool:
    """Return whether attempt ``number``, which is the last one or has no record of its end, trained the last step."""
    for event in reversed(read_events(run)):
        if event["event"] == "attempt-ended" or event.get("attempt", number) != number:  # what follows is older
            return False
        if event["event"] == "finished":
            return True
    return False


def _write(run: RunDir, attempt: AttemptRecord) -> None:
    write_document(run.attempt(attempt.number) / "attempt.json", dataclasses.asdict(attempt))


StopCause = Literal["growth", "idle"]  # to restart on more nodes; because the ranks do nothing


def request_stop(run: RunDir, attempt: int, cause: StopCause, why: Reason) -> None:
    """Record that the attempt is asked to stop. Raises OSError."""
    write_document(run.attempt(attempt) / f"{cause}.json", {"time": time.time(), **why.to_document()})


def withdraw_growth(run: RunDir, attempt: int) -> None:
    """Remove the request of an attempt whose ranks could not be signaled."""
    (run.attempt(attempt) / "growth.json").unlink(missing_ok=True)


def read_stop_request(run: RunDir, attempt: int, cause: StopCause) -> Reason | None:
    """Return why the attempt was asked to stop; None if it was not, or if that cannot be read."""
    data = undamaged_document(run.attempt(attempt) / f"{cause}.json")
    return None if data is None else reason_from(data)


@dataclass(frozen=True)
class GrowthRequest:
    """A request that an attempt stop: when, in Unix seconds, and on how many nodes it trained then, if recorded."""

    attempt: int
    time: float
    before: int | None


def growth_requests(run: RunDir) -> list[GrowthRequest]:
    """Return all requests of the run, in order of the attempts."""
    requests = []
    for number in run.attempts():
        data = undamaged_document(path := run.attempt(number) / "growth.json")
        if data is not None:
            with reporting_damage(path):
                before = typed(int | None, data.get("params", {}).get("before"))
                requests.append(GrowthRequest(number, typed(float, data["time"]), before))
    return requests
