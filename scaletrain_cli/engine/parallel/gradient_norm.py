"""The norm of a gradient whose pieces lie on several ranks, and clipping by it, where DeepSpeed does neither.

For ZeRO stage 0, where gradients are whole parameters' or their cuts'. Knows no optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaletrain_cli.engine.parallel.cuts import cut_of
from scaletrain_cli.engine.parallel.mesh import Mesh


def gradient_norm(parameters: Iterable[nn.Parameter], mesh: Mesh) -> Tensor:
    """The Euclidean norm over the whole model, a scalar on the parameters' device. Collective."""
    cut: list[Tensor] = []
    whole: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            (whole if cut_of(parameter) is None else cut).append(parameter.grad)
    squared = _norm(cut) ** 2
    if mesh.tensor.group is not None:
        squared = squared.to(whole[0].device)
        dist.all_reduce(squared, group=mesh.tensor.group)
    return (squared + _norm(whole) ** 2).sqrt()


def clip(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients so that their norm is at most ``max_norm``; 0 leaves them alone."""
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


def _norm(gradients: list[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
