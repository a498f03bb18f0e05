"""Gives a model outlined on the meta device its weights, module by module. Knows nothing of where they come from.

With ZeRO-3 each module is sharded as soon as it is real, so that no rank ever holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from scaletrain_cli.engine.model.mixture import Experts
from scaletrain_cli.engine.parallel.cuts import Cut, cut_of


class WeightSource(Protocol):
    """Something that knows every parameter by its Hugging Face name."""

    def read(self, name: str, whole_shape: tuple[int, ...], cut: Cut | None) -> Tensor:
        """This rank's piece; ``cut`` is None where every rank holds the whole."""


Partition = Callable[[nn.Module], None]


@torch.no_grad()
def materialise(
    model: nn.Module, source: WeightSource, device: torch.device, partition: Partition | None = None
) -> None:
    """Replace each parameter on the meta device by a real one from ``source``, fp32 on ``device``.

    Its attributes and its ties stay. Buffers, which must have values already, are moved. ``partition`` is called with each module whose own parameters have become real.
    Collective when ``partition`` is: every rank of its group walks the same modules.
    """
    real: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, outline in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not outline.is_meta:
                continue
            if outline not in real:
                path = f"{prefix}.{name}" if prefix else name
                if isinstance(module, Experts):
                    values = _stack(outline, prefix, module.matrices(name), source)
                else:
                    values = _whole(outline, path, source)
                real[outline] = _real(outline, path, values, device)
            setattr(module, name, real[outline])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
        if partition is not None:
            partition(module)


def _whole(outline: nn.Parameter, name: str, source: WeightSource) -> Tensor:
    cut = cut_of(outline)
    whole_shape = tuple(outline.shape) if cut is None else cut.whole_shape(outline.shape)
    return source.read(name, whole_shape, cut)


def _stack(outline: nn.Parameter, prefix: str, matrices: list[list[str]], source: WeightSource) -> Tensor:
    """Several matrices of the files as one parameter [members, rows, columns]; see Experts."""
    cut = cut_of(outline)
    cut = cut and Cut(cut.dim - 1, cut.ranks, cut.rank)  # of each of them
    shape = torch.Size((outline.shape[1] // len(matrices[0]), outline.shape[2]))
    whole_shape = tuple(shape) if cut is None else cut.whole_shape(shape)
    members = ([source.read(f"{prefix}.{name}", whole_shape, cut) for name in joined] for joined in matrices)
    return torch.stack([torch.cat(member) for member in members])


def _real(outline: nn.Parameter, name: str, values: Tensor, device: torch.device) -> nn.Parameter:
    if values.shape != outline.shape:
        raise ValueError(f"{name}: {tuple(values.shape)} values for a parameter of {tuple(outline.shape)}")
    parameter = nn.Parameter(values.to(device, torch.float32), requires_grad=outline.requires_grad)
    parameter.__dict__.update(outline.__dict__)  # the cut, and DeepSpeed's marks
    return parameter


def zero3_partition(config: dict[str, Any], mpu: Any, dtype: torch.dtype) -> Partition:
    """Shards a module's parameters over the data-parallel ranks, as ``deepspeed.initialize`` does with a whole model.

    ``config`` and ``mpu`` are those that ``deepspeed.initialize`` gets later; ``dtype`` is that of the forward pass,
    because DeepSpeed casts no parameter that is already in shards.
    """
    from deepspeed import zero

    group = mpu.get_data_parallel_group() if mpu is not None else None
    first: list[nn.Parameter] = []

    def partition(module: nn.Module) -> None:
        whole = [p for p in module.parameters(recurse=False) if not hasattr(p, "ds_id")]
        for parameter in whole:
            parameter.data = parameter.data.to(dtype)
        if whole and not first:
            # A list of its own, because Init would descend into children that are still on the meta device.
            zero.Init(nn.ParameterList(whole), group, config_dict_or_path=config, mpu=mpu)
            first.append(whole[0])
        elif whole:  # in the same context, because another Init would allocate its own buffers for swapping
            first[0].convert_to_zero_parameters(param_list=whole)  # type: ignore[attr-defined]

    return partition
