"""Layouts that only frozen weights, adapters and quantized weights make possible; and stages of a run."""

from typing import Any

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.plan.search.engine_support import submittable
from scaletrain_cli.plan.search.infeasible import PlanInfeasibleError
from scaletrain_cli.spec import RunSpec
from tests.plan.specs import spec_of

LORA = {"name": "lora", "rank": 16}
ON_24_GB = {"cluster__gpu": "rtx-4090", "cluster__gpus_per_node": 1, "training__global_batch_size": 16}


def tuned(preset: str, **changes: Any) -> RunSpec:
    return spec_of(preset, model__seq_len=2048, model__weights="/weights", **changes)


def planned(spec: RunSpec) -> RunPlan:
    plan = make_plan(spec)
    assert not submittable(spec, plan)
    return plan


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_an_adapter_of_8_billion_parameters_trains_on_24_gb_where_the_model_does_not(quantization: str) -> None:
    plan = planned(tuned("llama-3-8b", model__adapter=LORA, model__quantization=quantization, **ON_24_GB))
    assert plan.memory.verdict == "fits"
    assert plan.model.trainable_parameters == 41_943_040
    with pytest.raises(PlanInfeasibleError):
        make_plan(tuned("llama-3-8b", **ON_24_GB))


def test_an_adapter_of_70_billion_parameters_trains_on_eight_gpus_of_80_gb_and_quantized_on_one() -> None:
    sharded = planned(tuned("llama-3-70b", model__adapter=LORA, training__global_batch_size=64))
    shards = sharded.layout.tensor_parallel * sharded.layout.pipeline_parallel
    assert (sharded.layout.zero_stage, shards) == (1, 4)  # 141 GB of frozen weights
    one = {"model__quantization": "nf4", "cluster__gpus_per_node": 1, "training__global_batch_size": 16}
    alone = planned(tuned("llama-3-70b", model__adapter=LORA, **one))
    assert alone.memory.parameters < 0.65 * 70.6e9  # 0.5625 bytes a weight, the embeddings in 16 bits
    assert alone.memory.verdict == "fits"


def test_quantized_weights_are_never_sharded() -> None:
    spec = tuned("llama-3-70b", model__adapter=LORA, model__quantization="nf4", training__global_batch_size=64)
    plan = planned(spec)
    for layout in (plan.layout, *(each.layout for each in plan.alternatives)):
        assert layout.tensor_parallel == 1
        assert layout.zero_stage < 3


def test_frozen_weights_are_refused_where_a_framework_is_modeled_without_them() -> None:
    with pytest.raises(UsageError) as refused:
        make_plan(tuned("llama-3-8b", model__adapter=LORA, planner__framework="megatron"))
    assert "is modeled for training of all weights only" in str(refused.value.problems[0])
    make_plan(tuned("llama-3-8b", planner__framework="megatron", cluster__gpus_per_node=8))


def test_the_weights_of_a_whole_offloaded_model_are_fetched_though_few_of_them_train() -> None:
    away = {**ON_24_GB, "layout__zero_stage": 3, "layout__offload": "optimizer+params"}
    frozen = planned(tuned("llama-3-8b", model__adapter=LORA, **away))
    near = planned(tuned("llama-3-8b", model__adapter=LORA, **ON_24_GB))
    assert frozen.time.optimizer > near.time.optimizer + 1


def test_a_run_in_stages_has_the_memory_of_the_fullest_and_the_mean_time() -> None:
    head, all_ = {"match": "lm_head*"}, {"match": "*", "start_step": 251}
    plan = planned(tuned("llama-3-8b", training__trainable=[head, all_], training__steps=1000))
    first, second = plan.training_stages
    assert (first.first_step, first.last_step, second.first_step, second.last_step) == (1, 250, 251, 1000)
    assert first.trainable_parameters == 128_256 * 4096
    assert second.trainable_parameters == plan.model.trainable_parameters == plan.model.parameters
    assert first.peak < second.peak == plan.memory.peak
    assert first.step_seconds < second.step_seconds
    assert plan.time.step == pytest.approx(0.25 * first.step_seconds + 0.75 * second.step_seconds)
    assert plan.time.to_train == pytest.approx(1000 * plan.time.step)
    parts = ("compute", "exposed_communication", "bubble", "optimizer", "data_wait")
    assert sum(getattr(plan.time, part) for part in parts) == pytest.approx(plan.time.step)


def test_a_checkpoint_has_no_weights_that_never_train() -> None:
    adapter = make_plan(tuned("llama-3-8b", model__adapter=LORA)).durability.checkpoint_bytes
    assert adapter == 12 * 41_943_040
    spec = spec_of("llama-3-8b", model__seq_len=2048, model__adapter=LORA)  # random weights, which no file has
    assert make_plan(spec).durability.checkpoint_bytes == adapter + 2 * 8_030_261_248


def test_a_pair_of_answers_is_two_sequences() -> None:
    pinned = {"layout__zero_stage": 2, "layout__tensor_parallel": 1, "layout__pipeline_parallel": 1}
    pinned |= {"layout__sequence_parallel": 1, "layout__activation_checkpointing": "full", "training__compile": False}
    single, pair = (
        make_plan(tuned("llama-3-8b", training__objective=objective, training__micro_batch_size=size, **pinned))
        for objective, size in (("sft", 2), ("dpo", 1))
    )
    assert pair.memory == single.memory
    assert pair.time.step == pytest.approx(2 * single.time.step, rel=0.1)
