"""The mesh of ranks: process groups by axis of parallelism, shards along them, and differentiable collectives.

Tensor ranks are neighbors, so that they share a node; then come sequence, context, data, and pipeline ranks, which is
the order of DeepSpeed's PipeModelDataParallelTopology with sequence and context ranks among its data-parallel ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.stages import replicas, sequence_multiple, zero_shards


@dataclass(frozen=True)
class ShardSpec:
    """One of ``ranks`` shards along ``dim``, all of one size but for the last one, which may be smaller.

    ``parts``: a fused projection is this many matrices side by side, each of which is sharded (GPT-2's ``c_attn``: 3),
    or the ratio of their widths (Phi-3's ``qkv_proj`` with four queries per key: (4, 1, 1)). ``size``: of the whole
    dimension; None: that of all shards if they are of one size.
    """

    dim: int
    ranks: int
    rank: int
    parts: int | tuple[int, ...] = 1
    size: int | None = field(default=None, compare=False)

    def spans(self, size: int) -> list[tuple[int, int]]:
        """Return (first index, length) of this rank's share of each part, in a whole dimension of ``size``."""
        spans = []
        for first, width in self._parts(size):
            most = -(-width // self.ranks)
            begin = min(self.rank * most, width)
            spans.append((first + begin, min(most, width - begin)))
        return spans

    def held(self, size: int) -> int:
        """Return how much of a whole dimension of ``size`` this rank has."""
        return sum(length for _, length in self.spans(size))

    def take(self, whole: Tensor) -> Tensor:
        """Return this rank's shard, a copy."""
        shards = [whole.narrow(self.dim, *span) for span in self.spans(whole.shape[self.dim])]
        return torch.cat(shards, self.dim) if len(shards) > 1 else shards[0].clone()

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the whole, given the shards of all ranks in order."""
        size = sum(shard.shape[self.dim] for shard in shards)
        spans = [replace(self, rank=rank).spans(size) for rank in range(self.ranks)]
        widths = [[width for _, width in of_rank] for of_rank in spans]
        split = [torch.split(shard, own, self.dim) for shard, own in zip(shards, widths, strict=True)]
        return torch.cat([torch.cat(part, self.dim) for part in zip(*split, strict=True)], self.dim)

    def _parts(self, size: int) -> list[tuple[int, int]]:
        """Return (first index, width) of each part of a whole dimension of ``size``."""
        ratio = (1,) * self.parts if isinstance(self.parts, int) else self.parts
        widths = [size * share // sum(ratio) for share in ratio]
        return [(sum(widths[:number]), width) for number, width in enumerate(widths)]

    def whole_shape(self, local: torch.Size) -> tuple[int, ...]:
        """Return the shape before sharding."""
        return tuple((self.size or size * self.ranks) if dim == self.dim else size for dim, size in enumerate(local))


def mark_sharded(parameter: nn.Parameter, spec: ShardSpec) -> None:
    """Set the shard spec of a parameter, and let DeepSpeed count every model-parallel rank in the gradient norm."""
    parameter.shard_spec = spec  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.model_parallel = True  # type: ignore[attr-defined]


def shard_spec_of(parameter: nn.Parameter) -> ShardSpec | None:
    """Return the shard spec of a parameter; None if every rank has the whole."""
    return getattr(parameter, "shard_spec", None)


@dataclass(frozen=True)
class Axis:
    """The ranks that differ in one coordinate. ``group`` is None if this rank is alone."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def device(self) -> torch.device:
        """The device that collectives over the axis need."""
        on_gpu = self.group is not None and dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


class SequencePart(NamedTuple):
    """The positions of each sequence that a rank holds.

    A sequence is split into 2 x ``context`` chunks. Context rank r holds the chunks r and 2 x ``context`` - 1 - r, so
    that all ranks compute the same number of query-key pairs in causal attention ("zig-zag"). ``sequence`` ranks
    (Ulysses) divide the positions of their context rank in order.
    """

    context: int = 1
    context_rank: int = 0
    sequence: int = 1
    sequence_rank: int = 0

    @property
    def ranks(self) -> int:
        """Return the number of ranks that each sequence is sharded over."""
        return self.context * self.sequence

    @property
    def multiple(self) -> int:
        """Return the number that the length of a sequence must be a multiple of."""
        return sequence_multiple(self.sequence, self.context)

    def spans(self, length: int) -> list[slice]:
        """Return the ranges of this rank's positions in ascending order, in sequences of a length."""
        local = length // self.ranks
        first = self.sequence_rank * local
        if self.context == 1:
            return [slice(first, first + local)]
        chunk, spans = length // (2 * self.context), []
        for number, place in enumerate((self.context_rank, 2 * self.context - 1 - self.context_rank)):
            begin = max(first - number * chunk, 0)
            end = min(first + local - number * chunk, chunk)
            if begin < end:
                spans.append(slice(place * chunk + begin, place * chunk + end))
        return spans

    def take(self, whole: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the values at this rank's positions; the last dimension is the length."""
        parts = [whole[..., span] for span in self.spans(whole.shape[-1])]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)

    def places(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return this rank's positions in sequences of a length, int64 [length / ranks]."""
        return torch.cat([torch.arange(span.start, span.stop, device=device) for span in self.spans(length)])


WHOLE_SEQUENCE = SequencePart()


@dataclass(frozen=True)
class Mesh:
    """This rank's axes. ``replicas`` are data x context x sequence ranks, which ZeRO and experts are sharded over.

    With ``layout.zero_shard_size`` ZeRO shards over ``shards``, a group of neighboring replicas, and ``copies`` are the
    ranks of all groups with the same shards.

    ``sequence`` ranks exchange parts of sequences for heads (Ulysses), ``context`` ranks pass keys and values around;
    ``parts`` are both together, the ranks that have parts of the same sequences. ``expert_replicas`` have the same
    experts.
    """

    pipeline: Axis = Axis()
    data: Axis = Axis()
    context: Axis = Axis()
    sequence: Axis = Axis()
    parts: Axis = Axis()
    tensor: Axis = Axis()
    replicas: Axis = Axis()
    shards: Axis = Axis()
    copies: Axis = Axis()
    expert: Axis = Axis()
    expert_replicas: Axis = Axis()

    synchronous: Axis = Axis()  # replicas that reduce gradients together: all, or those of a group of local SGD
    groups: Axis = Axis()  # ranks of the groups of local SGD that update the same elements

    pipeline_ends: Axis = Axis()  # the first and the last stage, which share a tied embedding

    def without_groups(self) -> "Mesh":
        """Return the same axes without process groups, which another process can get as a pickle."""
        axes = {member.name: getattr(self, member.name) for member in fields(self)}
        return Mesh(**{name: Axis(axis.size, axis.rank) for name, axis in axes.items()})

    @property
    def part(self) -> SequencePart:
        """Return which positions of each sequence this rank has."""
        return SequencePart(self.context.size, self.context.rank, self.sequence.size, self.sequence.rank)


def coordinates_of(layout: Layout, rank: int) -> dict[str, int]:
    rest, tensor_rank = divmod(rank, layout.tensor_parallel)
    stage, replica = divmod(rest, replicas(layout))
    parts = layout.sequence_parallel * layout.context_parallel
    return {
        "pipeline": stage,
        "data": replica // parts,
        "context": replica % parts // layout.sequence_parallel,
        "sequence": replica % layout.sequence_parallel,
        "tensor": tensor_rank,
        "group": replica // parts * layout.local_sgd_groups // layout.data_parallel,
        "shard": replica % zero_shards(layout),
        "copy": replica // zero_shards(layout),
        "expert": replica % layout.expert_parallel,
        "expert_replica": replica // layout.expert_parallel,
    }


def build_mesh(layout: Layout) -> Mesh:
    """Return the mesh of a layout, with new process groups. Collective: every rank calls it once, at the same point."""
    last_stage = layout.pipeline_parallel - 1

    def end(rank: int) -> tuple[int, ...]:
        """Return a key that is equal for both ends of a pipeline, and unique for stages between them."""
        place = coordinates_of(layout, rank)
        others = (place[name] for name in ("data", "context", "sequence", "tensor"))
        return (place["pipeline"] % max(1, last_stage), *others)

    def axis(*varying: str) -> Axis:
        return _axis(lambda rank: tuple(v for k, v in coordinates_of(layout, rank).items() if k not in varying))

    def in_group(rank: int) -> tuple[int, ...]:
        place = coordinates_of(layout, rank)
        return place["pipeline"], place["tensor"], place["group"]

    def beside(rank: int) -> tuple[int, ...]:
        """Return a key that is equal for the ranks at the same place in all groups."""
        place = coordinates_of(layout, rank)
        data = place["data"] % (layout.data_parallel // layout.local_sgd_groups)
        return place["pipeline"], place["tensor"], place["sequence"], place["context"], data

    numbers = ("group", "expert", "expert_replica", "shard", "copy")  # other coordinates of the same replicas
    pipeline, data = axis("pipeline"), axis("data", *numbers)
    context, sequence = axis("context", *numbers), axis("sequence", *numbers)
    parts = sequence if context.size == 1 else context
    if context.size > 1 and sequence.size > 1:
        parts = axis("context", "sequence", *numbers)
    every = ("data", "context", "sequence", "group")
    everyone = axis(*every, "expert", "expert_replica", "shard", "copy")
    synchronous = _axis(in_group) if layout.local_sgd_groups > 1 else everyone
    grouped = layout.zero_shard_size > 0
    return Mesh(
        pipeline=pipeline,
        data=data,
        context=context,
        sequence=sequence,
        parts=parts,
        tensor=axis("tensor"),
        replicas=everyone,
        shards=axis(*every, "expert", "expert_replica", "shard") if grouped else synchronous,
        copies=axis(*every, "expert", "expert_replica", "copy") if grouped else Axis(),
        expert=axis(*every, "expert", "shard", "copy"),
        expert_replicas=axis(*every, "expert_replica", "shard", "copy"),
        synchronous=synchronous,
        groups=_axis(beside) if layout.local_sgd_groups > 1 else Axis(),
        pipeline_ends=_axis(end),
    )


def group_of(ranks: list[int]) -> dist.ProcessGroup:
    """Return a group that only its members create, because thousands of ranks have thousands. Collective among them.

    torch names it by its ranks and by the number of groups this process is in: all members must be in as many, or they
    wait for each other under different names. Hence the pipeline's ends come last in a mesh.
    """
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _axis(key: Callable[[int], tuple[int, ...]]) -> Axis:
    """Return the axis of the ranks with the same key as this one."""
    me = dist.get_rank()
    ranks = [rank for rank in range(dist.get_world_size()) if key(rank) == key(me)]
    return Axis(len(ranks), ranks.index(me), group_of(ranks)) if len(ranks) > 1 else Axis()


def copy_to_ranks(x: Tensor, axis: Axis) -> Tensor:
    """Return ``x``, with the sum of all ranks' gradients in the backward pass (Megatron-LM's f)."""
    return x if axis.group is None else _Copy.apply(x, axis.group)  # type: ignore[no-untyped-call]


def sum_over_ranks(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of ``x`` over the ranks; each rank's gradient is that of the sum (Megatron-LM's g)."""
    return x if axis.group is None else _Sum.apply(x, axis.group)  # type: ignore[no-untyped-call]


def exchange(x: Tensor, axis: Axis, split_dim: int, join_dim: int) -> Tensor:
    """Return ``x`` split over the ranks along ``split_dim`` and joined along ``join_dim`` (all-to-all)."""
    return x if axis.group is None else _Exchange.apply(x, axis, split_dim, join_dim)  # type: ignore[no-untyped-call]


class RingShift:
    """Sends tensors to the rank ``step`` places further in the ring, while as many arrive from the opposite one.

    What is computed until ``wait`` overlaps the messages. The tensors must stay as they are until then.
    """

    def __init__(self, tensors: list[Tensor], axis: Axis, step: int) -> None:
        assert axis.group is not None
        to, source = (dist.get_global_rank(axis.group, (axis.rank + places) % axis.size) for places in (step, -step))
        self._sent, self._arriving = tensors, [torch.empty_like(tensor) for tensor in tensors]
        operations = [dist.P2POp(dist.isend, tensor, to, axis.group) for tensor in tensors]
        operations += [dist.P2POp(dist.irecv, tensor, source, axis.group) for tensor in self._arriving]
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return self._arriving


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
