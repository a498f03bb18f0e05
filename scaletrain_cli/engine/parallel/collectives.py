"""Collectives that gradients flow through. Each is the identity, free of charge, where a rank is alone on its axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from scaletrain_cli.engine.parallel.mesh import Axis


def copy_to_ranks(x: Tensor, axis: Axis) -> Tensor:
    """The same tensor on every rank; each uses it differently, so their gradients add up (Megatron-LM's f)."""
    return x if axis.group is None else _Copy.apply(x, axis.group)  # type: ignore[no-untyped-call]


def sum_over_ranks(x: Tensor, axis: Axis) -> Tensor:
    """The sum of every rank's part, on every rank. All use it alike: its gradient is each part's (Megatron-LM's g)."""
    return x if axis.group is None else _Sum.apply(x, axis.group)  # type: ignore[no-untyped-call]


def exchange(x: Tensor, axis: Axis, cut: int, join: int) -> Tensor:
    """Cut dimension ``cut`` over the ranks and join their pieces along ``join`` (DeepSpeed-Ulysses' all-to-all)."""
    return x if axis.group is None else _Exchange.apply(x, axis, cut, join)  # type: ignore[no-untyped-call]


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, cut: int, join: int) -> Tensor:
        ctx.axis, ctx.cut, ctx.join = axis, cut, join
        return _swap(x, axis, cut, join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _swap(gradient, ctx.axis, ctx.join, ctx.cut), None, None, None


def _swap(x: Tensor, axis: Axis, cut: int, join: int) -> Tensor:
    mine = torch.stack(x.chunk(axis.size, cut))  # [ranks, ...], contiguous
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=axis.group)
    return torch.cat(theirs.unbind(), join)
