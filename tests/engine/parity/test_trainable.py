"""Frozen parameters, learning rates of their own, and stages: every layout trains as one plain torch loop does."""

import weakref
from pathlib import Path

import pytest

from scaletrain_cli.engine.optim.deepspeed_optimizer import master_weights
from scaletrain_cli.rundir.checkpoints import list_checkpoints
from tests.engine.parity.comparison import FP32, assert_same, difference
from tests.engine.parity.layouts import begun_run, ready, train_in_layout
from tests.engine.parity.reference import Trained, train_alone
from tests.engine.parity.rows import MUON, Row
from tests.engine.ranks import on_ranks

# A projector first, then all but the embeddings, then without the projector; a setting changes within a stage.
STAGES = (
    "training.trainable=[{match: '*mlp.down_proj.weight', lr: 2.0e-3, end_step: 4},"
    " {match: ['model.layers.*', 'lm_head.*', 'model.norm.*'], start_step: 3, end_step: 4, weight_decay: 0.3},"
    " {match: ['model.layers.[12].*', 'model.norm.*'], start_step: 5}]"
)
FROZEN = "training.trainable=[{match: 'model.layers.2.*', lr: 3.0e-3}, {match: '*norm*'}]"
DECAYED = "training.optimizer.layer_decay=0.7"
STEPS = 7
ROWS = [
    Row(0, overrides=(STAGES,), title="stages"),
    Row(1, data=2, overrides=(STAGES,), title="stages"),
    Row(2, data=2, overrides=(FROZEN,), title="frozen"),
    Row(3, data=2, checkpointing="full", overrides=(STAGES,), title="stages"),
    Row(1, data=2, pipeline=2, accumulation=2, overrides=(STAGES,), title="stages"),
    Row(0, tensor=2, sequence=2, overrides=(STAGES, DECAYED), title="stages and layer decay"),
]
# Pipeline stages on which nothing trains: the first, both in turn, all but the middle; and a frozen tied embedding.
HEAD = "training.trainable=[{match: 'lm_head.*'}]"
FROM_THE_HEAD = (
    "training.trainable=[{match: ['lm_head.*', '*.2.*'], end_step: 2},"
    " {match: '*.0.mlp.*', start_step: 3, end_step: 4}, {match: '*.1.*', start_step: 5}]"
)
TIED = "model.tie_word_embeddings=true"
NOT_TIED = "training.trainable=[{match: 'model.layers.[02].*'}]"
NO_MATRIX_AT_FIRST = "training.trainable=[{match: ['*.0.*norm*', '*.2.*']}]"
EXPERTS = (
    *("model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=32"),
    *("model.norm_topk_prob=true", "model.first_k_dense_replace=1", "layout.expert_parallel=2"),
)
ROUTER_FIRST = (
    "training.trainable=[{match: '*.mlp.gate.weight', end_step: 2}, {match: '*.experts.*', lr: 3.0e-3, start_step: 3}]"
)
MORE = [
    Row(1, pipeline=2, accumulation=2, overrides=(HEAD,), title="head"),
    Row(1, data=2, pipeline=3, accumulation=2, checkpointing="full", overrides=(FROM_THE_HEAD,), title="in turn"),
    Row(1, tensor=2, pipeline=2, accumulation=2, overrides=(NOT_TIED, TIED), title="frozen tied embedding"),
    Row(1, data=2, overrides=(ROUTER_FIRST, *EXPERTS), title="experts later"),
    Row(2, data=2, sequence=2, overrides=(ROUTER_FIRST, *EXPERTS), title="experts later"),
    Row(3, data=4, overrides=(ROUTER_FIRST, *EXPERTS), title="experts later"),
    Row(3, data=2, tensor=2, overrides=(STAGES, DECAYED), title="stages and layer decay"),
    Row(2, data=2, overrides=(STAGES, "layout.offload=optimizer"), title="stages, offload optimizer"),
    Row(3, data=2, overrides=(STAGES, "layout.offload=optimizer+params"), title="stages, offload both"),
    Row(2, data=2, overrides=(STAGES, *MUON), title="stages of muon"),
    Row(3, data=2, tensor=2, overrides=(STAGES, *MUON, DECAYED), title="stages of muon and layer decay"),
    # a pipeline stage on which Muon has no matrix
    Row(1, data=2, pipeline=2, accumulation=2, overrides=(NO_MATRIX_AT_FIRST, *MUON), title="muon on one stage"),
]


BF16 = Row(2, data=2, overrides=(STAGES, "training.precision=bf16"), title="stages in bf16")


def trained(row: Row, dataset: Path, *interrupted_after: int) -> Trained:
    return train_in_layout(row.spec(dataset, STEPS), *interrupted_after).trained


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if row is ROWS[3] else pytest.mark.long) for row in [*ROWS, *MORE]],
    ids=lambda row: row.name,
)
def test_a_layout_trains_what_one_process_trains(row: Row, dataset: Path) -> None:
    found = difference(trained(row, dataset), train_alone(row.reference.spec(dataset, STEPS)))
    assert found.within(FP32), found


INTERRUPTED = [ROWS[1], ROWS[3], ROWS[4], BF16, next(row for row in MORE if row.title == "stages of muon")]


@pytest.mark.long
@pytest.mark.parametrize("row", INTERRUPTED, ids=lambda row: row.name)
def test_a_staged_run_interrupted_within_and_between_stages_continues_bit_exactly(row: Row, dataset: Path) -> None:
    whole, resumed = trained(row, dataset), trained(row, dataset, 3, 4)
    assert_same(resumed, whole)


def roll_back(path: Path) -> tuple[list[float], list[float], bool]:
    """Train to a third stage, go back to the first one, and train again; also whether a replaced engine is freed."""
    trainer = ready(path)

    def losses(first: int, last: int) -> list[float]:
        for step in range(first, last + 1):
            trainer.optimizer_step(step)
        return [measured.values["loss"] for measured in trainer.deferred_metrics.remaining()]

    losses(1, 2)
    trainer.save(2, wait=True)
    before = [weakref.ref(weight) for weight in master_weights(trainer.composed.engine)]
    once = losses(3, STEPS)
    is_freed = not any(weight() is not None for weight in before)
    [saved] = list_checkpoints(trainer.context.run.checkpoints)
    trainer.stages.prepare_restore(saved.step)
    trainer.checkpointer.restore(saved)
    return once, losses(3, STEPS), is_freed


@pytest.mark.long
@pytest.mark.parametrize("row", [ROWS[1], ROWS[3]], ids=lambda row: row.name)
def test_a_run_rolled_back_to_an_earlier_stage_trains_the_same_again(row: Row, dataset: Path) -> None:
    run = begun_run(row.spec(dataset, STEPS))
    for once, again, is_freed in on_ranks(row.ranks, roll_back, run.path, connected=False):
        assert once == again
        assert is_freed, "the weights in fp32 of the first stage are still there"
