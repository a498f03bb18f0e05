"""The verb of docs/extending.md: installed from its own package, it is a verb like those of this project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extending.pages import install

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment in which the package of the page is installed, and one run of 1500 bytes exists."""
    site, run = tmp_path / "site", tmp_path / "runs" / "r1"
    site.mkdir()
    install("extending.md", "A verb", site)
    run.mkdir(parents=True)
    (run / "run.json").write_bytes(b" " * 1500)
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{PROJECT}", "SCALETRAIN_RUNS": str(run.parent)}


def scaletrain(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scaletrain_cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_verb_of_another_package_runs_and_appears_in_help(environment: dict[str, str]) -> None:
    assert scaletrain(environment, "du").stdout == "r1  1.50 kB\n"
    listed = scaletrain(environment, "--help").stdout
    assert "Plug-ins" in listed
    assert "From the package du-verb." in listed
    assert "Exit codes: 0 done; 2 usage or spec error." in scaletrain(environment, "du", "--help").stdout


def test_its_json_answer_and_its_errors_have_the_common_envelope(environment: dict[str, str]) -> None:
    answer = json.loads(scaletrain(environment, "du", "r1", "--json").stdout)
    assert answer == {"schema": "scaletrain.du/v1", "ok": True, "bytes": {"r1": 1500}}
    wrong = scaletrain(environment, "du", "--min-bytes", "-1", "--json")
    error = json.loads(wrong.stdout)["error"]
    assert (wrong.returncode, error["code"], error["remedy"]) == (2, "usage", "Give 0 or more.")


def test_a_verb_that_cannot_be_imported_is_one_error_and_disturbs_no_other_verb(environment: dict[str, str]) -> None:
    next(Path(environment["PYTHONPATH"].split(os.pathsep)[0]).glob("du_verb/du.py")).write_text("import nowhere_at_all")
    broken = scaletrain(environment, "du")
    assert broken.returncode == 2
    assert "the verb du of the package du-verb cannot be loaded (du_verb.du): ModuleNotFoundError" in broken.stderr
    assert "Traceback" not in broken.stderr
    assert scaletrain(environment, "--help").returncode == 0
    assert scaletrain(environment, "list").returncode == 0
