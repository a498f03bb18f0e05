"""The restart decision at the end of an attempt, the same under every scheduler: classify, decide, record.

The caller then starts the next attempt, requeues the job, or stops.
"""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence

from scaletrain_cli.errors import ExitCode, ScaletrainError
from scaletrain_cli.launch.attempts import (
    AttemptRecord,
    Decision,
    attempt_outcome,
    close_unended,
    end_attempt,
    read_attempt,
    read_attempts,
    read_stop_request,
    revise_decision,
    with_outcome,
)
from scaletrain_cli.launch.exit_classification import ExitReason, Outcome, cache_failure, ended_with_its_job
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.bad_nodes import BadNode, remember_bad_nodes
from scaletrain_cli.rundir.journal import has_committed, read_events, record_event
from scaletrain_cli.rundir.mirror_state import read_superseded
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_record
from scaletrain_cli.spec.run import RestartsSpec

ATTEMPTS_WITHOUT_PROGRESS = 3
PREEMPTIONS_WITHOUT_PROGRESS = 10
_START_UP_SECONDS = 600.0  # an attempt that lasted longer may have trained, also if no checkpoint shows it
CACHES_TRIED = 2
# The number of failures without progress after which the next attempt needs other nodes.
_FAILURES_ON_THE_SAME_NODES = 2
# The longest time for notifications: between two attempts, and at the end of the run, when nodes are idle.
_NOTIFY_SECONDS, _LAST_NOTIFY_SECONDS = 5.0, 15.0
# For the last events and the end of the run in its mirror; a checkpoint that is left is copied as far as time permits.
_RELEASE_SECONDS = 60.0
# After a preemption or at the time limit: the job must submit itself again before the scheduler kills it.
_PREEMPTED_NOTIFY_SECONDS = 1.0

# Of ``data``, ``nan`` and ``spike`` as a program of the user's states them; the engine's code 93 stops the run.
_REASONS: dict[str, tuple[ExitReason, ...]] = {
    "preemption": ("preempted", "out-of-grace"),
    "node": ("node", "wrong-nodes", "hardware", "hang", "communication"),
    "oom": ("oom", "host-oom"),
    "crash": ("crash", "killed", "unreadable", "data", "nan", "spike"),
}
_BUDGET: dict[str, str] = {reason: budget for budget, reasons in _REASONS.items() for reason in reasons}
# Not the run's fault: preempted on healthy nodes, or not started on unfit ones.
# fmt: off
_NEUTRAL: tuple[ExitReason, ...] = (
    "preempted", "time-limit", "out-of-grace", "resize", "idle", "cancelled", "wrong-nodes",
)
# fmt: on
# Restarts that are charged to no budget.
_FREE: tuple[ExitReason, ...] = ("time-limit", "resize")
# Charged to the node budget, though every node may be healthy; a node that is to blame is excluded, by a requeue.
_OF_SEVERAL: tuple[ExitReason, ...] = ("hang", "communication")
# How the ranks of an idle run may end on the signal: with their state saved, or without a handler for it.
_ENDS_OF_IDLE: tuple[ExitReason, ...] = ("preempted", "out-of-grace", "killed", "crash", "communication")


def decide(
    exit_code: int,
    reason: ExitReason,
    history: Sequence[AttemptRecord],
    restarts: RestartsSpec,
    cancelled: bool,
    *,
    progress_known: bool = True,
) -> Decision:
    """Return the restart decision. ``history``: the attempts that share the budgets; the last one has just ended.

    ``progress_known``: checkpoints of the run show its progress. Without it the time of attempts does, for preempted
    ones, and budgets limit the others.
    """
    if exit_code == ExitCode.DONE:
        return Decision.because(False, exit_code, Reason("launch.stop-done"))
    if cancelled or reason == "cancelled":
        return Decision.because(False, exit_code, Reason("launch.stop-cancelled"))
    if reason == "idle":
        return Decision.because(False, exit_code, Reason("launch.stop-idle"))
    if exit_code in (ExitCode.USAGE, ExitCode.INFEASIBLE, ExitCode.SCHEDULER, ExitCode.DO_NOT_REQUEUE):
        return Decision.because(False, exit_code, Reason("launch.stop-no-retry", {"exit_code": int(exit_code)}))
    if (cache := _full_caches(history)) is not None:
        return Decision.because(False, ExitCode.DO_NOT_REQUEUE, cache)
    free = bool(history) and history[-1].free_of_charge
    stuck = attempts_without_progress(history)
    if progress_known and stuck >= ATTEMPTS_WITHOUT_PROGRESS and reason not in _NEUTRAL and not free:
        why = Reason("launch.stop-no-progress", {"attempts": stuck})
        return Decision.because(False, ExitCode.DO_NOT_REQUEUE, why)
    idle = preemptions_without_progress(history, progress_known=progress_known)
    if idle >= PREEMPTIONS_WITHOUT_PROGRESS and (is_preemption(reason) or free):
        why = Reason("launch.stop-no-progress-preempted", {"attempts": idle})
        return Decision.because(False, ExitCode.DO_NOT_REQUEUE, why)
    if reason in _FREE:
        return Decision.because(True, exit_code, Reason("launch.restart-free", {"exit_reason": reason}))
    name = "preemption" if free else _BUDGET.get(reason, "crash")
    allowed: int | str = getattr(restarts, name)
    budgets = ("preemption" if one.free_of_charge else _BUDGET.get(one.reason or "node") for one in history)
    used = sum(budget == name for budget in budgets)
    params = {"exit_reason": reason, "budget": name, "used": used, "allowed": allowed}
    if allowed == "unlimited":
        return Decision.because(True, exit_code, Reason("launch.restart-unlimited", params))
    if used <= int(allowed):
        return Decision.because(True, exit_code, Reason("launch.restart-counted", params))
    # Exit code 75 reports to the scheduler that the state of the preempted run is saved.
    code = exit_code if exit_code == ExitCode.PREEMPTED else ExitCode.CRASHED
    return Decision.because(False, code, Reason("launch.stop-budget-used-up", params))


def _full_caches(history: Sequence[AttemptRecord]) -> Reason | None:
    """Return why no third node is tried for files of the hub; None if one may be.

    If the caches of two attempts cannot take the files for the same reason, the files or the folder are the cause.
    """
    codes = [cache_failure(attempt.why) if attempt.reason == "wrong-nodes" else None for attempt in history]
    if not codes or codes[-1] is None or codes.count(codes[-1]) < CACHES_TRIED:
        return None
    return Reason("launch.stop-caches", {"attempts": codes.count(codes[-1]), "failure": history[-1].why})


def is_preemption(reason: ExitReason) -> bool:
    """Return whether the restart after this reason is charged to no budget, as the scheduler took the nodes away."""
    return reason == "time-limit" or _BUDGET.get(reason) == "preemption"


def may_restart_in_place(history: Sequence[AttemptRecord], against: Sequence[str] = ()) -> bool:
    """Return whether the next attempt may begin in the job of the last one, which has just ended, on nodes that it has.

    ``against``: the nodes that are the cause, which others of the job may replace. Not where the scheduler took the
    nodes away, where the job is the cause, or once the run has failed repeatedly at the same step.
    """
    reason = history[-1].reason or "node"
    on_healthy_nodes = bool(against) or _BUDGET.get(reason) in ("crash", "oom") or reason in (*_OF_SEVERAL, "resize")
    return on_healthy_nodes and attempts_without_progress(history) < _FAILURES_ON_THE_SAME_NODES


def attempts_without_progress(history: Sequence[AttemptRecord]) -> int:
    """Return how many of the latest attempts failed without a newer checkpoint; preempted ones are skipped."""
    since = itertools.takewhile(lambda attempt: not attempt.made_progress, reversed(history))
    return sum(attempt.reason not in _NEUTRAL for attempt in since if not attempt.free_of_charge)


def preemptions_without_progress(history: Sequence[AttemptRecord], *, progress_known: bool = True) -> int:
    """Return how many of the latest attempts were preempted before they made progress.

    A program that exits with 75 each time it starts would otherwise be restarted without end.
    """

    def trained(attempt: AttemptRecord) -> bool:
        lasted = (attempt.ended or math.inf) - attempt.started
        return attempt.made_progress or (not progress_known and lasted > _START_UP_SECONDS)

    since = itertools.takewhile(lambda attempt: not trained(attempt), reversed(history))
    return sum(attempt.free_of_charge or is_preemption(attempt.reason or "node") for attempt in since)


def why_not_begin(run: RunDir, record: RunRecord, job_id: str) -> Decision | None:
    """Return why no attempt may begin (cancelled, done, or no budget left); None if one may."""
    if run.is_cancelled:
        why = _superseded(run) or Reason("launch.stop-cancelled-before-start")
        return Decision.because(False, ExitCode.PREEMPTED, why)
    # They share budgets: a requeue keeps the job id, a submission does not.
    history = [attempt for attempt in read_attempts(run) if attempt.job_id == job_id]
    last = history[-1] if history else None
    if last is None or last.exit_code is None or last.reason is None or (last.decision and last.decision.requeue):
        return None
    limits, known = record.spec.restarts, _progress_known(run, record)
    decision = decide(last.exit_code, last.reason, history, limits, cancelled=False, progress_known=known)
    return None if decision.requeue else decision


def _superseded(run: RunDir) -> Reason | None:
    """Return why no attempt may follow if another place continues the run from its mirror; None if none does."""
    if (owner := read_superseded(run)) is None:
        return None
    params = {"run_dir": owner.get("run_dir", "another folder"), "host": owner.get("host", "another host")}
    return Reason("launch.stop-superseded", params)


def _progress_known(run: RunDir, record: RunRecord) -> bool:
    """Return whether checkpoints show the progress: a program of ``code.command`` may save in a way of its own."""
    return record.spec.code.command is None or has_committed(run)


def first_attempt_of_job(run: RunDir, job_id: str, number: int) -> int:
    """Return the first attempt that counts against the budgets of attempt ``number``.

    A resume without a person grants no new budgets: the jobs before it count as well. The id of a local job is a pid,
    which an earlier job may have had: in a container or after a reboot.
    """
    submitted = [event for event in read_events(run) if event["event"] == "submitted"]
    while submitted and submitted[-1].get("job_id") != job_id:
        submitted.pop()
    jobs, first = {job_id}, 1
    for event in reversed(submitted):
        jobs.add(str(event.get("job_id")))
        first = event.get("first_attempt", 1)
        if not event.get("automatic"):
            break
    attempts = (attempt.number for attempt in read_attempts(run) if attempt.job_id in jobs)
    return min((attempt for attempt in attempts if attempt >= first), default=number)


def automatic_submissions(run: RunDir) -> int:
    """Return how often the run was resumed without a person since it was last submitted or resumed by one."""
    submitted = [event for event in read_events(run) if event["event"] == "submitted"]
    return sum(1 for _ in itertools.takewhile(lambda event: bool(event.get("automatic")), reversed(submitted)))


_HOUR = 3600.0
# How long a node is excluded, by cause: failed hardware needs a repair, an unfit node an administrator, and a node that
# was lost or hung often works again after a reboot.
_EXCLUDED_SECONDS: dict[ExitReason, float] = {
    "hardware": 7 * 24 * _HOUR,
    "wrong-nodes": 24 * _HOUR,
    "hang": 6 * _HOUR,
    "node": 6 * _HOUR,
}
_FULL_CACHE_SECONDS = _HOUR  # enough for the next attempt: the node itself works


def conclude_attempt(
    run: RunDir,
    record: RunRecord,
    number: int,
    *,
    first_attempt: int,
    launcher_exit_code: int | None = None,
    stop_reason: Reason | None = None,
    time_is_up: Callable[[], bool] = lambda: False,
    down: frozenset[str] | None = None,
    keeps_nodes: Callable[[Sequence[str]], bool] = lambda against: False,
) -> Decision:
    """End attempt ``number`` and return the restart decision.

    Budgets count from ``first_attempt`` on: each submission grants new ones. ``launcher_exit_code`` is that of the
    agent or of srun, for an attempt without records; ``stop_reason``: a reason outside the run why
    no attempt can follow. ``time_is_up`` distinguishes the time limit from a preemption. ``down``: the nodes that the
    scheduler reports as lost; without it, a node that reported no end may be one whose job was ended.
    ``keeps_nodes``: whether the job has nodes for another attempt, without those given; called only where that matters.
    """
    spec, cancelled = record.spec, run.is_cancelled
    outcome = attempt_outcome(run, spec, number, cancelled=cancelled, launcher_exit_code=launcher_exit_code)
    if stop_reason is not None and outcome.lost and not down:
        outcome = ended_with_its_job(outcome)
    before = read_attempt(run, number - 1)
    follows_in_place = before is not None and before.decision is not None and before.decision.in_place
    if outcome.lost and follows_in_place and not read_node_records(run, number):
        # As where Slurm cannot kill what the attempt before has left: no fault of the run.
        outcome = dataclasses.replace(outcome, reason="preempted", exit_code=int(ExitCode.PREEMPTED), lost=False)
    if outcome.reason in _ENDS_OF_IDLE and (idle := read_stop_request(run, number, "idle")) is not None:
        # How the ranks ended is no fault: they were asked to, for doing nothing.
        both = Reason("launch.one-then-another", {"first": idle, "then": outcome.why})
        outcome = Outcome(int(ExitCode.PREEMPTED), "idle", idle if outcome.reason == "preempted" else both)
    elif outcome.reason in _REASONS["preemption"]:
        if time_is_up():
            over = Reason("launch.out-of-time", {"end": outcome.why})
            outcome = dataclasses.replace(outcome, reason="time-limit", why=over)
        elif (asked := read_stop_request(run, number, "growth")) is not None:
            outcome = dataclasses.replace(outcome, reason="resize", why=asked)
    if stop_reason is not None and not cancelled and outcome.exit_code != ExitCode.DONE:
        decision = Decision.because(False, outcome.exit_code, stop_reason, left_to_scheduler=True)
    else:
        began = read_attempt(run, number)
        assert began is not None, f"attempt {number} was never begun"
        earlier = [attempt for attempt in read_attempts(run) if first_attempt <= attempt.number < number]
        history = [*earlier, with_outcome(run, spec, began, outcome)]
        code, known = outcome.exit_code, _progress_known(run, record)
        decision = decide(code, outcome.reason, history, spec.restarts, cancelled, progress_known=known)
        if decision.requeue and may_restart_in_place(history, outcome.against) and keeps_nodes(outcome.against):
            decision = dataclasses.replace(decision, in_place=True)
        if cancelled and outcome.exit_code != ExitCode.DONE and (why := _superseded(run)) is not None:
            decision = Decision.because(False, decision.exit_code, why)
    _record(run, end_attempt(run, spec, number, outcome, decision))
    _remember_bad_nodes(run, number, outcome, down, decision)
    if decision.requeue or decision.left_to_scheduler:  # else conclude_run sends it together with the end of the run
        seconds = _PREEMPTED_NOTIFY_SECONDS if is_preemption(outcome.reason) else _NOTIFY_SECONDS
        _send_notifications(run, record, _receivers_environment(run, record), seconds)
    return decision


def conclude_abandoned(
    run: RunDir, record: RunRecord, ended_with_job: Callable[[AttemptRecord], bool] = lambda _: False
) -> None:
    """Record the end of attempts that have none, from their records. None of them may still be running.

    No node is excluded for it: the process that watched the attempt may have been killed together with the rest.
    ``ended_with_job``: as for close_unended().
    """
    for attempt in close_unended(run, record.spec, ended_with_job):
        _record(run, attempt)


def withdraw_restart(run: RunDir, number: int, why: Reason, *, left_to_scheduler: bool = False) -> Decision:
    """Replace the decision on attempt ``number``: no restart follows, or the scheduler decides."""
    attempt = read_attempt(run, number)
    assert attempt is not None, f"attempt {number} was never begun"
    assert attempt.exit_code is not None, f"attempt {number} has not ended"
    decision = Decision.because(False, attempt.exit_code, why, left_to_scheduler=left_to_scheduler)
    revise_decision(run, attempt, decision)
    return decision


def conclude_run(run: RunDir, decision: Decision) -> int:
    """Record that no attempt follows, notify, and return the exit code. The engine itself records a finished run.

    The values of its secrets are removed, except after a preemption: each resume supplies them again.
    """
    record: RunRecord | None = None
    with contextlib.suppress(ScaletrainError, OSError):  # a damaged one must not change the end
        record = read_record(run)
    environment = None if record is None else _receivers_environment(run, record)  # before they are forgotten
    is_over = decision.exit_code != ExitCode.PREEMPTED or run.is_cancelled or decision.code == "launch.stop-idle"
    if is_over:
        forget_secrets(run)
    if decision.exit_code != ExitCode.DONE:
        if run.is_cancelled and _superseded(run) is None:
            record_event(run, "cancelled")
        record_event(run, "stopped", exit_code=decision.exit_code, why=decision.why, **decision.reason.to_document())
    if record is not None and environment is not None:
        _send_notifications(run, record, environment, _LAST_NOTIFY_SECONDS)
        if record.spec.checkpoint.mirror.to is not None and not decision.left_to_scheduler:
            from scaletrain_cli.launch.mirroring import release_mirror

            release_mirror(run, record, environment, _RELEASE_SECONDS if is_over else _NOTIFY_SECONDS)
    return decision.exit_code


def _receivers_environment(run: RunDir, record: RunRecord) -> dict[str, str]:
    """Return the variables for the receivers of notifications, and for the mirror; empty if there are none."""
    if not record.spec.notify and record.spec.checkpoint.mirror.to is None:
        return {}
    from scaletrain_cli.notify.notifier import receivers_environment

    return receivers_environment(run, record)


def _send_notifications(run: RunDir, record: RunRecord, environment: Mapping[str, str], seconds: float) -> None:
    """Send the notifications of what has ended, for at most ``seconds``. Never raises."""
    if record.spec.notify:
        from scaletrain_cli.notify.notifier import send_waiting

        send_waiting(run, record, environment, seconds)


def forget_secrets(run: RunDir) -> None:
    """Remove the values of ``secret_env`` from the run directory."""
    with contextlib.suppress(OSError):  # a failure must not change the end of the run
        run.secrets.unlink(missing_ok=True)


def _remember_bad_nodes(
    run: RunDir, number: int, outcome: Outcome, down: frozenset[str] | None, decision: Decision
) -> None:
    now, kept, is_cache = time.time(), _EXCLUDED_SECONDS.get(outcome.reason), cache_failure(outcome.why) is not None
    if kept is None or (is_cache and not decision.requeue):
        return
    kept = _FULL_CACHE_SECONDS if is_cache else kept
    bad_nodes = [
        BadNode(name, outcome.reason, str(outcome.why), run.run_id, number, now, now + kept)
        for name in outcome.against
        if outcome.reason != "node" or down is None or name in down
    ]
    if bad_nodes:
        with contextlib.suppress(OSError):  # informs later attempts; a failure must not change this decision
            remember_bad_nodes(run.path.parent, bad_nodes, now)


def _record(run: RunDir, attempt: AttemptRecord) -> None:
    if attempt.reason == "hang" and isinstance(finding := attempt.why.params.get("finding"), Reason):
        named = {name: finding.params.get(name) for name in ("node", "rank", "collective", "step")}
        record_event(run, "hang", attempt=attempt.number, message=attempt.message, **named, **attempt.why.to_document())
    decision = attempt.decision
    why = decision.reason if decision is not None else Reason("launch.watcher-gone")
    record_event(
        run,
        "attempt-ended",
        attempt=attempt.number,
        exit_code=attempt.exit_code,
        reason=attempt.reason,
        message=attempt.message,
        requeue=decision is not None and decision.requeue,
        in_place=decision is not None and decision.in_place,
        ends_run=decision is not None and not attempt.may_be_followed,
        why=str(why),
        **attempt.why.to_document(),
        decision=why.to_document(),
    )
