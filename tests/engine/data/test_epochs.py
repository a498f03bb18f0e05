"""training.epochs: as many steps as the prepared rows fill, so that training reads each row that many times."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from scaletrain_cli.engine.data.prepared import open_data_of, prepare_rows
from scaletrain_cli.engine.data.rows import RowSequences
from scaletrain_cli.engine.data.splits import held_back_of, open_reader
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh
from scaletrain_cli.launch.epochs import in_steps
from scaletrain_cli.launch.submit import plan_for_engine
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.spec import RunSpec
from tests.engine.data.test_row_dataset import folder, spec

__all__ = ["folder"]

pytest.importorskip("tokenizers")
PARTS = ("training.steps=null", "training.micro_batch_size=1", "training.global_batch_size=2")


def rows_on_disk(dataset: Path) -> int:
    """Return the number of training rows by the size of the file that has one fp64 number of each."""
    return (dataset / "train.totals.bin").stat().st_size // 8


def times_read(given: RunSpec, train: RowSequences) -> Counter[int]:
    """Return how often the run reads each row of the split, by the number of the row."""
    batch = given.training.global_batch_size
    layout = replace(
        plan_for_engine(given, "the spec").layout, data_parallel=1, micro_batch_size=batch, global_batch_size=batch
    )
    reader = open_reader(given, train, replace(layout, gradient_accumulation_steps=1), Mesh(data=Axis(1, 0)))
    found: Counter[int] = Counter()
    for step in range(1, given.total_steps + 1):
        found.update(reader.batch(step).numbers.flatten().tolist())
    return found


@pytest.mark.parametrize(
    ("objective", "packing", "epochs"), [("sft", "best_fit", 3), ("sft", "none", 0.5), ("dpo", "none", 1.1)]
)
def test_epochs_are_counted_in_the_prepared_rows_and_each_row_is_read_as_often(
    folder: Path, objective: str, packing: str, epochs: float
) -> None:
    given = spec(
        folder,
        *PARTS,
        f"training.epochs={epochs}",
        "training.schedule.warmup_steps=0",
        "evaluation.every=0",
        f"data.packing={packing}",
        objective=objective,
    )
    prepared = prepare_rows(given, runs_root())
    count = rows_on_disk(prepared) // (2 if objective == "dpo" else 1)
    resolved, how = in_steps(given, "run.yaml")
    assert resolved.training.epochs is None
    assert resolved.training.steps == math.ceil(round(epochs * count, 6) / 2)
    unit = "pairs" if objective == "dpo" else "sequences"
    assert str(how) == f"{epochs} epochs of {count} {unit} = {resolved.training.steps} steps of 2"
    info, train, _ = open_data_of(resolved, prepared)
    assert isinstance(train, RowSequences)
    read = times_read(resolved, train)
    assert sum(read.values()) == 2 * resolved.total_steps
    assert min(read[number] for number in range(count)) == math.floor(epochs)
    assert sum(read.values()) >= epochs * count
    assert info.train_rows == rows_on_disk(prepared)


def test_rows_that_a_run_holds_back_for_its_validation_are_no_part_of_an_epoch(folder: Path) -> None:
    given = spec(
        folder,
        *PARTS,
        "training.epochs=2",
        "training.schedule.warmup_steps=0",
        "evaluation={every: 5, batches: 1}",
        "data.validation_split=0",
    )
    prepared = prepare_rows(given, runs_root())
    count = rows_on_disk(prepared)
    resolved, how = in_steps(given, "run.yaml")
    layout = plan_for_engine(resolved, "run.yaml").layout
    held_back, _ = held_back_of(resolved, layout, [], count, 0, source=None, begun=False)
    assert held_back > 0
    assert resolved.total_steps == count - held_back
    assert how is not None
    assert f"2 epochs of {count - held_back} sequences" in str(how)
    assert str(how).endswith(f"; {held_back} more are held back for validation")


def test_epochs_of_rows_that_are_not_prepared_are_estimated(folder: Path) -> None:
    given = spec(folder, *PARTS, "training.epochs=2", "training.schedule.warmup_steps=0", "data.packing=none")
    resolved, how = in_steps(given, "run.yaml")
    rows = len((folder / "rows.jsonl").read_text().splitlines())
    about = round(0.9 * rows)
    assert str(how) == (
        f"2 epochs of about {about} sequences = about {about} steps of 2; they are counted when the data are prepared"
    )
    assert resolved.total_steps == about
    assert not (runs_root() / "datasets").exists()
