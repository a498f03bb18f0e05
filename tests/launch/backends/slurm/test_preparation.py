"""The jobs that prepare data, with stand-ins for Slurm's commands that keep the scripts and run their tasks."""

import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaletrain_cli.engine.data import preparation as preparation_process
from scaletrain_cli.errors import SchedulerError, UsageError
from scaletrain_cli.launch.backends.slurm.backend import SlurmBackend
from scaletrain_cli.launch.preparation import queue_preparation
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document
from tests.launch.conftest import MakeRun, make_spec

SECRET = "AKIA-for-this-test"
# The stand-in for sbatch keeps no environment, as a site with --export=NONE; that for srun runs the task.
COMMANDS = {
    "squeue": "true",
    "scancel": "true",
    "sbatch": """
[ ! -e {folder}/refuses ] || {{ echo "sbatch: error: Invalid qos" >&2; exit 1; }}
for script; do :; done
cp "$script" {folder}/
env > {folder}/"$script".environment
echo $(( 100 + $(ls {folder} | grep -c '[.]sh$') ))
""",
    "srun": """
while [ "${{1#--}}" != "$1" ]; do shift; done
for word; do printf '%s\\0' "$word"; done > {folder}/task
""",
}


@pytest.fixture(autouse=True)
def no_preparation() -> None:
    """Replace the fixture of this folder: these tests queue preparations."""


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the stand-ins, in which sbatch keeps the scripts."""
    folder = tmp_path / "slurm"
    (folder / "bin").mkdir(parents=True)
    for name, body in COMMANDS.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{body.format(folder=folder)}\n", encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("STORE_KEY", SECRET)
    monkeypatch.setattr(
        "scaletrain_cli.launch.preparation.run_engine_command",
        lambda *_, **__: {"prepared": False, "bytes": 10, "seconds": 1.0},
    )
    return folder


def run_job(slurm: Path, script: str, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> list[str]:
    """Run a script as Slurm would, and its task in this process; return the values of the secret in the task."""
    folder = {"PATH": f"{slurm / 'bin'}:/usr/bin:/bin", "HOME": "/", "SLURM_JOB_ID": "7"}
    subprocess.run(["bash", str(slurm / script)], env=folder, check=True)
    words = (slurm / "task").read_text(encoding="utf-8").split("\0")[:-1]
    monkeypatch.setenv("STORE_KEY", "")  # so that what the task sets is undone
    monkeypatch.delenv("STORE_KEY")
    seen: list[str] = []

    def prepared(*_: object) -> dict[str, Path]:
        seen.append(os.environ.get("STORE_KEY", ""))
        if fails:
            raise UsageError(Reason("engine.file-unreadable", {"path": "web.jsonl", "error": "gone"}))
        return {"source": Path("/data")}

    monkeypatch.setattr(preparation_process, "_prepared", prepared)
    arguments = words[words.index("prepare-job") + 1 :]
    if fails:
        with pytest.raises(UsageError):
            preparation_process.run_command(arguments)
    else:
        preparation_process.run_command(arguments)
    return seen


def test_every_job_gets_the_secrets_and_the_last_one_removes_them(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queued = queue_preparation(make_spec("cluster.scheduler=slurm", "secret_env=[STORE_KEY, NOT_SET]"), workers=2)
    secrets = queued[1] / "secrets.json"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    for name in ("tasks.sh", "tasks.sh.environment", "end.sh", "end.sh.environment"):
        assert SECRET not in (slurm / name).read_text(encoding="utf-8")
    assert run_job(slurm, "tasks.sh", monkeypatch) == [SECRET]
    assert secrets.exists()
    assert not (queued[1] / "done.json").exists()
    assert run_job(slurm, "end.sh", monkeypatch) == [SECRET]
    assert not secrets.exists()
    assert read_document(queued[1] / "done.json") == {"folders": ["/data"]}


def test_jobs_that_are_refused_or_fail_leave_no_secrets(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec("cluster.scheduler=slurm", "secret_env=[STORE_KEY]")
    (slurm / "refuses").touch()
    with pytest.raises(SchedulerError, match="Invalid qos"):
        queue_preparation(spec, workers=2)
    (slurm / "refuses").unlink()
    queued = queue_preparation(spec, workers=2)
    assert [*queued[1].parent.glob(".prepare-*/secrets.json")] == [queued[1] / "secrets.json"]
    run_job(slurm, "end.sh", monkeypatch, fails=True)
    assert not (queued[1] / "secrets.json").exists()
    assert not (queued[1] / "done.json").exists()


def test_the_preparation_keeps_the_secrets(slurm: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run("cluster.scheduler=slurm", "secret_env=[STORE_KEY]")
    SlurmBackend().submit_preparation(made.run, made.record, 3)
    for script in ("tasks.sh", "end.sh"):
        assert run_job(slurm, script, monkeypatch) == [SECRET]
    assert json.loads(made.run.secrets.read_text(encoding="utf-8")) == {"STORE_KEY": SECRET}
    run_job(slurm, "end.sh", monkeypatch, fails=True)
    assert not made.run.secrets.exists()
