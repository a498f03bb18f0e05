"""The verb of docs/extending.md: installed from its own package, it is a verb like those of this project."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extending.installed import Cli


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """The command line, with one run of 1500 bytes."""
    run = tmp_path / "runs" / "r1"
    run.mkdir(parents=True)
    (run / "run.json").write_bytes(b" " * 1500)
    return Cli(tmp_path, "A verb")


def test_a_verb_of_another_package_runs_and_appears_in_help(cli: Cli) -> None:
    command = [sys.executable, "-m", "scaletrain_cli", "du"]
    assert subprocess.check_output(command, env=cli.environment, cwd=cli.site, text=True) == "r1  1.50 kB\n"
    listed = cli.run("--help").stdout
    assert "Plug-ins" in listed
    assert "From the package du-verb." in listed
    assert "Exit codes: 0 done; 2 usage or spec error." in cli.run("du", "--help").stdout


def test_the_json_answer_and_the_errors_of_a_verb_have_the_common_envelope(cli: Cli) -> None:
    assert json.loads(cli.run("du", "r1", "--json").stdout) == {
        "schema": "scaletrain.du/v1", "ok": True, "bytes": {"r1": 1500},
    }  # fmt: skip
    error = cli.json("du", "--min-bytes", "-1", code=2)["error"]
    assert (error["code"], error["remedy"]) == ("usage", "Use 0 or more.")


def test_a_verb_that_cannot_be_imported_is_one_error_and_disturbs_no_other_verb(cli: Cli) -> None:
    next(cli.site.glob("du_verb/du.py")).write_text("import nowhere_at_all")
    broken = cli("du", code=2)
    assert "the verb du of the package du-verb cannot be loaded (du_verb.du): ModuleNotFoundError" in broken
    assert "Traceback" not in broken
    cli("--help")
    cli("list")
