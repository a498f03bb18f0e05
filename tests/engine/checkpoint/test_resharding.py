"""Any layout loads the state that another layout saved, bit by bit, and training continues equally."""

from pathlib import Path

import pytest
import torch

from scaletrain_cli.launch.submit import make_record
from scaletrain_cli.plan import make_plan
from scaletrain_cli.rundir.checkpoints import checkpoint_path
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import write_record
from scaletrain_cli.worker.checkpoint_commit import open_attempt
from tests.engine.checkpoint.whole_state import save_again, whole_state
from tests.engine.parity.comparison import FP32, difference
from tests.engine.parity.dataset import write_dataset
from tests.engine.parity.layouts import RankReport, train_rank, whole_weights
from tests.engine.parity.reference import Trained, train_alone
from tests.engine.parity.rows import Row, with_features
from tests.engine.ranks import on_ranks

STEPS = 3  # in each layout
MIXTURE = ("model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=48")
AVERAGE = ("training.averaging.name=ema", "training.averaging.every=1")
# Each stage saves what the next one loads.
ROUNDABOUT = [
    Row(0, data=2),
    Row(3, data=2),
    Row(1, tensor=2, pipeline=2, accumulation=2),
    Row(2, sequence=2),
    Row(0, data=2),
]
STAGE_3_ON_FOUR = [Row(3, data=2, tensor=2), Row(3, data=4), Row(1, tensor=2, pipeline=2, accumulation=4)]
EXPERTS = [
    with_features(Row(1, data=2, tensor=2), "experts", *MIXTURE, "layout.expert_parallel=2"),
    with_features(Row(3, data=2), "experts", *MIXTURE, "layout.expert_parallel=2"),
    with_features(Row(0), "experts", *MIXTURE),
]
TIED = [
    with_features(Row(1, pipeline=2, accumulation=4), "tied", "model.tie_word_embeddings=true", *AVERAGE),
    with_features(Row(2, data=2), "tied", "model.tie_word_embeddings=true", *AVERAGE),
]
SPLIT = [
    with_features(Row(1, pipeline=2, accumulation=4), "split", "layout.pipeline_split=[1, 2]"),
    with_features(Row(1, pipeline=2, accumulation=4), "split", "layout.pipeline_split=[2, 1]"),
]
# One set of parameters ends where a layout does, the next one within a layout.
STAGES = (
    "training.trainable=[{match: '*mlp.down_proj.weight', end_step: 5},"
    " {match: ['model.layers.*', 'lm_head.*'], lr: 2.0e-3, start_step: 4}]"
)
STAGED = [
    Row(3, data=2, overrides=(STAGES,), title="stages"),
    Row(1, tensor=2, pipeline=2, accumulation=4, overrides=(STAGES,), title="stages"),
    Row(2, data=1, sequence=2, overrides=(STAGES,), title="stages"),
]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(ROUNDABOUT, id="every axis"),
        pytest.param(STAGE_3_ON_FOUR, id="stage 3 on four ranks", marks=pytest.mark.long),
        pytest.param(STAGED, id="stages", marks=pytest.mark.long),
        pytest.param(EXPERTS, id="experts", marks=pytest.mark.long),
        pytest.param(SPLIT, id="blocks of stages", marks=pytest.mark.long),
        pytest.param(TIED, id="tied and averaged", marks=pytest.mark.long),
    ],
)
def test_a_run_resumed_in_several_layouts_keeps_its_state(rows: list[Row], tmp_path: Path) -> None:
    dataset, steps = write_dataset(tmp_path), STEPS * len(rows)
    checkpoints, losses, norms = tmp_path / "checkpoints", [], []
    for attempt, row in enumerate(rows, start=1):
        run = RunDir(tmp_path / f"attempt-{attempt}")
        run.path.mkdir()
        run.checkpoints.symlink_to(checkpoints)
        spec = row.spec(dataset, steps)
        write_record(run, make_record(spec, make_plan(spec)))
        run.attempt(attempt).mkdir(parents=True)
        open_attempt(checkpoints, attempt)
        if attempt > 1:
            on_ranks(row.ranks, save_again, run.path, attempt, run.path / "again", connected=False)
            assert_same_state(checkpoints, run.path / "again", STEPS * (attempt - 1))
        place = (run.path, attempt, STEPS * attempt)
        reports: list[RankReport] = on_ranks(row.ranks, train_rank, *place, connected=False)
        losses += reports[0].losses
        norms += reports[0].norms
    went_round = Trained(losses, norms, whole_weights([report.pieces for report in reports]))
    found = difference(went_round, train_alone(rows[0].reference.spec(dataset, steps)))
    assert found.within(FP32), found


def assert_same_state(first: Path, second: Path, step: int) -> None:
    before, after = whole_state(checkpoint_path(first, step)), whole_state(checkpoint_path(second, step))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert {key.partition("/")[0] for key in before} >= {"weight", "exp_avg", "exp_avg_sq"}
