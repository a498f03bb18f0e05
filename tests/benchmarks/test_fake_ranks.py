"""A rank on fake tensors sends and holds what its plan says: small models on 8 to 64 ranks."""

import contextlib
from unittest.mock import patch

import pytest
from fake_ranks import rank
from fake_ranks.cases import Case, planned, planned_bytes
from fake_ranks.rank import RankStep, train_rank

from tests.engine.ranks import on_ranks

SMALL = (
    *("model.num_hidden_layers=2", "model.hidden_size=512", "model.num_attention_heads=8"),
    *("model.num_key_value_heads=4", "model.intermediate_size=1024", "model.vocab_size=4096"),
    *("model.seq_len=1024", "model.head_dim=64"),
)


def measured(case: Case, stage: int = 0) -> RankStep:
    return train_rank(planned(case)[0], planned(case)[1].layout, stage)


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_rank_sends_what_is_planned(recompute: str) -> None:
    case = Case("llama-3.1-8b", 64, 1, tensor=2, sequence=2, recompute=recompute, others=SMALL)
    (step,) = on_ranks(1, measured, case, connected=False)
    spec, plan = planned(case)
    assert step.bytes_by_axis() == planned_bytes(spec, plan.layout, 0)
    assert step.reads <= 2


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "zero", "tensor"), [(8, 1, 1), (64, 2, 4)])
def test_a_rank_of_a_wide_model_holds_what_is_planned(ranks: int, zero: int, tensor: int) -> None:
    case = Case("llama-3.1-8b", ranks, zero, tensor, others=("model.num_hidden_layers=2",))
    (step,) = on_ranks(1, measured, case, connected=False)
    spec, plan = planned(case)
    assert step.bytes_by_axis() == planned_bytes(spec, plan.layout, 0)
    assert plan.memory.by_stage[0].allocated == pytest.approx(step.peak, rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize("shards", [{}, {"secondary_shard": 8}, {"shard": 8}], ids=["zero-3", "hpz", "mics"])
def test_zero_3_gathers_and_holds_what_is_planned_of_a_model_that_stays_for_the_backward_pass(
    shards: dict[str, int],
) -> None:
    case = Case("llama-3.1-8b", 64, 3, others=SMALL, **shards)  # type: ignore[arg-type]
    (step,) = on_ranks(1, measured, case, connected=False)
    spec, plan = planned(case)
    assert step.bytes_by_axis() == planned_bytes(spec, plan.layout, 0)
    assert plan.memory.by_stage[0].allocated == pytest.approx(step.peak, rel=0.01)


@pytest.mark.long
def test_a_rank_of_ring_attention_copies_its_gradients_for_their_reduction() -> None:
    case = Case("llama-3.1-8b", 64, 1, context=4, others=SMALL)
    (step,) = on_ranks(1, measured, case, connected=False)
    spec, plan = planned(case)
    assert step.bytes_by_axis() == planned_bytes(spec, plan.layout, 0)
    assert plan.memory.by_stage[0].allocated == pytest.approx(step.peak, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_pipeline_stage_of_tensor_ranks_sends_what_is_planned(stage: int) -> None:
    others = (*SMALL, "model.num_hidden_layers=3")
    case = Case("llama-3.1-8b", 24, 1, tensor=2, pipeline=3, accumulation=4, others=others)
    (step,) = on_ranks(1, measured, case, stage, connected=False)
    spec, plan = planned(case)
    assert step.bytes_by_axis() == planned_bytes(spec, plan.layout, stage)


@pytest.mark.long
def test_loops_over_ranks_change_no_message_and_no_byte_of_zero_3() -> None:
    case = Case("llama-3.1-8b", 8, 3, others=SMALL)
    (without,) = on_ranks(1, measured, case, connected=False)
    (with_loops,) = on_ranks(1, _measured_with_loops, case, connected=False)
    assert without == with_loops


def _measured_with_loops(case: Case) -> RankStep:
    with patch.object(rank, "without_loops_over_ranks", contextlib.nullcontext):
        return measured(case)
