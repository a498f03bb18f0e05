"""Why a run is where it is: from its directory, and from one scheduler that may be silent or have forgotten it.

Changes nothing. What a scheduler knows is asked in slurm_jobs; what an end means is in endings.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from scaletrain_cli.launch.attempts import AttemptRecord, read_attempts
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.explain_failures import why_it_ended
from scaletrain_cli.launch.finding import Evidence, Explanation, Finding
from scaletrain_cli.launch.status import RunStatus, run_status
from scaletrain_cli.rundir.journal import read_lines_backwards
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_record


def explain(run: RunDir) -> Explanation:
    """Raises UsageError when run.json is damaged."""
    record, status = read_record(run), run_status(run)
    attempts = read_attempts(run)
    last = attempts[-1] if attempts else None
    return Explanation(run.run_id, status.state, tuple(_findings(run, record, status, last)))


def _findings(run: RunDir, record: RunRecord, status: RunStatus, last: AttemptRecord | None) -> Iterator[Finding]:
    stuck = _stuck(run, record, status)
    yield from stuck
    job, unended = status.job, last is not None and last.ended is None
    may_go_on = last is None or unended or last.may_be_followed
    if job.state == "unknown" and job.may_be_active and may_go_on:
        yield _not_known(status)
    elif job.state == "queued" and not stuck:
        yield backend_for(status.scheduler).explain_waiting(run, record, status)
    elif job.state in ("suspended", "ending") and not stuck:
        yield _HELD_UP[job.state](run, status)
    elif job.state == "running" and (last is None or unended) and not stuck:
        yield _running(run, status)
    over = not job.may_be_active
    if last is not None and (last.ended is not None or over):
        yield why_it_ended(run, record, last, job)
    elif last is None and over:
        yield backend_for(status.scheduler).explain_never_began(run, record, status)


def _not_known(status: RunStatus) -> Finding:
    """The scheduler is silent, which says nothing about the run: nothing is concluded from it."""
    what = f"attempt {status.attempt}" if status.attempt else "the job"
    return Finding(
        "unknown",
        f"whether {what} of {status.run_id} is queued, runs or has ended is not known",
        (Evidence("the scheduler", status.job.detail),),
        (f"scaletrain explain {status.run_id}, again, once the scheduler answers", "scaletrain doctor"),
    )


def _suspended(run: RunDir, status: RunStatus) -> Finding:
    evidence = (Evidence("the scheduler", status.job.detail), *_how_far(run, status))
    actions = ["It continues when its scheduler, or who suspended it, resumes it"]
    actions += backend_for(status.scheduler).actions_if_suspended(status.job_id)
    headline = f"job {status.job_id} is suspended: its processes are stopped"
    return Finding("suspended", headline, evidence, tuple(actions))


def _ending(run: RunDir, status: RunStatus) -> Finding:
    evidence = (Evidence("the scheduler", status.job.detail), *_how_far(run, status))
    actions = (f"scaletrain status {status.run_id}, again: how it ended is known once its last process is gone",)
    return Finding("ending", f"job {status.job_id} is ending; some of its processes are still there", evidence, actions)


_HELD_UP = {"suspended": _suspended, "ending": _ending}


def _stuck(run: RunDir, record: RunRecord, status: RunStatus) -> list[Finding]:
    """What keeps a job there that nothing but a person can end."""
    if status.state not in ("queued", "running", "ending", "preempted"):
        return []
    return list(backend_for(status.scheduler).explain_stuck(run, record, status))


def _running(run: RunDir, status: RunStatus) -> Finding:
    """How it comes forward, by the last line that was logged."""
    evidence = [Evidence("the scheduler", status.job.detail), *_how_far(run, status)]
    if status.straggler:
        evidence.append(Evidence("events.jsonl", status.straggler))
    actions = (f"scaletrain logs {run.run_id} --follow",)
    what = f"attempt {status.attempt} runs" if status.attempt else "its job runs"
    return Finding("running", what, tuple(evidence), actions)


def _how_far(run: RunDir, status: RunStatus) -> Iterator[Evidence]:
    newest = next(read_lines_backwards(run.metrics), {})
    yield Evidence("metrics.jsonl", f"step {status.step} of {status.total_steps}")
    if "time" in newest:
        age = max(0.0, time.time() - float(newest["time"]))
        yield Evidence("metrics.jsonl", f"the last line is {age:.0f} s old")
