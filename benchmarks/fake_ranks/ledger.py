"""Counts what a rank on fake tensors sends, holds and launches, at torch's dispatcher."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

# What the caching allocator of a GPU rounds each allocation up to (c10/cuda/CUDACachingAllocator.cpp kMinBlockSize).
_BLOCK = 512
# Collectives of fewer bytes carry norms, losses and flags; the plan leaves them out.
SMALL = 128
# Matrix products and attention, whose time communication may overlap.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_backward"})


@dataclass(frozen=True)
class Sent:
    """A collective or message: ``op`` of c10d, group size, bytes that this rank sends in a ring.

    ``products``: how many matrix products the rank had enqueued in the step.
    """

    axis: str
    op: str
    ranks: int
    bytes: int
    products: int


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts from ``begin`` on. Enter it inside a FakeTensorMode.

    ``axis_of``: returns the axis of a process group, given the name of the collective. ``device``: whose tensors count.
    ``peaks``: the most bytes held in each phase; ``held``: now.
    """

    def __init__(self, axis_of: Callable[[Any, str], str], device: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axis_of, self._device = axis_of, device
        self._storages: dict[int, tuple[Any, int]] = {}  # by address: a weak reference, and bytes
        self.held = 0
        self._phase = "other"
        self.begin()

    def begin(self) -> None:
        """Forget what was sent and launched, and the peaks."""
        self.sent: list[Sent] = []
        self.peaks: Counter[str] = Counter({self._phase: self.held})
        self.products = 0
        self.reads = 0

    def enter(self, phase: str) -> None:
        """Begin a phase of the step, as ``StepSplit.enter``."""
        self._phase = phase
        self._raise_peak()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
            return _value(func, args[0])
        if func.namespace == "c10d":
            return self._communicate(func, args)
        found = func(*args, **(kwargs or {}))
        self.products += func._schema.name.removeprefix("aten::") in _PRODUCTS
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, FakeTensor):
                self._hold(tensor)
        return found

    def _hold(self, tensor: Tensor) -> None:
        if tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._storages:
            return
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self._storages[address] = weakref.ref(storage, lambda _: self._free(address)), size
        self.held += size
        self._raise_peak()

    def _free(self, address: int) -> None:
        _, size = self._storages.pop(address)
        self.held -= size

    def _raise_peak(self) -> None:
        self.peaks[self._phase] = max(self.peaks[self._phase], self.held)

    def _communicate(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Count a collective and return what it would, without running it."""
        name = func._schema.name.removeprefix("c10d::").strip("_")
        group = next(each for each in args if isinstance(each, torch.ScriptObject | dist.ProcessGroup))
        if not isinstance(group, dist.ProcessGroup):
            group = dist.ProcessGroup.unbox(group)
        ranks, size = group.size(), ring_bytes(name, args, group.size())
        self.sent.append(Sent(self._axis_of(group, name), name, ranks, size, self.products))
        work = FakeWork().boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)


def ring_bytes(name: str, args: Sequence[Any], ranks: int) -> int:
    """Return the bytes that a rank sends if a collective of c10d, called with ``args``, runs as a ring.

    Raises KeyError for a collective that has no entry here.
    """
    part = (ranks - 1) / ranks
    first, second = (args[0], args[1] if len(args) > 1 else None)
    sizes: dict[str, Callable[[], float]] = {
        "allreduce": lambda: 2 * part * _bytes(first),
        "allreduce_coalesced": lambda: 2 * part * _bytes(first),
        "allgather_base": lambda: part * _bytes(first),
        "allgather": lambda: part * _bytes(first),
        "allgather_into_tensor_coalesced": lambda: part * _bytes(first),
        "reduce_scatter_base": lambda: part * _bytes(second),
        "reduce_scatter": lambda: part * _bytes(second),
        "reduce_scatter_tensor_coalesced": lambda: part * _bytes(second),
        "alltoall_base": lambda: part * _bytes(second),
        "alltoall": lambda: part * _bytes(second),
        "broadcast": lambda: _bytes(first),
        "reduce": lambda: _bytes(first),
        "send": lambda: _bytes(first),
        "recv": lambda: 0,
        "barrier": lambda: 0,
    }
    return round(sizes[name]())


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))


def _value(func: Any, tensor: Tensor) -> Any:
    """Return the value that a rank reads of a tensor; of a fake one: False, or 1."""
    if not isinstance(tensor, FakeTensor):
        with no_dispatch():
            return func(tensor)
    if tensor.constant is not None:
        with no_dispatch():
            return tensor.constant.item()
    if tensor.dtype == torch.bool:
        return False
    return 1.0 if tensor.dtype.is_floating_point else 1
