"""The activation of an MLP, and the product of a gated one (arXiv:2002.05202)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

Activation = Callable[[Tensor], Tensor]


def activation_named(name: str) -> Activation:
    """Return SiLU for ``silu``, and otherwise GELU with its approximation by tanh."""
    return F.silu if name == "silu" else gelu_tanh


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU, approximated by tanh."""
    return F.gelu(x, approximate="tanh")


def gated(gate: Tensor, up: Tensor, activation: Activation = F.silu) -> Tensor:
    """Return ``activation(gate) * up``.

    The backward pass keeps ``gate`` and ``up``, and computes the activated gate again. torch.compile decides itself.
    """
    if torch.compiler.is_compiling():
        return activation(gate) * up
    return _Gated.apply(gate, up, activation)  # type: ignore[no-any-return, no-untyped-call]


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up if ctx.needs_input_grad[0] else None)
        ctx.activation = activation
        return activation(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        gate, up = ctx.saved_tensors
        of_gate = of_up = None
        if ctx.needs_input_grad[1]:
            of_up = ctx.activation(gate).mul_(gradient)
        if ctx.needs_input_grad[0]:
            of_gate = gradient * up
            if ctx.activation is F.silu:  # in place: the gradients of a wide MLP are the largest tensors of a block
                torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
            else:
                torch.ops.aten.gelu_backward.grad_input(of_gate, gate, approximate="tanh", grad_input=of_gate)
        return of_gate, of_up, None
