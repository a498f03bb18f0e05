"""What a rank of a pipeline stage holds: its parameters, its tokens, its micro-batches in flight. Counts, no bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from scaletrain_cli.plan.architecture import Architecture
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.stage_blocks import MOST_BLOCKS, blocks_by_stage
from scaletrain_cli.spec import ModelSpec, RunSpec

# Stages beyond these are sized by the first, second and last alone: nobody runs them, and a typing slip must end soon.
MOST_STAGES = 64


@dataclass(frozen=True)
class Shard:
    """Parameters that one rank computes with, by how ZeRO shares them: dense over all ranks, experts over fewer."""

    dense: int
    experts: int
    largest_block: int

    @property
    def parameters(self) -> int:
        return self.dense + self.experts


class Stage(NamedTuple):
    """One pipeline stage: its blocks, of which ``dense`` have no experts, and whether embedding and head are on it."""

    position: int
    blocks: int
    dense: int
    first: bool
    last: bool


def pipeline_stages(spec: RunSpec, pipeline_parallel: int) -> tuple[Stage, ...]:
    """Every stage, or of a very long pipeline the first, second and last."""
    return _stages(spec.transformer, pipeline_parallel, spec.planner.framework)


@lru_cache(maxsize=1024)
def _stages(model: ModelSpec, stages: int, framework: str) -> tuple[Stage, ...]:
    layers, last = model.num_hidden_layers, stages - 1
    plain = model.first_k_dense_replace if model.num_experts else layers
    if layers <= MOST_BLOCKS:
        counts = dict(enumerate(blocks_by_stage(model, stages, framework)))
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
    """The parameters of one rank of one stage; ``whole`` is already cut by tensor and expert parallelism.

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
    """Ranks that ZeRO shares dense parameters over: sequence and context ranks look like data-parallel ones."""
    return layout.data_parallel * layout.sequence_parallel * layout.context_parallel


def local_tokens(spec: RunSpec, layout: Layout) -> int:
    """Tokens of one micro-batch on one rank."""
    cut = layout.sequence_parallel * layout.context_parallel
    return layout.micro_batch_size * -(-spec.transformer.seq_len // cut)


def micro_batches_in_flight(layout: Layout, index: int) -> int:
    """Micro-batches whose activations a stage holds at once under 1F1B (SC21, arXiv:2104.04473, section 2.2.1)."""
    return min(layout.gradient_accumulation_steps, layout.pipeline_parallel - index)


def chunks_in_flight(layout: Layout, index: int) -> int:
    """Micro-batches in flight, counted once per virtual stage.

    Interleaved: a stage issues 2 (p - 1 - i) + (v - 1) p forwards before its first backward (Megatron-LM,
    pipeline_parallel/schedules.py get_pp_rank_microbatches), and then holds one more.
    """
    stages, chunks = layout.pipeline_parallel, layout.virtual_pipeline
    if chunks == 1 or stages == 1:
        return chunks * micro_batches_in_flight(layout, index)
    warm_up = 2 * (stages - 1 - index) + (chunks - 1) * stages
    return min(warm_up + 1, layout.gradient_accumulation_steps * chunks)
