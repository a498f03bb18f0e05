import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from scaletrain_cli.plan.architecture import (
    architecture,
    attention_matmul_flops,
    block_attention_flops,
    head_flops,
    mlp_matmul_flops,
)
from scaletrain_cli.plan.axes import resolve_axes
from scaletrain_cli.plan.frameworks.nanotron import loss_stage
from scaletrain_cli.plan.frameworks.registry import FRAMEWORKS, framework_of
from scaletrain_cli.plan.planning import make_plan
from scaletrain_cli.plan.search.layouts import build_layout, division_problems
from scaletrain_cli.plan.stages import Stage, blocks_per_stage, chunks_in_flight, stage_shard
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.run_consistency import run_inconsistencies
from tests.counting import calls_of
from tests.model_sizes import model_sizes
from tests.plan.specs import model_of, spec_of


def published_llama(layers: int, hidden: int, inner: int) -> dict[str, Any]:
    """The models of the Ultra-Scale Playbook's sweep."""
    sizes = model_sizes(
        layers=layers, hidden=hidden, intermediate=inner, heads=32, kv_heads=32, head_dim=hidden // 32, vocab=131072
    )
    return {"model__tie_word_embeddings": True, **{f"model__{key}": size for key, size in sizes.items()}}


def _stages(spec: RunSpec, stages: int) -> tuple[Stage, ...]:
    return framework_of(spec).pipeline_stages(spec.transformer, stages, spec.layout.pipeline_split)


def blocks(spec: RunSpec, stages: int) -> list[int]:
    return [stage.blocks for stage in _stages(spec, stages)]


def test_stages_share_the_blocks_by_number_by_weight_or_by_time() -> None:
    sizes = published_llama(28, 3072, 8192)  # the head weighs as much as 3.6 blocks, and takes as long as 2.8
    assert blocks(spec_of("llama-7b", planner__framework="megatron", **sizes), 8) == [4, 4, 4, 4, 3, 3, 3, 3]
    assert blocks(spec_of("llama-7b", planner__framework="nanotron", **sizes), 8) == [4, 4, 4, 4, 4, 4, 4, 0]
    assert blocks(spec_of("llama-7b", **sizes), 8) == [3, 4, 4, 4, 4, 4, 4, 1]


def test_the_user_sets_the_blocks_of_each_stage() -> None:
    sizes = {"layout__pipeline_parallel": 4, "layout__tensor_parallel": 1, "layout__zero_stage": 1}
    for framework in ("deepspeed", "megatron", "nanotron"):
        usual = spec_of("llama-7b", planner__framework=framework, **sizes)
        chosen = spec_of("llama-7b", planner__framework=framework, layout__pipeline_split=[5, 9, 9, 9], **sizes)
        assert blocks(chosen, 4) == [5, 9, 9, 9]
        first, second = make_plan(usual), make_plan(chosen)
        held = [sum(s.parameters for s in plan.memory.by_stage) for plan in (first, second)]
        assert held[0] == held[1], "the same parameters, divided otherwise"
        assert second.time.step >= first.time.step if framework == "deepspeed" else second.time.step > 0
        alike = spec_of("llama-7b", planner__framework=framework, layout__pipeline_split=blocks(usual, 4), **sizes)
        if framework != "nanotron":
            assert make_plan(alike).time == first.time
            assert make_plan(alike).memory == first.memory


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"pipeline_split": [16, 16]}, "layout.pipeline_parallel"),
        ({"pipeline_split": [16, 15], "pipeline_parallel": 2}, "layout.pipeline_split"),
        ({"pipeline_split": [16, 16], "pipeline_parallel": 2, "virtual_pipeline": 2}, "layout.virtual_pipeline"),
    ],
)
def test_a_split_that_contradicts_layers_or_stages_is_refused(settings: dict[str, Any], key: str) -> None:
    spec = spec_of("llama-7b", **{f"layout__{name}": value for name, value in settings.items()})
    assert [found for found, _ in run_inconsistencies(spec)] == [key]


@pytest.mark.parametrize("preset", ["gpt2", "llama-7b", "llama-3-8b", "qwen2.5-0.5b"])
def test_no_other_split_has_a_faster_slowest_stage(preset: str) -> None:
    model = model_of(preset, num_hidden_layers=10)
    block = attention_matmul_flops(model) + block_attention_flops(model) + mlp_matmul_flops(model, experts=False)

    def slowest(counts: Sequence[int]) -> int:
        return max(*(count * block for count in counts), counts[-1] * block + head_flops(model))

    for stages in range(2, 11):
        split = blocks_per_stage(model, stages)
        assert sum(split) == 10
        assert min(split) >= 1
        cuts = itertools.combinations(range(1, 10), stages - 1)
        others = ([b - a for a, b in itertools.pairwise((0, *cut, 10))] for cut in cuts)
        assert slowest(split) == min(map(slowest, others))


def test_remaining_blocks_go_to_stages_with_few_micro_batches_in_flight() -> None:
    assert blocks_per_stage(model_of("llama-7b"), 4) == (8, 8, 8, 8), "a head of half a block moves none"
    assert blocks_per_stage(model_of("llama-7b", num_hidden_layers=30), 4) == (7, 8, 8, 7)
    assert blocks_per_stage(model_of("llama-3-8b"), 4) == (8, 8, 9, 7)
    assert blocks_per_stage(model_of("gpt2"), 2) == (8, 4)


def test_every_framework_divides_all_blocks_over_its_stages() -> None:
    model = model_of("llama-7b", num_hidden_layers=30)
    assert FRAMEWORKS["fsdp"].blocks_by_stage(model, 4) == (8, 8, 7, 7)
    for framework, stages in itertools.product(("deepspeed", "fsdp", "megatron", "nanotron"), (1, 2, 4, 8, 30)):
        assert sum(FRAMEWORKS[framework].blocks_by_stage(model, stages)) == 30


def test_leading_dense_blocks_fall_on_the_first_stages() -> None:
    spec = spec_of("mixtral-8x7b", model__first_k_dense_replace=10)
    assert [stage.dense for stage in _stages(spec, 4)] == [8, 2, 0, 0]


def test_the_stages_of_an_untied_model_hold_all_its_parameters() -> None:
    whole = architecture(model_of("llama-7b"))
    shards = [stage_shard(whole, stage) for stage in _stages(spec_of("llama-7b"), 5)]
    assert sum(shard.parameters for shard in shards) == whole.parameters


def test_a_tied_head_needs_a_copy_of_the_embedding() -> None:
    spec = spec_of("gpt2")
    whole = architecture(spec.transformer)
    shards = [stage_shard(whole, stage) for stage in _stages(spec, 3)]
    assert sum(shard.parameters for shard in shards) == whole.parameters + whole.embedding


def test_interleaving_adds_p_minus_1_over_p_v_of_the_first_stage_and_fills_the_last() -> None:
    spec = spec_of("llama-7b", cluster__nodes=4, layout__pipeline_parallel=4, layout__virtual_pipeline=8)
    layout = build_layout(spec, resolve_axes(spec), 1, "none", 1)
    in_flight = [chunks_in_flight(layout, index) / 8 for index in range(4)]
    assert in_flight[0] == 4 * (1 + 3 / (4 * 8))
    assert in_flight[-1] == (7 * 4 + 1) / 8


@pytest.mark.parametrize(("stages", "last"), [(8, 7), (16, 14)])
def test_nanotron_leaves_stages_behind_the_loss_where_there_are_too_many(stages: int, last: int) -> None:
    spec = spec_of(
        "llama-7b",
        **published_llama(16, 2048, 8192),
        planner__framework="nanotron",
        layout__pipeline_parallel=stages,
        cluster__nodes=4,
    )
    assert loss_stage(spec.transformer, stages) == last
    refused = [problem for problem in division_problems(spec, resolve_axes(spec)) if "empty" in problem.message]
    assert bool(refused) == (last < stages - 1)


def test_a_pipeline_of_a_billion_stages_is_sized_as_one_of_a_thousand() -> None:
    few, many = (
        (spec_of("llama-7b", model__num_hidden_layers=stages, planner__framework="nanotron"), stages)
        for stages in (10**3, 10**9)
    )
    assert len(_stages(*few)) == len(_stages(*many)) == 3
    assert calls_of(lambda: _stages(*few)) == calls_of(lambda: _stages(*many))
