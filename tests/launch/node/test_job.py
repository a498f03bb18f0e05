"""The job of one node that any back end may start, with real processes and a stand-in engine."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scaletrain_cli.launch.attempts import read_attempts
from tests.forked import Forked, RealProcess, forking
from tests.launch.backends.local.test_local import kill_all_of
from tests.launch.conftest import ENGINE, MadeRun, MakeRun
from tests.waiting import wait_until

ONE_RANK = ("cluster.gpus_per_node=1", "training.global_batch_size=1")
Start = Callable[..., Forked | RealProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start the job of a run, as a back end does; it and its agents are killed at the end of the test."""
    started: list[tuple[MadeRun, Forked | RealProcess]] = []

    def job(made: MadeRun, *options: str, real: bool = False) -> Forked | RealProcess:
        words = [str(made.run.path), "--engine", ENGINE, "--scheduler", "local", "--job-id", "17", *options]
        kind, environment = (RealProcess, dict(os.environ)) if real else (Forked, forking(os.environ))
        process = kind("scaletrain_cli.launch.node.job", words, environment, stdout=1)
        started.append((made, process))
        return process

    yield job
    for made, process in started:
        process.kill()
        kill_all_of(made)  # the agents, which hold the pipe of the job
        process.communicate()


def preempt(made: MadeRun, job: Forked | RealProcess, attempt: int) -> int:
    """Send SIGTERM to a job whose ranks train; return its exit code."""
    wait_until(lambda: "up" in made.log(attempt, 0), f"attempt {attempt} is up")
    job.send_signal(signal.SIGTERM)
    return job.wait()


def test_sigterm_ends_a_job_that_no_scheduler_starts_again(make_run: MakeRun, start: Start) -> None:
    made = make_run(*ONE_RANK, steps=10_000, step_seconds=0.02)
    assert preempt(made, start(made, real=True), 1) == 75
    (stopped,) = made.events("stopped")
    assert (stopped["code"], stopped["exit_code"]) == ("launch.job-stopped", 75)


def test_a_requeued_job_that_is_preempted_goes_on_under_its_id(make_run: MakeRun, start: Start) -> None:
    made = make_run(*ONE_RANK, steps=10_000, step_seconds=0.02, stay={"2:0": 1})
    assert preempt(made, start(made, "--requeued"), 1) == 75
    (first,) = read_attempts(made.run)
    assert (first.reason, first.decision.requeue) == ("preempted", True)
    assert made.events("stopped") == []
    assert preempt(made, start(made, "--requeued"), 2) == 75
    assert [attempt.job_id for attempt in read_attempts(made.run)] == ["17", "17"]


def test_the_budgets_of_a_requeued_job_count_over_all_its_starts(make_run: MakeRun, start: Start) -> None:
    made = make_run(*ONE_RANK, "restarts.preemption=1", steps=10_000, step_seconds=0.02)
    assert preempt(made, start(made, "--requeued"), 1) == 75
    assert preempt(made, start(made, "--requeued"), 2) == 93, "no third attempt, and no further start of the job"
    assert [event["code"] for event in made.events("stopped")] == ["launch.stop-budget-used-up"]
    assert start(made, "--requeued").wait() == 93
    assert len(read_attempts(made.run)) == 2


def test_a_requeued_job_of_a_cancelled_run_is_not_started_again(make_run: MakeRun, start: Start) -> None:
    made = make_run(*ONE_RANK, steps=10_000, step_seconds=0.02)
    job = start(made, "--requeued")
    wait_until(lambda: "up" in made.log(1, 0), "the attempt is up")
    made.run.stop_file.touch()
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 93
    assert len(made.events("cancelled")) == 1
    (attempt,) = read_attempts(made.run)
    assert (attempt.exit_code, attempt.reason) == (75, "cancelled")


FAILING_JOB = """
import sys
from scaletrain_cli.launch.node import job
def fail(self, first):
    raise TypeError('a bug')
job.OneNodeJob._attempt = fail
sys.exit(job.main())
"""


def test_a_job_that_fails_by_a_bug_sends_a_notification_and_keeps_no_secret(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hidden")
    monkeypatch.setenv("SCALETRAIN_TRACEBACK", "1")
    made = make_run(*ONE_RANK, "secret_env=[TOKEN]", f"notify=[{{command: [tee, {tmp_path}/notification]}}]")
    assert made.run.secrets.exists()
    command = [sys.executable, "-c", FAILING_JOB, str(made.run.path), "--scheduler", "local", "--job-id", "17"]
    assert subprocess.run(command, capture_output=True, text=True).returncode == 1
    (stopped,) = made.events("stopped")
    assert (stopped["code"], stopped["exit_code"]) == ("node.job-failed", 1)
    assert stopped["why"] in (tmp_path / "notification").read_text()
    assert not made.run.secrets.exists()
