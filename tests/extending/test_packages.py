"""Packages of docs/extending.md: each is installed from its own folder, and works in real runs."""

import json
from pathlib import Path

import pytest

from tests.extending.installed import Cli, write_spec
from tests.forked import scaletrain


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("model.family=parallel_llama", "model.family = parallel_llama: must be one of"),
        ("training.optimizer.name=signum", "training.optimizer.name = signum: must be 'adamw'"),
        ("tracking=[csv]", "tracking.csv: unknown key. Known keys: log_every, jsonl, mlflow, prometheus, tensorboard"),
    ],
)
def test_without_its_package_a_name_is_refused_with_the_known_ones(setting: str, expected: str, tmp_path: Path) -> None:
    refused = scaletrain("validate", str(write_spec(tmp_path)), "--set", setting)
    assert refused.returncode == 2
    assert expected in refused.stderr


@pytest.mark.long
def test_a_run_trains_a_model_family_of_another_package(tmp_path: Path) -> None:
    cli, spec = Cli(tmp_path, "A model family"), write_spec(tmp_path)
    losses, run = cli.train(spec, "--set", "model.family=parallel_llama")
    sequential, _ = cli.train(spec)
    assert len(losses) == 6
    assert losses[0] != sequential[0]  # from the same weights and data, by another computation
    assert abs(losses[0] - sequential[0]) < 0.1
    (measured,) = run.glob("attempts/*/measured.json")
    for stage in json.loads(measured.read_text())["stages"]:
        weights = stage["parameters"]
        assert weights["measured"] == weights["planned"] > 0


@pytest.mark.long
def test_a_run_trains_with_an_optimizer_of_another_package_in_the_planned_memory(tmp_path: Path) -> None:
    cli = Cli(tmp_path, "An optimizer")
    losses, run = cli.train(write_spec(tmp_path), "--set", "training.optimizer={name: signum, lr: 0.001}")
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    (measured,) = run.glob("attempts/*/measured.json")
    for stage in json.loads(measured.read_text())["stages"]:
        states = stage["optimizer_states"]
        assert states["measured"] == states["planned"] > 0


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Cli(tmp_path_factory.mktemp("tracker"), "A tracker")


@pytest.mark.long
def test_a_run_logs_to_a_tracker_of_another_package(tracker: Cli, tmp_path: Path) -> None:
    _, run = tracker.train(write_spec(tmp_path, "tracking: [{csv: {digits: 3}}]\n"))
    rows = [line.split(",") for line in (run / "csv" / "loss.csv").read_text().splitlines()]
    assert [int(step) for step, _ in rows] == list(range(1, 7))
    assert all(len(value) <= 4 for _, value in rows)
    assert (run / "csv" / "outcome.txt").read_text() == "finished"
    assert {"started", "finished"} <= set((run / "csv" / "events.txt").read_text().split())
    tracker("status", run.name)


def test_the_options_of_a_tracker_are_validated_and_in_the_schema(tracker: Cli, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "tracking: [{csv: {digit: 3}}]\n")
    assert "tracking.csv.digit: unknown key. Did you mean digits?" in tracker("validate", str(spec), code=2)
    schema = json.loads(tracker.run("schema").stdout)
    options = schema["$defs"]["TrackingSpec"]["properties"]["csv"]["anyOf"][0]["properties"]
    assert options["digits"]["type"] == "integer"


@pytest.fixture
def drill(tmp_path: Path) -> Cli:
    return Cli(tmp_path, "A drill")


@pytest.mark.long
def test_a_drill_of_another_package_is_listed_and_passes(drill: Cli, tmp_path: Path) -> None:
    kinds = drill.json("drill", "--list")["kinds"]
    assert "sigkill" in kinds
    assert kinds["slow-storage"].startswith("a rank gets SIGTERM")
    ended = drill.run("drill", "slow-storage", "--spec", str(write_spec(tmp_path)), "--steps", "12", "--yes", "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (ended_drill,) = json.loads(ended.stdout)["drills"]
    assert (ended_drill["kind"], ended_drill["attempts"], ended_drill["steps_lost"]) == ("slow-storage", 2, 0)


def test_a_drill_whose_name_is_not_that_of_its_entry_point_is_refused_and_left_out_of_the_list(drill: Cli) -> None:
    module = drill.site / "storage_drills.py"
    module.write_text(module.read_text().replace('name="slow-storage"', 'name="sigkill"'))
    assert drill.json("drill", "slow-storage", code=2)["error"]["reason"]["code"] == "plugin.invalid"
    listed = drill.run("drill", "--list", "--json")
    assert json.loads(listed.stdout)["kinds"]["sigkill"] == "a rank is killed"
    assert "has the name sigkill, not that of its entry point" in listed.stderr


def test_a_package_that_cannot_be_imported_stops_no_drill_of_this_one(drill: Cli) -> None:
    (drill.site / "storage_drills.py").write_text("raise RuntimeError('broken')")
    built_in = drill.run("drill", "sigkill", "--timeout", "no-time")
    assert "no-time" in built_in.stderr
    assert "broken" not in built_in.stderr
    assert "broken" in drill.run("drill", "slow-storage").stderr
