from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.plan import PlanInfeasibleError, make_plan
from scaletrain_cli.plan.axes import Axes, divisors, resolve_axes
from scaletrain_cli.plan.search.layouts import division_problems, micro_batch_sizes, zero_stages
from tests.plan.specs import DATA_ALONE, spec_of


def problems_of(**overrides: Any) -> list[str]:
    spec = spec_of(**overrides)
    return [str(problem) for problem in division_problems(spec, resolve_axes(spec))]


def test_auto_is_1_where_attention_is_not_that_of_a_ring() -> None:
    long = {"cluster__nodes": 2, "layout__context_parallel": "auto", "model__sliding_window": 1024}
    plan = make_plan(spec_of("llama-7b", **long))
    layouts = [plan.layout, *(other.layout for other in plan.alternatives)]
    assert {layout.context_parallel for layout in layouts} == {1}
    assert any("which model.sliding_window changes" in row.text for row in plan.rejected)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"layout__data_parallel": 3}, "= 3 ranks, but the cluster has 1 x 8 = 8. Use 8, or auto."),
        ({"layout__pipeline_parallel": 3}, "Change the degrees so that their product divides 8."),
        ({"training__global_batch_size": 100}, "must be a multiple of 8 data-parallel ranks. Use 96 or 104."),
        ({"training__global_batch_size": 4}, "must be a multiple of 8 data-parallel ranks. Use 8."),
        (
            {"training__global_batch_size": 48, "training__micro_batch_size": 4},
            "training.micro_batch_size = 4: must divide the 6 sequences per data-parallel rank (48 / 8). Use 3 or 6.",
        ),
        ({"model__seq_len": 1023, "layout__context_parallel": 2}, "must be a multiple of 4, because each context"),
        ({"model__seq_len": 1023, "layout__sequence_parallel": 2}, "must be a multiple of sequence parallel = 2"),
        ({"model__intermediate_size": 11009, "layout__tensor_parallel": 2}, "must divide intermediate_size = 11009"),
        ({"layout__virtual_pipeline": 2}, "needs pipeline_parallel > 1"),
        ({"layout__expert_parallel": 2}, "needs a model with experts. Use 1 or auto."),
        ({"layout__offload": "optimizer+params", "layout__zero_stage": 2}, "needs ZeRO-3 or higher. Use 3 or auto."),
        ({"layout__pipeline_parallel": 2, "layout__zero_stage": 3}, "cannot be combined with pipeline parallelism"),
    ],
)
def test_degrees_that_do_not_divide_are_an_error_with_valid_ones(overrides: dict[str, Any], message: str) -> None:
    assert any(message in line for line in problems_of(**overrides)), problems_of(**overrides)
    with pytest.raises(PlanInfeasibleError):
        make_plan(spec_of(**DATA_ALONE | overrides))


def test_every_problem_is_reported_at_once() -> None:
    assert len(problems_of(training__global_batch_size=101, layout__data_parallel=3, layout__virtual_pipeline=2)) == 3


def test_stage_0_in_bf16_becomes_stage_1_with_a_warning() -> None:
    plan = make_plan(spec_of("gpt2", layout__zero_stage=0))
    assert plan.layout.zero_stage == 1
    assert any("layout.zero_stage = 0 with bf16 runs as ZeRO-1" in str(warning) for warning in plan.warnings)


@given(st.integers(1, 10**9))
def test_divisors_divide_and_come_in_pairs(number: int) -> None:
    found = divisors(number)
    assert found == sorted(set(found))
    assert all(number % n == 0 for n in found)
    assert [number // n for n in reversed(found)] == found


def test_only_deepspeed_turns_stage_0_into_1() -> None:
    for framework, expected in (("deepspeed", 1), ("fsdp", 0), ("megatron", 0), ("nanotron", 0)):
        spec = spec_of("gpt2", planner__framework=framework, layout__zero_stage=0)
        assert make_plan(spec).layout.zero_stage == expected


def test_each_framework_has_its_own_stages_and_but_for_fsdp_a_pipeline_has_no_more_than_one() -> None:
    expected = {"deepspeed": [1, 2, 3], "fsdp": [0, 2, 3], "megatron": [0, 1], "nanotron": [0, 1]}
    for framework, stages in expected.items():
        spec = spec_of(planner__framework=framework, planner__search="everything")
        alone = Axes(8, 1, 1, 1, 1, 1, 1)
        assert zero_stages(spec, alone) == stages
        piped = zero_stages(spec, alone._replace(data=4, pipeline=2))
        assert piped == [stage for stage in stages if stage <= 1 or framework == "fsdp"]


def test_an_interleaved_pipeline_needs_a_multiple_of_the_stages_as_micro_batches() -> None:
    spec = spec_of(training__global_batch_size=48)
    assert micro_batch_sizes(spec, Axes(2, 1, 4, 1, 1, 1, 1)) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert micro_batch_sizes(spec, Axes(2, 1, 4, 2, 1, 1, 1)) == [1, 2, 3, 6]


def test_valid_numbers_of_virtual_stages_are_named() -> None:
    spec = spec_of("llama-70b", layout__pipeline_parallel=8, layout__virtual_pipeline=3)
    with pytest.raises(PlanInfeasibleError, match=r"Use 1, 2, 5 or 10\."):
        make_plan(spec)


def test_a_contrastive_loss_gets_the_full_batch_if_it_fits() -> None:
    fits = make_plan(spec_of("clip-vit-large-patch14", training__global_batch_size=8192, cluster__nodes=8))
    assert fits.layout.gradient_accumulation_steps == 1
    assert not any("contrastive" in str(line) for line in fits.warnings)
    large = make_plan(spec_of("clip-vit-large-patch14", training__global_batch_size=2**18))
    assert large.layout.gradient_accumulation_steps > 1
    assert any("second forward pass (GradCache" in str(line) for line in large.warnings)
    compared = {"planner__framework": "fsdp"}
    other = make_plan(spec_of("clip-vit-large-patch14", training__global_batch_size=2**18, **compared))
    assert any("changes a contrastive loss" in str(line) for line in other.warnings)


def test_nvme_offload_needs_zero_3() -> None:
    offload = {"layout__offload": "optimizer", "layout__offload_device": "nvme"}
    assert zero_stages(spec_of(**offload), resolve_axes(spec_of(**offload)), "optimizer") == [3]
    problems = division_problems(spec_of(**offload, layout__zero_stage=2), resolve_axes(spec_of(**offload)))
    assert any("needs ZeRO-3" in problem.message for problem in problems)


def test_an_offload_that_a_framework_lacks_is_sized_with_the_stage_it_needs() -> None:
    offload = "optimizer+params"
    spec = spec_of(planner__framework="megatron", layout__offload=offload)
    assert zero_stages(spec, resolve_axes(spec), offload) == [3]
