"""Run directories are created completely or not at all, and submitted once."""

import json
import os
import re
import signal
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

import scaletrain_cli
from scaletrain_cli.errors import SchedulerError, UsageError
from scaletrain_cli.launch.backends.base import Backend, PreflightResult, Start
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.code import code_hash
from scaletrain_cli.launch.job import Job, read_submission
from scaletrain_cli.launch.submit import create_run, new_run_id, submit_run
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import recorded
from scaletrain_cli.rundir.paths import RunDir, list_runs, runs_root
from scaletrain_cli.rundir.record import CodeRecord, RunRecord, read_record
from scaletrain_cli.spec import RunSpec
from tests.launch.conftest import MakeRun, make_plan, make_spec


class CountingScheduler(Backend):
    """A slow back end that submits nothing and counts the calls."""

    name: ClassVar[str] = "local"

    def __init__(self) -> None:
        self.submitted = 0
        self._pause = threading.Event()

    def preflight(
        self, spec: RunSpec, plan: RunPlan, run: RunDir | None = None, code: CodeRecord | None = None
    ) -> PreflightResult:
        return PreflightResult(Start(None, recorded("no estimate")))

    def render(self, run: RunDir, record: RunRecord) -> str:
        return ""

    def submit(self, run: RunDir, record: RunRecord) -> str:
        self._pause.wait(0.05)
        self.submitted += 1
        return f"job-{self.submitted}"

    def job(self, run: RunDir, record: RunRecord) -> Job:
        return Job("", "ended")

    def cancel(self, run: RunDir, record: RunRecord) -> None:
        return None


def test_a_created_run_has_the_record_that_the_engine_reads() -> None:
    spec = make_spec()
    made = create_run(spec, make_plan(spec))
    assert made.created
    record = read_record(made.run)
    assert record == made.record
    assert record.spec == spec
    assert record.versions.keys() >= {"python", "scaletrain"}
    assert re.fullmatch("[0-9a-f]{64}", record.code_hash)
    assert re.fullmatch("[a-z0-9]{8}", record.wandb_run_id)
    assert record.working_folder == str(Path.cwd())
    assert not made.run.secrets.exists()


def test_the_code_hash_is_over_the_files_of_the_package_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path), read_bytes(path))[1])
    code_hash()
    package = Path(scaletrain_cli.__file__).parent
    assert sorted(read) == sorted(package.rglob("*.py"))


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        *(("llama-7b", "llama-7b"), ('it\'s "quoted"', "it-s-quoted"), ("two\nlines", "two-lines")),
        *(("$(rm -rf /) `id`; & |", "rm-rf-id"), ("../../etc/passwd", "etc-passwd"), ("模型", "run")),
        *(("-" * 200, "run"), ("a" * 200, "a" * 48)),
    ],
)
def test_any_name_gives_a_run_id_that_is_a_safe_file_name(name: str, slug: str) -> None:
    assert re.fullmatch(re.escape(slug) + r"-\d{8}-\d{6}-[0-9a-f]{4}", new_run_id(name, 0.0))


@pytest.mark.parametrize("run_id", ["", ".", "..", "../up", "a/b", "a b", "a\nb", "-x", ".hidden", "$(id)", "x" * 200])
def test_a_run_id_that_is_not_a_plain_file_name_is_rejected(run_id: str) -> None:
    spec = make_spec()
    with pytest.raises(UsageError, match="run id"):
        create_run(spec, make_plan(spec), run_id)
    assert not runs_root().exists()


def test_concurrent_submissions_of_one_id_create_one_run() -> None:
    spec = make_spec()
    plan = make_plan(spec)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: create_run(spec, plan, "mine"), range(16)))
    assert [one.created for one in made].count(True) == 1
    assert {one.record.wandb_run_id for one in made} == {read_record(made[0].run).wandb_run_id}
    assert [entry.name for entry in runs_root().iterdir()] == ["mine"]


def test_concurrent_submissions_of_one_run_submit_one_job(make_run: MakeRun) -> None:
    made, scheduler = make_run(), CountingScheduler()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: submit_run(made.run, made.record, scheduler), range(8)))
    assert scheduler.submitted == 1
    assert {one.job_id for one in found} == {"job-1"}
    assert read_submission(made.run) == found[0]
    assert len(made.events("submitted")) == 1


def test_the_answer_to_a_request_is_recorded_when_the_terminal_is_gone(make_run: MakeRun) -> None:
    class HungUp(CountingScheduler):
        def submit(self, run: RunDir, record: RunRecord) -> str:
            os.kill(os.getpid(), signal.SIGHUP)
            return super().submit(run, record)

    made = make_run()
    before = signal.getsignal(signal.SIGHUP)
    submit_run(made.run, made.record, HungUp())
    assert read_submission(made.run).job_id == "job-1"
    assert signal.getsignal(signal.SIGHUP) == before


def test_a_folder_that_is_not_a_run_is_not_changed() -> None:
    stranger = runs_root() / "mine"
    stranger.mkdir(parents=True)
    (stranger / "thesis.tex").touch()
    spec = make_spec()
    with pytest.raises(UsageError, match="cannot be created"):
        create_run(spec, make_plan(spec), "mine")
    assert [entry.name for entry in stranger.iterdir()] == ["thesis.tex"]
    assert [entry.name for entry in runs_root().iterdir()] == ["mine"]


def test_a_run_that_is_being_created_is_not_listed(make_run: MakeRun) -> None:
    made = make_run()
    draft = runs_root() / ".other.1234"
    draft.mkdir()
    (draft / "run.json").write_text("{")
    assert list_runs() == [made.run]


def test_secrets_are_in_one_file_that_only_the_owner_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    value = "s3cr3t 'quoted'\nline"
    monkeypatch.setenv("API_KEY", value)
    old_mask = os.umask(0)
    try:
        spec = make_spec("secret_env=[API_KEY]")
        made = create_run(spec, make_plan(spec))
    finally:
        os.umask(old_mask)
    assert json.loads(made.run.secrets.read_text()) == {"API_KEY": value}
    assert stat.S_IMODE(made.run.secrets.stat().st_mode) == 0o600
    assert "s3cr3t" not in made.run.record.read_text()


def test_an_unset_secret_is_rejected_before_anything_is_written() -> None:
    spec = make_spec("secret_env=[NOT_SET_ANYWHERE]")
    with pytest.raises(UsageError, match="NOT_SET_ANYWHERE"):
        create_run(spec, make_plan(spec))
    assert list_runs() == []


def test_an_unknown_scheduler_is_an_error() -> None:
    with pytest.raises(SchedulerError, match="no back end is named mesos") as caught:
        backend_for("mesos")
    assert caught.value.message.endswith("Installed: local, slurm, kubernetes.")
    assert caught.value.exit_code == 4
