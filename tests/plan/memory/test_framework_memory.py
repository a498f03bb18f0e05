"""Memory under Megatron-LM, nanotron and FSDP: against single published runs, and its dependence on the profiles.

The whole sets are in benchmarks/planner_accuracy.py; here is one run per mechanism. No constant is fitted to these.
"""

from dataclasses import replace
from typing import Any

import pytest

from scaletrain_cli.plan.axes import resolve_axes
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.frameworks.fsdp import Fsdp
from scaletrain_cli.plan.memory.device_memory import plan_memory
from scaletrain_cli.plan.result import Memory
from scaletrain_cli.plan.search.layouts import build_layout
from scaletrain_cli.ui.plan_breakdown import MEMORY_PARTS
from tests.model_sizes import model_sizes
from tests.plan.specs import spec_of
from tests.plan.test_stages import published_llama

GIB = 2**30


def memory_of(
    framework: str, preset: str = "llama-7b", stage: int = 1, mode: str = "none", micro_batch: int = 1, **changed: Any
) -> Memory:
    spec = spec_of(preset, planner__framework=framework, **changed)
    layout = build_layout(spec, resolve_axes(spec), stage, mode, micro_batch)
    return plan_memory(spec, layout, find_accelerator(spec.cluster))


def megatron_test(attention: str, **changed: Any) -> Memory:
    """A model of Megatron-LM's functional tests: 12 layers of width 512, GPT-2's vocabulary, distributed optimizer."""
    sizes = model_sizes(layers=12, hidden=512, heads=8, kv_heads=8, head_dim=64, intermediate=2048, vocab=50304)
    sizes |= {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    changed |= {f"model__{key}": value for key, value in sizes.items()} | {"planner__attention": attention}
    batch = {"micro_batch": 4, "training__global_batch_size": 32}
    return memory_of("megatron", "gpt2", cluster__gpu="a100-sxm-80gb", **batch, **changed)


def test_allocated_bytes_of_megatron_s_tests() -> None:
    # gpt3_mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer on A100 (golden values of Megatron-LM@d98e8a64), and with
    # unfused attention ..._fim_dataset on H100.
    assert megatron_test("flash").allocated == pytest.approx(2_711_718_912, rel=0.05)
    assert megatron_test("materialised").allocated == pytest.approx(4_702_430_208, rel=0.05)


def test_reserved_bytes_of_torchtitan_s_8b_on_8_gpus() -> None:
    # benchmarks/llama3_h100_202412_torchtitan.md, table 1: 82.4 GiB at two sequences of 8192, selective operations.
    memory = memory_of("fsdp", "llama-3-8b", 3, "selective", 2, training__global_batch_size=16, model__seq_len=8192)
    assert memory.reserved == pytest.approx(82.4 * GIB, rel=0.05)


def test_reserved_bytes_of_torchtitan_s_405b_over_eight_stages() -> None:
    # The same file, table 5: 82.5 GiB with 1F1B, 512 GPUs (FSDP 8, TP 8, PP 8), micro-batches of 4, full recomputation.
    sizes = model_sizes(layers=126, hidden=16384, heads=128, kv_heads=8, head_dim=128, intermediate=53248, vocab=128256)
    cut = {"layout__tensor_parallel": 8, "layout__pipeline_parallel": 8, "cluster__nodes": 64}
    changed = {f"model__{key}": value for key, value in sizes.items()} | {"model__seq_len": 8192, **cut}
    memory = memory_of("fsdp", "llama-3-8b", 3, "full", 4, training__global_batch_size=256, **changed)
    assert memory.reserved == pytest.approx(82.5 * GIB, rel=0.08)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_fsdp_keeps_whole_fp32_gradients_between_the_micro_batches_of_a_pipeline(pipeline: int) -> None:
    def buffers(samples: int) -> int:
        stage = {"layout__pipeline_parallel": pipeline, "training__global_batch_size": samples}
        return memory_of("fsdp", "llama-7b", 3, "full", model__seq_len=4096, **stage).by_stage[0].communication_buffers

    added = buffers(64) - buffers(8 // pipeline)
    assert added == (0 if pipeline == 1 else pytest.approx(4 * 6_738_415_616 / 2, rel=0.001))


def test_fsdp_without_synchronization_keeps_whole_gradients_until_the_last_micro_batch() -> None:
    class WithoutSync(Fsdp):
        memory_profile = replace(Fsdp.memory_profile, accumulates_unsharded=True)

    spec = spec_of("llama-7b", planner__framework="fsdp", training__global_batch_size=64, model__seq_len=4096)
    layout = build_layout(spec, resolve_axes(spec), 3, "full", 1)
    device = find_accelerator(spec.cluster)
    synchronized, whole = (plan_memory(spec, layout, device, each) for each in (Fsdp(), WithoutSync()))
    added = whole.communication_buffers - synchronized.communication_buffers
    assert added == pytest.approx(4 * 6_738_415_616, rel=0.001)


@pytest.mark.parametrize(("micro_batch", "measured"), [(1, 29.8), (2, 46.0)])
def test_reserved_bytes_of_nanotron_s_first_stage(micro_batch: int, measured: float) -> None:
    # The Ultra-Scale Playbook's sweep, 3B on two nodes, 8 stages of tensor parallel 1, ZeRO-1.
    memory = memory_of(
        "nanotron",
        micro_batch=micro_batch,
        cluster__nodes=2,
        layout__pipeline_parallel=8,
        model__seq_len=4096,
        **published_llama(28, 3072, 8192),
    )
    assert memory.by_stage[0].reserved == pytest.approx(measured * GIB, rel=0.1)


def test_a_stage_of_nanotron_without_blocks_has_no_states() -> None:
    cut = {"cluster__nodes": 2, "layout__pipeline_parallel": 16, "training__global_batch_size": 64}
    memory = memory_of("nanotron", model__seq_len=4096, **cut, **published_llama(16, 2048, 8192))
    assert 0 in [stage.parameters for stage in memory.by_stage]


@pytest.mark.parametrize("framework", ["fsdp", "megatron", "nanotron"])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_the_parts_add_up_and_allocated_is_below_reserved_is_below_peak(framework: str, mode: str) -> None:
    memory = memory_of(framework, mode=mode, layout__tensor_parallel=2, layout__pipeline_parallel=2)
    assert len(memory.by_stage) == 2
    for stage in memory.by_stage:
        assert sum(getattr(stage, name) for name in MEMORY_PARTS) == stage.peak
        assert 0 < stage.allocated <= stage.reserved <= stage.peak == stage.cached


@pytest.mark.parametrize(("framework", "replicas"), [("megatron", 8), ("nanotron", 8)])
def test_states_are_6_bytes_and_12_shared_per_parameter(framework: str, replicas: int) -> None:
    # Megatron-LM, docs of the distributed optimizer: bf16 weights, fp32 gradients: 6 + 12 / d.
    memory = memory_of(framework, layout__data_parallel=replicas)
    states = memory.parameters + memory.gradients + memory.optimizer_states
    assert states / 6_738_415_616 == pytest.approx(6 + 12 / replicas, rel=0.001)


def test_fsdp_shares_the_16_bytes_of_fp32_states() -> None:
    memory = memory_of("fsdp", stage=3, model__seq_len=4096)
    states = memory.parameters + memory.gradients + memory.optimizer_states
    assert states / 6_738_415_616 == pytest.approx(16 / 8, rel=0.001)


def test_megatron_s_selective_checkpointing_only_drops_the_scores() -> None:
    flash, materialised = (
        [memory_of("megatron", mode=mode, planner__attention=attention).activations for mode in ("none", "selective")]
        for attention in ("flash", "materialised")
    )
    assert flash[0] == flash[1]
    assert materialised[1] < materialised[0]


def test_tensor_parallelism_shards_the_width_of_experts_not_their_number() -> None:
    cut: dict[str, Any] = {"cluster__nodes": 2, "layout__tensor_parallel": 4}
    whole, each = (
        memory_of("megatron", "mixtral-8x7b", layout__expert_tensor_parallel=ranks, **cut) for ranks in (1, 4)
    )
    assert whole.parameters > 3 * each.parameters


def test_collectives_defer_tensors_only_if_the_gpu_is_slower_than_the_host() -> None:
    def lost(tensor: int, micro_batch: int) -> int:
        memory = memory_of(
            "nanotron",
            micro_batch=micro_batch,
            model__seq_len=4096,
            layout__tensor_parallel=tensor,
            **published_llama(16, 2048, 8192),
        )
        return memory.fragmentation

    whole_tensor = 2 * 4096 * 2048
    assert lost(8, 16) - lost(8, 1) * 16 > 0  # a larger micro-batch keeps the GPU busy: more than in proportion
    assert lost(8, 16) > 40 * 16 * whole_tensor
    assert lost(1, 1) < lost(8, 16) / 3


def test_offloading_moves_states_to_the_host() -> None:
    kept = memory_of("megatron")
    gone = memory_of("megatron", layout__offload="optimizer")
    assert gone.optimizer_states == 0 == kept.host
    assert gone.host > kept.optimizer_states
    assert gone.peak < kept.peak


def test_8_bit_adam_keeps_a_quarter_of_the_moments() -> None:
    plain, small = (
        memory_of("fsdp", stage=3, training__optimizer={"name": name}).optimizer_states
        for name in ("adamw", "adamw_8bit")
    )
    assert small == pytest.approx(plain * (2 + 2 * 4 / 256) / 8, rel=0.01)
