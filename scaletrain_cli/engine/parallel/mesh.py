"""Collectives that gradients flow through. Each is the identity, free of charge, where a rank is alone on its axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from scaletrain_cli.plan.result import Layout

# Which piece of a whole parameter a rank holds.


@dataclass(frozen=True)
class ShardSpec:
    """One of ``ranks`` equal slices along ``dim``.

    ``parts``: a fused projection is that many matrices side by side, and each of them is cut (GPT-2's ``c_attn``: 3).
    """

    dim: int
    ranks: int
    rank: int
    parts: int = 1

    def take(self, whole: Tensor) -> Tensor:
        """This rank's slice, a copy."""
        pieces = [part.chunk(self.ranks, self.dim)[self.rank] for part in whole.chunk(self.parts, self.dim)]
        return torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].clone()

    def whole_shape(self, local: torch.Size) -> tuple[int, ...]:
        """The shape before it was cut."""
        return tuple(size * self.ranks if dim == self.dim else size for dim, size in enumerate(local))


def mark_sharded(parameter: nn.Parameter, spec: ShardSpec) -> None:
    """Remember the cut, and tell DeepSpeed that every rank of the model-parallel group counts in the gradient norm."""
    parameter.shard_spec = spec  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.model_parallel = True  # type: ignore[attr-defined]


def shard_spec_of(parameter: nn.Parameter) -> ShardSpec | None:
    """The cut of a parameter, or None where every rank holds the whole."""
    return getattr(parameter, "shard_spec", None)


# The ranks as a grid: which ones work together along each axis of parallelism.


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


def copy_to_ranks(x: Tensor, axis: Axis) -> Tensor:
    """The same tensor on every rank; each uses it differently, so their gradients add up (Megatron-LM's f)."""
    return x if axis.group is None else _Copy.apply(x, axis.group)  # type: ignore[no-untyped-call]


def sum_over_ranks(x: Tensor, axis: Axis) -> Tensor:
    """The sum of every rank's part, on every rank. All use it alike: its gradient is each part's (Megatron-LM's g)."""
    return x if axis.group is None else _Sum.apply(x, axis.group)  # type: ignore[no-untyped-call]


def exchange(x: Tensor, axis: Axis, split_dim: int, join_dim: int) -> Tensor:
    """Return ``x`` split over the ranks along ``split_dim`` and joined along ``join_dim`` (all-to-all)."""
    return x if axis.group is None else _Exchange.apply(x, axis, split_dim, join_dim)  # type: ignore[no-untyped-call]


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, split_dim: int, join_dim: int) -> Tensor:
        ctx.axis, ctx.split_dim, ctx.join_dim = axis, split_dim, join_dim
        return _swap(x, axis, split_dim, join_dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _swap(gradient, ctx.axis, ctx.join_dim, ctx.split_dim), None, None, None


def _swap(x: Tensor, axis: Axis, split_dim: int, join_dim: int) -> Tensor:
    mine = torch.stack(x.chunk(axis.size, split_dim))  # [ranks, ...], contiguous
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=axis.group)
    return torch.cat(theirs.unbind(), join_dim)
