"""ZeRO-3's collectives of DeepSpeed with the same messages and allocations, without their loops over ranks.

DeepSpeed 0.19.8 cuts each tensor into a view per rank, in Python, which takes hours of fake views with 4,096 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor


@contextmanager
def without_loops_over_ranks() -> Iterator[None]:
    """Replace ``reduce_scatter_coalesced`` and ``AllGatherCoalescedHandle.wait``."""
    from deepspeed.runtime.zero import stage3
    from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle

    with (
        patch.object(stage3, "reduce_scatter_coalesced", _reduce_scatter_coalesced),
        patch.object(AllGatherCoalescedHandle, "wait", _wait),
    ):
        yield


@torch.no_grad()
def _reduce_scatter_coalesced(tensors: list[Tensor], group: Any = None) -> list[Tensor]:
    """Return this rank's part of each tensor (``coalesced_collectives.py``)."""
    from deepspeed.runtime.comm.coalesced_collectives import _torch_reduce_scatter_fn

    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [-(-tensor.numel() // ranks) for tensor in tensors]
    if len(tensors) == 1 and tensors[0].numel() % ranks == 0:
        joined = tensors[0].view(-1)
    else:
        joined = tensors[0].new_empty(ranks * sum(sizes))  # the parts of all ranks, padded
    joined.div_(ranks)
    own = joined.narrow(0, rank * sum(sizes), sum(sizes))
    _torch_reduce_scatter_fn(joined, own, group=group)
    found, offset = [], 0
    for tensor, size in zip(tensors, sizes, strict=True):
        length = min(size, max(0, tensor.numel() - rank * size))
        found.append(own.narrow(0, offset, length))
        offset += size
    return found


def _wait(handle: Any, handle_dependency: bool = True) -> None:
    """Give each parameter a tensor of its own, as the parts that have arrived are joined to."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if handle.complete:
        return
    handle.allgather_handle.wait()
    for parameter in handle.params:
        parameter.data = parameter.ds_tensor.new_empty(parameter.ds_numel).view(parameter.ds_shape)
        parameter.ds_status = ZeroParamStatus.AVAILABLE
    handle.complete = True
