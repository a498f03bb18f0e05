"""The tracker of docs/extending.md: installed from its own package, it works in a real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drills.training_runs import spec_text
from tests.extending.pages import install

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the package of the page is installed, beside those of this one."""
    site = tmp_path_factory.mktemp("site")
    install("extending.md", "A tracker", site)
    runs = tmp_path_factory.mktemp("runs")
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{PROJECT}", "SCALETRAIN_RUNS": str(runs)}


def scaletrain(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scaletrain_cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_a_run_logs_to_a_tracker_of_another_package(installed: dict[str, str], tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    lines = [{"text": f"the {n} quick brown foxes jump over {n * n} lazy dogs " * 30} for n in range(120)]
    corpus.write_text("\n".join(map(json.dumps, lines)))
    spec = tmp_path / "run.yaml"
    spec.write_text(spec_text(corpus) + "tracking: [{csv: {digits: 3}}]\n")
    ended = scaletrain(
        installed, "train", str(spec), "--set", "training.steps=6", "--set", "data.tokenizer.vocab_size=300"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (folder,) = Path(installed["SCALETRAIN_RUNS"]).glob("*/csv")
    rows = [line.split(",") for line in (folder / "loss.csv").read_text().splitlines()]
    assert [int(step) for step, _ in rows] == list(range(1, 7))
    assert all(len(value) <= 4 for _, value in rows)
    assert (folder / "outcome.txt").read_text() == "finished"
    assert {"started", "finished"} <= set((folder / "events.txt").read_text().split())
    shown = scaletrain(installed, "status", folder.parent.name, "--json")
    assert shown.returncode == 0, shown.stderr


def test_its_options_are_checked_and_stand_in_the_schema(installed: dict[str, str], tmp_path: Path) -> None:
    spec = tmp_path / "run.yaml"
    spec.write_text(spec_text(Path("python-stdlib")) + "tracking: [{csv: {digit: 3}}]\n")
    refused = scaletrain(installed, "validate", str(spec))
    assert refused.returncode == 2
    assert "tracking.csv.digit: unknown key. Did you mean digits?" in refused.stderr
    schema = json.loads(scaletrain(installed, "schema").stdout)
    options = schema["$defs"]["TrackingSpec"]["properties"]["csv"]["anyOf"][0]["properties"]
    assert options["digits"]["type"] == "integer"


def test_without_the_package_the_name_is_unknown(tmp_path: Path) -> None:
    spec = tmp_path / "run.yaml"
    spec.write_text(spec_text(Path("python-stdlib")) + "tracking: [csv]\n")
    refused = scaletrain({**os.environ, "PYTHONPATH": str(PROJECT)}, "validate", str(spec))
    assert refused.returncode == 2
    assert "tracking.csv: unknown key. Known keys: log_every, jsonl, mlflow, tensorboard, wandb." in refused.stderr
