"""Bytes that a rank sends, counted by hand from the papers, and what overlap leaves of their time."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from scaletrain_cli.plan.axes import resolve_axes
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.catalogue.networks import cluster_link
from scaletrain_cli.plan.frameworks.registry import FRAMEWORKS, framework_of
from scaletrain_cli.plan.memory.parameter_groups import elements_in_small_tensors
from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.search.layouts import build_layout
from scaletrain_cli.plan.speed.communication import CONTENTION, block_traffic, data_traffic, exposed, sent_bytes
from scaletrain_cli.plan.speed.step_time import stage_bytes
from scaletrain_cli.plan.stages import Stage
from scaletrain_cli.spec import RunSpec
from tests.counting import calls_of
from tests.plan.specs import spec_of


def run(zero_stage: int = 1, checkpointing: str = "none", **spec: Any) -> tuple[RunSpec, Layout]:
    made = spec_of("llama-7b", **{"training__global_batch_size": 64, "training__micro_batch_size": 1, **spec})
    return made, build_layout(made, resolve_axes(made), zero_stage, checkpointing, 1)


WHOLE = Stage(0, 32, 32, True, True)


def small_model(**overrides: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
    sizes |= {"head_dim": 8, "intermediate_size": 128, "vocab_size": 512}
    return {f"model__{key}": value for key, value in (sizes | overrides).items()}


def _shards_norms(spec: RunSpec, layout: Layout) -> bool:
    return framework_of(spec).shards_norms(spec, layout)


def data_bytes(framework: str, zero_stage: int, parameters: int = 8_000_000, **groups: int) -> int:
    spec, layout = run(zero_stage, planner__framework=framework, **groups)
    device = find_accelerator(spec.cluster)
    profile = FRAMEWORKS[framework].profile_on(device)
    return data_traffic(spec, layout, cluster_link(spec.cluster, device), profile, parameters, 32).sent


def test_tensor_parallelism_sends_four_all_reduces_per_block_and_five_if_it_is_recomputed() -> None:
    spec, layout = run(layout__tensor_parallel=8)
    payload = 4096 * 4096 * 2  # tokens, channels, bytes
    ends = 2 * 64 * 2 * payload * 7 // 8 + 64 * 2 * 16 * 4096 * 7 // 8  # embedding, head, and the loss of each token
    assert sent_bytes(spec, layout, WHOLE, 0).tensor == 4 * 32 * 64 * 2 * payload * 7 // 8 + ends
    spec, layout = run(checkpointing="full", layout__tensor_parallel=8)
    assert sent_bytes(spec, layout, WHOLE, 0).tensor == 5 * 32 * 64 * 2 * payload * 7 // 8 + ends


def test_the_bytes_of_a_stage_follow_the_split_of_the_spec() -> None:
    degrees = {"layout__tensor_parallel": 2, "layout__pipeline_parallel": 4}
    spec, layout = run(layout__pipeline_split=[5, 9, 9, 9], **degrees)
    first, second = (stage_bytes(spec, layout, find_accelerator(spec.cluster), at).tensor for at in (0, 1))
    # Two parts per all-reduce: four per block, and one of the embedding. One part per gathered activation.
    assert first * (2 * 4 * 9 + 3) == second * (2 * (4 * 5 + 1) + 2)


def test_a_pipeline_sends_one_activation_each_way() -> None:
    spec, layout = run(layout__pipeline_parallel=8)
    inner, first = Stage(1, 4, 4, False, False, 4), Stage(0, 4, 4, True, False)
    assert sent_bytes(spec, layout, inner, 0).pipeline == 2 * 64 * 4096 * 4096 * 2
    assert sent_bytes(spec, layout, first, 0).pipeline == 64 * 4096 * 4096 * 2


@pytest.mark.parametrize(("position", "gathers"), [(0, 2), (1, 3), (2, 1)])
def test_tensor_ranks_of_a_pipeline_gather_the_activations_that_they_share(position: int, gathers: int) -> None:
    degrees = {"layout__tensor_parallel": 4, "layout__pipeline_parallel": 3}
    stage = Stage(position, 4, 4, position == 0, position == 2, 4 * position)
    spec, layout = run(**degrees, cluster__nodes=3, training__global_batch_size=48)
    m = layout.gradient_accumulation_steps
    alone = sent_bytes(spec, replace(layout, pipeline_parallel=1), stage, 0)
    there = sent_bytes(spec, layout, stage, 0)
    payload = 4096 * 4096 * 2
    assert there.tensor - alone.tensor == gathers * m * payload * 3 // 4
    assert there.pipeline == ((position > 0) + (position < 2)) * m * payload // 4


# Seven of eight parts of 8 million parameters; 8 micro-batches. ZeRO, arXiv:1910.02054, section 7.
@pytest.mark.parametrize(
    ("framework", "stage", "expected"),
    [
        ("megatron", 0, 2 * 4 * 7_000_000),  # an all-reduce of fp32 gradients
        ("megatron", 1, (4 + 2) * 7_000_000),  # scattered gradients, gathered weights
        ("nanotron", 1, (4 + 2) * 7_000_000),
        ("deepspeed", 1, (2 * 2 + 2) * 7_000_000),  # 16 bits, but reduced for all
        ("deepspeed", 2, (8 * 2 * 2 + 2) * 7_000_000),
        ("fsdp", 3, 8 * (2 * 2 + 4) * 7_000_000),
    ],
)
def test_each_framework_has_its_own_traffic(framework: str, stage: int, expected: int) -> None:
    assert data_bytes(framework, stage) == expected


@pytest.mark.parametrize("stage", [2, 3])
def test_fsdp_gathers_and_reduces_once_per_step_with_a_pipeline(stage: int) -> None:
    """As its memory: torch's stages keep weights and gradients whole until the last micro-batch."""
    assert data_bytes("fsdp", stage, layout__pipeline_parallel=2, cluster__nodes=2) == (2 + 4) * 7_000_000


def test_overlapped_communication_slows_compute() -> None:
    assert exposed(1.0, 10.0, 1.0) == pytest.approx(CONTENTION)
    assert exposed(1.0, 10.0, 0.0) == 1.0
    assert exposed(5.0, 2.0, 1.0) == pytest.approx(3.0 + 2.0 * CONTENTION)


def test_norms_are_sharded_where_the_framework_or_the_spec_says_so() -> None:
    for framework, expected in (("deepspeed", False), ("megatron", True), ("nanotron", True)):
        assert _shards_norms(*run(layout__tensor_parallel=2, planner__framework=framework)) is expected
    assert not _shards_norms(*run(planner__framework="megatron"))
    pinned: dict[str, Any] = {"layout__tensor_parallel": 2, "layout__tensor_sequence_parallel": False}
    assert not _shards_norms(*run(planner__framework="megatron", **pinned))


@pytest.mark.parametrize(("groups", "ranks"), [({}, 8), ({"zero_shard_size": 4}, 4)])
def test_zero_3_gathers_the_ends_once_per_micro_batch_and_norms_once_a_step(groups: dict[str, int], ranks: int) -> None:
    norms, table, block = 65 * 4096, 32_000 * 4096, 4 * 4096**2 + 3 * 4096 * 11_008
    every = norms + 2 * table + 32 * block
    kept = table + (1_000_000_000 - table) // block * block + 4096 * 11_008  # and the last matrix of the block before
    gathered = 8 * (2 * (every - norms) - kept) + norms  # elements, 8 micro-batches
    across = 4 * every // 4 if groups else 0  # fp32 gradients of a shard, averaged over 2 groups
    sizes = {f"layout__{key}": size for key, size in groups.items()}
    sent = data_bytes("deepspeed", 3, every, layout__zero_stage=3, **sizes)
    assert sent == (2 * gathered + 8 * 2 * every) * (ranks - 1) // ranks + across


@pytest.mark.parametrize("mixture", [{}, {"num_experts": 10**9, "num_experts_per_tok": 1}])
def test_the_bytes_of_zero_3_do_not_take_longer_to_count_for_more_layers(mixture: dict[str, int]) -> None:
    calls = []
    for layers in (10, 10, 10**9):  # what is computed once is computed the first time
        spec, layout = run(3, **small_model(num_hidden_layers=layers, **mixture))
        device = find_accelerator(spec.cluster)
        profile = FRAMEWORKS["deepspeed"].profile_on(device)
        count = partial(data_traffic, spec, layout, cluster_link(spec.cluster, device), profile, 10**12, 10**9)
        assert count().sent > 0
        calls.append(calls_of(count))
    assert calls[2] < 2 * calls[1]


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("model", [{}, {"qkv_bias": True, "qk_norm": True}, {"family": "gpt"}])
def test_small_tensors_are_those_of_the_files(tensor: int, model: dict[str, Any]) -> None:
    spec, _ = run(3, **small_model(**model))
    most = 64 * 64
    sizes = [each.numel // (1 if each.tensor_dim is None else tensor) for each in model_parameters(spec.transformer)]
    assert elements_in_small_tensors(spec.transformer, tensor, most) == sum(size for size in sizes if size <= most)


def test_the_second_copy_of_weights_is_gathered_from_after_the_first_pass() -> None:
    norms, one = 3 * 4096, 2 * 32_000 * 4096 + 4 * 4096**2 + 3 * 4096 * 11_008
    every = norms + one  # all of a model of one block stays from the forward to the backward pass
    second = {"layout__zero_stage": 3, "layout__zero_secondary_shard_size": 4}
    sent = data_bytes("deepspeed", 3, every, **second, model__num_hidden_layers=1)
    first, others = (one + norms) * 2 * 7 // 8, 7 * one * 2 * 3 // 4
    assert sent == first + others + 8 * 2 * every * 7 // 8


def test_fp32_adapters_are_reduced_and_gathered_in_fp32() -> None:
    adapter = {"model__adapter": {"name": "lora", "rank": 16}, "model__weights": "/weights"}
    trained, parameters = 1_000_000, 8_000_000

    def sent(zero_stage: int, **changes: Any) -> int:
        spec, layout = run(zero_stage, **{**adapter, **changes})
        device = find_accelerator(spec.cluster)
        profile = FRAMEWORKS["deepspeed"].profile_on(device)
        return data_traffic(spec, layout, cluster_link(spec.cluster, device), profile, parameters, 32, trained).sent

    both = {"training__trainable": [{"match": "*norm*"}]}  # then factors have 16 bits
    assert sent(1) == 7 / 8 * (2 * 4 + 4) * trained == 2 * sent(1, **both)
    assert sent(2) == 7 / 8 * (8 * 2 * 4 + 4) * trained
    gathered = 2 * (parameters - trained) + 4 * trained  # once in a step: factors, norms and their like are never freed
    assert sent(3) == 7 / 8 * (gathered + 8 * 4 * trained)


@pytest.mark.parametrize(
    ("stage", "groups", "expected"),
    [
        # 8 micro-batches of 8 million parameters on 8 ranks; gradients are reduced in 2 bytes and accumulated in 4.
        # An all-reduce of the shard, 2 million elements, over 2 groups sends as much as it has.
        (2, {"zero_shard_size": 2}, (8 * 2 * 2 + 2) * 4_000_000 + 2 * 4 * 4_000_000 * 3 // 4)
    ],
)
def test_groups_of_ranks_gather_from_their_neighbors(stage: int, groups: dict[str, int], expected: int) -> None:
    sizes = {f"layout__{key}": size for key, size in groups.items()}
    assert data_bytes("deepspeed", stage, layout__zero_stage=stage, **sizes) == expected


def test_a_second_copy_takes_all_gathers_but_the_first_off_the_network() -> None:
    # hpZ (arXiv:2306.10209, section 3.3): 8 billion 16-bit weights on two nodes of H100, 8 micro-batches. Once
    # 16 GB x 15/16 at the 17 GB/s that ZeRO-3 reaches between nodes, 15 times 16 GB x 7/8 at 0.8 of 450 GB/s.
    between, inside = 16 * 15 / 16 / 17, 16 * 7 / 8 / (0.8 * 450)
    traffics = []
    for size in (1, 8):
        spec, layout = run(
            3,
            cluster__nodes=2,
            training__global_batch_size=128,
            layout__zero_stage=3,
            layout__zero_secondary_shard_size=size,
        )
        device = find_accelerator(spec.cluster)
        profile = FRAMEWORKS["deepspeed"].profile_on(device)
        traffics.append(data_traffic(spec, layout, cluster_link(spec.cluster, device), profile, 8_000_000_000, 32))
    one, second = traffics
    assert (one.forward, one.backward) == pytest.approx((between, 2 * between), rel=0.03)
    assert second.forward == pytest.approx((between + 7 * inside) / 8, rel=0.06)
    assert second.backward == pytest.approx(between + inside, rel=0.03)


def test_ring_attention_hides_half_of_the_exchange_of_keys_and_values() -> None:
    # Llama 7B, 32,768 tokens on four H100: keys and values of 8,192 tokens, 4,096 channels and 2 bytes, travel three
    # times forward; backward their gradients in fp32 too (engine/parallel/sequence.py). 0.8 of 450 GB/s.
    spec, layout = run(cluster__gpus_per_node=4, model__seq_len=32768, layout__context_parallel=4)
    device = find_accelerator(spec.cluster)
    profile = FRAMEWORKS["deepspeed"].profile_on(device)
    found = block_traffic(spec, layout, cluster_link(spec.cluster, device), profile)
    sent = 3 * 2 * 8192 * 4096 * 2 / (0.8 * 450e9)
    assert (found.forward, found.backward) == pytest.approx((sent / 2, 3 * sent / 2), rel=0.06)
