"""Gives a model outlined on the meta device its weights, module by module. Knows nothing of where they come from.

With ZeRO-3 each module is sharded as soon as it is real, so that no rank ever holds the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from scaletrain_cli.engine.parallel.shard_spec import ShardSpec, cut_of


class WeightSource(Protocol):
    """Something that knows every parameter by its Hugging Face name."""

    def read(self, name: str, whole_shape: tuple[int, ...], cut: ShardSpec | None) -> Tensor:
        """This rank's piece; ``cut`` is None where every rank holds the whole."""


Partition = Callable[[nn.Module], None]


@torch.no_grad()
def materialise(
    model: nn.Module,
    source: WeightSource,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    partition: Partition | None = None,
) -> None:
    """Replace each parameter on the meta device by a real one from ``source``.

    ``dtype`` is that of the forward pass: DeepSpeed would cast to it, but for a while hold both, and casts no parameter
    that is in shards. Attributes and ties stay. Buffers, which must have values already, are moved. ``partition`` is
    called with each module whose own parameters have become real. Collective when ``partition`` is: every rank of its
    group walks the same modules.
    """
    real: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, outline in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not outline.is_meta:
                continue
            if outline not in real:
                values = torch.empty(outline.shape, device=device, dtype=dtype)
                for matrix in matrices_in(module, prefix, name, outline):
                    _fill(values.view(-1)[matrix.start : matrix.stop], matrix, source)
                real[outline] = nn.Parameter(values, requires_grad=outline.requires_grad)
                real[outline].__dict__.update(outline.__dict__)  # the cut, and DeepSpeed's marks
            setattr(module, name, real[outline])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
        if partition is not None:
            partition(module)


def named_matrices(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and whole shape of all that ``materialise`` would read."""
    seen: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                for matrix in matrices_in(module, prefix, name, parameter):
                    yield matrix.name, matrix.whole_shape


class Matrix(NamedTuple):
    """What a source has under one name, and which elements of a rank's parameter, laid flat, that is."""

    name: str
    whole_shape: tuple[int, ...]
    cut: ShardSpec | None
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def _fill(place: Tensor, matrix: Matrix, source: WeightSource) -> None:
    piece = source.read(matrix.name, matrix.whole_shape, matrix.cut)
    if piece.shape != matrix.shape:
        raise ValueError(f"{matrix.name}: {tuple(piece.shape)} values for {matrix.shape}")
    place.copy_(piece.reshape(-1))


def matrices_in(module: nn.Module, prefix: str, name: str, parameter: nn.Parameter) -> Iterator[Matrix]:
    """One, but several where a module says that its parameters are stacks of them (see mixture.Experts.matrices)."""
    path, cut = f"{prefix}." if prefix else "", cut_of(parameter)
    local: torch.Size = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 empties what is not in use
    shape = tuple(local) if cut is None else cut.whole_shape(local)
    matrices: Callable[[str], list[list[str]]] | None = getattr(module, "matrices", None)
    if matrices is None:
        yield Matrix(path + name, shape, cut, tuple(local), 0)
        return
    start = 0
    for joined in matrices(name):
        part = None if cut is None else ShardSpec(cut.dim - 1, cut.ranks, cut.rank)
        for matrix in joined:
            whole_shape = (shape[1] // len(joined), *shape[2:])
            found = Matrix(path + matrix, whole_shape, part, (local[1] // len(joined), *local[2:]), start)
            yield found
            start = found.stop


def zero3_partition(config: dict[str, Any], mpu: Any) -> Partition:
    """Shards a module's parameters over the data-parallel ranks, as ``deepspeed.initialize`` does with a whole model.

    ``config`` and ``mpu`` are those that ``deepspeed.initialize`` gets later.
    """
    from deepspeed import zero

    group = mpu.get_data_parallel_group() if mpu is not None else None
    first: list[nn.Parameter] = []

    def partition(module: nn.Module) -> None:
        whole = [p for p in module.parameters(recurse=False) if not hasattr(p, "ds_id")]
        if whole and not first:
            # A list of its own, because Init would descend into children that are still on the meta device.
            zero.Init(nn.ParameterList(whole), group, config_dict_or_path=config, mpu=mpu)
            first.append(whole[0])
        elif whole:  # in the same context, because another Init would allocate its own buffers for swapping
            first[0].convert_to_zero_parameters(param_list=whole)  # type: ignore[attr-defined]

    return partition
