"""Resuming a run: the report, rejected resumes, and the submitted job."""

import pytest

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError, UsageError
from scaletrain_cli.launch.attempts import Decision, Outcome, begin_attempt, end_attempt
from scaletrain_cli.launch.job import Job, read_submission
from scaletrain_cli.launch.replan import replan
from scaletrain_cli.launch.resume import inspect_resume, resume
from scaletrain_cli.launch.submit import submit_run
from scaletrain_cli.reasons import recorded
from scaletrain_cli.rundir.journal import append_line, read_events, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.worker import checkpoint_commit
from tests.launch.conftest import MadeRun, MakeRun
from tests.launch.test_submit import CountingScheduler


class Cluster(CountingScheduler):
    """A back end whose job is in the given state."""

    state = "ended"

    def job(self, run: RunDir, record: RunRecord) -> Job:
        return Job("7", self.state)  # type: ignore[arg-type]


@pytest.fixture
def made(make_run: MakeRun) -> MadeRun:
    return make_run()


def commit(made: MadeRun, step: int) -> None:
    folder = made.run.checkpoints
    checkpoint_commit.open_attempt(folder, 1)
    writer = checkpoint_commit.HashingWriter(checkpoint_commit.stage_checkpoint(folder, 1, step) / "shard")
    writer.write(b"x" * 100)
    checkpoint_commit.commit_checkpoint(folder, step, {"shard": writer.close()}, world_size=2, clean=True, attempt=1)
    record_event(made.run, "checkpoint", step=step)


def log_steps(made: MadeRun, *steps: int) -> None:
    for step in steps:
        append_line(made.run.metrics, {"step": step, "loss": 1.0})


def attempt(made: MadeRun, code: int, reason: str, requeue: bool = False) -> None:
    number = begin_attempt(made.run, made.record.spec, scheduler="local", job_id="1", nodes=("n",))
    outcome = Outcome(code, reason, recorded(f"{reason} happened"))  # type: ignore[arg-type]
    end_attempt(made.run, made.record.spec, number, outcome, Decision(requeue, code, "so it was decided"))


def test_a_resume_reports_why_the_run_ended_the_checkpoint_and_the_lost_steps(made: MadeRun) -> None:
    commit(made, 10)
    log_steps(made, *range(1, 15))
    attempt(made, 1, "oom")
    report = inspect_resume(made.run, Cluster())
    assert "attempt 1 ended with exit code 1: oom happened; so it was decided" in str(report.why_ended)
    assert report.checkpoint.step == 10
    assert (report.last_step_logged, report.steps_lost) == (14, 4)
    assert (report.finished, report.active, report.passed_over) == (False, False, [])


def test_lost_steps_are_counted_from_the_last_attempt(made: MadeRun) -> None:
    commit(made, 10)
    log_steps(made, *range(1, 20), *range(11, 13))
    assert inspect_resume(made.run, Cluster()).steps_lost == 2


def test_a_resume_submits_a_new_job_with_fresh_budgets_and_clears_a_cancellation(made: MadeRun) -> None:
    cluster = Cluster()
    submit_run(made.run, made.record, cluster)
    attempt(made, 75, "cancelled")
    commit(made, 10)
    made.run.stop_file.touch()
    resumption = resume(made.run, scheduler=cluster)
    assert not made.run.stop_file.exists()
    assert (resumption.submission.job_id, resumption.submission.first_attempt) == ("job-2", 2)
    assert read_submission(made.run) == resumption.submission


def test_a_run_that_never_started_is_started_by_resume(made: MadeRun) -> None:
    attempt(made, 5, "wrong-nodes")
    cluster = Cluster()
    report = resume(made.run, scheduler=cluster).report
    assert (report.checkpoint, report.steps_lost, cluster.submitted) == (None, 0, 1)


def test_a_run_that_ended_before_its_first_checkpoint_is_started_by_resume(made: MadeRun) -> None:
    log_steps(made, 12)
    attempt(made, 93, "nan")
    cluster = Cluster()
    report = resume(made.run, resize=replan(made.run, ["training.optimizer.lr=1e-5"]), scheduler=cluster).report
    assert (report.checkpoint, report.steps_lost, cluster.submitted) == (None, 12, 1)


def test_without_a_loadable_checkpoint_resume_requires_from_scratch(made: MadeRun) -> None:
    commit(made, 10)
    log_steps(made, 12)
    (made.run.checkpoints / "step-00000010" / "shard").unlink()
    cluster = Cluster()
    with pytest.raises(UsageError, match=r"up to step 12, .* step-00000010/shard: No such file"):
        resume(made.run, scheduler=cluster)
    assert cluster.submitted == 0
    resume(made.run, from_scratch=True, scheduler=cluster)
    assert cluster.submitted == 1
    assert len(made.events("from-scratch")) == 1


def test_a_missing_folder_of_checkpoints_is_reported(made: MadeRun) -> None:
    commit(made, 10)
    checkpoint_commit.delete_checkpoint(made.run.checkpoints / "step-00000010")
    with pytest.raises(UsageError, match="none of its checkpoints exists"):
        resume(made.run, scheduler=Cluster())


def test_from_scratch_is_rejected_while_a_valid_checkpoint_exists(made: MadeRun) -> None:
    commit(made, 10)
    with pytest.raises(UsageError, match="step-00000010 is valid"):
        resume(made.run, from_scratch=True, scheduler=Cluster())


def test_a_job_of_unknown_state_is_not_submitted_again(made: MadeRun) -> None:
    """For example, a local run of another host that shares the file system."""
    commit(made, 10)
    attempt(made, 75, "preempted")
    cluster = Cluster()
    cluster.state = "unknown"
    with pytest.raises(UsageError, match="is still running is not known"):
        resume(made.run, scheduler=cluster)


class Unwilling(Cluster):
    """A back end that rejects the job, or does not answer, when the start from scratch is already recorded."""

    def __init__(self, error: SchedulerError) -> None:
        super().__init__()
        self.error = error

    def submit(self, run: RunDir, record: RunRecord) -> str:
        assert read_events(run)[-1]["event"] == "from-scratch"
        raise self.error


def test_a_rejected_resume_from_scratch_records_no_start_from_scratch(made: MadeRun) -> None:
    commit(made, 10)
    (made.run.checkpoints / "step-00000010" / "shard").unlink()
    before = made.run.events.read_bytes()
    with pytest.raises(SchedulerError):
        resume(made.run, from_scratch=True, scheduler=Unwilling(SchedulerError("no such partition")))
    assert made.run.events.read_bytes() == before


def test_without_an_answer_of_the_scheduler_the_start_from_scratch_is_kept(made: MadeRun) -> None:
    with pytest.raises(SchedulerSilentError):
        resume(made.run, from_scratch=True, scheduler=Unwilling(SchedulerSilentError("no answer")))
    assert len(made.events("from-scratch")) == 1
