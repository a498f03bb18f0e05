"""The norm of a gradient whose pieces lie on several ranks, and clipping by it, where DeepSpeed does neither.

For ZeRO stage 0, where gradients are whole parameters' or their cuts'. Knows no optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaletrain_cli.engine.parallel.cuts import cut_of
from scaletrain_cli.engine.parallel.expert import is_cut_over_experts
from scaletrain_cli.engine.parallel.mesh import Mesh


def gradient_norm(parameters: Iterable[nn.Parameter], mesh: Mesh) -> Tensor:
    """The Euclidean norm over the whole model, a scalar on the parameters' device. Collective."""
    pieces: dict[tuple[bool, bool], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            place = (cut_of(parameter) is not None, is_cut_over_experts(parameter))
            pieces.setdefault(place, []).append(parameter.grad)
    device = next(iter(pieces.values()))[0].device
    squared = torch.zeros(2, 2, device=device)  # by whether tensor ranks and expert ranks hold different pieces
    for (over_tensor, over_experts), gradients in pieces.items():
        squared[int(over_tensor), int(over_experts)] = torch.nn.utils.get_total_norm(gradients) ** 2
    if mesh.tensor.group is not None:
        dist.all_reduce(squared[1], group=mesh.tensor.group)
    if mesh.expert.group is not None:
        of_experts = squared[:, 1].contiguous()
        dist.all_reduce(of_experts, group=mesh.expert.group)
        squared[:, 1] = of_experts
    return squared.sum().sqrt()


def clip(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients so that their norm is at most ``max_norm``; 0 leaves them alone."""
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
