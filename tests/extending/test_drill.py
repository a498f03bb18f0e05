"""The drill of docs/extending.md: installed from its own package, it is listed and run."""

import json
from pathlib import Path

import pytest

from tests.extending.installed import Cli, write_spec


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path, "A drill")


@pytest.mark.long
def test_a_drill_of_another_package_is_listed_and_passes(cli: Cli, tmp_path: Path) -> None:
    kinds = cli.json("drill", "--list")["kinds"]
    assert "sigkill" in kinds
    assert kinds["slow-storage"].startswith("a rank gets SIGTERM")
    ended = cli.run("drill", "slow-storage", "--spec", str(write_spec(tmp_path)), "--steps", "12", "--yes", "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (drill,) = json.loads(ended.stdout)["drills"]
    assert (drill["kind"], drill["attempts"], drill["steps_lost"]) == ("slow-storage", 2, 0)


def test_a_drill_whose_name_is_not_that_of_its_entry_point_is_refused_and_left_out_of_the_list(cli: Cli) -> None:
    module = cli.site / "storage_drills.py"
    module.write_text(module.read_text().replace('name="slow-storage"', 'name="sigkill"'))
    assert cli.json("drill", "slow-storage", code=2)["error"]["reason"]["code"] == "plugin.invalid"
    listed = cli.run("drill", "--list", "--json")
    assert json.loads(listed.stdout)["kinds"]["sigkill"] == "a rank is killed"
    assert "has the name sigkill, not that of its entry point" in listed.stderr


def test_a_package_that_cannot_be_imported_stops_no_drill_of_this_one(cli: Cli) -> None:
    (cli.site / "storage_drills.py").write_text("raise RuntimeError('broken')")
    built_in = cli.run("drill", "sigkill", "--timeout", "no-time")
    assert "no-time" in built_in.stderr
    assert "broken" not in built_in.stderr
    assert "broken" in cli.run("drill", "slow-storage").stderr
