"""Where a rank's fp32 weights and optimizer states lie in DeepSpeed's wrappers, as pieces of named matrices.

Reads what DeepSpeed 0.19 keeps behind its optimizers: ``_hp_mapping`` of a parameter for stages 1 and 2 and for the
bf16 optimizer of pipelines, ``grad_position`` for stage 3. Knows no file.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scaletrain_cli.engine.checkpoint.slices import Slice
from scaletrain_cli.engine.model.materialization import Matrix, matrices_in
from scaletrain_cli.engine.optim.master_weights import in_memory, master_weights
from scaletrain_cli.engine.parallel.expert import is_cut_over_experts
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh
from scaletrain_cli.engine.parallel.shard_spec import cut_of


class Held(NamedTuple):
    """A piece, and the place of its first element in the holder."""

    piece: Slice
    offset: int


@dataclass(frozen=True)
class FlatShard:
    """One flat tensor that the optimizer updates; padding may lie between and behind its pieces.

    ``owned``: what this rank saves. What several ranks hold alike is in the ``held`` of each and ``owned`` by one.
    """

    index: int
    numel: int
    held: tuple[Held, ...]
    owned: tuple[Held, ...]


class HeldStates:
    """The holders of a rank, and the way into each."""

    def __init__(self, engine: Any, model: nn.Module, mesh: Mesh) -> None:
        """After DeepSpeed has started."""
        self._engine, self.device = engine, torch.device(engine.device)
        self._optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self.holders = list(_holders(engine, model, mesh))

    @contextmanager
    def weight(self, holder: FlatShard) -> Generator[Tensor]:
        """The holder's fp32 weights, flat; what is written there stays."""
        if self._engine.zero_optimization_stage() == 3:
            with in_memory(self._engine.optimizer, holder.index) as weight:
                yield weight
        else:
            yield master_weights(self._engine)[holder.index]

    def optimizer_states(self, weight: Tensor) -> dict[str, Any]:
        """Of a weight that ``weight`` has yielded: the optimizer's own dictionary, empty before its first update."""
        states: dict[str, Any] = self._optimizer.state[weight]
        return states

    def place_of_counts(self, weight: Tensor) -> torch.device | None:
        """Where the optimizer keeps the tensor that counts a weight's steps; None where it counts without one."""
        if not type(self._optimizer).__module__.startswith("torch."):
            return None
        beside = self._optimizer.defaults.get("fused") or self._optimizer.defaults.get("capturable")
        return weight.device if beside else torch.device("cpu")


class _Segment(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter, from ``offset`` on in a holder."""

    parameter: nn.Parameter
    start: int
    stop: int
    offset: int


def _holders(engine: Any, model: nn.Module, mesh: Mesh) -> Iterator[FlatShard]:
    stage, matrices = engine.zero_optimization_stage(), _matrices(model)
    segments_of_holders = _stage_3(engine.optimizer) if stage == 3 else _flat(engine, model)
    for index, (numel, segments) in enumerate(segments_of_holders):
        held: list[Held] = []
        owned: list[Held] = []
        for segment in segments:
            found = list(_pieces(matrices[segment.parameter], segment))
            held += found
            owned += _owned(found, segment.parameter, mesh, sharded=stage > 0)
        yield FlatShard(index, numel, tuple(held), tuple(owned))


def _matrices(model: nn.Module) -> dict[nn.Parameter, list[Matrix]]:
    found: dict[nn.Parameter, list[Matrix]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in found:
                found[parameter] = list(matrices_in(module, prefix, name, parameter))
    return found


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
            found = _Segment(parameter, here.start, here.start + here.numel, there.start)
            segments[mapping.param_group_index].append(found)
    for weight, parts in zip(weights, segments, strict=True):
        yield weight.numel(), parts


def _pieces(matrices: list[Matrix], segment: _Segment) -> Iterator[Held]:
    for matrix in matrices:
        start, stop = max(matrix.start, segment.start), min(matrix.stop, segment.stop)
        if start < stop:
            piece = Slice(matrix.name, matrix.whole_shape, matrix.cut, start - matrix.start, stop - matrix.start)
            yield Held(piece, segment.offset + start - segment.start)


def _owned(found: list[Held], parameter: nn.Parameter, mesh: Mesh, *, sharded: bool) -> list[Held]:
    """Of tensor ranks and of the ends of a pipeline that hold the same the first saves it; replicas share it out."""
    alike = cut_of(parameter) is None and mesh.tensor.rank > 0
    if alike or getattr(parameter, "ds_pipe_replicated", False):
        return []
    if sharded:  # by ZeRO, which leaves no two replicas with the same
        return found
    replicas = mesh.expert_replicas if is_cut_over_experts(parameter) else mesh.replicas
    return [share for held in found if (share := _share(held, replicas)).piece.numel > 0]


def _share(held: Held, axis: Axis) -> Held:
    """One of ``axis.size`` equal parts of a piece; the last ones may be shorter, or empty."""
    numel = held.piece.numel
    length = -(-numel // axis.size)
    start, stop = min(numel, length * axis.rank), min(numel, length * (axis.rank + 1))
    first = held.piece.start
    return Held(replace(held.piece, start=first + start, stop=first + stop), held.offset + start)
