"""The ranks as a grid: which ones work together along each axis of parallelism.

Tensor ranks are neighbours, so that they share a node; then sequence, data, and pipeline slowest, which is the order
of DeepSpeed's PipeModelDataParallelTopology when sequence ranks are hidden among its data-parallel ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from scaletrain_cli.plan.result import Layout


@dataclass(frozen=True)
class Axis:
    """The ranks that differ in one coordinate only. ``group`` is None where this rank is alone."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Mesh:
    """This rank's place. ``replicas`` are data x sequence ranks, which ZeRO shards over; experts are cut over them.

    ``expert_replicas`` hold the same experts.
    """

    pipeline: Axis = Axis()
    data: Axis = Axis()
    sequence: Axis = Axis()
    tensor: Axis = Axis()
    replicas: Axis = Axis()
    expert: Axis = Axis()
    expert_replicas: Axis = Axis()

    pipeline_ends: Axis = Axis()  # the first and the last stage, which share a tied embedding

    @classmethod
    def alone(cls) -> Mesh:
        """One rank."""
        return cls()


def build_mesh(layout: Layout) -> Mesh:
    """Make the process groups of a layout. Collective: every rank calls it once, at the same point."""
    tensor, sequence, data = layout.tensor_parallel, layout.sequence_parallel, layout.data_parallel
    expert, replicas, last_stage = layout.expert_parallel, sequence * data, layout.pipeline_parallel - 1

    def coordinates(rank: int) -> dict[str, int]:
        rest, tensor_rank = divmod(rank, tensor)
        stage, replica = divmod(rest, replicas)
        return {
            "pipeline": stage,
            "data": replica // sequence,
            "sequence": replica % sequence,
            "tensor": tensor_rank,
            "expert": replica % expert,
            "expert_replica": replica // expert,
        }

    def end(rank: int) -> tuple[int, ...]:
        """The same for both ends of a pipeline; of a stage between them, for nobody else."""
        place = coordinates(rank)
        return (place["pipeline"] % max(1, last_stage), place["data"], place["sequence"], place["tensor"])

    def axis(*varying: str) -> Axis:
        return _axis(lambda rank: tuple(v for k, v in coordinates(rank).items() if k not in varying))

    return Mesh(
        pipeline=axis("pipeline"),
        data=axis("data", "expert", "expert_replica"),
        sequence=axis("sequence", "expert", "expert_replica"),
        tensor=axis("tensor"),
        replicas=axis("data", "sequence", "expert", "expert_replica"),
        expert=axis("data", "sequence", "expert"),
        expert_replicas=axis("data", "sequence", "expert_replica"),
        pipeline_ends=_axis(end),
    )


def group_of(ranks: list[int]) -> dist.ProcessGroup:
    """A group that only its members make, for a job of thousands of ranks has thousands. Collective among them.

    torch names it by its ranks and by how many groups this process is in already: all members must be in as many, or
    they wait for each other under different names. Hence the pipeline's ends come last in a mesh.
    """
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _axis(key: Callable[[int], tuple[int, ...]]) -> Axis:
    """Ranks with the same key as this one work together."""
    me = dist.get_rank()
    ranks = [rank for rank in range(dist.get_world_size()) if key(rank) == key(me)]
    return Axis(len(ranks), ranks.index(me), group_of(ranks)) if len(ranks) > 1 else Axis()
