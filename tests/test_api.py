"""The Python interface: the same as the commands, without printing or prompting."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletrain_cli import api
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.preparation import PreparationJob, preparation_folder, read_job, record_job
from scaletrain_cli.safe_files import make_folder
from tests.cli.command_line import SMALL
from tests.launch.conftest import forked_jobs
from tests.tiny_program import settings
from tests.waiting import wait_until

__all__ = ["forked_jobs"]


@pytest.fixture
def spec(tmp_path: Path) -> api.RunSpec:
    return api.load_spec(SMALL, settings(tmp_path / "program", steps=4))


def test_a_run_is_submitted_once_and_shown_to_its_end(spec: api.RunSpec, capsys: pytest.CaptureFixture[str]) -> None:
    submitted = api.submit(spec, run_id="first")
    assert submitted.created
    again = api.submit(spec, run_id="first")
    assert (again.created, again.job_id) == (False, submitted.job_id)
    run = submitted.run
    ended = run.wait()
    assert (ended.state, ended.step) == ("finished", 4)
    assert [line.text for line in run.logs()] == ["finished at step 4"]
    assert run.explain().state == "finished"
    assert api.list_runs() == [run] == [api.find_run("fir")]
    assert (run.spec, run.plan) == (spec, api.make_plan(spec))
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("forked_jobs")
def test_a_run_is_cancelled_with_its_state_and_resumed(spec: api.RunSpec, tmp_path: Path) -> None:
    slow = api.load_spec(SMALL, settings(tmp_path / "program", steps=100_000, step_seconds=0.02))
    run = api.submit(slow).run
    wait_until(lambda: run.status().step > 0, "a step")
    assert run.cancel() == api.Cancellation(run.run_id, "running", cancelled=True)
    saved = run.wait()
    assert (saved.state, saved.last_checkpoint_step) == ("cancelled", saved.step)
    assert run.cancel() == api.Cancellation(run.run_id, "cancelled", cancelled=False)
    assert run.resume().job_id != saved.job_id
    assert run.status().attempt == 2
    run.cancel()
    assert run.wait().state == "cancelled"


@pytest.mark.parametrize("refusal", [api.SchedulerError, api.SchedulerSilentError])
def test_a_run_whose_job_was_refused_is_not_left_behind(
    spec: api.RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: type[api.SchedulerError]
) -> None:
    def refuse(*_: object) -> str:
        raise refusal("no answer")

    monkeypatch.setattr(LocalBackend, "submit", refuse)
    with pytest.raises(refusal):
        api.submit(spec, run_id="first")
    # After a request without an answer there may be a job.
    assert (tmp_path / "runs" / "first").exists() == (refusal is api.SchedulerSilentError)


JOB = PreparationJob("kubernetes", "7", "", 1)


def test_a_run_whose_data_could_not_be_prepared_stays_and_can_be_explained(
    spec: api.RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(run: RunDir, *_: object) -> None:
        make_folder(preparation_folder(run))
        record_job(preparation_folder(run), JOB)
        raise api.SchedulerError("the job that prepares the data has failed")

    monkeypatch.setattr("scaletrain_cli.launch.prepared_submission.submit_run", prepare)
    with pytest.raises(api.SchedulerError):
        api.submit(spec, run_id="first")
    assert read_job(preparation_folder(RunDir(tmp_path / "runs" / "first"))) == JOB


def test_nothing_is_written_before_a_submission(spec: api.RunSpec, tmp_path: Path) -> None:
    prepared = api.prepare_submission(spec, run_id="later")
    assert "supervisor" in prepared.render().text
    assert prepared.check().steps_left == 4
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_checks_a_run_that_was_submitted_before_as_a_new_one(
    spec: api.RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scaletrain_cli.launch.prepared_submission.submitted_before", lambda run_id: object())
    assert api.prepare_submission(spec, run_id="same").earlier is not None
    assert api.prepare_submission(spec, run_id="same", dry_run=True).earlier is None


def test_an_invalid_spec_an_unknown_run_and_an_impossible_plan_are_raised_as_errors(spec: api.RunSpec) -> None:
    with pytest.raises(api.SpecError):
        api.load_spec(SMALL, ["training.stepz=1"])
    with pytest.raises(api.UsageError):
        api.status("no-such-run")
    with pytest.raises(api.InfeasibleError):
        api.submit(api.load_spec(SMALL, ["planner.framework=megatron"]))


@pytest.mark.parametrize("name", sorted({*api.__all__} - {"API_VERSION"}))
def test_every_public_name_has_a_docstring_of_its_own(name: str) -> None:
    text = getattr(api, name).__doc__
    assert text
    assert not text.startswith(f"{name}(")  # which a dataclass writes itself


@pytest.mark.usefixtures("forked_jobs")
def test_a_run_of_another_user_is_not_cancelled_whatever_status_is_given(
    spec: api.RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = api.load_spec(SMALL, settings(tmp_path / "program", steps=100_000, step_seconds=0.02))
    run = api.submit(slow).run
    seen = run.status()
    with monkeypatch.context() as other:
        other.setattr("scaletrain_cli.safe_files.other_owner", lambda path: 12345)
        for options in ({"seen": seen}, {}):
            with pytest.raises(api.UsageError, match="belongs to"):
                api.cancel(run, **options)
        with pytest.raises(api.UsageError, match="--force"):
            api.cancel(run, seen=seen, force=True)
    assert run.status().state == "running"
    assert run.cancel().cancelled
    assert run.wait().state == "cancelled"
