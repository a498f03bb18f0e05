from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from scaletrain_cli.plan.axes import resolve_axes
from scaletrain_cli.plan.catalogue.hardware import Accelerator, accelerator_names, find_accelerator, rank_cores
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.buffers import zero_buffers
from scaletrain_cli.plan.memory.device_memory import plan_memory
from scaletrain_cli.plan.result import Layout, Network, Time
from scaletrain_cli.plan.search.layouts import build_layout
from scaletrain_cli.plan.speed.block_time import RankWork, _expert_products
from scaletrain_cli.plan.speed.kernels import linear_products, rates
from scaletrain_cli.plan.speed.offload import host_update_seconds
from scaletrain_cli.plan.speed.step_time import plan_time
from scaletrain_cli.spec import RunSpec
from tests.counting import calls_of
from tests.plan.specs import spec_of


def layout_of(spec: RunSpec, zero_stage: int = 1, checkpointing: str = "none", micro_batch: int = 1) -> Layout:
    return build_layout(spec, resolve_axes(spec), zero_stage, checkpointing, micro_batch)


def plan(preset: str = "llama-7b", layout: dict[str, Any] | None = None, **spec: Any) -> tuple[Time, Network]:
    run = spec_of(preset, **spec)
    return plan_time(run, layout_of(run, **(layout or {})), find_accelerator(run.cluster))


def seconds(preset: str = "llama-7b", layout: dict[str, Any] | None = None, **spec: Any) -> float:
    return plan(preset, layout, **spec)[0].step


CASES: list[dict[str, Any]] = [
    {},
    {"layout__tensor_parallel": 4, "cluster__nodes": 4, "planner__framework": "megatron"},
    {"layout__pipeline_parallel": 8, "cluster__nodes": 4, "planner__framework": "nanotron"},
    {"layout": {"zero_stage": 3, "checkpointing": "full"}, "planner__framework": "fsdp"},
    {"layout__context_parallel": 4, "layout__sequence_parallel": 2},
    {"layout__offload": "optimizer", "layout": {"zero_stage": 2}},
    {"preset": "mixtral-8x7b", "layout__expert_parallel": 8, "planner__framework": "megatron"},
    {"preset": "gpt2", "cluster__gpu": "cpu", "cluster__gpus_per_node": 2},
]


@pytest.mark.parametrize("case", CASES)
def test_the_parts_add_up_to_the_step(case: dict[str, Any]) -> None:
    time, _ = plan(**case)
    parts = time.compute + time.exposed_communication + time.bubble + time.optimizer + time.data_wait
    assert time.step == pytest.approx(parts)
    assert min(time.compute, time.exposed_communication, time.optimizer) > 0
    assert (time.bubble > 0) == (case.get("layout__pipeline_parallel", 1) > 1)
    assert (time.recompute > 0) == (case.get("layout", {}).get("checkpointing") == "full")
    assert time.recompute < time.compute
    assert time.samples_per_second == pytest.approx(256 / time.step)
    assert 0 < time.mfu <= time.hfu < 1
    assert all(stage.forward > 0 and stage.backward > 0 for stage in time.by_stage)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_activation_offload_takes_the_time_of_a_copy_to_the_host_and_one_back(checkpointing: str) -> None:
    here, away = (spec_of("llama-7b", cluster__gpu="a100-sxm-80gb", layout__activation_offload=on) for on in (0, 1))
    layout = layout_of(here, 3, checkpointing)
    device = find_accelerator(here.cluster)
    moved = plan_memory(away, layout, device).host - plan_memory(here, layout, device).host
    assert moved > 2e8
    copies = 2 * layout.gradient_accumulation_steps * moved / (0.8 * device.host_bandwidth)
    extra = plan_time(away, layout, device)[0].step - plan_time(here, layout, device)[0].step
    assert extra == pytest.approx(copies, rel=0.02)


@pytest.mark.parametrize("gpu", [name for name in accelerator_names() if name != "cpu"])
@pytest.mark.parametrize("framework", ["deepspeed", "fsdp", "megatron", "nanotron"])
def test_every_device_has_a_plausible_speed(gpu: str, framework: str) -> None:
    time, _ = plan("gpt2-xl", {"micro_batch": 4}, cluster__gpu=gpu, planner__framework=framework)
    assert 0.005 < time.mfu < 0.85


def test_causal_attention_makes_long_sequences_slower_but_not_by_their_square() -> None:
    def per_token(length: int) -> float:
        return 1 / plan(model__seq_len=length, model__max_position_embeddings=131072)[0].tokens_per_second

    assert 1.0 < per_token(16384) / per_token(4096) < 2.5


def test_full_checkpointing_costs_about_a_third_and_says_so() -> None:
    plain, _ = plan(layout={"micro_batch": 4})
    full, _ = plan(layout={"micro_batch": 4, "checkpointing": "full"})
    assert 1.2 < full.step / plain.step < 1.36
    assert full.recompute == pytest.approx(full.compute - plain.compute, rel=0.05)
    assert full.mfu < 0.9 * plain.mfu
    assert full.hfu == pytest.approx(plain.mfu, rel=0.05)


def test_tiny_micro_batches_wait_for_the_host() -> None:
    one = plan("gpt2", {"micro_batch": 1}, model__seq_len=256, training__global_batch_size=512)[0]
    many = plan("gpt2", {"micro_batch": 64}, model__seq_len=256, training__global_batch_size=512)[0]
    assert one.step > 3 * many.step


def test_tensor_parallelism_over_nodes_is_slow() -> None:
    eager = {"cluster__nodes": 2, "training__compile": False}
    inside = seconds(layout__tensor_parallel=8, **eager)
    outside = seconds(layout__tensor_parallel=16, **eager)
    assert outside > 1.5 * inside


def test_a_slower_network_exposes_more() -> None:
    fast, _ = plan(cluster__nodes=8, layout={"zero_stage": 3})
    slow, _ = plan(cluster__nodes=8, layout={"zero_stage": 3}, cluster__inter_node_bandwidth="200MB/s")
    assert slow.exposed_communication > 5 * fast.exposed_communication
    assert slow.compute == pytest.approx(fast.compute, rel=0.01)


def test_more_micro_batches_shrink_the_bubble_and_chunks_too() -> None:
    def bubble(**spec: Any) -> float:
        time, _ = plan(layout__pipeline_parallel=4, planner__framework="megatron", **spec)
        return time.bubble / time.step

    assert bubble(training__global_batch_size=256) < bubble(training__global_batch_size=64) / 2
    assert bubble(layout__virtual_pipeline=4) < bubble() / 3


def test_an_optimizer_on_the_host_is_as_fast_as_its_threads() -> None:
    def update(**cluster: Any) -> float:
        offloaded = {f"cluster__{key}": value for key, value in cluster.items()}
        offloaded["training__global_batch_size"] = 8
        return plan(layout={"zero_stage": 2}, layout__offload="optimizer", **offloaded)[0].optimizer

    assert update(cpus_per_gpu=1) > 4 * update(cpus_per_gpu=8)
    assert update(cpus_per_gpu=64) == update(cpus_per_gpu=32), "the memory of the host sets the pace"
    # chenyaofo (gist d4cd6a20), LLaMA 7B on 8 A800, one thread per rank: the step takes 17 to 20 s more with offload.
    assert update(gpu="a800-sxm-80gb", cpus_per_gpu=1) == pytest.approx(18, rel=0.2)


def test_the_update_on_the_host_takes_48_bytes_per_parameter_and_the_copy_of_its_weights() -> None:
    spec = spec_of("llama-7b", cluster__gpu="a100-sxm-80gb", cluster__cpus_per_gpu=1)
    device = find_accelerator(spec.cluster)
    link = 0.8 * device.host_bandwidth
    assert host_update_seconds(spec, device, 10**9) == pytest.approx(48e9 / 2.5e9 + 2e9 / link)


def test_the_update_on_the_host_has_the_cores_and_the_memory_of_the_usual_server() -> None:
    def seconds(spec: RunSpec) -> float:
        device = find_accelerator(spec.cluster)
        return host_update_seconds(spec, device, 10**9) - 2e9 / (0.8 * device.host_bandwidth)

    old, new = (spec_of("llama-7b", cluster__gpu=gpu) for gpu in ("v100-sxm2-32gb", "h100-sxm-80gb"))
    assert [rank_cores(spec) for spec in (old, new)] == [40 // 8, 112 // 8]
    assert seconds(old) == pytest.approx(48e9 / (136.5e9 / 8 * 0.8 * 48 / 68))  # its memory is slower than its cores
    assert seconds(new) == pytest.approx(48e9 / (14 * 2.5e9))
    threads = new.model_copy(update={"env": {"OMP_NUM_THREADS": "2"}})
    assert seconds(threads) == pytest.approx(48e9 / 5e9)
    # With the cores of its eight GPUs one rank has all the memory too, and is limited by what a process reaches.
    alone = spec_of("llama-7b", cluster__gpu="v100-sxm2-32gb", cluster__gpus_per_node=1, cluster__cpus_per_gpu=40)
    assert seconds(alone) == pytest.approx(48e9 / 35e9)
    pod = spec_of("llama-7b", cluster__scheduler="kubernetes", cluster__kubernetes={"cpus_per_node": 24})
    assert (rank_cores(pod), seconds(pod)) == (3, pytest.approx(48e9 / 7.5e9))


def test_the_head_multiplies_in_16_bits_beside_fp8() -> None:
    def seconds(precision: str, vocab_size: int) -> float:
        spec = spec_of("llama-7b", cluster__gpu="h100-sxm-80gb", training__precision=precision)
        spec = spec.model_copy(update={"model": spec.transformer.model_copy(update={"vocab_size": vocab_size})})
        return plan_time(spec, layout_of(spec), find_accelerator(spec.cluster))[0].compute

    bf16, fp8 = (seconds(precision, 256_000) - seconds(precision, 32_000) for precision in ("bf16", "fp8"))
    assert fp8 == pytest.approx(bf16, rel=0.01)


def test_blocking_launches_add_host_to_device_and_overlap_nothing() -> None:
    spec = spec_of("llama-7b", cluster__nodes=2, cluster__gpu="a100-sxm-80gb")
    blocked = spec.model_copy(update={"env": {"CUDA_LAUNCH_BLOCKING": "1"}})
    free, slow = (plan_time(run, layout_of(run), find_accelerator(run.cluster))[0] for run in (spec, blocked))
    assert slow.exposed_communication > free.exposed_communication
    assert slow.compute > free.compute
    allowed = spec.model_copy(update={"env": {"CUDA_LAUNCH_BLOCKING": "0"}})
    assert plan_time(allowed, layout_of(allowed), find_accelerator(allowed.cluster))[0].step == free.step


@pytest.mark.parametrize(("zero_stage", "stages", "overlaps"), [(1, 1, True), (1, 2, False), (2, 1, True)])
def test_deepspeed_overlaps_reduction_where_overlap_comm_is_set(zero_stage: int, stages: int, overlaps: bool) -> None:
    spec = spec_of("llama-7b", layout__pipeline_parallel=stages)
    layout = layout_of(spec, zero_stage)
    framework = framework_of(spec)
    assert (framework.reduce_overlap(layout, framework.profile) > 0) is overlaps
    assert zero_buffers(10**9, zero_stage, pipeline=stages > 1).overlap_comm is overlaps


def test_a_larger_head_makes_the_last_stage_the_slowest() -> None:
    time, _ = plan(layout__pipeline_parallel=8, model__vocab_size=262144, planner__framework="megatron")
    last, middle = time.by_stage[-1], time.by_stage[3]
    assert last.forward + last.backward > 1.2 * (middle.forward + middle.backward)
    assert len(time.by_stage) == 8


def test_slow_storage_makes_steps_wait_for_data() -> None:
    assert plan()[0].data_wait == 0
    assert plan(cluster__storage_bandwidth="1KB/s")[0].data_wait > 1


def test_one_layout_is_timed_by_less_than_a_thousand_calls() -> None:
    """A tenth of a millisecond or so; a search times thousands of layouts."""
    run = spec_of(layout__pipeline_parallel=4, cluster__nodes=4)
    layout, device = layout_of(run), find_accelerator(run.cluster)
    plan_time(run, layout, device)
    for stage in (0, 1):
        assert calls_of(lambda stage=stage: plan_time(run, replace(layout, zero_stage=stage), device)) < 1000


@pytest.mark.parametrize(("tensor", "expert_tensor"), [(1, 1), (2, 2), (4, 4), (4, 1), (8, 8)])
def test_experts_do_the_same_work_in_every_sharding(tensor: int, expert_tensor: int) -> None:
    model = spec_of("mixtral-8x7b").transformer
    work = RankWork(
        tokens=8192, keys=8192, tensor=tensor, sequence=1, expert=8, expert_tensor=expert_tensor,
        sharded_norms=True, flash=True, compiled=False,
    )  # fmt: skip
    routed = sum(count * rows * inner * columns for count, rows, inner, columns in _expert_products(model, work)[1:])
    assert routed * tensor == model.num_experts_per_tok * 8192 * 3 * model.hidden_size * model.intermediate_size


def test_an_odd_number_of_tokens_does_not_reduce_the_rate() -> None:
    rate = rates(find_accelerator(spec_of().cluster), "bf16")
    even, odd = (sum(linear_products(tokens, 4096, 4096, False, rate)) for tokens in (8192, 8191))
    assert odd <= even * 1.01


def test_nvme_offload_takes_the_time_to_read_and_write_all_states() -> None:
    offloaded = {"layout": {"zero_stage": 3}, "layout__offload": "optimizer"}
    on_host = seconds(**offloaded)
    on_drives = seconds(**offloaded, layout__offload_device="nvme", cluster__nvme_bandwidth=8e9)
    parameters_of_a_rank = 6_738_415_616 / 8
    assert on_drives - on_host == pytest.approx(2 * 12 * parameters_of_a_rank / 1e9, rel=1e-3)


_MORE = (1.05, 1.3, 2.0, 8.0)
# A faster link may be of a generation with a microsecond more of latency; and faster products leave communication a
# little less of the backward pass to hide behind, where the host sets the pace of the whole.
_HARDLY = 1.001


def _step(spec: RunSpec, zero_stage: int, device: Accelerator) -> float:
    layout = build_layout(spec, resolve_axes(spec), zero_stage, "none", 1)
    return plan_time(spec, layout, device)[0].step


def _faster(device: Accelerator, what: str, by: float) -> Accelerator:
    if what == "flops":
        return replace(device, flops={name: by * peak for name, peak in device.flops.items()})
    return replace(device, **{what: by * getattr(device, what)})


LAYOUTS: list[tuple[str, str, str, int, int, int]] = [
    (preset, gpu, framework, tensor, pipeline, chunks)
    for (preset, gpu), framework, (tensor, pipeline, chunks) in product(
        (("gpt2", "l40s"), ("llama-7b", "h100-sxm-80gb"), ("llama-70b", "gb300")),
        ("deepspeed", "megatron", "nanotron"),
        ((1, 2, 1), (4, 8, 1), (2, 4, 2), (1, 1, 1), (4, 1, 1)),
    )
    if chunks == 1 or framework == "megatron"
    if preset != "gpt2" or (pipeline < 8 or framework != "nanotron")
]


@pytest.mark.parametrize("case", LAYOUTS)
def test_more_hardware_is_never_slower(case: tuple[str, str, str, int, int, int]) -> None:
    preset, gpu, framework, tensor, pipeline, chunks = case
    overrides: dict[str, Any] = {
        "cluster__gpu": gpu,
        "cluster__nodes": 8,
        "planner__framework": framework,
        "layout__tensor_parallel": tensor,
        "layout__pipeline_parallel": pipeline,
    }
    if chunks > 1:
        overrides["layout__virtual_pipeline"] = chunks
    spec = spec_of(preset, **overrides)
    device = find_accelerator(spec.cluster)
    for zero_stage in (0, 1) if pipeline > 1 else (1, 3):
        before = _step(spec, zero_stage, device)
        for what, by in product(("flops", "memory_bandwidth", "intra_node_bandwidth"), _MORE):
            after = _step(spec, zero_stage, _faster(device, what, by))
            assert after <= before * _HARDLY, (zero_stage, what, by, after / before)
        steps = []
        for by in (1.0, *_MORE):
            cluster = spec.cluster.model_copy(update={"inter_node_bandwidth": by * 12.5e9})
            steps.append(_step(spec.model_copy(update={"cluster": cluster}), zero_stage, device))
        assert max(steps) <= steps[0] * _HARDLY, (zero_stage, "inter_node_bandwidth", steps)
