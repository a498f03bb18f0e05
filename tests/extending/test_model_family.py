"""The model family of docs/extending.md: installed from its own package, it trains a real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.paths import RunDir
from tests.drills.training_runs import spec_text
from tests.extending.pages import install

PROJECT = Path(__file__).parents[2]
SHORT = ("--set", "training.steps=6", "--set", "data.tokenizer.vocab_size=300")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment in which the package of the page is installed, beside those of this one."""
    site = tmp_path / "site"
    site.mkdir()
    install("extending.md", "A model family", site)
    runs = str(tmp_path / "runs")
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{PROJECT}", "SCALETRAIN_RUNS": runs}


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    corpus = tmp_path / "corpus.jsonl"
    lines = [{"text": f"the {n} quick brown foxes jump over {n * n} lazy dogs " * 30} for n in range(120)]
    corpus.write_text("\n".join(map(json.dumps, lines)))
    path = tmp_path / "run.yaml"
    path.write_text(spec_text(corpus))
    return path


def scaletrain(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scaletrain_cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def losses(environment: dict[str, str], spec: Path, *arguments: str) -> tuple[list[float], Path]:
    """Train; return the loss of each step, and the run's folder."""
    before = set(Path(environment["SCALETRAIN_RUNS"]).glob("*/run.json"))
    ended = scaletrain(environment, "train", str(spec), *SHORT, *arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (record,) = set(Path(environment["SCALETRAIN_RUNS"]).glob("*/run.json")) - before
    run = RunDir(record.parent)
    return [line["loss"] for line in read_metrics(run) if "loss" in line], run.path


def test_a_run_trains_a_model_family_of_another_package(environment: dict[str, str], spec: Path) -> None:
    found, run = losses(environment, spec, "--set", "model.family=parallel_llama")
    sequential, _ = losses(
        environment,
        spec,
    )
    assert len(found) == 6
    assert found[0] != sequential[0]  # from the same weights and data, by another computation
    assert abs(found[0] - sequential[0]) < 0.1
    (measured,) = run.glob("attempts/*/measured.json")
    for stage in json.loads(measured.read_text())["stages"]:
        weights = stage["parameters"]
        assert weights["measured"] == weights["planned"] > 0


def test_without_the_package_the_name_is_refused_with_the_names_that_are_known(spec: Path) -> None:
    bare = {**os.environ, "PYTHONPATH": str(PROJECT)}
    refused = scaletrain(bare, "validate", str(spec), "--set", "model.family=parallel_llama")
    assert refused.returncode == 2
    assert "model.family = parallel_llama: must be one of" in refused.stderr
