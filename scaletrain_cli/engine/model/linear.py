"""Products of linear layers, in fp8 through torchao with ``training.precision: fp8``.

Weights, activations and gradients keep their dtype; the two factors of each product are scaled to fp8 (dynamic
tensor-wise scaling; FP8 formats for deep learning, arXiv:2209.05433). Attention and the head are not in fp8.

The activation of an MLP, and the product of a gated one (arXiv:2002.05202).
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.errors import UsageError
from scaletrain_cli.extras import require
from scaletrain_cli.reasons import Reason

Activation = Callable[[Tensor], Tensor]


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


class Product(Protocol):
    """The product that a linear layer of this package calls, so that it can be replaced."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor: ...


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
    """Return x [..., in] times a weight [out, in], or [in, out] if ``transposed``, plus a bias.

    Under ZeRO-3 the backward pass must not keep the gathered weight. A parameter that is saved itself may be gathered
    again; a transposed view of it is kept. Hence no ``weight.t()``, and F.linear looked up at each call, because
    DeepSpeed replaces it by one without that view (zero/linear.py).
    """
    if not transposed:
        return F.linear(x, weight, bias)
    rows = x.flatten(0, -2)
    product = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return product.view(*x.shape[:-1], -1)


_LEAST_CAPABILITY = (8, 9)  # Ada, Hopper and later have fp8 tensor cores
_MULTIPLE = 16  # for both dimensions, required by torch._scaled_mm


def fp8_problem(device: torch.device) -> Reason | None:
    """Return why a device cannot compute fp8 products; None if it can."""
    if device.type != "cuda":
        return Reason("engine.fp8-needs-nvidia-gpu", {"device": device.type})
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        params = {"device": torch.cuda.get_device_name(device), "found": "{}.{}".format(*capability)}
        return Reason("engine.fp8-needs-compute-capability", {**params, "needed": "{}.{}".format(*_LEAST_CAPABILITY)})
    return None


def use_fp8_linears(model: CausalLM, device: torch.device, *, emulated: bool = False) -> None:
    """Compute the linear layers of a model's blocks in fp8, including those sharded over tensor ranks.

    Call it before DeepSpeed starts; parameters stay the same objects. ``emulated``: the same numerics on any device,
    slowly. Raises UsageError if the device has no fp8 or torchao is not installed.
    """
    if not emulated and (problem := fp8_problem(device)):
        raise UsageError(problem)
    float8 = require("torchao.float8", "fp8", "engine.torchao-missing")
    linear = require("torchao.float8.float8_linear", "fp8", "engine.torchao-missing")
    config = float8.Float8LinearConfig(emulate=emulated)
    like = linear.Float8Linear.from_float(nn.Linear(_MULTIPLE, _MULTIPLE, bias=False, device="meta"), config)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
        factor = weight if transposed else weight.t()
        result: Tensor = linear.matmul_with_hp_or_float8_args.apply(x, factor, like.linear_mm_config, config)
        return result if bias is None else result + bias

    for block in model.blocks.values():
        float8.convert_to_float8_training(block, config=config, module_filter_fn=lambda layer, _: _fits(layer))
        for layer in block.modules():
            if hasattr(layer, "product") and _fits(layer):
                layer.product = product  # type: ignore[assignment]


def _fits(layer: Any) -> bool:
    return all(size % _MULTIPLE == 0 for size in layer.weight.shape)
