import contextlib
from typing import Any
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


def case(ranks: int, zero: int, others: tuple[str, ...] = SMALL, **settings: Any) -> Case:
    return Case("llama-3.1-8b", ranks, zero, others=others, **settings)


TWO_BLOCKS = ("model.num_hidden_layers=2",)
PIPELINE = case(24, 1, (*SMALL, "model.num_hidden_layers=3"), tensor=2, pipeline=3, accumulation=4)
# A case, a stage of its pipeline, and how near its peak is to the plan: relative, None if that is not the subject.
CASES = {
    "sequence": (case(64, 1, tensor=2, sequence=2), 0, None),
    "recomputed": (case(64, 1, tensor=2, sequence=2, recompute="full"), 0, None),
    "wide": (case(8, 1, TWO_BLOCKS), 0, 0.05),
    "wide of tensor ranks": (case(64, 2, TWO_BLOCKS, tensor=4), 0, 0.05),
    "zero-3 of a model that stays for the backward pass": (case(64, 3), 0, 0.01),
    "hpz": (case(64, 3, secondary_shard=8), 0, 0.01),
    "mics": (case(64, 3, shard=8), 0, 0.01),
    "ring attention, which copies gradients for their reduction": (case(64, 1, context=4), 0, 0.01),
    **{f"pipeline stage {stage} of tensor ranks": (PIPELINE, stage, None) for stage in range(3)},
}


@pytest.mark.long
@pytest.mark.parametrize(("case", "stage", "near"), CASES.values(), ids=CASES)
def test_a_rank_sends_and_holds_what_is_planned(case: Case, stage: int, near: float | None) -> None:
    (step,) = on_ranks(1, measured, case, stage, connected=False)
    spec, plan = planned(case)
    assert step.bytes_by_axis() == planned_bytes(spec, plan.layout, stage)
    assert step.reads <= 2 or case.sequence == 1
    if near is not None:
        assert plan.memory.by_stage[0].allocated == pytest.approx(step.peak, rel=near)


@pytest.mark.long
def test_loops_over_ranks_change_no_message_and_no_byte_of_zero_3() -> None:
    (without,) = on_ranks(1, measured, case(8, 3), connected=False)
    (with_loops,) = on_ranks(1, _measured_with_loops, case(8, 3), connected=False)
    assert without == with_loops


def _measured_with_loops(case: Case) -> RankStep:
    with patch.object(rank, "without_loops_over_ranks", contextlib.nullcontext):
        return measured(case)
