"""The tracker of docs/extending.md: installed from its own package, it works in a real run."""

import json
from pathlib import Path

import pytest

from tests.extending.installed import Cli, write_spec
from tests.forked import scaletrain


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Cli(tmp_path_factory.mktemp("tracker"), "A tracker")


@pytest.mark.long
def test_a_run_logs_to_a_tracker_of_another_package(cli: Cli, tmp_path: Path) -> None:
    _, run = cli.train(write_spec(tmp_path, "tracking: [{csv: {digits: 3}}]\n"))
    rows = [line.split(",") for line in (run / "csv" / "loss.csv").read_text().splitlines()]
    assert [int(step) for step, _ in rows] == list(range(1, 7))
    assert all(len(value) <= 4 for _, value in rows)
    assert (run / "csv" / "outcome.txt").read_text() == "finished"
    assert {"started", "finished"} <= set((run / "csv" / "events.txt").read_text().split())
    cli("status", run.name)


def test_the_options_of_a_tracker_are_validated_and_in_the_schema(cli: Cli, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "tracking: [{csv: {digit: 3}}]\n")
    assert "tracking.csv.digit: unknown key. Did you mean digits?" in cli("validate", str(spec), code=2)
    schema = json.loads(cli.run("schema").stdout)
    options = schema["$defs"]["TrackingSpec"]["properties"]["csv"]["anyOf"][0]["properties"]
    assert options["digits"]["type"] == "integer"


def test_without_the_package_the_tracker_is_an_unknown_key(tmp_path: Path) -> None:
    refused = scaletrain("validate", str(write_spec(tmp_path, "tracking: [csv]\n")))
    assert refused.returncode == 2
    assert (
        "tracking.csv: unknown key. Known keys: log_every, jsonl, mlflow, prometheus, tensorboard, wandb."
        in refused.stderr
    )
