"""Gradient clipping that DeepSpeed does not have: by value, by adaptive norm, and by norm without ZeRO."""

import math
import statistics
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scaletrain_cli.engine.parallel.expert import is_sharded_over_experts
from scaletrain_cli.engine.parallel.mesh import Mesh, shard_spec_of


def gradient_norm(parameters: Iterable[nn.Parameter], mesh: Mesh) -> Tensor:
    """Return the Euclidean norm of the gradient of the whole model, a scalar on the parameters' device. Collective."""
    shards: dict[tuple[bool, bool], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            place = (shard_spec_of(parameter) is not None, is_sharded_over_experts(parameter))
            shards.setdefault(place, []).append(parameter.grad)
    device = next(iter(shards.values()))[0].device
    squared = torch.zeros(2, 2, device=device)  # by whether tensor ranks and expert ranks hold different shards
    for (over_tensor, over_experts), gradients in shards.items():
        squared[int(over_tensor), int(over_experts)] = torch.nn.utils.get_total_norm(gradients) ** 2
    if mesh.tensor.group is not None:
        dist.all_reduce(squared[1], group=mesh.tensor.group)
    if mesh.expert.group is not None:
        of_experts = squared[:, 1].contiguous()
        dist.all_reduce(of_experts, group=mesh.expert.group)
        squared[:, 1] = of_experts
    return squared.sum().sqrt()


def clip(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients so that their norm is at most ``max_norm``; 0 for no limit."""
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


# Constants of ZClip (arXiv:2504.02507).
_MEMORY = 0.97
_DEVIATIONS = 2.5
_FEWEST_NORMS = 25


def clip_elements(optimizer: torch.optim.Optimizer, limit: float) -> RemovableHandle:
    """Clamp every gradient element to ``limit`` before each optimizer step.

    ``optimizer`` is the one inside DeepSpeed's: there, in every ZeRO stage, gradients are averaged over the replicas,
    unscaled and in fp32, each rank with the part that it updates, so that no communication is needed.
    """

    def clamp(inner: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in inner.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-limit, limit)

    return optimizer.register_step_pre_hook(clamp)


class AdaptiveClip:
    """Clips norms more than 2.5 standard deviations above the running mean (ZClip, arXiv:2504.02507).

    Such a norm is clipped to that threshold and enters the statistics as clipped, so that a spike does not raise the
    threshold. The paper clips further below the threshold the larger the norm; that needs the norm before the threshold
    is known. All ranks see the same norms and keep the same statistics.
    """

    def __init__(self, largest: float) -> None:
        """``largest``: an upper bound of the threshold, 0 for none; the only limit until 25 norms are known."""
        self._largest = largest or math.inf
        self._seen: list[float] = []
        self._mean = self._variance = 0.0

    def threshold(self) -> float:
        """Return the largest norm of the next update; 0 for no limit."""
        bound = min(self._largest, self._unusual())
        return bound if math.isfinite(bound) else 0.0

    def observe(self, norm: float) -> None:
        """Record the norm, before clipping, of an update; a norm that is not finite is ignored."""
        if not math.isfinite(norm):
            return
        if len(self._seen) < _FEWEST_NORMS:
            self._seen.append(norm)
            self._mean = statistics.fmean(self._seen)
            self._variance = statistics.pvariance(self._seen)
        else:
            norm = min(norm, self._unusual())
            self._mean = _MEMORY * self._mean + (1 - _MEMORY) * norm
            self._variance = _MEMORY * self._variance + (1 - _MEMORY) * (norm - self._mean) ** 2

    def _unusual(self) -> float:
        if len(self._seen) < _FEWEST_NORMS:
            return math.inf
        return self._mean + _DEVIATIONS * math.sqrt(self._variance)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self._seen), "mean": self._mean, "variance": self._variance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen, self._mean, self._variance = list(state["seen"]), state["mean"], state["variance"]
