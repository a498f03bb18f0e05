"""Bytes that a rank sends, counted by hand from the papers, and what overlap leaves of their time."""

from __future__ import annotations

from typing import Any

import pytest

from scaletrain_cli.plan.axes import resolve_axes
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.catalogue.networks import cluster_link
from scaletrain_cli.plan.frameworks.registry import FRAMEWORKS, framework_of
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.search.layouts import build_layout
from scaletrain_cli.plan.speed.communication import CONTENTION, data_traffic, exposed, sent_bytes
from scaletrain_cli.plan.speed.step_time import stage_bytes
from scaletrain_cli.plan.stages import Stage
from scaletrain_cli.spec import RunSpec
from tests.plan.specs import spec_of


def run(zero_stage: int = 1, checkpointing: str = "none", **spec: Any) -> tuple[RunSpec, Layout]:
    made = spec_of("llama-7b", **{"training__global_batch_size": 64, "training__micro_batch_size": 1, **spec})
    return made, build_layout(made, resolve_axes(made), zero_stage, checkpointing, 1)


WHOLE = Stage(0, 32, 32, True, True)


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
    assert first * (4 * 9) == second * (4 * 5 + 1)  # all-reduces of the blocks, and one of the embedding


def test_a_pipeline_sends_one_activation_each_way() -> None:
    spec, layout = run(layout__pipeline_parallel=8)
    inner, first = Stage(1, 4, 4, False, False, 4), Stage(0, 4, 4, True, False)
    assert sent_bytes(spec, layout, inner, 0).pipeline == 2 * 64 * 4096 * 4096 * 2
    assert sent_bytes(spec, layout, first, 0).pipeline == 64 * 4096 * 4096 * 2


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
    frozen, learned = 2 * 2 * (parameters - trained), (2 * 4 + 4) * trained
    assert sent(3) == 8 * 7 / 8 * (frozen + learned)  # 8 micro-batches, each gathers all weights twice


@pytest.mark.parametrize(
    ("stage", "groups", "expected"),
    [
        # 8 micro-batches of 8 million parameters on 8 ranks; gradients are reduced in 2 bytes and accumulated in 4.
        # ZeRO-3 gathers 8 times 2 forward and backward, once of these over all ranks; the other 15 in groups of 4.
        (3, {"zero_secondary_shard_size": 4}, (2 + 8 * 2) * 7_000_000 + 15 * 2 * 6_000_000),
        # An all-reduce of the shard, 2 million elements, over 2 groups sends as much as it has.
        (3, {"zero_shard_size": 4}, 8 * (2 + 2 + 2) * 6_000_000 + 4 * 2_000_000),
        (2, {"zero_shard_size": 2}, (8 * 2 * 2 + 2) * 4_000_000 + 2 * 4 * 4_000_000 * 3 // 4),
        (3, {"zero_shard_size": 8}, 8 * (2 + 2 + 2) * 7_000_000),
    ],
)
def test_groups_of_ranks_gather_from_their_neighbors(stage: int, groups: dict[str, int], expected: int) -> None:
    sizes = {f"layout__{key}": size for key, size in groups.items()}
    assert data_bytes("deepspeed", stage, layout__zero_stage=stage, **sizes) == expected
