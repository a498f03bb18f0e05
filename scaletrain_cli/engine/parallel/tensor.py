"""Tensor parallelism (Megatron-LM, arXiv:1909.08053, section 3): which layers are sharded, and the sharded layers.

Works on modules on the meta device; weight sources read the shard spec of each parameter.

Attach adapters to a model whose layers are sharded: which part of each factor a rank has, and what ranks sum.

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
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from scaletrain_cli.engine.data.rows import NOT_COUNTED
from scaletrain_cli.engine.model.adapters import (
    AdapterSettings,
    LatestContext,
    Placement,
    add_adapter,
    remember_context,
)
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.model.gpt import Conv1D
from scaletrain_cli.engine.model.latent_attention import LatentAttention
from scaletrain_cli.engine.model.linear import Product, linear_product
from scaletrain_cli.engine.model.loss import logits_of
from scaletrain_cli.engine.model.moe import Experts
from scaletrain_cli.engine.model.norm import rms_norm, scaled
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh, ShardSpec, copy_to_ranks, mark_sharded, sum_over_ranks
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
        return Placement(shard_a=along(1), reduce=sum_products, first_input=module.inputs // axis.size * axis.rank)
    if isinstance(layer, VocabularyParallelEmbedding):
        return Placement(shard_a=along(1), lookup=partial(_looked_up, first=layer.first, axis=axis))
    if module.kind == "head":
        return Placement(shard_b=along(0))
    return Placement()  # a layer that every tensor rank has, such as an embedding of positions


def _looked_up(tokens: Tensor, rows: Tensor, first: int, axis: Axis) -> Tensor:
    """Return the rows of tokens: of each the one of the rank that has it. ``rows``: of this rank, from ``first`` on."""
    numbers = tokens - first
    elsewhere = (numbers < 0) | (numbers >= len(rows))
    vectors = F.embedding(numbers.masked_fill(elsewhere, 0), rows)
    return sum_over_ranks(vectors.masked_fill(elsewhere.unsqueeze(-1), 0.0), axis)


# Cross-entropy over a vocabulary that is sharded over tensor ranks: no rank holds all logits of a token.


class VocabularyLoss:
    """Replaces the head's ``token_loss`` and ``token_losses`` if its weight is sharded over the vocabulary."""

    def __init__(self, axis: Axis, vocabulary: int, softcap: float | None = None) -> None:
        self._axis, self._vocabulary, self._softcap = axis, vocabulary, softcap

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Return summed cross-entropy: hidden [tokens, size], weight [entries of this rank, size], labels [tokens]."""
        return self.each(hidden, weight, labels, label_smoothing).sum()

    def each(self, hidden: Tensor, weight: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Return the cross-entropy of each token, [tokens]."""
        ((_, held),) = ShardSpec(0, self._axis.size, self._axis.rank).spans(self._vocabulary)
        logits = logits_of(copy_to_ranks(hidden, self._axis), weight, self._softcap, held)
        place = (self._axis, self._vocabulary)
        return _CrossEntropy.apply(logits, labels, *place, label_smoothing)  # type: ignore[no-any-return, no-untyped-call]


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, axis: Axis, vocabulary: int, smoothing: float) -> Tensor:
        ((first, held),) = ShardSpec(0, axis.size, axis.rank).spans(vocabulary)
        highest = logits.amax(dim=1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=axis.group)
        logits = logits - highest.unsqueeze(1)
        counted, rows = labels != NOT_COUNTED, labels - first
        here = counted & (rows >= 0) & (rows < held)
        rows = rows.masked_fill(~here, 0)
        own = logits.gather(1, rows.unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0)
        exponentials = logits.exp()
        sums = torch.stack([own, exponentials.sum(dim=1), logits.sum(dim=1)])
        dist.all_reduce(sums, group=axis.group)
        own, total, everything = sums
        losses = total.log() - (1 - smoothing) * own - smoothing / vocabulary * everything
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(1)), rows, here, counted)
        ctx.smoothing, ctx.vocabulary = smoothing, vocabulary
        row_losses: Tensor = losses.masked_fill(~counted, 0.0)
        return row_losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, rows, here, counted = ctx.saved_tensors
        change = probabilities - ctx.smoothing / ctx.vocabulary
        label = here.to(change.dtype).mul_(ctx.smoothing - 1).unsqueeze(1)
        change.scatter_add_(1, rows.unsqueeze(1), label)
        return change.mul_((gradient * counted).unsqueeze(1)), None, None, None, None


# By the last part of a layer's name: sharded output features (with the number of fused matrices), or input features.
_COLUMNS = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "gate_proj": 1, "up_proj": 1, "c_attn": 3, "c_fc": 1}
_COLUMNS |= {"qkv_proj": 3, "gate_up_proj": 2, "q_b_proj": 1, "kv_b_proj": 1}
_ROWS = {"o_proj", "down_proj", "c_proj"}
_VOCABULARY = {"embed_tokens", "wte"}
# Of queries and keys: whole on every rank and applied to its heads, or sharded and applied to all heads together.
_HEAD_NORMS = {"q_norm", "k_norm"}


def shard_over_tensor_ranks(model: CausalLM, axis: Axis) -> None:
    """Replace the layers of a model on the meta device by this rank's shards."""
    if axis.size == 1:
        return
    readers: dict[str, nn.Module] = {}  # modules whose input is read by layers with sharded outputs
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if name in _COLUMNS:
            parts: int | tuple[int, ...] = _COLUMNS[name]
            if name == "qkv_proj":  # queries, keys and values
                groups = model.spec.num_attention_heads // model.spec.num_key_value_heads
                parts = 3 if groups == 1 else (groups, 1, 1)
            shard: nn.Module = ColumnParallelLinear(module, axis, parts)
            # The layers that read latents copy their own inputs: the latents come from layers that every rank has.
            latent = isinstance(model.get_submodule(parent), LatentAttention)
            readers[path if latent else parent] = shard if latent else model.get_submodule(parent)
        elif name in _ROWS:
            shard = RowParallelLinear(module, axis)
        elif name in _VOCABULARY:
            shard = VocabularyParallelEmbedding(module, axis)
        elif name in _HEAD_NORMS:
            over_heads = model.spec.qk_norm_scope == "head"
            shard = NormOverHeads(module, axis) if over_heads else NormOverRanks(module, axis)
        elif getattr(module, "sinks", None) is not None:  # one per head
            module.sinks = sharded(module.sinks, ShardSpec(0, axis.size, axis.rank))
            continue
        else:
            continue
        setattr(model.get_submodule(parent), name, shard)
    for reader in readers.values():
        reader.register_forward_pre_hook(lambda _, inputs: (copy_to_ranks(inputs[0], axis), *inputs[1:]))
    for module in model.modules():
        if isinstance(module, LatentAttention):
            module.share_key = partial(copy_to_ranks, axis=axis)
    if model.lm_head is not None:
        if model.spec.tie_word_embeddings:
            model.tie()
        else:
            model.lm_head.weight = sharded(model.lm_head.weight, ShardSpec(0, axis.size, axis.rank))
        loss = VocabularyLoss(axis, model.spec.vocab_size, model.lm_head.softcap)
        model.lm_head.token_loss, model.lm_head.token_losses = loss, loss.each


class ColumnParallelLinear(nn.Module):
    """Output features sharded over the ranks: the whole input in, this rank's features out."""

    def __init__(self, whole: Any, axis: Axis, parts: int | tuple[int, ...] = 1) -> None:
        super().__init__()
        self.transposed, self.parts = isinstance(whole, Conv1D), parts
        self.weight = sharded(whole.weight, ShardSpec(1 if self.transposed else 0, axis.size, axis.rank, parts))
        self.bias = None if whole.bias is None else sharded(whole.bias, ShardSpec(0, axis.size, axis.rank, parts))
        self.product: Product = linear_product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias, transposed=self.transposed)


class RowParallelLinear(nn.Module):
    """Input features sharded over the ranks: this rank's features in, the whole output out. The bias is whole."""

    def __init__(self, whole: Any, axis: Axis) -> None:
        super().__init__()
        self.axis, self.transposed = axis, isinstance(whole, Conv1D)
        self.weight = sharded(whole.weight, ShardSpec(0 if self.transposed else 1, axis.size, axis.rank))
        self.bias = whole.bias
        self.product: Product = linear_product

    def forward(self, x: Tensor) -> Tensor:
        mixed = sum_over_ranks(self.product(x, self.weight, None, transposed=self.transposed), self.axis)
        return mixed if self.bias is None else mixed + self.bias


class VocabularyParallelEmbedding(nn.Module):
    """Vocabulary rows sharded over the ranks; a token's vector comes from the rank that has its row."""

    def __init__(self, whole: Any, axis: Axis) -> None:
        super().__init__()
        self.axis, spec = axis, ShardSpec(0, axis.size, axis.rank)
        ((self.first, _),) = spec.spans(len(whole.weight))
        self.weight = sharded(whole.weight, spec)

    def forward(self, tokens: Tensor) -> Tensor:
        return _looked_up(tokens, self.weight, self.first, self.axis)


class NormOverHeads(nn.Module):
    """A norm over single heads. Its gradient is a sum over all heads, so over the ranks."""

    def __init__(self, whole: Any, axis: Axis) -> None:
        super().__init__()
        self.axis, self.weight, self.eps, self.zero_centered = axis, whole.weight, whole.eps, whole.zero_centered

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, copy_to_ranks(self.weight, self.axis), self.eps, self.zero_centered)


class NormOverRanks(nn.Module):
    """A norm over the channels of all ranks, whose squares are summed; the weight is sharded."""

    def __init__(self, whole: Any, axis: Axis) -> None:
        super().__init__()
        self.axis, self.eps, self.zero_centered = axis, whole.eps, whole.zero_centered
        self.weight = sharded(whole.weight, ShardSpec(0, axis.size, axis.rank))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = sum_over_ranks(wide.pow(2).sum(-1, keepdim=True), self.axis)
        # Each rank's output depends on the sum, so that its gradient is summed, too.
        mean = copy_to_ranks(squares, self.axis) / (x.shape[-1] * self.axis.size)
        return scaled(wide * torch.rsqrt(mean + self.eps), self.weight, x.dtype, self.zero_centered)


def sharded(whole: Tensor, spec: ShardSpec) -> nn.Parameter:
    """Return this rank's shard of a parameter, marked as such."""
    shard = nn.Parameter(spec.take(whole))
    mark_sharded(shard, replace(spec, size=whole.shape[spec.dim]))
    return shard
