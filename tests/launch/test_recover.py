"""Lost jobs: which runs count as lost, when they are resumed without a person, and that two callers start one job."""

import contextlib
import errno
import math
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from scaletrain_cli.cli.status import wait_for_end as wait_in_command
from scaletrain_cli.errors import SchedulerError, SchedulerSilentError
from scaletrain_cli.launch.attempts import Decision, begin_attempt, read_attempts, request_stop
from scaletrain_cli.launch.backends.local.backend import LocalBackend, read_supervisor
from scaletrain_cli.launch.backends.slurm import queue
from scaletrain_cli.launch.backends.slurm.backend import SlurmBackend
from scaletrain_cli.launch.cancel import wait_for_end
from scaletrain_cli.launch.job import Job, Submission
from scaletrain_cli.launch.node.record import NodeRecord, RankRecord, read_node_records, write_node_record
from scaletrain_cli.launch.recover import delay_seconds, recover, recover_runs, why_lost
from scaletrain_cli.launch.restart import automatic_submissions, first_attempt_of_job
from scaletrain_cli.launch.submit import submit_run
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.rundir.journal import append_line, read_events, record_event
from scaletrain_cli.safe_files import touch
from tests.launch.conftest import LOCAL, MadeRun, MakeRun
from tests.waiting import wait_until

SLURM = SlurmBackend()
GONE = Job.because("7", "ended", recorded("gone"), cause="node")


def decided(code: str, *, requeue: bool = False, left: bool = False) -> Decision:
    return Decision.because(requeue, 1, Reason(code), left_to_scheduler=left)


def ended(made: MadeRun, reason: str | None, decision: Decision | None) -> MadeRun:
    """Return the run with one attempt that has ended so; without a reason it has reported no end."""
    began = {"number": 1, "scheduler": "slurm", "job_id": "7", "nodes": ["n1"], "started": 1.0}
    end = {} if reason is None else {"ended": 2.0, "exit_code": 1, "reason": reason}
    record = {"reason": None, "decision": None if decision is None else vars(decision)}
    made.run.new_attempt()
    write_document(made.run.attempt(1) / "attempt.json", began | record | end)
    return made


LOST = {
    "no end was reported": (None, None, GONE),
    "a requeue that did not happen": ("preempted", decided("launch.restart-unlimited", requeue=True), GONE),
    "Slurm ended the job": ("preempted", decided("slurm.job-being-ended", left=True), replace(GONE, cause="preempted")),
    "scontrol requeue was refused": ("node", decided("slurm.job-not-requeued"), replace(GONE, cause=None)),
    "no fitting nodes (code 5)": ("wrong-nodes", decided("launch.stop-budget-used-up"), replace(GONE, cause=None)),
}
NOT_LOST = {
    "the run is done": ("done", decided("launch.stop-done"), GONE),
    "it did nothing": ("idle", decided("launch.stop-idle"), GONE),
    "it crashed too often": ("crash", decided("launch.stop-budget-used-up"), GONE),
    "a retry cannot help": ("nan", decided("launch.stop-no-retry"), GONE),
    "no progress": ("node", decided("launch.stop-no-progress"), GONE),
    "the user cancelled the requeued job": (
        "preempted",
        decided("launch.restart-unlimited", requeue=True),
        replace(GONE, cause="cancelled"),
    ),
    "the job is queued": (None, None, replace(GONE, state="queued")),
    "Slurm does not answer": (None, None, replace(GONE, state="unknown")),
    "Slurm has forgotten who ended it": (
        "preempted",
        decided("slurm.job-being-ended", left=True),
        replace(GONE, cause=None, forgotten=True),
    ),
}


@pytest.fixture(autouse=True)
def no_accounting(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    states: dict[str, str] = {}
    monkeypatch.setattr(queue, "_accounted_states", lambda ids: {name: states[name] for name in ids if name in states})
    return states


@pytest.mark.parametrize("case", LOST)
def test_a_run_is_lost(make_run: MakeRun, case: str) -> None:
    reason, decision, job = LOST[case]
    made = ended(make_run(), reason, decision)
    assert why_lost(made.run, made.record, job, SLURM) is not None
    touch(made.run.stop_file)
    assert why_lost(made.run, made.record, job, SLURM) is None, "a run that was cancelled is never lost"


@pytest.mark.parametrize("case", NOT_LOST)
def test_a_run_is_not_lost(make_run: MakeRun, case: str) -> None:
    reason, decision, job = NOT_LOST[case]
    made = ended(make_run(), reason, decision)
    assert why_lost(made.run, made.record, job, SLURM) is None


@pytest.mark.parametrize(("job", "lost"), [(GONE, True), (replace(GONE, cause=None, forgotten=True), False)])
def test_a_job_without_an_attempt_is_lost_only_if_so_reported(make_run: MakeRun, job: Job, lost: bool) -> None:
    made = make_run()
    assert (why_lost(made.run, made.record, job, SLURM) is not None) == lost
    assert why_lost(made.run, made.record, replace(GONE, cause=None, exit_code=5), SLURM) is not None
    assert why_lost(made.run, made.record, replace(GONE, exit_code=2), SLURM) is None


def test_a_job_is_lost_if_another_user_deleted_it(make_run: MakeRun, no_accounting: dict[str, str]) -> None:
    made = ended(make_run(), None, None)
    deleted = replace(GONE, cause="cancelled")
    assert why_lost(made.run, made.record, deleted, SLURM) is None, "who did it is not known"
    no_accounting["7"] = f"CANCELLED by {os.geteuid()}"
    assert why_lost(made.run, made.record, deleted, SLURM) is None
    no_accounting["7"] = f"CANCELLED by {os.geteuid() + 1}"
    assert why_lost(made.run, made.record, deleted, SLURM) is not None


def test_a_job_that_its_owner_deleted_is_not_lost_although_its_script_could_not_record_the_end(
    make_run: MakeRun, no_accounting: dict[str, str]
) -> None:
    """A plain scancel: the ranks save and exit, and Slurm kills the batch script before it records that."""
    made = ended(make_run("cluster.gpus_per_node=1"), None, None)
    rank = RankRecord(0, 1, 0.0).end(75, 1.0, killed_by_agent=False)
    saved = NodeRecord("node-0000-n1", "n1", 0, 1, 1, 0.0, (rank,), ended=1.0, exit_code=75)
    write_node_record(made.run, 1, saved)
    deleted = replace(GONE, cause="cancelled")
    no_accounting["7"] = f"CANCELLED by {os.geteuid()}"
    assert why_lost(made.run, made.record, deleted, SLURM) is None
    no_accounting["7"] = f"CANCELLED by {os.geteuid() + 1}"
    assert why_lost(made.run, made.record, deleted, SLURM) is not None
    assert why_lost(made.run, made.record, replace(GONE, cause="preempted"), SLURM) is not None


def test_a_job_that_was_signaled_and_that_slurm_has_forgotten_is_not_lost(make_run: MakeRun) -> None:
    made, forgotten = ended(make_run(), None, None), replace(GONE, cause=None, forgotten=True)
    assert why_lost(made.run, made.record, forgotten, SLURM) is not None, "its node was lost"
    record_event(made.run, "signal", signal="SIGTERM", attempt=1, node="n1")
    assert why_lost(made.run, made.record, forgotten, SLURM) is None, "its owner may have deleted it"
    assert why_lost(made.run, made.record, GONE, SLURM) is not None


@pytest.mark.parametrize("case", ["no end was reported", "scontrol requeue was refused", "no fitting nodes (code 5)"])
def test_the_job_before_makes_no_later_one_lost(make_run: MakeRun, no_accounting: dict[str, str], case: str) -> None:
    reason, decision, _ = LOST[case]
    made = ended(make_run(), reason, decision)
    submission = {"scheduler": "slurm", "job_id": "8", "submitted": 3.0, "first_attempt": 2}
    write_document(made.run.path / "submission.json", {"state": "submitted", **submission})
    job = replace(GONE, id="8")
    no_accounting["8"] = f"CANCELLED by {os.geteuid()}"
    assert why_lost(made.run, made.record, replace(job, cause="cancelled"), SLURM) is None, "deleted while it waited"
    assert why_lost(made.run, made.record, replace(job, cause=None, forgotten=True), SLURM) is None
    found = why_lost(made.run, made.record, job, SLURM)
    assert found.code == "launch.lost-before-attempt"


def test_a_run_that_is_ended_as_idle_is_not_lost_although_its_end_was_not_reported(make_run: MakeRun) -> None:
    made = ended(make_run(), None, None)
    request_stop(made.run, 1, "idle", Reason("launch.ended-idle", {"seconds": 1800, "what": "GPUs"}))
    assert why_lost(made.run, made.record, GONE, SLURM) is None


def test_a_run_is_lost_by_a_shutdown_and_not_by_ctrl_c(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ended(make_run(), "preempted", decided("local.supervisor-stopped"))
    here = os.uname().nodename
    write_document(made.run.path / "supervisor.json", {"hostname": here, "pid": 1 << 22, "start_ticks": 1})
    job = Job.because("1", "ended", recorded("gone"))
    monkeypatch.setattr("psutil.boot_time", lambda: 3.0)
    assert why_lost(made.run, made.record, job, LOCAL) is not None
    monkeypatch.setattr("psutil.boot_time", lambda: 1.0)
    assert why_lost(made.run, made.record, job, LOCAL) is None


def test_each_resume_waits_twice_as_long_up_to_an_hour() -> None:
    assert [delay_seconds(earlier) for earlier in (0, 1, 2, 10, 1000)] == [60, 120, 240, 3600, 3600]


def test_a_node_whose_clock_is_a_day_ahead_does_not_delay_a_resume(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ended(make_run("restarts.lost=2"), *LOST["a requeue that did not happen"][:2])
    write_document(made.run.submission, vars(Submission("slurm", "7", submitted=1000.0, first_attempt=1)))
    monkeypatch.setattr(SlurmBackend, "job", lambda *_: GONE)
    for seconds in (2000.0, 2000.0 + 86400):
        append_line(made.run.events, {"time": seconds, "event": "suspended", "attempt": 1})
    waiting = recover(made.run, SLURM, now=2030.0)
    assert waiting is not None
    assert waiting.after == 2060.0


# ---- whole runs ------------------------------------------------------------------------------------------------------


def lose(made: MadeRun) -> None:
    """Start the run and kill all of its processes at once, as a machine that loses power does."""
    submit_run(made.run, made.record, LOCAL)
    wait_until(lambda: any("up" in made.log(1, rank) for rank in range(2)), "it trains")
    wait_until(lambda: (made.run.path / "checkpoints" / "step-00000005").is_dir(), "it has saved")
    supervisor = read_supervisor(made.run)
    assert supervisor is not None
    (node,) = read_node_records(made.run, 1)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # else the agent passes on the signal at its parent's death
        for pid in (supervisor.process.pid, node.agent_pid, *(rank.pid for rank in node.ranks)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    wait_until(lambda: LOCAL.job(made.run, made.record).state == "ended", "it is gone")


def submissions(made: MadeRun) -> list[int]:
    return [event.get("automatic", 0) for event in made.events("submitted")]


@pytest.mark.process
def test_a_lost_run_is_resumed_once_however_many_look(make_run: MakeRun, forked_jobs: None) -> None:
    made = make_run("restarts.lost=2", steps=20, stay={"1:*": 8}, checkpoint_every=5, silence=600)
    lose(made)
    waiting = recover(made.run, LOCAL)
    assert (waiting.state, waiting.number, waiting.allowed) == ("waiting", 1, 2)
    assert waiting.after is not None
    assert submissions(made) == [0]
    later = waiting.after + 1
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: recover(made.run, LOCAL, now=later), range(4)))
    assert sorted(one.state for one in found if one is not None) == ["resumed"]
    assert submissions(made) == [0, 1]
    assert wait_for_end(made.run, LOCAL, math.inf, lambda _: None).state == "finished"
    attempts = read_attempts(made.run)
    assert [attempt.checkpoint_at_start for attempt in attempts] == [None, 5]
    assert first_attempt_of_job(made.run, attempts[1].job_id, 2) == 1, "the attempts before count"
    assert recover(made.run, LOCAL, now=later + 1e6) is None


@pytest.mark.process
def test_a_run_that_wants_no_resume_or_has_used_all_stays_as_it_is(make_run: MakeRun, forked_jobs: None) -> None:
    made = make_run("restarts.lost=1", steps=20, stay={"1:*": 8}, checkpoint_every=5, silence=600)
    lose(made)
    record_event(made.run, "submitted", job_id="8", automatic=1)
    assert automatic_submissions(made.run) == 1
    found = recover(made.run, LOCAL, now=time.time() + 1e6)
    assert found.state == "used-up"
    LOCAL.cancel(made.run, made.record)
    assert recover(made.run, LOCAL, now=time.time() + 1e6) is None
    assert len(made.events("submitted")) == 2
    other = ended(make_run(run_id="other"), None, None)
    assert recover(other.run, LOCAL, now=time.time() + 1e6) is None


def test_a_resume_by_a_person_grants_all_resumes_again(make_run: MakeRun) -> None:
    made = make_run()
    for job, automatic in (("1", 0), ("2", 1), ("3", 2), ("4", 0), ("5", 1)):
        record_event(made.run, "submitted", job_id=job, automatic=automatic)
        begin_attempt(made.run, made.record.spec, scheduler="test", job_id=job, nodes=())
    assert automatic_submissions(made.run) == 1
    assert [first_attempt_of_job(made.run, str(job), job) for job in range(1, 6)] == [1, 1, 1, 4, 4]


def test_a_job_whose_id_an_earlier_one_had_does_not_count_the_attempts_before(make_run: MakeRun) -> None:
    """As of local jobs in a container, where the supervisor gets the same pid each time."""
    made = make_run()
    for number, automatic in ((1, 0), (2, 0), (3, 1)):
        record_event(made.run, "submitted", job_id="7", automatic=automatic, first_attempt=number)
        begin_attempt(made.run, made.record.spec, scheduler="local", job_id="7", nodes=())
    assert first_attempt_of_job(made.run, "7", 3) == 2


def test_attempts_of_a_job_count_although_its_submission_is_not_recorded_here(make_run: MakeRun) -> None:
    made = make_run()
    for job in ("6", "7", "7"):
        begin_attempt(made.run, made.record.spec, scheduler="test", job_id=job, nodes=())
    assert first_attempt_of_job(made.run, "7", 3) == 2


@pytest.mark.parametrize("error", [SchedulerError("no answer."), OSError(errno.ESTALE, "Stale file handle")])
def test_a_run_that_cannot_be_judged_does_not_keep_the_others(
    error: Exception, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_run("restarts.lost=1", run_id=name) for name in ("one", "two")]
    for made in runs:
        write_document(
            made.run.path / "submission.json",
            {"state": "submitted", "scheduler": "local", "job_id": "7", "submitted": 1.0, "first_attempt": 1},
        )

    def job(self: LocalBackend, run: object, record: object) -> Job:
        if run == runs[0].run:
            raise error
        return GONE

    monkeypatch.setattr(LocalBackend, "job", job)
    monkeypatch.setattr(LocalBackend, "submit", lambda self, run, record: "8")
    done = recover_runs([made.run for made in runs])
    assert list(done.errors) == ["one"]
    assert [(one.run.run_id, one.state, one.job_id) for one in done.found] == [("two", "resumed", "8")]
    assert read_events(runs[1].run)[-1]["automatic"] == 1
    assert done.to_json()["runs"][0]["number"] == 1


def lost_run(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> MadeRun:
    """Return a run whose job is lost, and that may be resumed now."""
    made = make_run("restarts.lost=3")
    submission = {"scheduler": "local", "job_id": "7", "submitted": 1.0, "first_attempt": 1}
    write_document(made.run.path / "submission.json", {"state": "submitted", **submission})
    monkeypatch.setattr(LocalBackend, "job", lambda self, run, record: GONE)
    return made


def test_a_scheduler_that_does_not_answer_is_no_refusal(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made = lost_run(make_run, monkeypatch)

    def refuses(self: LocalBackend, run: object, record: object) -> str:
        raise SchedulerError("invalid account.")

    def is_silent(self: LocalBackend, run: object, record: object) -> str:
        raise SchedulerSilentError("no answer.")

    monkeypatch.setattr(LocalBackend, "submit", refuses)
    refused = recover(made.run)
    assert refused.state == "refused"
    monkeypatch.setattr(LocalBackend, "submit", is_silent)
    with pytest.raises(SchedulerSilentError):
        recover(made.run)


def test_a_scheduler_that_falls_silent_is_no_refusal(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = lost_run(make_run, monkeypatch), []

    def job(self: LocalBackend, run: object, record: object) -> Job:
        asked.append(run)
        if len(asked) > 1:
            raise SchedulerError("no answer.")
        return GONE

    monkeypatch.setattr(LocalBackend, "job", job)
    with pytest.raises(SchedulerError, match="no answer"):
        recover(made.run)


def test_a_waiting_command_goes_on_if_another_one_resumed(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two `status --wait --resume` at once: the second one finds that the run is no longer lost."""
    made, resumed = lost_run(make_run, monkeypatch), []

    def by_another(run: object) -> None:
        resumed.append(run)
        monkeypatch.setattr(LocalBackend, "job", lambda self, run, record: replace(GONE, state="running", cause=None))

    monkeypatch.setattr("scaletrain_cli.launch.recover.recover", by_another)
    status, code = wait_in_command(made.run, 0.0, resume=True)
    assert resumed == [made.run]
    assert (status.state, code) == ("running", 124)
