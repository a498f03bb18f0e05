"""The optimizer of docs/extending.md: installed from its own package, it trains a real run."""

import json
from pathlib import Path

import pytest

from tests.extending.installed import Cli, write_spec
from tests.forked import scaletrain


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


def test_without_the_package_the_optimizer_is_refused_with_the_known_names(tmp_path: Path) -> None:
    refused = scaletrain("validate", str(write_spec(tmp_path)), "--set", "training.optimizer.name=signum")
    assert refused.returncode == 2
    assert "training.optimizer.name = signum: must be 'adamw'" in refused.stderr
