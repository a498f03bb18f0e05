"""The values of secret_env are in the run directory only while a rank may need them."""

import math
import os
from collections.abc import Mapping

import pytest

from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.launch.cancel import wait_for_end
from scaletrain_cli.launch.resume import resume
from scaletrain_cli.launch.submit import submit_run
from scaletrain_cli.tracking.base import Outcome, TrackedRun, Tracker, TrackerOptions
from scaletrain_cli.worker import trackers
from tests.launch.conftest import LOCAL, MadeRun, MakeRun
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_jobs")


def ended(made: MadeRun) -> str:
    return wait_for_end(made.run, LOCAL, math.inf, lambda status: None).state


def test_an_ended_run_keeps_no_secret_and_a_resume_takes_it(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "first")
    made = make_run("secret_env=[MY_TOKEN]", "restarts.crash=1", die={"1:0": 1, "2:0": 93}, echo=["MY_TOKEN"])
    assert made.run.secrets.stat().st_mode & 0o777 == 0o600
    submit_run(made.run, made.record, LOCAL)
    assert ended(made) == "failed"
    assert "MY_TOKEN='first'" in made.log(2, 0), "a retry has it still"
    assert not made.run.secrets.exists()

    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(UsageError, match="MY_TOKEN"):
        resume(made.run, scheduler=LOCAL)
    monkeypatch.setenv("MY_TOKEN", "second")
    resume(made.run, scheduler=LOCAL)
    assert ended(made) == "finished"
    assert "MY_TOKEN='second'" in made.log(3, 0)
    assert not made.run.secrets.exists()


def test_a_run_that_is_cancelled_keeps_no_secret(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "first")
    made = make_run("secret_env=[MY_TOKEN]", stay={"1:*": 1})
    submit_run(made.run, made.record, LOCAL)
    wait_until(lambda: "up" in made.log(1, 0), "the ranks are up")
    LOCAL.cancel(made.run, made.record)
    assert ended(made) == "cancelled"
    assert not made.run.secrets.exists()
    unstarted = make_run("secret_env=[MY_TOKEN]", run_id="unstarted")
    LOCAL.cancel(unstarted.run, unstarted.record)
    assert not unstarted.run.secrets.exists()


def test_a_refused_resume_leaves_no_secret_behind(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "first")
    made = make_run("secret_env=[MY_TOKEN]", "restarts.crash=0", die={"1:0": 93})
    submit_run(made.run, made.record, LOCAL)
    assert ended(made) == "failed"

    def refuse(*_: object) -> str:
        raise ScaletrainError("refused")

    monkeypatch.setattr("scaletrain_cli.launch.backends.local.backend.LocalBackend.submit", refuse)
    with pytest.raises(ScaletrainError, match="refused"):
        resume(made.run, scheduler=LOCAL)
    assert not made.run.secrets.exists()


class Refused(Tracker[TrackerOptions]):
    def start(self, run: TrackedRun) -> None:
        raise ConnectionError(f"request to https://me:hunter22@host failed, key {os.environ['TRACKER_LOGIN']}")

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None: ...

    def finish(self, outcome: Outcome) -> None: ...


def test_the_error_of_a_tracker_is_recorded_without_secrets(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKER_LOGIN", "swordfish")
    monkeypatch.setattr(trackers, "_new_tracker", lambda name, options: Refused(options))
    made = make_run("secret_env=[TRACKER_LOGIN]", "tracking=[tensorboard]")
    started = trackers.start_trackers(made.run, made.record, 1)
    started.finish("failed")
    text = made.run.events.read_text()
    assert "request to " in text
    assert "swordfish" not in text
    assert "hunter22" not in text
