"""Pipeline stages: the blocks of each, their parameters on a rank, tokens and micro-batches in flight."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from scaletrain_cli.plan.architecture import (
    Architecture,
    architecture,
    attention_matmul_flops,
    block_attention_flops,
    head_flops,
    mean_block_flops,
    mlp_matmul_flops,
)
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import ModelSpec, RunSpec

# Models with more blocks are divided by number, not by cost: none is published, and a typing error in a spec must not
# take minutes.
MOST_BLOCKS = 4096


@lru_cache(maxsize=4096)
def blocks_per_stage(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """Return the number of blocks on each stage of this project's engine; they minimize the time of the slowest stage.

    The cost of a stage is the forward FLOPs of its blocks; the last stage also has the head. (The backward pass takes
    twice as long for both, and the embedding lookup almost no time.) All blocks count the same, with or without
    experts. Blocks left over by the division go to the stages just before the last one, because these hold fewer
    micro-batches in flight than the first. Every stage gets at least one block; ``stages`` must not exceed the number
    of blocks.
    """
    layers = model.num_hidden_layers
    if stages == 1:
        return (layers,)
    block = attention_matmul_flops(model) + block_attention_flops(model)
    block += mlp_matmul_flops(model, experts=bool(model.num_experts))
    if model.block_types:
        block = mean_block_flops(model)
    head = head_flops(model)
    others, most = stages - 1, layers - (stages - 1)
    even = (layers * block - others * head) // (stages * block)  # blocks with which the last stage has average cost

    def cost(last: int) -> tuple[int, int, int]:
        blocks, left = divmod(layers - last, others)
        slowest = max((blocks + (left > 0)) * block, last * block + head)
        squares = left * (blocks + 1) ** 2 + (others - left) * blocks**2
        return slowest, squares * block**2 + (last * block + head) ** 2, last

    last = min((min(max(1, even + near), most) for near in (-1, 0, 1, 2)), key=cost)
    blocks, left = divmod(layers - last, others)
    return (*[blocks] * (others - left), *[blocks + 1] * left, last)


# In a pipeline with more stages only the first, second and last are sized: no published run has more, and a typing
# error in a spec must not take minutes.
MOST_STAGES = 64


@dataclass(frozen=True)
class Shard:
    """Parameters on one rank of a stage, before ZeRO, which shards dense ones over all ranks and experts over fewer."""

    dense: int
    experts: int
    largest_block: int

    @property
    def parameters(self) -> int:
        return self.dense + self.experts


class Stage(NamedTuple):
    """One pipeline stage: its number of blocks, of which ``dense`` have no experts.

    ``first``: it has the embedding; ``last``: it has the final norm, the head and the loss. ``start``: number of its
    first block, from 0.
    """

    position: int
    blocks: int
    dense: int
    first: bool
    last: bool
    start: int = 0


def engine_stages(model: ModelSpec, stages: int, split: tuple[int, ...] = ()) -> tuple[Stage, ...]:
    """Return the pipeline stages of this project's engine; only the first, second and last of a very long pipeline."""
    return stages_of(model, stages, blocks_per_stage, split)


def stages_in(spec: RunSpec, layout: Layout) -> tuple[Stage, ...]:
    """Return the pipeline stages of a run of this project's engine under a layout."""
    return engine_stages(spec.transformer, layout.pipeline_parallel, layout.pipeline_split)


@lru_cache(maxsize=1024)
def stages_of(
    model: ModelSpec,
    stages: int,
    blocks_by_stage: Callable[[ModelSpec, int], tuple[int, ...]],
    split: tuple[int, ...] = (),
) -> tuple[Stage, ...]:
    """Return the pipeline stages; ``blocks_by_stage(model, stages)`` returns the number of blocks on each.

    ``split``: these numbers, if user or planner have set them.
    """
    indices = range(stages) if stages <= MOST_STAGES else (0, 1, stages - 1)
    if model.num_hidden_layers <= MOST_BLOCKS or split:
        all_stages = stages_with(model, split or blocks_by_stage(model, stages))
        return tuple(all_stages[index] for index in indices)
    blocks, left = divmod(model.num_hidden_layers, stages)
    return tuple(
        _stage(model, index, blocks + (index < left), index * blocks + min(index, left), index == stages - 1)
        for index in indices
    )


@lru_cache(maxsize=1024)
def stages_with(model: ModelSpec, blocks: tuple[int, ...]) -> tuple[Stage, ...]:
    """Return all pipeline stages, with these numbers of blocks."""
    places = enumerate(zip(blocks, accumulate(blocks, initial=0), strict=False))
    return tuple(_stage(model, index, count, start, index == len(blocks) - 1) for index, (count, start) in places)


def _stage(model: ModelSpec, index: int, count: int, start: int, last: bool) -> Stage:
    return Stage(index, count, model.dense_blocks(start, count), index == 0, last, start)


@lru_cache(maxsize=1024)
def first_alike(stages: tuple[Stage, ...]) -> tuple[int, ...]:
    """Return for each stage the place of the first one with the same ends and as many blocks with and without experts.

    In a model with a pattern of blocks, or of which blocks train different parts, such stages may still differ.
    """
    first: dict[Stage, int] = {}
    alike = (stage._replace(position=0, start=0) for stage in stages)
    return tuple(first.setdefault(stage, place) for place, stage in enumerate(alike))


def rank_architecture(spec: RunSpec, layout: Layout) -> Architecture:
    """Return the parameters that one rank holds under tensor and expert parallelism, of all stages."""
    return architecture(spec.transformer, layout.tensor_parallel, layout.expert_parallel)


@lru_cache(maxsize=4096)
def stage_shard(per_rank: Architecture, stage: Stage, expert_share: float = 1.0) -> Shard:
    """Return the parameters on one rank of one stage.

    ``per_rank``: see ``rank_architecture``.
    ``expert_share``: factor on the routed experts, which are sharded over expert_tensor instead of tensor ranks.
    """
    dense = sum(times * block.shared for block, times in per_rank.kinds(stage.start, stage.blocks))
    if stage.first:
        dense += per_rank.embedding
    if stage.last:
        dense += per_rank.final_norm + per_rank.head
        if not per_rank.head and not stage.first:
            dense += per_rank.embedding  # a tied head needs a copy of an embedding that is on another stage
    routed = per_rank.block.routed
    if expert_share != 1.0:
        routed = round(routed * expert_share)
    largest = max((block.shared for block in per_rank.blocks.values() if not block.experts), default=0)
    return Shard(dense, (stage.blocks - stage.dense) * routed, max(largest, per_rank.block.shared + routed))


def zero_shards(layout: Layout) -> int:
    """Return the number of ranks over which ZeRO shards dense parameters.

    The replicas of a group of local SGD, or with ``layout.zero_shard_size`` a group of all replicas.
    """
    alike = replicas(layout) // layout.local_sgd_groups
    return min(layout.zero_shard_size, alike) or alike


def replicas(layout: Layout) -> int:
    """Return the number of ranks that have the same part of the model: data x sequence x context."""
    return layout.data_parallel * layout.sequence_parallel * layout.context_parallel


def sequence_multiple(sequence: int, context: int) -> int:
    """Return the number that the length of a sequence must be a multiple of, to be sharded over its ranks.

    Context ranks have two equal chunks each, so that causal attention costs each the same.
    """
    return math.lcm(2 * context, context * sequence) if context > 1 else sequence


def rows_per_sample(spec: RunSpec) -> int:
    """Return the rows of a batch that one sample has: 2 for a pair of preferred and rejected answer, otherwise 1."""
    return spec.units_per_sample // spec.transformer.seq_len


def local_tokens(spec: RunSpec, layout: Layout) -> int:
    """Return the tokens of one micro-batch on one rank."""
    ranks = layout.sequence_parallel * layout.context_parallel
    return layout.micro_batch_size * rows_per_sample(spec) * -(-spec.transformer.seq_len // ranks)


def chunks_in_flight(layout: Layout, index: int) -> int:
    """Return the micro-batches in flight on stage ``index``, counted once per virtual stage.

    With v virtual stages on each of p stages (interleaved 1F1B), stage i runs 2 (p - 1 - i) + (v - 1) p forward passes
    before its first backward pass (Megatron-LM, pipeline_parallel/schedules.py get_pp_rank_microbatches), and then one
    more.
    """
    return chunks_of_schedule(
        layout.gradient_accumulation_steps, layout.pipeline_parallel, layout.virtual_pipeline, index
    )


def chunks_of_schedule(micro_batches: int, stages: int, chunks: int, index: int) -> int:
    """Return the same as ``chunks_in_flight`` for numbers in place of a layout.

    ``stages``: of the pipeline; ``chunks``: virtual stages on each; ``index``: the stage.
    """
    if chunks == 1 or stages == 1:
        return chunks * min(micro_batches, stages - index)
    warm_up = 2 * (stages - 1 - index) + (chunks - 1) * stages
    return min(warm_up + 1, micro_batches * chunks)
