"""Products of linear layers in fp8, through torchao. Knows no training loop.

Weights, activations and gradients stay as they are; the two factors of each product are scaled to fp8 on the way in
(dynamic tensor-wise scaling: FP8 formats for deep learning, arXiv:2209.05433). Attention and the head are left alone.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.errors import UsageError
from scaletrain_cli.extras import install_command

# The product of every linear layer that is not torch's own.


class Product(Protocol):
    """What such a layer calls, so that another arithmetic can take its place."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor: ...


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
    """x [..., in] times a weight [out, in], or [in, out] where ``transposed``, plus a bias.

    Under ZeRO-3 the backward pass must not hold on to the whole weight that was gathered for this. A parameter that is
    multiplied as it is may be gathered again; a transposed view of it stays. Hence no ``weight.t()`` here, and
    F.linear by its name at each call, because DeepSpeed puts one without that view in its place (zero/linear.py).
    """
    if not transposed:
        return F.linear(x, weight, bias)
    rows = x.flatten(0, -2)
    product = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return product.view(*x.shape[:-1], -1)


_LEAST_CAPABILITY = (8, 9)  # Ada, Hopper and later have fp8 tensor cores
_MULTIPLE = 16  # of both sides of a matrix, which torch._scaled_mm asks for


def fp8_refusal(device: torch.device) -> str | None:
    """Why a device cannot run fp8 products; None when it can."""
    if device.type != "cuda":
        return f"training.precision = fp8 needs an NVIDIA GPU, and this is a {device.type}. Use bf16."
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"training.precision = fp8 needs compute capability 8.9, and {name} has {capability[0]}.{capability[1]}."
    return None


def use_fp8_linears(model: CausalLM, device: torch.device, *, emulated: bool = False) -> None:
    """Let the linear layers of a model's blocks multiply in fp8, those cut over tensor ranks too.

    Before DeepSpeed. Parameters stay the same objects. ``emulated``: the same numerics on any device, slowly. Raises
    UsageError when the device has no fp8 or torchao is not installed.
    """
    if not emulated and (refusal := fp8_refusal(device)):
        raise UsageError(refusal)
    try:
        float8 = importlib.import_module("torchao.float8")
        linear = importlib.import_module("torchao.float8.float8_linear")
    except ImportError as error:
        raise UsageError(
            f"training.precision = fp8 needs torchao, which cannot be imported ({error}). Run {install_command('fp8')}."
        ) from error
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
