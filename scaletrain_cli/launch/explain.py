"""Explain why a run is in its state, from its directory and its scheduler, which may not know the job any more.

Changes nothing. Texts and remedies are in reason_texts/launch.py, those of a back end in its own table.
"""

import time
from collections.abc import Iterator

from scaletrain_cli.launch.attempts import AttemptRecord, newest_checkpoint_step, read_attempts
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.exit_classification import ExitReason
from scaletrain_cli.launch.finding import Evidence, Explanation, Finding
from scaletrain_cli.launch.job import Job
from scaletrain_cli.launch.logs import last_error
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.launch.run_status import RunStatus
from scaletrain_cli.launch.status import failed_preparation, run_status, unreported_end
from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.rundir.documents import undamaged_document
from scaletrain_cli.rundir.journal import (
    SEVERITIES,
    last_logged_step,
    raised_findings,
    read_events,
    read_lines_backwards,
)
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.preparation import preparation_folder
from scaletrain_cli.rundir.record import RunRecord, read_record
from scaletrain_cli.worker.failures import read_failures

# Exit reasons that a single rank reports: the end of its log is the best evidence.
_REPORTED_BY_A_RANK: tuple[ExitReason, ...] = (
    *("crash", "killed", "oom", "host-oom", "nan", "usage", "disk-full", "unreadable", "communication", "hardware"),
)
# Exit reasons whose own remedies contain a `scaletrain resume`; the others get the plain one.
RESUME_IS_A_REMEDY: tuple[ExitReason, ...] = (
    *("cancelled", "time-limit", "idle", "crash", "oom", "nan", "spike", "disk-full", "unreadable", "data"),
)
_MOST_FAILURES = 4
_MOST_FINDINGS = 3
# The raised findings that explain an exit reason, by the beginning of their code.
_OF_TRAINING = tuple(f"diagnosis.{name}" for name in ("not-finite", "l", "warm-up", "gradient", "always-clipped"))
_OF_SPEED = tuple(f"diagnosis.{name}" for name in ("slow", "data-wait", "saves", "restarts", "checkpoint-interval"))
_EXPLAINED_BY: dict[ExitReason, tuple[str, ...]] = {
    "nan": _OF_TRAINING,
    "spike": _OF_TRAINING,
    "oom": ("diagnosis.memory",),
    "host-oom": ("diagnosis.memory",),
    "killed": ("diagnosis.memory",),
    "time-limit": _OF_SPEED,
    "out-of-grace": ("diagnosis.saves",),
    "hang": ("diagnosis.slow-rank",),
    "communication": ("diagnosis.slow-rank",),
}


def explain(run: RunDir) -> Explanation:
    """Return why the run waits, or why it ended. Raises UsageError when run.json is damaged."""
    record, status = read_record(run), run_status(run)
    last = next(reversed(read_attempts(run)), None)
    return Explanation(run.run_id, status.state, tuple(_findings(run, record, status, last)))


def _findings(run: RunDir, record: RunRecord, status: RunStatus, last: AttemptRecord | None) -> Iterator[Finding]:
    backend = backend_for(status.scheduler)
    stuck: tuple[Finding, ...] = ()
    if status.state in ("queued", "running", "ending", "preempted"):
        stuck = tuple(backend.explain_stuck(run, record, status))
    yield from stuck
    job, unended = status.job, last is not None and last.ended is None
    may_go_on = last is None or unended or last.may_be_followed
    if job.state == "unknown" and job.may_be_active and may_go_on:
        what = f"attempt {status.attempt}" if status.attempt else "the job"
        why = Reason("launch.state-unknown", {"what": what, "run": status.run_id})
        remedies = () if job.reason is None else job.reason.remedies
        yield Finding.because("unknown", why, (_scheduler_reports(status),), remedies)
    elif job.state == "queued" and not stuck:
        yield backend.explain_waiting(run, record, status)
    elif job.state == "suspended" and not stuck:
        evidence = (_scheduler_reports(status), *_progress(run, status))
        why = Reason("launch.suspended", {"job": status.job_id})
        yield Finding.because("suspended", why, evidence, backend.actions_if_suspended(status.job_id))
    elif job.state == "ending" and not stuck:
        evidence = (_scheduler_reports(status), *_progress(run, status))
        yield Finding.because("ending", Reason("launch.ending", {"job": status.job_id, "run": run.run_id}), evidence)
    elif job.state == "running" and (last is None or unended) and not stuck:
        yield _running(run, status)
    over = not job.may_be_active
    if last is not None and job.begins_no_attempt:
        yield Finding.because("never-began", job.why, needs_action=True)
    if last is not None and (last.ended is not None or over):
        yield why_it_ended(run, record, last, job)
    elif last is None and over:
        failed = None if run.is_cancelled else failed_preparation(run, record, job)
        if failed is not None:
            folder = preparation_folder(run).name
            logs = sorted((run.path / folder).glob("*.log"))[:_MOST_FAILURES]
            errors = tuple(Evidence(f"{folder}/{path.name}", text) for path in logs if (text := last_error(path)))
            yield Finding.because("preparation", failed, errors, needs_action=True)
        else:
            yield backend.explain_never_began(run, record, status)


def _running(run: RunDir, status: RunStatus) -> Finding:
    evidence = [_scheduler_reports(status), *_progress(run, status), *_shared_cores(run, status.attempt)]
    known = (status.starting, status.straggler)
    evidence += [Evidence.because("events.jsonl", reason) for reason in known if reason is not None]
    ended = [attempt for attempt in read_attempts(run) if attempt.ended is not None][-1:]  # why it was requeued
    for attempt in ended:
        evidence += [Evidence.because(f"{_folder(attempt)}/attempt.json", attempt.why), *_decision(attempt, status.job)]
    if (unreached := _unreachable(run, status.attempt)) is not None:
        evidence.append(Evidence.because("events.jsonl", unreached))
        return Finding.because("communication", unreached, tuple(evidence), needs_action=True)
    if status.idle is not None:
        return Finding.because("idle", status.idle, tuple(evidence), needs_action=True)
    params = {"attempt": status.attempt, "run": run.run_id}
    why = Reason("launch.running" if status.attempt else "launch.job-running", params)
    return Finding.because("running", why, tuple(evidence))


def _unreachable(run: RunDir, attempt: int) -> Reason | None:
    """Return that a node does not reach the first one, if the ranks have not begun to train since."""
    events = (event for event in reversed(read_events(run)) if event.get("attempt") == attempt)
    newest = next((event for event in events if event["event"] in ("unreachable", "started", "resumed")), None)
    if newest is None or newest["event"] != "unreachable":
        return None
    return Reason("launch.unreachable", {key: newest.get(key) for key in ("node", "address", "port", "error")})


def _shared_cores(run: RunDir, attempt: int) -> Iterator[Evidence]:
    """Yield that the ranks of a node share CPU cores, from the inspection of the first node on which they do."""
    for path in sorted((run.attempt(attempt) / "preflight").glob("[!.]*.json")):
        reasons = map(reason_from, (undamaged_document(path) or {}).get("note_reasons", ()))
        if (note := next((reason for reason in reasons if reason.code == "node.few-cores"), None)) is not None:
            yield Evidence.because(path.stem, note)
            return


def _scheduler_reports(status: RunStatus) -> Evidence:
    return Evidence.because("the scheduler", status.job.why)


def _progress(run: RunDir, status: RunStatus) -> Iterator[Evidence]:
    if not status.step_seen:
        return
    newest = next(read_lines_backwards(run.metrics), {})
    steps = Reason("launch.steps-logged", {"step": status.step, "total": status.total_steps})
    yield Evidence.because("metrics.jsonl" if status.files_seen else "its pods", steps)
    if "time" in newest:
        age = max(0.0, time.time() - float(newest["time"]))
        yield Evidence.because("metrics.jsonl", Reason("launch.last-line-age", {"age": age}))


def why_it_ended(run: RunDir, record: RunRecord, attempt: AttemptRecord, job: Job) -> Finding:
    """Return the finding about the end of ``attempt``, recorded or not.

    ``job`` is the scheduler's answer. If the attempt may be running, call this only once the job is over.
    """
    if attempt.reason is None:
        return _unreported(run, record, attempt, job)
    cause: ExitReason = attempt.reason
    params = {"attempt": attempt.number, "run": run.run_id}
    why = Reason(f"launch.exit-{cause}", params)
    left = attempt.decision is not None and attempt.decision.left_to_scheduler
    if left and job.cause is not None and cause in ("preempted", "out-of-grace", "node"):
        # The scheduler ended the job and reports the reason.
        cause = job.cause
        why = Reason(f"launch.exit-by-scheduler-{cause}", params | {"detail": job.why})
    followed = _is_followed(attempt, job) or (job.state == "unknown" and attempt.may_be_followed)
    needs_resume = attempt.reason != "done" and not followed  # as far as is known
    return Finding.because(
        cause,
        why,
        (
            Evidence.because(f"{_folder(attempt)}/attempt.json", attempt.why),
            *_failures(run, attempt),
            *_log_end(run, attempt, cause),
            *_memory_report(run, attempt, cause),
            *_raised(run, cause),
            *_history(run, attempt),
            *_decision(attempt, job),
        ),
        Reason("launch.continue", {"run": run.run_id}).remedies
        if needs_resume and cause not in RESUME_IS_A_REMEDY
        else (),
    )


def _unreported(run: RunDir, record: RunRecord, attempt: AttemptRecord, job: Job) -> Finding:
    """Return the finding about an end that neither an agent nor a supervisor recorded, from the files that exist."""
    end = unreported_end(run, record, attempt, job)
    newest, logged = newest_checkpoint_step(run, record.spec), last_logged_step(run) or 0
    saved = Reason("launch.no-checkpoint", {"logged": logged})
    if newest is not None:
        saved = Reason("launch.newest-checkpoint", {"step": newest, "logged": logged})
    return Finding.because(
        end.exit_reason or "not-known",
        end.why,
        (
            Evidence.because("checkpoints", saved),
            *_failures(run, attempt),
            *(_log_end(run, attempt, end.exit_reason) if end.exit_reason is not None else ()),
            *_history(run, attempt),
        ),
    )


def _is_followed(attempt: AttemptRecord, job: Job) -> bool:
    """Return whether another attempt follows: its job is active and no decision rules it out."""
    return job.is_active and attempt.may_be_followed


def _failures(run: RunDir, attempt: AttemptRecord) -> Iterator[Evidence]:
    """Yield the failures that ranks and nodes reported, except those that the attempt's reason already contains."""
    known = list(_parts(attempt.why))
    # The ranks of a node at a hang are compared with those of the other nodes: the attempt's reason has the result.
    failures = [report for report in read_failures(run, attempt.number) if report.why not in known and not report.ranks]
    source = f"{_folder(attempt)}/failures"
    for failure in failures[:_MOST_FAILURES]:
        who = failure.node if failure.rank is None else f"rank {failure.rank}"
        yield Evidence.because(source, Reason("launch.failure-of", {"who": who, "failure": failure.why}))
    if len(failures) > _MOST_FAILURES:
        yield Evidence.because(source, Reason("launch.more-failures", {"count": len(failures) - _MOST_FAILURES}))


def _parts(reason: Reason) -> Iterator[Reason]:
    """Yield the reason and all reasons that are nested in its parameters."""
    yield reason
    for value in reason.params.values():
        if isinstance(value, Reason):
            yield from _parts(value)


def _log_end(run: RunDir, attempt: AttemptRecord, reason: ExitReason) -> Iterator[Evidence]:
    """Yield the error in the log of the rank that failed first."""
    if reason not in _REPORTED_BY_A_RANK:
        return
    nodes = [node for node in read_node_records(run, attempt.number) if node.first_failure is not None]
    for node in sorted(nodes, key=lambda node: node.ended or 0.0)[:1]:
        for path in (run.attempt(attempt.number) / "logs").glob(f"*-{node.first_failure:05d}.log"):
            if text := last_error(path):
                yield Evidence(f"{_folder(attempt)}/logs/{path.name}", text)


def _memory_report(run: RunDir, attempt: AttemptRecord, reason: ExitReason) -> Iterator[Evidence]:
    if reason == "oom":
        for path in sorted((run.attempt(attempt.number) / "memory").glob("rank-*.json"))[:1]:
            yield Evidence.because(f"{_folder(attempt)}/memory/{path.name}", Reason("launch.memory-by-part"))


def _raised(run: RunDir, reason: ExitReason) -> Iterator[Evidence]:
    """Yield the raised findings of the diagnosis that explain the end, the most severe first."""
    codes = _EXPLAINED_BY.get(reason, ())
    raised = [
        finding
        for finding in raised_findings(read_events(run)).values()
        if finding.reason.code.startswith(codes or "-")
    ]
    raised.sort(key=lambda finding: -SEVERITIES.index(finding.severity))
    for finding in raised[:_MOST_FINDINGS]:
        params = {"severity": finding.severity, "finding": finding.reason, "run": run.run_id}
        yield Evidence.because("events.jsonl", Reason("launch.raised-finding", params))


def _history(run: RunDir, attempt: AttemptRecord) -> Iterator[Evidence]:
    """Yield the ends of the earlier attempts, and the number of steps that were trained twice."""
    earlier = [other for other in read_attempts(run) if other.number < attempt.number]
    if earlier:
        shown = [f"{other.number} {other.reason or 'unfinished'} at step {other.last_step or 0}" for other in earlier]
        lost = sum(event.get("lost_steps", 0) for event in read_events(run))
        why = Reason("launch.earlier-attempts", {"attempts": shown[-5:], "lost": lost})
        yield Evidence.because("attempts before it", why)
        copies = [event for event in read_events(run) if event["event"] == "resumed" and "saved_step" in event]
        if copies:
            params = {"resumed": len(copies), "step": copies[-1]["step"], "saved": copies[-1]["saved_step"]}
            yield Evidence.because("events.jsonl", Reason("launch.resumed-from-copies", params))


def _decision(attempt: AttemptRecord, job: Job) -> Iterator[Evidence]:
    if attempt.reason == "done":
        return
    if _is_followed(attempt, job):
        follows = Reason("launch.follows")
    elif not attempt.may_be_followed:
        follows = Reason("launch.follows-not")
    elif job.state == "unknown":
        follows = Reason("launch.follows-unknown", {"detail": job.why})
    else:
        follows = Reason("launch.follows-not-job-over", {"detail": job.why})
    if attempt.decision is not None:
        follows = Reason("launch.decided", {"decision": attempt.decision.reason, "follows": follows})
    yield Evidence.because("decided", follows)


def _folder(attempt: AttemptRecord) -> str:
    return f"attempts/{attempt.number:04d}"
