"""Pipeline stages: which blocks each holds, its parameters, its tokens and its micro-batches in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from scaletrain_cli.plan.architecture import (
    Architecture,
    attention_matmul_flops,
    block_attention_flops,
    head_flops,
    mlp_matmul_flops,
)
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import ModelSpec, RunSpec

# More blocks are spread by number, never by cost: no published model has them, and a typing error in a spec must not
# run for minutes.
MOST_BLOCKS = 4096


@lru_cache(maxsize=4096)
def blocks_per_stage(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """Return the blocks on each stage of our engine's pipeline, which minimize the time of the slowest stage.

    A stage costs the forward FLOPs of its blocks, the last one those of the head as well (the backward pass is twice
    the forward for both, and looking up embeddings costs next to nothing). Blocks count alike, with experts or not.
    What does not divide goes to the stages before the last, which hold fewer micro-batches in flight than the first.
    Every stage gets at least one block; ``stages`` must not exceed the blocks.
    """
    layers = model.num_hidden_layers
    if stages == 1:
        return (layers,)
    block = attention_matmul_flops(model) + block_attention_flops(model)
    block += mlp_matmul_flops(model, experts=bool(model.num_experts))
    head = head_flops(model)
    others, most = stages - 1, layers - (stages - 1)
    even = (layers * block - others * head) // (stages * block)  # blocks that give the last stage an average cost

    def cost(last: int) -> tuple[int, int, int]:
        each, left = divmod(layers - last, others)
        slowest = max((each + (left > 0)) * block, last * block + head)
        squares = left * (each + 1) ** 2 + (others - left) * each**2
        return slowest, squares * block**2 + (last * block + head) ** 2, last

    last = min((min(max(1, even + near), most) for near in (-1, 0, 1, 2)), key=cost)
    each, left = divmod(layers - last, others)
    return (*[each] * (others - left), *[each + 1] * left, last)


def blocks_by_number(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of blocks on each stage, spread evenly; the first stages take the remainder."""
    return tuple(layers // stages + (1 if index < layers % stages else 0) for index in range(stages))


# Beyond these stages only the first, second and last are sized: no published run has them, and a typing error
# in a spec must not run for minutes.
MOST_STAGES = 64


@dataclass(frozen=True)
class Shard:
    """Parameters on one rank, by ZeRO sharding: dense ones over all ranks, experts over fewer."""

    dense: int
    experts: int
    largest_block: int

    @property
    def parameters(self) -> int:
        return self.dense + self.experts


class Stage(NamedTuple):
    """One pipeline stage: its blocks, of which ``dense`` have no experts, and whether it has embedding and head."""

    position: int
    blocks: int
    dense: int
    first: bool
    last: bool


def engine_stages(model: ModelSpec, stages: int) -> tuple[Stage, ...]:
    """Return the pipeline stages of this project's engine; of a very long pipeline the first, second and last."""
    return stages_of(model, stages, blocks_per_stage)


@lru_cache(maxsize=1024)
def stages_of(
    model: ModelSpec, stages: int, blocks_by_stage: Callable[[ModelSpec, int], tuple[int, ...]]
) -> tuple[Stage, ...]:
    """Return the pipeline stages with the distribution ``blocks_by_stage``."""
    layers, last = model.num_hidden_layers, stages - 1
    plain = model.first_k_dense_replace if model.num_experts else layers
    if layers <= MOST_BLOCKS:
        counts = dict(enumerate(blocks_by_stage(model, stages)))
        starts = dict(enumerate(accumulate(counts.values(), initial=0)))
    else:
        indices = range(stages) if stages <= MOST_STAGES else (0, 1, last)
        counts = {index: layers // stages + (1 if index < layers % stages else 0) for index in indices}
        starts = {index: index * (layers // stages) + min(index, layers % stages) for index in indices}
    return tuple(
        Stage(index, count, max(0, min(starts[index] + count, plain) - starts[index]), index == 0, index == last)
        for index, count in counts.items()
        if stages <= MOST_STAGES or index in (0, 1, last)
    )


def stage_shard(whole: Architecture, stage: Stage, expert_share: float = 1.0) -> Shard:
    """Return the parameters of one rank of one stage; ``whole`` is already sharded by tensor and expert parallelism.

    ``expert_share``: what a rank holds of the experts that ``whole`` gives it, where these are cut over other ranks.
    """
    dense = stage.dense * whole.dense_block.shared + (stage.blocks - stage.dense) * whole.block.shared
    if stage.first:
        dense += whole.embedding
    if stage.last:
        dense += whole.final_norm + whole.head
        if not whole.head and not stage.first:
            dense += whole.embedding  # a tied head on another stage than the embedding needs a copy
    routed = whole.block.routed
    if expert_share != 1.0:
        routed = round(routed * expert_share)
    return Shard(dense, (stage.blocks - stage.dense) * routed, whole.block.shared + routed)


def zero_shards(layout: Layout) -> int:
    """Return the number of ranks over which ZeRO shards dense parameters; sequence and context ranks count too."""
    return layout.data_parallel * layout.sequence_parallel * layout.context_parallel


def local_tokens(spec: RunSpec, layout: Layout) -> int:
    """Return the tokens of one micro-batch on one rank."""
    cut = layout.sequence_parallel * layout.context_parallel
    return layout.micro_batch_size * -(-spec.transformer.seq_len // cut)


def micro_batches_in_flight(layout: Layout, index: int) -> int:
    """Return the micro-batches in flight on a stage under 1F1B (arXiv:2104.04473, section 2.2.1)."""
    return min(layout.gradient_accumulation_steps, layout.pipeline_parallel - index)


def chunks_in_flight(layout: Layout, index: int) -> int:
    """Return the micro-batches in flight, counted once per virtual stage.

    Interleaved: a stage issues 2 (p - 1 - i) + (v - 1) p forwards before its first backward (Megatron-LM,
    pipeline_parallel/schedules.py get_pp_rank_microbatches), and then holds one more.
    """
    stages, chunks = layout.pipeline_parallel, layout.virtual_pipeline
    if chunks == 1 or stages == 1:
        return chunks * micro_batches_in_flight(layout, index)
    warm_up = 2 * (stages - 1 - index) + (chunks - 1) * stages
    return min(warm_up + 1, layout.gradient_accumulation_steps * chunks)
