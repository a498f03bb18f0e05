import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import scaletrain_cli

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
