"""Train a few steps as one rank of a run, on fake tensors and a process group that only counts.

The model is composed by the engine and trained by DeepSpeed as on a GPU, at any size and number of ranks: tensors have
shapes, storages and lifetimes, but no values, and collectives return at once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd import Function
from torch.testing._internal.distributed.fake_pg import FakeStore

from fake_ranks.ledger import SMALL, Ledger, Sent
from fake_ranks.many_ranks import without_loops_over_ranks
from scaletrain_cli.engine import compose as compose_module
from scaletrain_cli.engine.compose import compose
from scaletrain_cli.engine.data.batches import MicroBatch
from scaletrain_cli.engine.model import norm
from scaletrain_cli.engine.optim import optimizers
from scaletrain_cli.engine.parallel import sequence
from scaletrain_cli.engine.parallel.mesh import ShardSpec, build_mesh, coordinates_of
from scaletrain_cli.engine.step import build_stepper
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import RunSpec

# The first step allocates the optimizer's states; ZeRO-3 learns the order in which parameters are used in the first two
# (partitioned_param_coordinator.py).
_STEPS = {1: 2, 2: 2, 3: 3}


@dataclass(frozen=True)
class RankStep:
    """The last of the steps that a rank trained.

    ``sent``: its collectives and messages. ``peaks``: the most bytes held in each phase; ``states``: held between two
    steps. ``products``: the number of matrix products; ``reads``: how often the host read a value of a tensor.
    """

    sent: tuple[Sent, ...]
    peaks: dict[str, int]
    states: int
    products: int
    reads: int

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    def bytes_by_axis(self) -> dict[str, int]:
        """Return the bytes sent by axis, without small messages."""
        found: Counter[str] = Counter()
        for each in self.sent:
            if each.bytes >= SMALL:
                found[each.axis] += each.bytes
        return dict(found)

    def beside_products(self, axis: str) -> int:
        """Return the bytes of an axis that were sent before the last matrix product of the step was enqueued."""
        return sum(each.bytes for each in self.sent if each.axis == axis and each.products < self.products)


def train_rank(spec: RunSpec, layout: Layout, stage: int = 0) -> RankStep:
    """Train as the first rank of a pipeline stage, and return what its last step sends and holds.

    ``spec`` without compilation and offloading. Call it once per process, in which torch has no process group yet.
    """
    rank = stage * (layout.world_size // layout.pipeline_parallel)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(layout.world_size), "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    mesh, device = build_mesh(layout), torch.device("cpu")
    ledger = Ledger(lambda group, name: axis_of(layout, dist.get_process_group_ranks(group), name))
    with _as_on_a_gpu(), without_loops_over_ranks(), FakeTensorMode(allow_non_fake_inputs=True), ledger:
        composed = compose(spec, layout, mesh, device, source=_Shapes())
        stepper = build_stepper(composed, mesh, device, spec.training)
        stepper.split = ledger  # type: ignore[assignment]
        _know_shapes(composed.engine, spec, layout)
        for _ in range(_STEPS[layout.zero_stage]):
            batches = [_micro_batch(spec, layout) for _ in range(layout.gradient_accumulation_steps)]
            gc.collect()
            ledger.begin()
            stepper.train(batches)
        del batches
        gc.collect()
        return RankStep(tuple(ledger.sent), dict(ledger.peaks), ledger.held, ledger.products, ledger.reads)


def axis_of(layout: Layout, ranks: list[int], name: str) -> str:
    """Return the axis of a process group with these ranks; ``name`` of the collective."""
    places = [coordinates_of(layout, rank) for rank in (ranks[0], ranks[-1])]
    if name in ("send", "recv"):  # of a pipeline in the group of all ranks, of ring attention in that of its ring
        return "sequence" if places[0]["pipeline"] == places[1]["pipeline"] else "pipeline"
    varying = {key for key in ("pipeline", "tensor") if places[0][key] != places[1][key]}
    if not varying:
        # one set of ranks for both if there is only one sequence group
        return "sequence" if name.startswith("alltoall") else "data"
    return varying.pop() if len(varying) == 1 else "world"


def _micro_batch(spec: RunSpec, layout: Layout) -> MicroBatch:
    rows, parts = layout.micro_batch_size, layout.sequence_parallel * layout.context_parallel
    length = spec.transformer.seq_len // parts
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    return MicroBatch(tokens, tokens.clone(), torch.arange(length), torch.arange(rows), None)


class _Shapes:
    """A source of weights that have shapes only."""

    def read(self, name: str, whole_shape: tuple[int, ...], spec: ShardSpec | None) -> Tensor:
        """Return an empty tensor of this rank's shape."""
        ranks = {} if spec is None else {spec.dim: spec.ranks}
        return torch.empty([size // ranks.get(dim, 1) for dim, size in enumerate(whole_shape)], dtype=torch.bfloat16)


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Use the kernels of a GPU where they allocate other tensors than those of a CPU: attention, norms, optimizers."""
    builders = {
        name: lambda groups, settings, _, build=build: build(groups, settings, True)
        for name, build in optimizers.BUILDERS.items()
    }
    from deepspeed.runtime.zero import partitioned_param_coordinator

    with (
        # the other ranks, which do not exist, have the same order of parameters
        patch.object(partitioned_param_coordinator, "assert_ints_same_as_other_ranks", lambda _: None),
        patch.object(F, "scaled_dot_product_attention", _flash_attention),
        patch.object(sequence, "_Kernel", _FlashKernel),
        patch.object(norm, "has_kernel", lambda x, weight: weight.dtype == x.dtype),
        patch.dict(optimizers.BUILDERS, builders),
        patch.object(compose_module, "_sharded_model", _outlined),
        patch.object(torch.nn.Module, "_apply", lambda module, *_, **__: module),  # all are on the device already
    ):
        yield


def _outlined(*arguments: Any, build: Any = compose_module._sharded_model) -> Any:
    with unset_fake_temporarily():
        return build(*arguments)


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    return _FlashAttention.apply(query, key, value)  # type: ignore[no-any-return, no-untyped-call]


class _FlashAttention(Function):
    """FlashAttention-2 by torch's own shapes of its kernels (torch/_meta_registrations.py)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)
        ctx.save_for_backward(query, key, value, output, sums)
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, output, sums = ctx.saved_tensors
        seed = torch.empty(2, dtype=torch.uint64, device=gradient.device)
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, output, sums, None, None, query.shape[2], key.shape[2], 0.0, True, seed, seed
        )


class _FlashKernel:
    """FlashAttention-2 of one block of ring attention."""

    def __init__(self, _: Any, scale: float) -> None:
        self._scale = scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=self._scale
        )
        return found[0], found[1]

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        result: Tensor,
        sums: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool,
    ) -> Any:
        seed = torch.empty(2, dtype=torch.uint64, device=gradient.device)
        saved = (gradient, query, key, value, result, sums.contiguous(), None, None, query.shape[2], key.shape[2])
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *saved, 0.0, causal, seed, seed, scale=self._scale
        )


def _know_shapes(engine: Any, spec: RunSpec, layout: Layout) -> None:
    """Let the stages of a pipeline know what DeepSpeed reads from messages: the shapes of what arrives.

    Tensor ranks send each other's stage a share each: where the shares begin (``PartitionedTensor.to_meta``), and one.
    """
    if layout.pipeline_parallel == 1:
        return
    from deepspeed.runtime.pipe import engine as pipe_engine
    from deepspeed.runtime.utils import partition_uniform

    ranks, length = layout.tensor_parallel, spec.transformer.seq_len // layout.sequence_parallel
    shape = [layout.micro_batch_size, length // layout.context_parallel, spec.transformer.hidden_size]
    elements = math.prod(shape)
    places = [len(shape), *shape, ranks, engine.grid.get_slice_parallel_rank(), *partition_uniform(elements, ranks)]
    one = functools.partial(engine._allocate_or_extend_buffers, dtype=torch.bfloat16)
    if ranks == 1:
        engine._recv_tensor_meta = lambda _: one(0, shape)
        return
    engine._recv_tensor_meta = lambda _: (
        engine._allocate_or_extend_buffers(0, [len(places)], torch.int64),
        one(1, [elements // ranks]),
    )
    pipe_engine.PartitionedTensor = _partitioned(places)


def _partitioned(places: list[int]) -> Any:
    """Return DeepSpeed's class of a tensor of which each tensor rank has a share; all begin at ``places``."""
    from deepspeed.runtime.utils import PartitionedTensor

    class Partitioned(PartitionedTensor):  # type: ignore[misc]
        @classmethod
        def from_meta(cls, meta: Tensor, local_part: Tensor, group: Any, device: str = "cpu") -> Any:
            return super().from_meta(_Places(places), local_part, group, device)

    return Partitioned


class _Places:
    """A tensor of integers that has values, in the place of a fake one."""

    dtype = torch.int64

    def __init__(self, values: list[int]) -> None:
        self._values = values

    def tolist(self) -> list[int]:
        return self._values
