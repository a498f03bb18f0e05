"""The model family of docs/extending.md: installed from its own package, it trains a real run."""

import json
from pathlib import Path

import pytest

from tests.extending.installed import Cli, write_spec
from tests.forked import scaletrain


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


def test_without_the_package_the_family_is_refused_with_the_known_names(tmp_path: Path) -> None:
    refused = scaletrain("validate", str(write_spec(tmp_path)), "--set", "model.family=parallel_llama")
    assert refused.returncode == 2
    assert "model.family = parallel_llama: must be one of" in refused.stderr
