"""The drill of docs/extending.md: installed from its own package, it is listed and run."""

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


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment in which the package of the page is installed, beside those of this one."""
    install("extending.md", "A drill", tmp_path / "site")
    path = f"{tmp_path / 'site'}{os.pathsep}{PROJECT}"
    return {**os.environ, "PYTHONPATH": path, "SCALETRAIN_RUNS": str(tmp_path / "runs")}


def scaletrain(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scaletrain_cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_a_drill_of_another_package_is_listed_and_passes(installed: dict[str, str], tmp_path: Path) -> None:
    kinds = json.loads(scaletrain(installed, "drill", "--list", "--json").stdout)["kinds"]
    assert "sigkill" in kinds
    assert kinds["slow-storage"].startswith("a rank gets SIGTERM")
    corpus = tmp_path / "corpus.jsonl"
    lines = [{"text": f"the {n} quick brown foxes jump over {n * n} lazy dogs " * 30} for n in range(120)]
    corpus.write_text("\n".join(map(json.dumps, lines)))
    spec = tmp_path / "run.yaml"
    spec.write_text(spec_text(corpus))
    options = ["--spec", str(spec), "--steps", "12", "--set", "data.tokenizer.vocab_size=300", "--yes", "--json"]
    ended = scaletrain(installed, "drill", "slow-storage", *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (drill,) = json.loads(ended.stdout)["drills"]
    assert (drill["kind"], drill["attempts"], drill["steps_lost"]) == ("slow-storage", 2, 0)


def test_a_drill_whose_name_is_not_that_of_its_entry_point_is_refused_and_left_out_of_the_list(
    installed: dict[str, str], tmp_path: Path
) -> None:
    module = tmp_path / "site" / "storage_drills.py"
    module.write_text(module.read_text().replace('name="slow-storage"', 'name="sigkill"'))
    refused = scaletrain(installed, "drill", "slow-storage", "--json")
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["error"]["reason"]["code"] == "plugin.invalid"
    listed = scaletrain(installed, "drill", "--list", "--json")
    assert json.loads(listed.stdout)["kinds"]["sigkill"] == "a rank is killed"
    assert "has the name sigkill, not that of its entry point" in listed.stderr


def test_a_package_that_cannot_be_imported_stops_no_drill_of_this_one(
    installed: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "site" / "storage_drills.py").write_text("raise RuntimeError('broken')")
    built_in = scaletrain(installed, "drill", "sigkill", "--timeout", "no-time")
    assert "no-time" in built_in.stderr
    assert "broken" not in built_in.stderr
    assert "broken" in scaletrain(installed, "drill", "slow-storage").stderr
