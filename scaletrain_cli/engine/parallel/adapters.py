"""Attach adapters to a model whose layers are sharded: which part of each factor a rank has, and what ranks sum.

| layer | A | B | summed over tensor ranks |
|---|---|---|---|
| column-parallel | whole | rows of the rank | the gradient of A |
| row-parallel | columns of the rank | whole | A(x), before B |
| embedding | columns of the rank's tokens | whole | the columns of A that were looked up |
| head | whole | rows of the rank | the gradient of [x, A(x)], by the loss |
| experts, gate and up | whole | rows of the rank | the gradient of A |
| experts, down | columns of the rank | whole | the gradient of B |

Factors of experts are on the ranks of their experts, and a pipeline stage has those of its own layers.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletrain_cli.engine.model.adapters import (
    AdapterSettings,
    LatestContext,
    Placement,
    add_adapter,
    remember_context,
)
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.model.moe import Experts
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh, ShardSpec, copy_to_ranks, sum_over_ranks
from scaletrain_cli.engine.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    sharded,
)
from scaletrain_cli.spec.adapter import Adapted, AdapterSpec


def attach_adapters(
    model: CausalLM,
    adapter: AdapterSpec,
    modules: Iterable[Adapted],
    mesh: Mesh,
    seed: int,
    dtype: torch.dtype | None = None,
) -> None:
    """Add this rank's part of the adapters to its part of a model on the meta device.

    ``modules``: those of the whole model that have an adapter. ``dtype`` of the factors; None: that of the model. Call
    it after all parallelism, and before blocks are wrapped.
    """
    latest = LatestContext() if adapter.dropout else None
    settings = AdapterSettings(adapter, seed, dtype, latest, mesh.part)
    here = {name: module for name, module in model.named_modules() if module is not None}
    for module in modules:
        layer = here.get(module.name) or here.get(module.name.rpartition(".")[0] if module.kind == "experts" else "")
        # the last stage of a tied model has the embedding only as the weight of its head
        if layer is None or layer is model or (module.kind == "embedding" and mesh.pipeline.rank > 0):
            continue
        add_adapter(layer, module, settings, _placement(layer, module, mesh.tensor))
    if latest is not None:
        remember_context(model, latest)


def _placement(layer: nn.Module, module: Adapted, axis: Axis) -> Placement:
    """Return the place of an adapter; see the table above."""
    if axis.size == 1:
        return Placement()

    def sum_gradient(factor: Tensor) -> Tensor:
        return copy_to_ranks(factor, axis)

    def sum_products(x: Tensor) -> Tensor:
        return sum_over_ranks(x, axis)

    def along(dim: int, parts: int | tuple[int, ...] = 1) -> Any:
        return lambda whole: sharded(whole, ShardSpec(dim, axis.size, axis.rank, parts))

    if isinstance(layer, Experts):
        if len(module.halves) > 1:
            return Placement(shard_b=along(1, len(module.halves)), share_a=sum_gradient)
        return Placement(shard_a=along(2), share_b=sum_gradient)
    if isinstance(layer, ColumnParallelLinear):
        return Placement(shard_b=along(0, layer.parts), share_a=sum_gradient)
    if isinstance(layer, RowParallelLinear):
        first = module.inputs // axis.size * axis.rank
        return Placement(shard_a=along(1), reduce=sum_products, first_input=first)
    if isinstance(layer, VocabularyParallelEmbedding):
        return Placement(shard_a=along(1), lookup=_lookup(axis))
    if module.kind == "head":
        return Placement(shard_b=along(0))
    return Placement()  # a layer that every tensor rank has, such as an embedding of positions


def _lookup(axis: Axis) -> Any:
    """Return a lookup in rows [tokens of the rank, rank of the adapter], as that of a sharded embedding."""

    def lookup(tokens: Tensor, rows: Tensor) -> Tensor:
        numbers = tokens - axis.rank * len(rows)
        elsewhere = (numbers < 0) | (numbers >= len(rows))
        found = F.embedding(numbers.masked_fill(elsewhere, 0), rows)
        return sum_over_ranks(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), axis)

    return lookup
