import shutil
import sqlite3
import subprocess
import sys
import types
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import scaletrain_cli
from scaletrain_cli.tracking.base import TrackedRun
from scaletrain_cli.tracking.mlflow import MlflowOptions, MlflowTracker

PROGRAM = """
import os, sys, tempfile
from pathlib import Path
from sqlalchemy import event
from sqlalchemy.engine import Engine
from scaletrain_cli.tracking.base import TrackedRun
from scaletrain_cli.tracking.mlflow import MlflowOptions, MlflowTracker

@event.listens_for(Engine, "after_cursor_execute")
def kill(connection, cursor, statement, *rest):
    if sys.argv[2] == "killed" and "CREATE TABLE _alembic_tmp_trace_tags" in statement:
        os._exit(9)

tracker = MlflowTracker(MlflowOptions())
tracker.start(TrackedRun("a-1", "abcdefgh", Path(sys.argv[1]), {"training": {"steps": 4}}, 1))
if sys.argv[2] == "whole":
    tracker.log(1, {"loss": 0.5}, 1.0)

"""


def start(run: Path, temporary: Path, mode: str) -> int:
    """Start the tracker in a process of its own and return the exit code."""
    environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(temporary), "HOME": str(temporary)}
    environment["PYTHONPATH"] = str(Path(scaletrain_cli.__file__).parents[1])
    command = [sys.executable, "-c", PROGRAM, str(run), mode]
    return subprocess.run(command, env=environment, cwd=temporary).returncode


@pytest.mark.long
def test_a_database_whose_creation_was_killed_is_created_again(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    run, temporary = tmp_path / "run", tmp_path / "tmp"
    run.mkdir()
    temporary.mkdir()
    assert start(run, temporary, "killed") == 9
    assert not (run / "mlflow.db").exists()
    # As if it had been created in place: MLflow cannot open this file.
    (half,) = temporary.glob("scaletrain-mlflow-*/mlflow.db")
    shutil.copy(half, run / "mlflow.db")
    assert start(run, temporary, "whole") == 0
    with closing(sqlite3.connect(run / "mlflow.db")) as database:
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (1,)
        assert database.execute("SELECT count(*) FROM metrics WHERE key = 'loss'").fetchone() == (1,)
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    assert not [name for name in tables if name.startswith("_alembic_tmp")]
    assert [path.name for path in run.glob("mlflow.db*")] == ["mlflow.db"]


class Server:
    """A client of a server on which another run creates the experiment just before this one."""

    def __init__(self, tracking_uri: str) -> None:
        self.experiments: dict[str, Any] = {}

    def get_experiment_by_name(self, name: str) -> Any:
        return self.experiments.get(name)

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        self.experiments[name] = types.SimpleNamespace(experiment_id="7")
        raise RuntimeError(f"RESOURCE_ALREADY_EXISTS: Experiment {name} already exists.")

    def search_runs(self, experiments: list[str], filter_string: str) -> list[Any]:
        assert experiments == ["7"]
        return []

    def create_run(self, experiment: str, **_: object) -> Any:
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"run in {experiment}"))

    def log_batch(self, run: str, **_: object) -> None:
        assert run == "run in 7"


def test_runs_that_create_the_same_experiment_at_a_time_are_all_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=Server))
    monkeypatch.setitem(sys.modules, "mlflow.entities", types.SimpleNamespace(Param=lambda key, value: (key, value)))
    tracker = MlflowTracker(MlflowOptions(uri="https://mlflow.example.org"))
    assert tracker.start(TrackedRun("a-1", "abcdefgh", tmp_path, {"training": {"steps": 4}}, 1)) == {}
