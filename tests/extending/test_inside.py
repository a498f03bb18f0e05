"""The rows of docs/extending.md in a copy of the package: what they name needs no other change of the project."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.paths import RunDir
from tests import forked
from tests.extending.installed import PROJECT, write_spec
from tests.extending.pages import files_of

RMSPROP = "training.optimizer={name: rmsprop, lr: 0.001}"


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """Return a folder with a copy of the package that has the rows."""
    shutil.copytree(PROJECT / "scaletrain_cli", tmp_path / "scaletrain_cli")
    for title, row in files_of("extending.md", "Inside the project").items():
        table, _, file = title.partition(" in ")
        path = tmp_path / "scaletrain_cli" / file
        text, rows = re.subn(rf"^({table}\b.*?^)}}$", rf"\1{row}}}", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert rows == 1
        path.write_text(text)
    return tmp_path


def scaletrain(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder), "SCALETRAIN_RUNS": str(folder / "runs")}
    command = [sys.executable, "-m", "scaletrain_cli", *arguments]
    return subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_an_optimizer_needs_a_row_of_its_traits_and_a_builder_to_be_planned(changed: Path) -> None:
    command = ["plan", str(write_spec(changed)), "--json"]
    plans = scaletrain(changed, *command, "--set", RMSPROP), forked.scaletrain(*command).stdout
    states = [json.loads(plan)["memory"]["optimizer_states"] for plan in plans]
    assert 3 * states[0] == 2 * states[1] > 0, "4 bytes of moments instead of 8, and 4 of the master weight"


@pytest.mark.long
def test_an_optimizer_of_two_rows_trains_in_the_planned_memory(changed: Path) -> None:
    scaletrain(changed, "train", str(write_spec(changed)), "--set", "training.steps=6", "--set", RMSPROP)
    (run,) = (changed / "runs").glob("*/run.json")
    losses = [line["loss"] for line in read_metrics(RunDir(run.parent)) if "loss" in line]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    (measured,) = run.parent.glob("attempts/*/measured.json")
    for stage in json.loads(measured.read_text())["stages"]:
        states = stage["optimizer_states"]
        assert states["measured"] == states["planned"] > 0
