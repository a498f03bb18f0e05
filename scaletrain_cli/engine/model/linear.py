"""The product of every linear layer that is not torch's own. Knows no layer and no distribution."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


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
