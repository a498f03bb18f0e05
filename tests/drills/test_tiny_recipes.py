"""The recipes for a laptop train to the end, and their loss falls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.paths import RunDir

pytestmark = [pytest.mark.drill, pytest.mark.long]
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*-tiny-cpu.yaml")))
def test_a_tiny_recipe_trains_to_the_end(recipe: str, tmp_path: Path) -> None:
    environment = {**os.environ, "SCALETRAIN_RUNS": str(tmp_path)}
    command = [sys.executable, "-m", "scaletrain_cli", "train", str(RECIPES / f"{recipe}.yaml"), "--run-id", "r"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses = [line["loss"] for line in read_metrics(RunDir(tmp_path / "r")) if "loss" in line]
    assert losses[-1] < 0.9 * losses[0]


def test_the_recipe_of_digits_learns_to_read_them(tmp_path: Path) -> None:
    environment = {**os.environ, "SCALETRAIN_RUNS": str(tmp_path)}
    recipe = str(RECIPES / "vision-digits-cpu.yaml")
    command = [sys.executable, "-m", "scaletrain_cli", "train", recipe, "--run-id", "r"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (*_, accuracy) = [
        line["validation_top1"] for line in read_metrics(RunDir(tmp_path / "r")) if "validation_top1" in line
    ]
    assert accuracy > 0.97  # a nearest neighbor among the pixels has 0.98
