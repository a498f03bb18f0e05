import json
import os
from pathlib import Path

import pytest

from scaletrain_cli.plan.data_size import data_size
from scaletrain_cli.spec import override_spec
from tests.engine.data.test_row_dataset import PAIRS, ROWS, folder, opened, spec

__all__ = ["folder"]

ROW = json.dumps({"prompt": "p" * 100, "completion": "c" * 300}) + "\n"


@pytest.mark.parametrize(("objective", "packing"), [("sft", "none"), ("sft", "best_fit"), ("dpo", "none")])
def test_prepared_data_have_the_samples_that_the_engine_reads(folder: Path, objective: str, packing: str) -> None:
    given = spec(folder, f"data.packing={packing}", objective=objective)
    info, train, validation = opened(given, folder / "runs")
    (prepared,) = (folder / "runs").rglob("dataset.json")
    known = data_size(spec(folder, f"data.packing={packing}", f"data.source={prepared.parent}", objective=objective))
    assert (known.train, known.validation, known.tokens) == (len(train), len(validation), info.train_tokens)
    assert known.exact
    estimated = data_size(given)
    assert not estimated.exact
    if packing == "none":
        rows = len(PAIRS if objective == "dpo" else ROWS)
        assert estimated.train + estimated.validation == rows


def test_large_files_are_estimated_from_their_beginnings(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(ROW * 5000)
    known = data_size(spec(tmp_path, f"data.source={tmp_path}", "data.validation_split=0", "model.seq_len=512"))
    assert known.train == pytest.approx(10_000, rel=0.001)
    assert known.tokens == pytest.approx(10_000 * 400 / 4, rel=0.001)
    packed = data_size(
        spec(
            tmp_path, f"data.source={tmp_path}", "data.validation_split=0", "model.seq_len=512", "data.packing=best_fit"
        )
    )
    assert packed.train == pytest.approx(1_000_000 / 512, rel=0.01)


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert data_size(spec(tmp_path, f"data.source={tmp_path}/nothing.jsonl")) is None
    for name, text in (("bad", "not json\n"), ("deep", "[" * 100_000 + "\n"), ("empty", "")):
        (tmp_path / f"{name}.jsonl").write_text(text)
        assert data_size(spec(tmp_path, f"data.source={tmp_path}/{name}.jsonl")) is None
    assert data_size(spec(tmp_path, "data.source=hf://datasets/org/rows@main")) is None
    assert data_size(spec(tmp_path, "data.source=python-docstrings")) is None


def test_a_fifo_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text(ROW)
    for source in (tmp_path, tmp_path / "a.jsonl"):
        assert data_size(spec(tmp_path, f"data.source={source}")) is None


def test_rows_of_which_too_few_are_seen_give_no_estimate(tmp_path: Path) -> None:
    long = json.dumps({"prompt": "p", "completion": "c" * 300_000}) + "\n"
    for name, text in (("long", long), ("later", ROW * 20 + long), ("few", ROW * 3 + "\n" * 300_000 + ROW)):
        (tmp_path / f"{name}.jsonl").write_text(text)
        assert data_size(spec(tmp_path, f"data.source={tmp_path}/{name}.jsonl")) is None
    (tmp_path / "whole.jsonl").write_text(ROW * 3)
    known = data_size(spec(tmp_path, f"data.source={tmp_path}/whole.jsonl", "data.validation_split=0"))
    assert known.train == 3


@pytest.mark.parametrize("count", ["Infinity", "NaN", "-1", "1.5", "1" + "0" * 400, "true", "null"])
def test_prepared_data_with_an_impossible_count_have_an_unknown_size(tmp_path: Path, count: str) -> None:
    counts = ", ".join(f'"{name}": 10' for name in ("train_tokens", "validation_tokens", "validation_rows"))
    (tmp_path / "dataset.json").write_text(f'{{{counts}, "train_rows": {count}}}')
    assert data_size(spec(tmp_path, f"data.source={tmp_path}")) is None


def test_a_file_that_the_ranks_do_not_read_has_an_unknown_size(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(ROW * 20)
    source = f"data.source={tmp_path}/a.jsonl"
    assert data_size(spec(tmp_path, source, "cluster.scheduler=slurm")) is not None
    assert data_size(spec(tmp_path, source, "cluster.scheduler=kubernetes")) is None
    image = "cluster.slurm.container={image: /a.sqsh, mounts: [%s]}"
    assert data_size(spec(tmp_path, source, "cluster.scheduler=slurm", image % "/data")) is None
    assert data_size(spec(tmp_path, source, "cluster.scheduler=slurm", image % tmp_path)) is not None


def test_a_relative_source_is_that_of_the_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rows in (("here", 20), ("there", 30)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text(ROW * rows)
    monkeypatch.chdir(tmp_path / "here")
    given = spec(tmp_path, "data.source=a.jsonl", "data.validation_split=0")
    assert getattr(data_size(given), "train", None) == 20
    given.set_folder(tmp_path / "there")
    resumed = override_spec(given, ["cluster.nodes=1"], file="run.json")
    assert getattr(data_size(resumed), "train", None) == 30
