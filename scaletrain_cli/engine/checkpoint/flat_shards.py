"""The flat shards of a rank: where ZeRO places slices of parameters in the tensors that the optimizer updates."""

from collections.abc import Container, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scaletrain_cli.engine.checkpoint.shard_file import Slice
from scaletrain_cli.engine.model.materialization import Matrix, matrices_of, stored_buffers
from scaletrain_cli.engine.optim.deepspeed_optimizer import counter_names, in_memory, master_weights
from scaletrain_cli.engine.parallel.expert import is_sharded_over_experts
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh, shard_spec_of


class PlacedSlice(NamedTuple):
    """A slice, and the position of its first element in the flat shard."""

    slice: Slice
    offset: int


@dataclass(frozen=True)
class FlatShard:
    """One flat tensor that the optimizer updates, with padding between and after its slices.

    ``owned``: the slices that this rank saves. Of slices that several ranks have, one rank saves each.
    """

    index: int
    numel: int
    slices: tuple[PlacedSlice, ...]
    owned: tuple[PlacedSlice, ...]


@dataclass(frozen=True)
class FrozenShard:
    """A parameter that does not train now, in the dtype of the forward pass; ZeRO-3 has a part of it on this rank.

    Or a buffer, which every rank has whole, in its own dtype.

    ``slices`` and ``owned``: as in a FlatShard, placed in the flattened part of this rank.
    """

    parameter: Tensor
    slices: tuple[PlacedSlice, ...]
    owned: tuple[PlacedSlice, ...]

    @property
    def values(self) -> Tensor:
        """The flat values on this rank."""
        return getattr(self.parameter, "ds_tensor", self.parameter).detach().view(-1)


class ShardedState:
    """The flat shards of a rank, and access to their tensors."""

    def __init__(self, engine: Any, model: nn.Module, mesh: Mesh, base: Container[str] = ()) -> None:
        """Call it after DeepSpeed has started. ``base``: names of parameters that checkpoints do not store."""
        self._engine, self.device = engine, torch.device(engine.device)
        self._optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self.shards = list(_flat_shards(engine, model, mesh))
        self.frozen = list(_frozen_shards(engine, model, mesh, base))
        self.buffers = list(_buffer_shards(model, mesh))

    @property
    def owned(self) -> dict[str, Slice]:
        """The slices that this rank saves, by name: of one parameter at most one."""
        return {placed.slice.name: placed.slice for shard in self._all for placed in shard.owned}

    @property
    def needed(self) -> list[Slice]:
        """The slices that this rank reads from a checkpoint."""
        return [placed.slice for shard in self._all for placed in shard.slices]

    @property
    def _all(self) -> list[FlatShard | FrozenShard]:
        return [*self.shards, *self.frozen, *self.buffers]

    @contextmanager
    def weight(self, shard: FlatShard) -> Generator[Tensor]:
        """Yield the flat fp32 weights of a shard; changes are kept."""
        if self._engine.zero_optimization_stage() == 3:
            with in_memory(self._engine.optimizer, shard.index) as weight:
                yield weight
        else:
            yield master_weights(self._engine)[shard.index]

    def optimizer_states(self, weight: Tensor) -> dict[str, Any]:
        """Return the optimizer's states of a weight that ``weight`` yielded; empty before its first update."""
        states: dict[str, Any] = self._optimizer.state[weight]
        return states

    def counter_names(self) -> set[str]:
        return counter_names(self._optimizer)

    def place_of_counts(self, weight: Tensor) -> torch.device | None:
        """Return the device of the tensor that counts a weight's steps; None if the optimizer counts without one."""
        kind = type(self._optimizer)
        if not (kind.__module__.startswith("torch.") or getattr(kind, "counts_like_torch", False)):
            return None
        beside = self._optimizer.defaults.get("fused") or self._optimizer.defaults.get("capturable")
        return weight.device if beside else torch.device("cpu")


class _Segment(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter or buffer, at ``offset`` in a flat shard."""

    parameter: Any
    start: int
    stop: int
    offset: int


def _flat_shards(engine: Any, model: nn.Module, mesh: Mesh) -> Iterator[FlatShard]:
    stage, matrices = engine.zero_optimization_stage(), matrices_of(model)
    segments_of_holders = _stage_3(engine.optimizer) if stage == 3 else _flat(engine, model)
    for index, (numel, segments) in enumerate(segments_of_holders):
        slices: list[PlacedSlice] = []
        owned: list[PlacedSlice] = []
        for segment in segments:
            of_segment = list(_slices_of(matrices[segment.parameter], segment))
            slices += of_segment
            owned += _owned(of_segment, segment.parameter, mesh, sharded=stage > 0)
        yield FlatShard(index, numel, tuple(slices), tuple(owned))


def _frozen_shards(engine: Any, model: nn.Module, mesh: Mesh, base: Container[str]) -> Iterator[FrozenShard]:
    sharded = engine.zero_optimization_stage() == 3
    for parameter, matrices in matrices_of(model).items():
        stored = [matrix for matrix in matrices if matrix.name not in base]
        if parameter.requires_grad or not stored:
            continue
        whole: Any = parameter
        start, stop = 0, whole.numel()
        if sharded:
            length = whole.ds_tensor.numel()
            start = min(length * whole.ds_zero_partition_rank, whole.ds_numel)
            stop = min(start + length, whole.ds_numel)
        slices = list(_slices_of(stored, _Segment(parameter, start, stop, 0)))
        yield FrozenShard(parameter, tuple(slices), tuple(_owned(slices, parameter, mesh, sharded=sharded)))


def _buffer_shards(model: nn.Module, mesh: Mesh) -> Iterator[FrozenShard]:
    mesh = replace(mesh, synchronous=mesh.replicas)  # groups of local SGD have them alike
    for buffer, matrix in stored_buffers(model):
        slices = list(_slices_of([matrix], _Segment(buffer, 0, buffer.numel(), 0)))
        yield FrozenShard(buffer, tuple(slices), tuple(_owned(slices, buffer, mesh, sharded=False)))


def _stage_3(optimizer: Any) -> Iterator[tuple[int, list[_Segment]]]:
    for group in optimizer.fp16_groups:
        segments, numel = [], 0
        for parameter in group:
            _, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = length * optimizer._get_param_partition_rank(parameter)
            stop = min(start + length, parameter.ds_numel)
            segments += [_Segment(parameter, start, stop, offset)] if start < stop else []
            numel += length
        yield numel, segments


def _flat(engine: Any, model: nn.Module) -> Iterator[tuple[int, list[_Segment]]]:
    weights = master_weights(engine)
    segments: list[list[_Segment]] = [[] for _ in weights]
    for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        if engine.zero_optimization_stage() == 0:
            segments[number] = [_Segment(parameter, 0, parameter.numel(), 0)]
        elif (mapping := parameter._hp_mapping) is not None:  # type: ignore[attr-defined]
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            segment = _Segment(parameter, here.start, here.start + here.numel, there.start)
            segments[mapping.param_group_index].append(segment)
    for weight, parts in zip(weights, segments, strict=True):
        yield weight.numel(), parts


def _slices_of(matrices: list[Matrix], segment: _Segment) -> Iterator[PlacedSlice]:
    for matrix in matrices:
        start, stop = max(matrix.start, segment.start), min(matrix.stop, segment.stop)
        if start < stop:
            part = Slice(matrix.name, matrix.whole_shape, matrix.shard_spec, start - matrix.start, stop - matrix.start)
            yield PlacedSlice(part, segment.offset + start - segment.start)


def _owned(slices: list[PlacedSlice], parameter: Any, mesh: Mesh, *, sharded: bool) -> list[PlacedSlice]:
    """Return the slices that this rank saves.

    Of equal copies on tensor ranks and pipeline ends the first rank saves all; replicas save a share each.
    """
    alike = shard_spec_of(parameter) is None and mesh.tensor.rank > 0
    if alike or getattr(parameter, "ds_pipe_replicated", False):
        return []
    if sharded:  # ZeRO leaves no equal copies on the ranks over which it shards
        replicas = mesh.copies
    else:
        replicas = mesh.expert_replicas if is_sharded_over_experts(parameter) else mesh.synchronous
    return [share for placed in slices if (share := _share(placed, replicas)).slice.numel > 0]


def _share(placed: PlacedSlice, axis: Axis) -> PlacedSlice:
    """Return this rank's part of a slice, one of ``axis.size`` equal parts; the last ones may be shorter or empty."""
    numel = placed.slice.numel
    length = -(-numel // axis.size)
    start, stop = min(numel, length * axis.rank), min(numel, length * (axis.rank + 1))
    first = placed.slice.start
    return PlacedSlice(replace(placed.slice, start=first + start, stop=first + stop), placed.offset + start)
