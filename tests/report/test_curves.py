"""Reading metrics.jsonl for a page: which rows are kept, that extremes stay, and what a long file costs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.report import curves as reading
from scaletrain_cli.report.curves import Curves, read_curves
from scaletrain_cli.rundir.journal import append_line, append_lines, read_events, read_metrics, record_event
from scaletrain_cli.rundir.paths import RunDir


def train(run: RunDir, first: int, last: int, **more: Any) -> None:
    rows = [{"step": step, "loss": 10.0 - step / 100, "time": 1e9 + step, **more} for step in range(first, last + 1)]
    append_lines(run.metrics, rows)


def curves_of(run: RunDir, **more: int) -> Curves:
    return read_curves(run.metrics, read_events(run), **more)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.events.touch()
    return run


def test_a_run_without_metrics_has_no_curves(run: RunDir) -> None:
    found = curves_of(run)
    assert (found.kept["step"], found.undone, found.validations, found.every_row_read) == ([], [], [], True)


def test_steps_that_were_undone_are_kept_apart_in_their_order(run: RunDir) -> None:
    """The rows are those of read_metrics(): a start from scratch, a rollback, a crash, and a step trained again."""
    train(run, 1, 4)
    record_event(run, "from-scratch")
    record_event(run, "started", step=0, attempt=1)
    train(run, 1, 20, attempt=1)
    record_event(run, "rolled-back", from_step=20, to_step=10, skip=[18, 20], lost_steps=10)
    train(run, 11, 15, attempt=1, loss=5.0)
    record_event(run, "resumed", step=12, attempt=2, lost_steps=3)
    train(run, 13, 18, attempt=2, loss=4.0)
    found = curves_of(run)
    rows = read_metrics(run)
    assert found.kept["step"] == [row["step"] for row in rows] == list(range(1, 19))
    assert found.kept["columns"]["loss"]["mean"] == [row["loss"] for row in rows]
    assert found.kept["attempt"] == [1] * 12 + [2] * 6
    assert [(part["step"][0], part["step"][-1]) for part in found.undone] == [(1, 4), (11, 20), (13, 15)]


def test_bins_have_mean_and_extremes_and_a_value_that_is_not_known_is_none(run: RunDir) -> None:
    append_lines(run.metrics, [{"step": step, "loss": float(step % 7), "mfu": None} for step in range(1, 1001)])
    append_line(run.metrics, {"step": 1001, "loss": 99.0, "grad_norm": 1.0})
    found = curves_of(run, most_bins=10)
    loss = found.kept["columns"]["loss"]
    assert (len(found.kept["step"]), found.kept["step"][-1], "mfu" in found.kept["columns"]) == (10, 1001, False)
    assert (min(loss["low"]), max(loss["high"])) == (0.0, 99.0)
    assert loss["mean"][0] == pytest.approx(sum(step % 7 for step in range(1, 102)) / 101, rel=1e-5)
    assert found.kept["columns"]["grad_norm"]["mean"] == [None] * 9 + [1.0]


def test_damaged_lines_and_values_of_another_kind_are_skipped(run: RunDir) -> None:
    run.metrics.write_bytes(
        b'{"step":1,"loss":3.0}\n{"step":2,"loss":"nan"}\n\xff\xfe\n{"step":"3","loss":1}\n[1]\n{"step":4,"loss":2.0}\n{"st'
    )
    found = curves_of(run)
    assert (found.kept["step"], found.kept["columns"]["loss"]["mean"]) == ([1, 2, 4], [3.0, None, 2.0])


def test_validations_have_their_sources_and_measures(run: RunDir) -> None:
    train(run, 1, 3)
    append_line(run.metrics, {"step": 3, "validation_loss": 2.5, "validation_loss/web": 2.7, "validation_top1": 0.5})
    (row,) = curves_of(run).validations
    assert (row["step"], row["loss"], row["sources"], row["measures"]) == (3, 2.5, {"web": 2.7}, {"top1": 0.5})


def test_a_long_file_keeps_its_extremes_and_validations(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file, read whole and in pieces: the same ends, extremes and validations, and nearly the same means."""
    for step in range(1, 8001):
        loss = 77.5 if step == 5003 else 3.0 + math.sin(step)
        line = {"step": step, "loss": loss, "grad_norm": 1e-7 if step == 6001 else 1.0, "step_seconds": 0.5}
        with run.metrics.open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            if step % 1000 == 0:
                file.write(json.dumps({"step": step, "validation_loss": 2.0}, separators=(",", ":")) + "\n")
    record_event(run, "rolled-back", from_step=8000, to_step=7500, skip=[1, 2], lost_steps=500)
    whole = curves_of(run, most_bins=80)
    monkeypatch.setattr(reading, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(reading, "_PIECES", 20)
    pieces = curves_of(run, most_bins=80)
    assert (whole.every_row_read, pieces.every_row_read) == (True, False)
    assert pieces.rows_read < whole.rows_read / 4
    assert [row["step"] for row in pieces.validations] == [row["step"] for row in whole.validations]
    assert (len(pieces.undone), len(whole.undone)) == (1, 1)
    assert 7501 <= pieces.undone[0]["step"][0] <= pieces.undone[0]["step"][-1] <= 8000
    for name, end in (("loss", max), ("grad_norm", min)):
        extremes = [end(found.kept["columns"][name]["high" if end is max else "low"]) for found in (whole, pieces)]
        assert extremes[0] == extremes[1]
    means = pieces.kept["columns"]["loss"]["mean"]
    assert sum(means) / len(means) == pytest.approx(3.0, abs=0.2)  # without the spike, which was chosen


def test_the_extreme_of_a_long_file_is_its_own_line_and_not_one_that_begins_alike(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least loss, 0.5, is the beginning of an earlier one, 0.5625."""
    losses = [1.0, 0.5625, *[1.0] * 150, 0.5, *[1.0] * 200]
    for step, loss in enumerate(losses, start=1):
        append_line(run.metrics, {"step": step, "loss": loss})
    monkeypatch.setattr(reading, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(reading, "_PIECES", 1)
    monkeypatch.setattr(reading, "_ROWS_OF_PIECE", 4)
    loss = curves_of(run).kept["columns"]["loss"]
    assert min(loss["mean"]) == 0.5
