import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from scaletrain_cli.plan import PlanInfeasibleError, find_accelerator, make_plan
from scaletrain_cli.plan.axes import AXES, Axes
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.frameworks.deepspeed import ENGINE
from scaletrain_cli.plan.planning import plan_or_raise, plan_within
from scaletrain_cli.plan.result import Layout, RunPlan, Time
from scaletrain_cli.plan.search.bounds import Bounds
from scaletrain_cli.plan.search.cluster_search import Clusters, on_cluster
from scaletrain_cli.plan.search.layout_search import Candidate, choose, evaluate, search, search_near
from scaletrain_cli.plan.search.layouts import build_layout, checkpointing_modes, describe, zero_stages
from scaletrain_cli.plan.search.search_space import Group, RejectionCounts, axes_to_try, groups
from scaletrain_cli.plan.speed.step_time import plan_time, plan_times, step_seconds
from scaletrain_cli.plan.workloads import text
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.spec import RunSpec
from tests.model_sizes import model_sizes
from tests.plan.specs import spec_of

EVERY_AXIS = {f"layout__{key}": "auto" for key in ("virtual_pipeline", "context_parallel", "offload")}
EVERYTHING = {**EVERY_AXIS, "planner__search": "everything"}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "num_hidden_layers": 8}
# Axes that would multiply the layouts without a new case are pinned: all of them are sized here.
NO_CONTEXT, NO_SEQUENCE = {"layout__context_parallel": 1}, {"layout__sequence_parallel": 1}
SMALL_CLUSTERS: dict[str, dict[str, Any]] = {
    "7b on 8": {"preset": "llama-7b", "training__global_batch_size": 16},
    "13b on 16": {"preset": "llama-13b", "cluster__nodes": 2, "training__global_batch_size": 16, **NO_CONTEXT},
    "70b on 32": {
        "preset": "llama-70b",
        "cluster__nodes": 4,
        "training__global_batch_size": 32,
        **NO_CONTEXT,
        **NO_SEQUENCE,
    },
    "13b as megatron": {
        "preset": "llama-13b",
        "planner__framework": "megatron",
        "training__global_batch_size": 32,
        **NO_CONTEXT,
    },
    "7b on L4": {"preset": "llama-7b", "cluster__gpu": "l4-24gb", "training__global_batch_size": 16, **NO_SEQUENCE},
    "experts": {
        "preset": "llama-7b",
        "training__global_batch_size": 16,
        **NO_CONTEXT,
        **{f"model__{key}": value for key, value in EXPERTS.items()},
    },
    "6 GPUs": {"preset": "llama-7b", "cluster__gpus_per_node": 6, "training__global_batch_size": 48},
}
SHORT = ("13b as megatron", "experts", "6 GPUs")
clusters = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.long) for name in SMALL_CLUSTERS]
)


def everything(name: str) -> RunSpec:
    return spec_of(**{**EVERYTHING, **SMALL_CLUSTERS[name]})


@cache
def plan_of(name: str) -> RunPlan:
    return make_plan(everything(name))


@cache
def every_layout(name: str) -> list[tuple[Group, str, str, int, Candidate]]:
    spec = everything(name)
    device = find_accelerator(spec.cluster)
    return [
        (
            group,
            mode,
            offload,
            size,
            evaluate(spec, build_layout(spec, group.axes, group.zero_stage, mode, size, offload), device),
        )
        for group in groups(spec, axes_to_try(spec, RejectionCounts()))
        for mode in checkpointing_modes(spec)
        for offload in group.offload
        for size in group.micro_batches
    ]


@clusters
def test_the_search_chooses_what_sizing_every_layout_would_and_its_bounds_hold(name: str) -> None:
    spec = everything(name)
    rows = every_layout(name)
    best = choose([candidate for *_, candidate in rows if candidate.memory.fits])
    plan = plan_of(name)
    assert describe(plan.layout) == describe(best.layout)
    assert plan.considered == len(rows)

    bounds = Bounds(spec, find_accelerator(spec.cluster), "none")

    @cache
    def floors(group: Group) -> list[float]:
        far = bounds.step_seconds(group.axes, group.micro_batches)
        return bounds.group_seconds(group.axes, group.zero_stage, group.offload[0], group.micro_batches, far)

    for group, mode, offload, size, candidate in rows:
        at_least = floors(group)[group.micro_batches.index(size)]
        at_least = max(at_least, *bounds.step_seconds(group.axes, [size], mode))
        assert at_least <= candidate.time.step, describe(candidate.layout)
        held = bounds.peak_bytes(group.axes, group.zero_stage, size, mode, offload)
        assert held <= candidate.memory.peak, describe(candidate.layout)
        of_stage = bounds.stage_bytes(group.axes, group.zero_stage, size, mode, offload)
        assert of_stage <= candidate.memory.peak, describe(candidate.layout)
        (sent,) = bounds.traffic_seconds(group.axes, group.zero_stage, [size])
        assert sent <= candidate.time.step, describe(candidate.layout)


@clusters
def test_the_bound_of_the_layouts_of_a_group_that_may_fit_holds(name: str) -> None:
    """For the smallest micro-batches only, and from each mode of recomputation on."""
    spec = everything(name)
    bounds, modes = Bounds(spec, find_accelerator(spec.cluster), "none"), checkpointing_modes(spec)
    for group, mode, _, size, candidate in every_layout(name)[::7]:
        axes, sizes, at = group.axes, group.micro_batches, group.micro_batches.index(size)
        floors = bounds.step_seconds(axes, sizes)
        for count in {at + 1, len(sizes)}:
            for least in modes[: modes.index(mode) + 1]:
                some = sizes[:count], floors[:count]
                closer = bounds.group_seconds(axes, group.zero_stage, group.offload[0], *some, checkpointing=least)
                assert closer[at] <= candidate.time.step, (describe(candidate.layout), count, least)


@clusters
def test_degrees_are_the_same_whether_the_others_are_counted_or_not(name: str) -> None:
    spec = everything(name)
    assert axes_to_try(spec) == axes_to_try(spec, RejectionCounts())


@clusters
def test_degrees_that_are_not_worthwhile_are_left_out(name: str) -> None:
    """With a bound on the step that is no less for data parallelism divided into stages."""
    for wanted in ("everything", "engine"):
        spec = spec_of(**{**EVERY_AXIS, **SMALL_CLUSTERS[name], "planner__search": wanted})
        bounds, every = Bounds(spec, find_accelerator(spec.cluster), "none"), axes_to_try(spec)
        bound = sorted(map(bounds.least_step_seconds, every))[len(every) // 2]

        def worthwhile(axes: Axes, bounds: Bounds = bounds, bound: float = bound) -> bool:
            return bounds.least_step_seconds(axes) <= bound

        assert axes_to_try(spec, worthwhile=worthwhile) == list(filter(worthwhile, every))


@clusters
@pytest.mark.parametrize("nodes", [1, 3, 16])
def test_the_least_bound_of_a_cluster_is_that_of_all_its_degrees(name: str, nodes: int) -> None:
    """Degrees left out by a bound, or by rules checked before virtual stages and experts, have no lower bound."""
    spec = on_cluster(everything(name), nodes)
    bounds = Bounds(spec, find_accelerator(spec.cluster), checkpointing_modes(spec)[0])
    every = [bounds.step_seconds(group.axes, group.micro_batches) for group in groups(spec, axes_to_try(spec))]
    assert Clusters(everything(name)).least_step_seconds(nodes, None) == min(map(min, every), default=math.inf)


@pytest.mark.parametrize("second_copy", [1, 8])
def test_times_of_several_numbers_of_micro_batches_are_those_of_each(second_copy: int) -> None:
    spec = spec_of("llama-7b", cluster__nodes=2, layout__zero_secondary_shard_size=second_copy, layout__zero_stage=3)
    device = find_accelerator(spec.cluster)
    layout = build_layout(spec, Axes(16, 1, 1, 1, 1, 1, 1), 3, "none", 1)
    layouts = [replace(layout, gradient_accumulation_steps=m, global_batch_size=16 * m) for m in (1, 2, 8)]
    whole = [plan_time(spec, each, device) for each in layouts]
    assert plan_times(spec, layouts, device) == whole

    def seconds(time: Time) -> tuple[float, ...]:
        return time.step, time.compute, time.exposed_communication, time.optimizer

    assert [*map(seconds, step_seconds(spec, layouts, device))] == [seconds(time) for time, _ in whole]


@clusters
def test_the_fullest_stage_is_the_first_of_its_kind(name: str) -> None:
    spec = everything(name)
    device, workload = find_accelerator(spec.cluster), workload_of(spec.model)
    tried = [(axes, stage) for axes in axes_to_try(spec)[::7] for stage in zero_stages(spec, axes, "none")]
    assert tried
    for axes, stage in tried:
        layout = build_layout(spec, axes, stage, "selective", 1)
        every, some = workload.memory(spec, layout, device), workload.fullest_memory(spec, layout, device)
        assert replace(every, by_stage=()) == replace(some, by_stage=())


@clusters
def test_every_layout_is_chosen_or_rejected_for_a_reason(name: str) -> None:
    plan = plan_of(name)
    degrees = ("layout.", "training.", "model.", "zero_stage", *AXES)
    reported = sum(row.count for row in plan.rejected if not row.text.startswith(degrees))
    assert reported == plan.considered - 1 > 0, plan.rejected
    assert all(row.text and row.example and row.count > 0 for row in plan.rejected)


@clusters
def test_a_layout_that_is_called_not_faster_is_not_faster(name: str) -> None:
    """Of layouts that are equally fast within the error of the model, the simplest is taken; the reason says so."""
    plan, found = plan_of(name), set()
    for row in plan.alternatives:
        gain = 100 * (1 - row.step_seconds / plan.time.step)
        found.add(row.why.code)
        if row.why.code == "plan.not-faster":
            assert gain < 0.1, row
        elif row.why.code == "plan.faster-within-error":
            assert row.why.params["gain"] == pytest.approx(gain / 100, abs=1e-9), (gain, row)
    if name in ("13b as megatron", "experts"):
        assert {"plan.not-faster", "plan.faster-within-error"} <= found


@clusters
def test_a_plan_without_comparison_chooses_the_same_layout(name: str) -> None:
    full, bare = plan_of(name), plan_or_raise(everything(name), compared=False)
    assert (bare.layout, bare.time, bare.considered) == (full.layout, full.time, full.considered)
    assert bare.alternatives == ()


def test_invalid_degrees_are_rejected_with_the_rule() -> None:
    reasons = [row.text for row in plan_of("experts").rejected]
    for expected in (
        "layout.expert_parallel: must divide data x context x sequence parallel",
        "virtual_pipeline: stages x virtual stages do not",
        "zero_stage above 1: deepspeed does not support it with a pipeline",
    ):
        assert any(reason.startswith(expected) for reason in reasons), reasons
    over = make_plan(spec_of("llama-7b", cluster__nodes=2, **EVERYTHING)).rejected
    assert ("tensor_parallel: more ranks than the 8 GPUs of a node", "tensor_parallel 16") in {
        (row.text, row.example) for row in over
    }


def test_by_default_only_layouts_of_the_engine_are_proposed_and_others_are_counted() -> None:
    plan = make_plan(spec_of("llama-7b", cluster__nodes=2, **EVERY_AXIS))
    assert all(getattr(plan.layout, axis) == 1 for axis in AXES if axis not in ENGINE.axes)
    assert plan.layout.offload in ENGINE.offload
    reasons = [row.text for row in plan.rejected]
    assert "virtual_pipeline: this engine version supports only 1" in reasons


def test_everything_is_at_least_as_fast_as_what_the_engine_runs() -> None:
    settings = {"cluster__nodes": 2, "training__global_batch_size": 16, "model__seq_len": 4096}
    ours = make_plan(spec_of("llama-13b", **settings))
    whole = make_plan(spec_of("llama-13b", **settings, **EVERYTHING))
    assert whole.time.step <= 1.02 * ours.time.step


def test_more_memory_never_makes_the_steps_to_expect_slower() -> None:
    table = {
        "name": "growing",
        "bf16_flops": "300TFLOPS",
        "fp32_flops": "20TFLOPS",
        "memory_bandwidth": "2TB/s",
        "intra_node_bandwidth": "300GB/s",
    }
    steps = []
    for gigabytes in range(24, 200, 20):
        gpu = {**table, "memory": f"{gigabytes}GB"}
        try:
            plan = make_plan(spec_of("llama-7b", cluster__gpu=gpu, training__global_batch_size=32, **EVERYTHING))
        except PlanInfeasibleError:  # too small to hold it at all
            continue
        if plan.memory.verdict == "fits":
            steps.append(plan.time.step / (1 - plan.memory.out_of_memory_probability))
    assert len(steps) > 5
    assert all(later <= 1.02 * min(steps[: index + 1]) for index, later in enumerate(steps[1:]))


LARGEST = {"cluster__nodes": 2048, "training__global_batch_size": 2048, **EVERYTHING}
LLAMA_405B = model_sizes(
    hidden=16384,
    layers=126,
    heads=128,
    kv_heads=8,
    head_dim=128,
    intermediate=53248,
    vocab=128256,
    seq_len=8192,
    positions=8192,
)
EXPERTS_256 = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "shared_expert_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    **model_sizes(
        hidden=7168,
        layers=61,
        heads=128,
        kv_heads=128,
        head_dim=128,
        intermediate=18432,
        vocab=129280,
        seq_len=4096,
        positions=163840,
    ),
}


LARGE_RUNS: dict[str, dict[str, Any]] = {
    "405B on 512 nodes": {**LLAMA_405B, "cluster__nodes": 512},
    "405B as megatron": {**LLAMA_405B, "cluster__nodes": 64, "planner__framework": "megatron"},
    "405B as nanotron": {**LLAMA_405B, "cluster__nodes": 32, "planner__framework": "nanotron"},
    "405B with Muon": {**LLAMA_405B, "cluster__nodes": 128, "training__optimizer": {"name": "muon"}},
    "256 experts on 64 nodes": {**EXPERTS_256, "cluster__nodes": 64},
    "256 experts on 2048 nodes": {**EXPERTS_256, "cluster__nodes": 2048, "training__optimizer": {"name": "lion"}},
    "256 experts as megatron": {**EXPERTS_256, "cluster__nodes": 256, "planner__framework": "megatron"},
    "experts in every second block": {**EXPERTS_256, "decoder_sparse_step": 2, "cluster__nodes": 64},
    "small experts behind wide blocks": {
        **EXPERTS_256,
        "first_k_dense_replace": 40,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 0,
        "cluster__nodes": 64,
    },
    "405B with windows": {**LLAMA_405B, "sliding_window": 1024, "cluster__nodes": 64},
}


LARGE_IN_LONG = (
    "405B on 512 nodes",
    "256 experts on 64 nodes",
    "256 experts on 2048 nodes",
    "256 experts as megatron",
    "405B with windows",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LARGE_IN_LONG else []) for name in LARGE_RUNS]
)
def test_no_bound_on_memory_or_traffic_exceeds_what_a_layout_of_a_large_run_needs(name: str) -> None:
    """For some hundred of its layouts at random, most of them pipelines of unequal stages."""
    raw = {key if "__" in key else f"model__{key}": value for key, value in LARGE_RUNS[name].items()}
    spec = spec_of("llama-7b", **{**EVERYTHING, "training__global_batch_size": 2048, **raw})
    device, draw, modes = find_accelerator(spec.cluster), random.Random(name), checkpointing_modes(spec)
    bounds, every = Bounds(spec, device, modes[0]), list(groups(spec, axes_to_try(spec)))
    closest = 0.0
    for group in draw.sample(every, 200):
        size, mode, offload = draw.choice(group.micro_batches), draw.choice(modes), draw.choice(group.offload)
        candidate = evaluate(spec, build_layout(spec, group.axes, group.zero_stage, mode, size, offload), device)
        wanted = group.axes, group.zero_stage, size, mode, offload
        held = bounds.stage_bytes(*wanted)
        (sent,) = bounds.traffic_seconds(group.axes, group.zero_stage, [size])
        assert max(held, bounds.peak_bytes(*wanted)) <= candidate.memory.peak, describe(candidate.layout)
        assert sent <= candidate.time.step, describe(candidate.layout)
        closest = max(closest, held / candidate.memory.peak)
    assert closest > 0.6


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        pytest.param(LLAMA_405B, 2048, id="405B dense"),
        pytest.param(EXPERTS_256, 16384, id="256 experts", marks=pytest.mark.long),
    ],
)
def test_a_few_thousand_layouts_are_timed(model: dict[str, Any], batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds keep the search of 16,384 GPUs within 2 s; benchmarks/planner_speed.py measures the time."""
    dims = {f"model__{key}": value for key, value in model.items()}
    spec = spec_of("llama-7b", **{**LARGEST, **dims, "training__global_batch_size": batch})
    timed = count_calls(monkeypatch)
    plan = make_plan(spec)
    assert plan.memory.fits
    assert plan.considered > 50_000
    assert len(timed) < 10_000
    assert len(plan.alternatives) <= 200


def test_a_given_layout_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(
        "llama-70b",
        cluster__nodes=8,
        layout__tensor_parallel=8,
        layout__pipeline_parallel=4,
        layout__sequence_parallel=1,
        layout__zero_stage=1,
        layout__activation_checkpointing="full",
        training__micro_batch_size=1,
    )
    timed = count_calls(monkeypatch)
    make_plan(spec)
    assert len(timed) <= 4


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that grows with each layout that the search and its bounds time."""
    calls: list[None] = []
    one, several = text.plan_time, text.step_seconds

    def counted(*arguments: Any) -> Any:
        calls.append(None)
        return one(*arguments)

    def counted_several(spec: RunSpec, layouts: Sequence[Layout], device: Accelerator) -> Any:
        calls.extend([None] * len(layouts))
        return several(spec, layouts, device)

    monkeypatch.setattr(text, "plan_time", counted)
    monkeypatch.setattr(text, "step_seconds", counted_several)
    return calls


def test_a_search_with_a_limit_of_time_finds_the_same_layout_or_none() -> None:
    spec, plan = everything("6 GPUs"), plan_of("6 GPUs")
    within = plan_within(spec, plan.time.step)
    assert (within.layout, within.time) == (plan.layout, plan.time)
    assert plan_within(spec, 0.9 * plan.time.step) is None


@clusters
def test_the_fastest_layout_with_a_margin_is_the_one_that_the_complete_search_chooses(name: str) -> None:
    spec = everything(name)
    device = find_accelerator(spec.cluster)
    whole = search(spec, device, axes_to_try(spec), RejectionCounts()).chosen
    assert whole.comfortable or name not in SHORT
    if not whole.comfortable:
        pytest.skip("no layout has a margin")
    bounds = Bounds(spec, device, checkpointing_modes(spec)[0])
    assert search(spec, device, axes_to_try(spec), RejectionCounts(), compared=False, bounds=bounds).chosen == whole
    near = search_near(spec, device, bounds, whole.time.step)
    assert near is None or near.chosen == whole
    assert near is not None or name == "contrastive"
    late = search_near(spec, device, bounds, 0.9 * whole.time.step)
    assert late is None or late.too_slow


def test_bounds_of_another_number_of_nodes_give_the_same_plan() -> None:
    spec = spec_of("llama-7b", **EVERYTHING, training__global_batch_size=64)
    bounds = Bounds(spec, find_accelerator(spec.cluster), checkpointing_modes(spec)[0])
    for nodes in (1, 4, 2):
        other = spec_of("llama-7b", **EVERYTHING, training__global_batch_size=64, cluster__nodes=nodes)
        assert plan_within(other, math.inf, compared=True, bounds=bounds.on_cluster(other)) == make_plan(other)


def test_a_pipeline_that_may_stall_is_not_chosen_where_another_layout_fits() -> None:
    raw = {"training__global_batch_size": 256, "cluster__nodes": 32, "planner__framework": "nanotron"}
    spec = spec_of("llama-7b", cluster__network="efa-p5", **raw)
    plan = make_plan(spec)
    piped = make_plan(spec.model_copy(update={"layout": spec.layout.model_copy(update={"pipeline_parallel": 2})}))
    assert plan.layout.pipeline_parallel == 1
    assert piped.time.stall_probability == pytest.approx(1 - 0.981**32)
    accumulation = piped.layout.gradient_accumulation_steps
    assert piped.time.stall_seconds == pytest.approx(0.3 * 2 * accumulation)
    assert piped.time.expected == pytest.approx(piped.time.step + piped.time.stall_probability * 0.6 * accumulation)
    calm = spec_of("llama-7b", cluster__network="infiniband-ndr", layout__pipeline_parallel=2, **raw)
    assert make_plan(calm).time.stall_probability == 0


def test_more_likely_stalls_are_part_of_the_step() -> None:
    raw = {"cluster__nodes": 64, "layout__pipeline_parallel": 4, "training__global_batch_size": 512}
    spec = spec_of("llama-7b", cluster__network="efa-p5", **raw)
    time = make_plan(spec).time
    assert time.stall_probability > 0.5
    assert time.exposed_communication > time.stall_seconds > 0
    assert time.unstalled == pytest.approx(time.step - time.stall_seconds)
