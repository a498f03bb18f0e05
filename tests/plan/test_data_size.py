"""The size of the training data, estimated from files and counted by the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scaletrain_cli.plan.data_size import data_size
from tests.engine.data.test_row_dataset import PAIRS, ROWS, folder, opened, spec

__all__ = ["folder"]


@pytest.mark.parametrize(("objective", "packing"), [("sft", "none"), ("sft", "best_fit"), ("dpo", "none")])
def test_prepared_data_have_the_samples_that_the_engine_reads(folder: Path, objective: str, packing: str) -> None:
    given = spec(folder, f"data.packing={packing}", objective=objective)
    info, train, validation = opened(given, folder / "runs")
    (prepared,) = (folder / "runs").rglob("dataset.json")
    known = data_size(spec(folder, f"data.packing={packing}", f"data.source={prepared.parent}", objective=objective))
    assert known is not None
    assert (known.train, known.validation, known.tokens) == (len(train), len(validation), info.train_tokens)
    assert known.exact
    estimated = data_size(given)
    assert estimated is not None
    assert not estimated.exact
    if packing == "none":
        rows = len(PAIRS if objective == "dpo" else ROWS)
        assert estimated.train + estimated.validation == rows


def test_large_files_are_estimated_from_their_beginnings(tmp_path: Path) -> None:
    row = json.dumps({"prompt": "p" * 100, "completion": "c" * 300}) + "\n"
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(row * 5000)
    known = data_size(spec(tmp_path, f"data.source={tmp_path}", "data.validation_split=0", "model.seq_len=512"))
    assert known is not None
    assert known.train == pytest.approx(10_000, rel=0.001)
    assert known.tokens == pytest.approx(10_000 * 400 / 4, rel=0.001)
    packed = data_size(
        spec(
            tmp_path, f"data.source={tmp_path}", "data.validation_split=0", "model.seq_len=512", "data.packing=best_fit"
        )
    )
    assert packed is not None
    assert packed.train == pytest.approx(1_000_000 / 512, rel=0.01)


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert data_size(spec(tmp_path, f"data.source={tmp_path}/nothing.jsonl")) is None
    for name, text in (("bad", "not json\n"), ("deep", "[" * 100_000 + "\n"), ("empty", "")):
        (tmp_path / f"{name}.jsonl").write_text(text)
        assert data_size(spec(tmp_path, f"data.source={tmp_path}/{name}.jsonl")) is None
    assert data_size(spec(tmp_path, "data.source=hf://datasets/org/rows@main")) is None
    assert data_size(spec(tmp_path, "data.source=python-docstrings")) is None
