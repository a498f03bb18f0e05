"""Muon: the update, on the elements of each rank, of matrices that ZeRO and tensor parallelism have sharded.

Momentum is elementwise, so each rank keeps that of the elements it updates; matrix_exchange.py orthogonalizes whole
matrices. Gradients are reduced, unscaled and clipped before, in every ZeRO stage. torch.optim.Muon rounds to the dtype
of the iteration first of all, as the exchange does: nothing is lost, and the result is that of one process.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from scaletrain_cli.spec.training import OptimizerSpec

# The key of a parameter group whose matrices are orthogonalized.
ORTHOGONALIZED = "orthogonalized"

# torch.optim.Muon's coefficients of the quintic iteration, which are K. Jordan's, and its least norm.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST_NORM = 1e-7


def newton_schulz(matrix: Tensor, iterations: int) -> Tensor:
    """Return the approximate orthogonal factor of a matrix [rows, columns], in its dtype.

    Each iteration takes X to (a + b X Xᵀ + c (X Xᵀ)²) X. Singular values end between about 0.7 and 1.2.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=_LEAST_NORM)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def rate_factor(rows: int, columns: int, rule: str) -> float:
    """Return the factor of the learning rate of a matrix with ``rows`` outputs and ``columns`` inputs.

    ``original``: sqrt(max(1, rows / columns)) (K. Jordan). ``match_rms_adamw``: 0.2 sqrt(max(rows, columns)), with
    which updates are as large as AdamW's (arXiv:2502.16982, section 2.2).
    """
    return math.sqrt(max(1.0, rows / columns)) if rule == "original" else 0.2 * math.sqrt(max(rows, columns))


# Orthogonalizes matrices that several ranks hold together, given the updates of weights. Yields of each piece (weight,
# offset, values, factor): the orthogonalized values, and the factor of their learning rate. Collective.
Orthogonalize = Callable[[dict[Tensor, Tensor]], Iterator[tuple[Tensor, int, Tensor, float | Tensor]]]


class Muon(torch.optim.Optimizer):
    """Muon for the parameter groups marked with ``ORTHOGONALIZED``, and AdamW for the others.

    ``connect`` must be called once DeepSpeed has replaced the parameters of the groups by its flat parts.
    """

    counts_like_torch = True  # a tensor per weight counts its steps

    def __init__(self, groups: list[dict[str, Any]], settings: OptimizerSpec, fused: bool) -> None:
        self._settings, self._momentum = settings.muon, settings.momentum
        self._orthogonalize: Orthogonalize | None = None
        self._adamw = torch.optim.AdamW(
            [torch.zeros(1)],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            **({"fused": True} if fused else {}),
        )
        super().__init__(groups, self._adamw.defaults)

    def connect(self, orthogonalize: Orthogonalize) -> None:
        """Set how whole matrices are orthogonalized."""
        self._orthogonalize = orthogonalize

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have gradients, which it changes. Collective."""
        loss = None if closure is None else closure()
        others = [group for group in self.param_groups if not group.get(ORTHOGONALIZED)]
        if others:
            self._adamw.param_groups, self._adamw.state = others, self.state
            self._adamw.step()
        updates: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            if group.get(ORTHOGONALIZED):
                for weight in group["params"]:
                    if weight.grad is not None:
                        updates[weight] = self._with_momentum(weight)
                        weight.mul_(1 - group["lr"] * group["weight_decay"])
        if updates:
            assert self._orthogonalize is not None
            rates = {
                weight: group["lr"]
                for group in self.param_groups
                for weight in group["params"]
                if group.get(ORTHOGONALIZED)
            }
            for weight, offset, values, factor in self._orthogonalize(updates):
                part = weight.view(-1)[offset : offset + values.numel()]
                values = values.to(weight.device)
                if isinstance(factor, Tensor):
                    part.addcmul_(values.to(part.dtype), factor.to(weight.device), value=-rates[weight])
                else:
                    part.add_(values, alpha=-rates[weight] * factor)
        return loss

    def _with_momentum(self, weight: Tensor) -> Tensor:
        """Return the update before it is orthogonalized, in the memory of the gradient."""
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        if "step" not in state:
            place = weight.device if self.defaults.get("fused") else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=place)
        state["step"] += 1
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - self._momentum)
        return gradient.lerp_(buffer, self._momentum) if self._settings.nesterov else gradient.copy_(buffer)
