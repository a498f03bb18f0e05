import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.plan import PlanInfeasibleError, RunPlan, accelerator_names, make_plan, submittable
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.ui.plan_breakdown import MEMORY_PARTS
from tests.model_sizes import SIZES, model_sizes

small, huge = st.sampled_from([1, 2, 3, 4, 8, 12, 64, 96, 128, 1000, 4096]), st.integers(1, 10**9)
whole = small | huge
degree = st.just("auto") | small | huge
# Most specs must get past the check of what divides, or the rest of the planner is never tried.
tame_degree = st.sampled_from(["auto", "auto", 1, 1, 2])
rate = st.floats(1e-300, 1e18) | st.sampled_from([1.0, 50e9])


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    family = draw(st.sampled_from(["llama", "gpt"]))
    kv_heads = draw(st.sampled_from([2, 4, 8]) | whole)
    heads = kv_heads * draw(st.integers(1, max(1, min(8, 10**9 // kv_heads))))
    experts = draw(st.sampled_from([0, 0, 1, 8]) | huge) if family == "llama" else 0
    seq_len = draw(st.sampled_from([8, 128, 4096]) | whole)
    return {
        "family": family,
        "hidden_size": draw(whole),
        "num_hidden_layers": draw(whole),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 5 * 10**8) | st.just(32)),
        "intermediate_size": draw(whole),
        "vocab_size": draw(whole),
        "seq_len": seq_len,
        "max_position_embeddings": seq_len,
        "tie_word_embeddings": draw(st.booleans()),
        "qkv_bias": draw(st.booleans()),
        "qk_norm": family == "llama" and draw(st.booleans()),
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)) if experts else 0,
        "moe_intermediate_size": draw(st.sampled_from([0, 64])) if experts else 0,
    }


@st.composite
def accelerators(draw: st.DrawFn) -> Any:
    if draw(st.booleans()):
        return draw(st.sampled_from([*accelerator_names(), "h100", "", "ünknown\n"]))
    return {
        "name": draw(st.text(min_size=1, max_size=9)),
        "memory": draw(st.integers(1, 10**18)),
        "bf16_flops": draw(st.none() | rate),
        "fp32_flops": draw(rate),
        "memory_bandwidth": draw(rate),
        "intra_node_bandwidth": draw(rate),
    }


@st.composite
def specs(draw: st.DrawFn) -> RunSpec | None:
    precision = draw(st.sampled_from(["fp32", "tf32", "bf16", "fp16", "fp8"]))
    tame = draw(st.integers(0, 3)) > 0
    axis = tame_degree if tame else degree
    nodes, per_node = (1, 2, 4, 96), (1, 2, 8)
    raw = {
        "schema": "scaletrain/v1",
        "name": draw(st.text(min_size=1, max_size=20)),
        "model": draw(models()),
        "data": {"source": "python-stdlib", "tokenizer": {"kind": "bpe", "vocab_size": 1}},
        "training": {
            "global_batch_size": 768 * draw(st.integers(1, 10**6)) if tame else draw(whole),
            "micro_batch_size": draw(tame_degree if tame else degree),
            "precision": precision,
            "grad_dtype": "fp32" if precision in ("fp32", "tf32") else draw(st.sampled_from(["fp32", "bf16"])),
            "compile": draw(st.booleans()),
            **draw(st.sampled_from([{"steps": 1}, {"steps": 10**9}, {"tokens": 10**18}, {"tokens": 1}])),
        },
        "layout": {
            "data_parallel": "auto" if tame else draw(degree),
            "tensor_parallel": draw(axis),
            "pipeline_parallel": draw(axis),
            "virtual_pipeline": draw(st.sampled_from([1, "auto"])) if tame else draw(whole),
            "sequence_parallel": draw(axis),
            "context_parallel": draw(st.sampled_from([1, 1, 2])) if tame else draw(whole),
            "expert_parallel": draw(axis),
            "zero_stage": draw(st.sampled_from(["auto", 0, 1, 2, 3])),
            "activation_checkpointing": draw(st.sampled_from(["auto", "none", "selective", "full"])),
            "offload": draw(st.sampled_from(["none", "none", "auto", "optimizer", "optimizer+params"])),
        },
        "cluster": {
            "scheduler": "slurm",
            "nodes": draw(st.sampled_from(nodes)) if tame else draw(st.integers(1, 100_000)),
            "gpus_per_node": draw(st.sampled_from(per_node)) if tame else draw(st.integers(1, 1024)),
            "gpu": draw(accelerators()),
            "intra_node_bandwidth": draw(st.just("auto") | rate),
            "inter_node_bandwidth": draw(rate),
            "spot": draw(st.booleans()),
            "mean_time_between_interruptions": draw(st.none() | st.floats(1e-6, 1e18)),
            "grace_seconds": draw(st.sampled_from([0, 120])),
            "price_per_gpu_hour": draw(st.sampled_from(["auto", 0, 2.5, 1e6])),
        },
        "checkpoint": {"every": draw(degree), "async": draw(st.booleans())},
        "planner": {
            "framework": draw(st.sampled_from(["deepspeed", "deepspeed", "fsdp", "megatron", "nanotron"])),
            "search": draw(st.sampled_from(["engine", "engine", "everything"])),
        },
    }
    try:
        return RunSpec.model_validate(raw)
    except ValueError:
        return None  # not a valid spec: not the planner's business


def assert_sound(plan: RunPlan) -> None:
    for memory in (plan.memory, *plan.memory.by_stage):
        parts = [getattr(memory, name) for name in MEMORY_PARTS]
        assert sum(parts) == memory.peak
        assert min(parts) >= 0
    layout = plan.layout
    product = layout.data_parallel * layout.tensor_parallel * layout.pipeline_parallel
    assert product * layout.sequence_parallel * layout.context_parallel == layout.world_size
    batch = layout.micro_batch_size * layout.gradient_accumulation_steps * layout.data_parallel
    assert batch == layout.global_batch_size
    assert math.isfinite(plan.time.to_train)
    assert plan.time.step > 0
    json.dumps(plan.to_json(), allow_nan=False)


def plan_or_refusal(spec: RunSpec) -> RunPlan | ScaletrainError:
    try:
        return make_plan(spec)
    except ScaletrainError as error:
        return error


@given(spec=specs())
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_a_valid_spec_gives_a_valid_plan_or_a_scaletrain_error(spec: RunSpec | None) -> None:
    if spec is None:
        return
    result = plan_or_refusal(spec)
    if isinstance(result, RunPlan):
        assert result.memory.fits
        assert_sound(result)
        assert make_plan(spec) == result
        submittable(spec, result)
        return
    assert str(result)
    assert result.problems
    if isinstance(result, PlanInfeasibleError) and result.plan is not None:
        assert not result.plan.memory.fits
        assert_sound(result.plan)
        assert submittable(spec, result.plan)


@pytest.mark.long
def test_model_dims_at_their_limits_do_not_overflow() -> None:
    largest = 10**9
    model = ModelSpec(
        family="llama", **model_sizes(**dict.fromkeys(SIZES, largest)), num_experts=largest, num_experts_per_tok=largest
    )
    raw = {
        "schema": "scaletrain/v1",
        "name": "largest",
        "model": model,
        "data": {"source": "python-stdlib"},
        "training": {"global_batch_size": largest, "steps": largest},
        "cluster": {"gpu": {**dict.fromkeys(("memory", "fp32_flops", "memory_bandwidth"), 1), "name": "x",
                            "intra_node_bandwidth": 1}, "price_per_gpu_hour": 1e6},
    }  # fmt: skip
    refusal = plan_or_refusal(RunSpec.model_validate(raw))
    assert isinstance(refusal, PlanInfeasibleError)
    assert_sound(refusal.plan)
