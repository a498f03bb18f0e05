"""Frozen parameters, learning rates of their own, and stages: every layout trains as one plain torch loop does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.parity.comparison import FP32, difference
from tests.engine.parity.dataset import write_dataset
from tests.engine.parity.layouts import train_in_layout
from tests.engine.parity.reference import Trained, train_alone
from tests.engine.parity.rows import Row

# A projector first, then all but the embeddings, then without the projector; a setting changes within a stage.
STAGES = (
    "training.trainable=[{match: '*mlp.down_proj.weight', lr: 2.0e-3, end_step: 6},"
    " {match: ['model.layers.*', 'lm_head.*', 'model.norm.*'], start_step: 4, end_step: 6, weight_decay: 0.3},"
    " {match: ['model.layers.[12].*', 'model.norm.*'], start_step: 7}]"
)
FROZEN = "training.trainable=[{match: 'model.layers.2.*', lr: 3.0e-3}, {match: '*norm*'}]"
DECAYED = "training.optimizer.layer_decay=0.7"
STEPS = 9
ROWS = [
    Row(0, overrides=(STAGES,), title="stages"),
    Row(1, data=2, overrides=(STAGES,), title="stages"),
    Row(2, data=2, overrides=(FROZEN,), title="frozen"),
    Row(3, data=2, checkpointing="full", overrides=(STAGES,), title="stages"),
    Row(1, data=2, pipeline=2, accumulation=2, overrides=(STAGES,), title="stages"),
    Row(0, tensor=2, sequence=2, overrides=(STAGES, DECAYED), title="stages and layer decay"),
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("parity"))


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path))


def trained(row: Row, dataset: Path, *interrupted_after: int) -> Trained:
    return train_in_layout(row.spec(dataset, STEPS), *interrupted_after).trained


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_layout_trains_what_one_process_trains(row: Row, dataset: Path) -> None:
    found = difference(trained(row, dataset), train_alone(row.reference.spec(dataset, STEPS)))
    assert found.within(FP32), found


# After the last step of a stage, and within one.
INTERRUPTED = [(ROWS[1], 3, 4), (ROWS[3], 5, 6), (ROWS[4], 3, 4)]


@pytest.mark.parametrize(("row", "first", "second"), INTERRUPTED, ids=lambda given: getattr(given, "name", given))
def test_a_staged_run_interrupted_within_and_between_stages_continues_bit_exactly(
    row: Row, first: int, second: int, dataset: Path
) -> None:
    whole, resumed = trained(row, dataset), trained(row, dataset, first, second)
    assert resumed.losses == whole.losses
    assert resumed.norms == whole.norms
    assert all(torch.equal(resumed.weights[name], whole.weights[name]) for name in whole.weights)
