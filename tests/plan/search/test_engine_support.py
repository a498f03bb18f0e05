from typing import Any

import pytest

from scaletrain_cli.errors import InfeasibleError
from scaletrain_cli.plan import make_plan, submittable
from scaletrain_cli.plan.axes import AXES, resolve_axes
from scaletrain_cli.plan.frameworks.deepspeed import ENGINE
from scaletrain_cli.plan.search.engine_support import capabilities, opened, unsupported
from scaletrain_cli.plan.search.layouts import broken_rules
from tests.model_sizes import model_sizes
from tests.plan.specs import ONE_LAYOUT, spec_of

SMALL = model_sizes(hidden=512, layers=4, heads=8, kv_heads=8, head_dim=64, intermediate=1536)
FEW_LAYOUTS = {"layout__activation_checkpointing": "none", "training__micro_batch_size": 1}
GROUPS = {"training__local_sgd": {"groups": 2}, "layout__tensor_parallel": 1, "layout__pipeline_parallel": 1}
EXPERTS = {"model__num_experts": 4, "model__num_experts_per_tok": 2}
BIASED_EXPERTS = EXPERTS | {
    "model__scoring_func": "sigmoid",
    "model__topk_method": "noaux_tc",
    "model__bias_update_speed": 0.01,
}
RING = {"layout__context_parallel": 2}
ZERO_3 = {"layout__zero_stage": 3}
SECOND = {"layout__zero_secondary_shard_size": 4}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"layout__virtual_pipeline": 2, "layout__pipeline_parallel": 2}, "layout.virtual_pipeline = 2"),
        ({**RING, "data__packing": "documents"}, "context_parallel = 2: ring attention is causal attention to"),
        ({**RING, "model__sliding_window": 1024}, "Use 1; layout.sequence_parallel supports model.sliding_window."),
        ({**RING, "model__attn_logit_softcapping": 30.0}, "which model.attn_logit_softcapping changes"),
        ({**RING, "model__attention_sinks": True}, "which model.attention_sinks changes"),
        ({**RING, "model__attention_dropout": 0.1}, "which model.attention_dropout changes"),
        ({**RING, **EXPERTS, "model__capacity_factor": 1.25}, "in which model.capacity_factor drops some"),
        ({"layout__tensor_parallel": 2, "model__num_key_value_heads": 1}, "must divide 1 key-value heads, which"),
        (
            {"layout__tensor_parallel": 2, "model__vocab_size": 1},
            "leaves ranks without a token of model.vocab_size = 1",
        ),
        ({"layout__tensor_parallel": 2, "layout__tensor_sequence_parallel": True}, "tensor_sequence_parallel = true"),
        ({"layout__tensor_parallel": 2, "training__cross_entropy": "liger"}, "the full vocabulary on each rank"),
        ({"training__cross_entropy": "liger", "cluster__gpu": "cpu"}, "liger: the kernel of liger needs a GPU"),
        ({**EXPERTS, "model__moe_intermediate_size": 12}, "moe_intermediate_size = 12: must be a multiple of 8"),
        ({**EXPERTS, "layout__tensor_parallel": 2, "layout__expert_tensor_parallel": 1}, "expert_tensor_parallel = 1"),
        ({"training__precision": "fp8", "cluster__gpu": "a100-sxm-80gb"}, "8.9 or higher, and a100-sxm-80gb has 8.0"),
        ({"training__precision": "fp8", "cluster__gpu": "mi300x"}, "8.9 or higher, and this is mi300x"),
        ({"training__precision": "fp16", "training__grad_dtype": "bf16"}, "fp16 gradients accumulate in fp32 or fp16"),
        ({"training__grad_dtype": "fp16"}, "training.grad_dtype = fp16"),
        ({"training__precision": "tf32", "cluster__gpu": "cpu"}, "training.precision = tf32: needs an NVIDIA GPU"),
        (
            {"training__optimizer": {"name": "muon"}, "layout__offload": "optimizer", "layout__offload_device": "nvme"},
            "training.optimizer.name = muon: offload to NVMe supports only Adam's two moments",
        ),
        (
            {
                "training__optimizer": {"name": "muon"},
                "model__adapter": {"name": "lora", "rank": 4},
                "model__weights": "w",
            },
            "training.optimizer.name = muon: is not defined for the factors of adapters",
        ),
        (
            {"training__optimizer": {"name": "muon"}, "training__trainable": [{"match": ["lm_head.*", "*norm*"]}]},
            "training.optimizer.name = muon: no matrix of a block trains",
        ),
        (
            {**GROUPS, "layout__offload": "optimizer", "layout__offload_device": "nvme"},
            "layout.offload_device = nvme: the outer step of 2 groups updates weights in memory",
        ),
        ({**GROUPS, "training__precision": "fp16"}, "training.precision = fp16: each of 2 groups would have a loss"),
        ({**GROUPS, "training__averaging": {"name": "ema"}}, "training.averaging.name = ema: the outer weights"),
        ({**GROUPS, "training__optimizer": {"name": "adamw_8bit"}}, "adamw_8bit: its blocks of 8-bit states"),
        ({**GROUPS, "training__trainable": [{"match": "*.mlp.*"}]}, "local_sgd.groups = 2: needs all weights to train"),
        (
            {**GROUPS, "training__early_stopping": {"patience": 2}, "evaluation__every": 250},
            "early_stopping.patience = 2: the outer weights would lack the steps since the last of each 100",
        ),
        ({**GROUPS, "training__gradient_clipping_by": "adaptive"}, "adaptive: each of 2 groups would have a history"),
        ({**GROUPS, "data__loss_mask": "document_starts"}, "data.loss_mask = document_starts: groups would have"),
        ({**GROUPS, "data__packing": "documents"}, "data.packing = documents: groups would have different numbers"),
        ({**GROUPS, **BIASED_EXPERTS}, "model.bias_update_speed = 0.01: would have to count the loads of experts"),
        ({"training__optimizer": {"name": "lion"}, "layout__offload": "optimizer"}, "updates its states on the device"),
        (
            {"training__optimizer": {"name": "sgd"}, "layout__offload": "optimizer", "layout__offload_device": "nvme"},
            "offload to NVMe supports only Adam's two moments",
        ),
        (
            {"training__averaging": {"name": "ema"}, "layout__offload": "optimizer", "layout__offload_device": "nvme"},
            "training.averaging.name = ema: averaging does not support offload to NVMe",
        ),
        ({**ZERO_3, "layout__zero_shard_size": 2, "layout__offload": "optimizer"}, "with layout.offload"),
        ({**ZERO_3, "layout__zero_secondary_shard_size": 3}, "must divide the number of ranks"),
        ({**ZERO_3, **SECOND, "layout__tensor_parallel": 2}, "which layout.tensor_parallel divides"),
        ({**ZERO_3, **SECOND, "layout__offload": "optimizer+params"}, "would be in host memory"),
        ({**ZERO_3, **SECOND, "layout__zero_shard_size": 2}, "with layout.zero_secondary_shard_size"),
        ({"checkpoint__dir": "scratch"}, "checkpoint.dir = scratch: must be an absolute path"),
        ({"planner__framework": "megatron"}, "planner.framework = megatron"),
        ({"planner__attention": "flash3"}, "planner.attention = flash3: in this engine PyTorch chooses"),
        ({"planner__attention": "masked"}, "planner.attention = masked: in this engine PyTorch chooses"),
        ({"planner__attention": "materialised"}, "planner.attention = materialised: in this engine PyTorch chooses"),
    ],
)
def test_a_layout_that_the_engine_cannot_run_is_planned_not_submitted(overrides: dict[str, Any], expected: str) -> None:
    spec = spec_of("llama-7b", **(FEW_LAYOUTS | {f"model__{key}": value for key, value in SMALL.items()} | overrides))
    plan = make_plan(spec)
    (broken,) = submittable(spec, plan)
    assert expected in broken.text
    assert broken.hint or "nodes start" in broken.text
    assert any(warning.params.get("cause") == broken.reason.code for warning in plan.warnings)


@pytest.mark.parametrize("groups", [{"zero_shard_size": 16}, {"zero_secondary_shard_size": 8}])
def test_the_search_proposes_beside_a_group_of_shards_what_the_engine_runs(groups: dict[str, int]) -> None:
    """Alone it spreads the experts over ranks, which the engine cannot do beside a group."""
    layout = FEW_LAYOUTS | {"layout__zero_stage": 3, "layout__offload": "auto", "cluster__nodes": 4}
    alone = spec_of("qwen3-30b-a3b", **layout)
    grouped = spec_of("qwen3-30b-a3b", **layout, **{f"layout__{key}": size for key, size in groups.items()})
    assert make_plan(alone).layout.expert_parallel > 1
    assert submittable(grouped, make_plan(grouped)) == []


def test_the_search_proposes_no_offload_beside_a_group_of_shards() -> None:
    grouped = ONE_LAYOUT | {"layout__zero_shard_size": 8, "layout__offload": "auto", "cluster__nodes": 4}
    with pytest.raises(InfeasibleError, match=r"smallest layout: ZeRO-3, .* sharded over 8 ranks\."):
        make_plan(spec_of("qwen3-30b-a3b", **grouped))


@pytest.mark.parametrize(
    "overrides",
    [
        {"cluster__nodes": 4},
        {"cluster__gpu": "cpu"},
        {"layout__tensor_parallel": 2, "layout__pipeline_parallel": 2, "layout__sequence_parallel": 2},
        {**ZERO_3, **SECOND, "layout__sequence_parallel": 2},
        {"layout__zero_stage": 2, "layout__zero_shard_size": 2, "layout__tensor_parallel": 2},
        {**RING, "layout__sequence_parallel": 2, "model__hidden_dropout": 0.1},
        {**RING, **EXPERTS, "layout__expert_parallel": 4, "layout__pipeline_parallel": 2},
        {**EXPERTS, "layout__expert_parallel": 4, "layout__zero_stage": 3, "layout__tensor_parallel": 2},
        {"layout__offload": "optimizer+params", "layout__offload_device": "nvme"},
        {"training__precision": "fp16", "training__grad_dtype": "fp16"},
        {**EXPERTS, "layout__expert_parallel": 2, "layout__pipeline_parallel": 2},
        {"layout__pipeline_parallel": 2, "layout__offload": "optimizer"},
        {"training__precision": "fp8", "layout__tensor_parallel": 2},
        {"training__optimizer": {"name": "lion"}, "training__schedule": {"name": "wsd"}},
        {"training__optimizer": {"name": "momentum"}, "layout__offload": "optimizer"},
        {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1, "training__cross_entropy": "chunked"},
        {"training__averaging": {"name": "ema"}, "layout__activation_offload": True},
        {"training__optimizer": {"name": "muon"}, "layout__offload": "optimizer", "layout__tensor_parallel": 2},
        {**GROUPS, "training__optimizer": {"name": "muon"}, "layout__zero_stage": 3},
        {**GROUPS, **RING},
        {**RING, "training__optimizer": {"name": "muon"}},
        {"training__optimizer": {"name": "muon"}, "training__trainable": [{"match": "*.layers.1.*"}]},
    ],
    ids=lambda overrides: " ".join(key.rpartition("__")[2] for key in overrides),
)
def test_a_layout_that_the_engine_can_run_may_be_submitted(overrides: dict[str, Any]) -> None:
    spec = spec_of("llama-7b", **(FEW_LAYOUTS | {f"model__{key}": value for key, value in SMALL.items()} | overrides))
    assert submittable(spec, make_plan(spec)) == []


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("qwen2.5-0.5b", {"cluster__nodes": 2}),  # 2 key-value heads
        ("gpt2", {"model__vocab_size": 50257}),
        ("mixtral-8x7b", {"cluster__nodes": 8, "layout__offload": "auto"}),
        ("llama-70b", {"cluster__nodes": 4, "layout__offload": "auto"}),
        (
            "llama-7b",
            {"training__optimizer": {"name": "adamw_8bit"}, "cluster__gpu": "rtx-4090", "layout__offload": "auto"},
        ),
    ],
)
def test_the_search_proposes_only_what_the_engine_runs(preset: str, overrides: dict[str, Any]) -> None:
    spec = spec_of(preset, **overrides)
    plan = make_plan(spec)
    assert submittable(spec, plan) == []
    assert all(unsupported(spec, other.layout) == [] for other in plan.alternatives)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_groups_that_share_states_divide_the_replicas(size: int) -> None:
    spec = spec_of("llama-7b", layout__zero_stage=3, layout__zero_shard_size=size, layout__sequence_parallel=1)
    rules = [rule for rule in broken_rules(spec, resolve_axes(spec)) if rule.key == "layout.zero_shard_size"]
    assert [rule.message for rule in rules] == ["must be 2 or more and divide 8 replicas."]
    with pytest.raises(InfeasibleError, match="divide"):
        make_plan(spec)


def test_an_engine_of_the_user_may_run_every_layout() -> None:
    spec = spec_of(planner__framework="fsdp", code__engine="mine.train", checkpoint__dir="scratch")
    (only,) = unsupported(spec, make_plan(spec).layout)
    assert only.text.startswith("checkpoint.dir = scratch: must be an absolute path")


def test_the_search_proposes_what_the_engine_declares_unless_everything_is_requested() -> None:
    assert capabilities(spec_of()) is ENGINE
    assert capabilities(spec_of(planner__search="everything")).axes == set(AXES)


def test_other_frameworks_are_offered_the_axes_that_they_have() -> None:
    missing = {"fsdp": set(), "megatron": {"sequence_parallel"}, "nanotron": {"sequence_parallel", "virtual_pipeline"}}
    for framework, axes in missing.items():
        assert capabilities(spec_of(planner__framework=framework)).axes == set(AXES) - axes
    spec = spec_of("llama-70b", cluster__nodes=4, planner__framework="megatron", planner__search="everything")
    plan = make_plan(spec)
    assert plan.layout.sequence_parallel == 1
    assert "sequence_parallel: megatron supports only 1" in {row.text for row in plan.rejected}


def test_a_search_of_everything_tries_every_axis_that_the_spec_does_not_set() -> None:
    layout = opened(spec_of(planner__search="everything")).layout
    assert (layout.virtual_pipeline, layout.context_parallel) == ("auto", "auto")
    pinned = spec_of(planner__search="everything", layout__virtual_pipeline=1, layout__context_parallel=1)
    assert opened(pinned).layout.virtual_pipeline == opened(pinned).layout.context_parallel == 1
    assert opened(spec_of()).layout.virtual_pipeline == 1
