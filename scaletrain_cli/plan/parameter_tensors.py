"""Every parameter that a rank of our engine holds, by its number of elements, in the order in which the engine has
them. Counts, no bytes.

DeepSpeed flattens, pads and cuts parameters group by group, so that exact bytes need more than their sum.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from scaletrain_cli.plan.architecture import Architecture, architecture
from scaletrain_cli.plan.stages import Stage
from scaletrain_cli.spec import ModelSpec


class Tensors(NamedTuple):
    """Elements of each parameter of a part of the model, by what becomes of them.

    Matrices decay, vectors do not; experts are matrices that lie on fewer ranks than the others.
    """

    matrices: tuple[int, ...] = ()
    vectors: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()


class Group(NamedTuple):
    """One parameter group: tensors in order, as runs of (sizes, how often they come one after another)."""

    runs: tuple[tuple[tuple[int, ...], int], ...]

    @property
    def elements(self) -> int:
        return sum(sum(sizes) * times for sizes, times in self.runs)

    @property
    def largest(self) -> int:
        """Elements of its largest tensor."""
        return max(max(sizes) for sizes, _ in self.runs)

    def pieces(self, ranks: int) -> int:
        """Elements on one of the ranks when each tensor is cut on its own, rounded up."""
        return sum(sum(-(-size // ranks) for size in sizes) * times for sizes, times in self.runs)

    def tensor_at(self, element: int) -> tuple[int, int]:
        """Where the tensor begins and ends that holds this element of the flattened group."""
        start = 0
        for sizes, times in self.runs:
            length = sum(sizes)
            if element < start + length * times:
                start += (element - start) // length * length
                for size in sizes:
                    if element < start + size:
                        return start, start + size
                    start += size
            start += length * times
        raise IndexError(element)


class StageGroups(NamedTuple):
    """The parameter groups of one pipeline stage; an empty one is none to DeepSpeed."""

    matrices: Group
    vectors: Group
    experts: Group


@lru_cache(maxsize=4096)
def stage_groups(model: ModelSpec, tensor: int, expert: int, blocks: int, dense: int, ends: str) -> StageGroups:
    """Of ``blocks`` blocks, the first ``dense`` without experts. ``ends``: those of ends_of."""
    whole = architecture(model, tensor, expert)
    opening, closing = _ends(model, whole, ends)
    parts = (
        (opening, 1),
        (_block(model, tensor, expert, experts=False), dense),
        (_block(model, tensor, expert, experts=True), blocks - dense),
        (closing, 1),
    )
    return StageGroups(
        *(
            Group(tuple((part[kind], times) for part, times in parts if times and part[kind]))
            for kind in range(len(Tensors._fields))
        )
    )


def ends_of(stage: Stage) -> str:
    """Which ends of the model a stage holds: ``first``, ``last``, ``both`` or ``none``."""
    return {(True, True): "both", (True, False): "first", (False, True): "last"}.get((stage.first, stage.last), "none")


def _ends(model: ModelSpec, whole: Architecture, ends: str) -> tuple[Tensors, Tensors]:
    """What comes before the blocks and after them; the last stage of a tied model has a table of its own."""
    opening = closing = Tensors()
    norm = _norm(model)
    if ends in ("first", "both"):
        positions = whole.embedding - whole.table - (sum(norm) if model.embedding_norm else 0)
        opening = Tensors(
            (whole.table, positions) if positions else (whole.table,), norm if model.embedding_norm else ()
        )
    elif ends == "last" and model.tie_word_embeddings:
        opening = Tensors((whole.table,))
    if ends in ("last", "both"):
        closing = Tensors((whole.head,) if whole.head else (), norm)
    return opening, closing


@lru_cache(maxsize=1024)
def _block(model: ModelSpec, tensor: int, expert: int, experts: bool) -> Tensors:
    """One block; the order within it is that of the engine's modules."""
    hidden, norm = model.hidden_size, _norm(model)
    heads = -(-model.num_attention_heads // tensor) * model.head_dim
    keys = max(-(-model.num_key_value_heads // tensor), 1) * model.head_dim
    bias = (hidden,) if model.has_bias else ()
    if model.kv_lora_rank:  # not in this engine, which leaves the order open
        matrices = [architecture(model, tensor, expert).block.attention]
        attention = [model.q_lora_rank, model.kv_lora_rank] if model.q_lora_rank else [model.kv_lora_rank]
    elif model.family == "gpt":  # one fused matrix
        matrices = [hidden * (heads + 2 * keys), heads * hidden]
        attention = [*([heads + 2 * keys] if model.has_bias or model.qkv_bias else []), *bias]
    else:
        matrices = [hidden * heads, hidden * keys, hidden * keys, heads * hidden]
        attention = [*([heads, keys, keys] if model.has_bias or model.qkv_bias else []), *bias]
    if model.qk_norm:
        attention += [model.head_dim, model.head_dim]
    away: tuple[int, ...] = ()
    if experts and model.num_experts:
        inner, held = -(-model.expert_size // tensor), -(-model.num_experts // expert)
        joined, down = _mlp(model, inner)
        stacked = (held * sum(joined), held * down)
        away = stacked if expert > 1 else ()
        shared = model.shared_expert_intermediate_size
        first, second = _mlp(model, -(-shared // tensor)) if shared else ((), 0)
        matrices += [hidden * model.num_experts, *(() if away else stacked), *first, *([second] if shared else [])]
        mlp = _mlp_bias(model, -(-shared // tensor)) if shared else []
        mlp += [held * size for size in _mlp_bias(model, inner)]
    else:
        inner = -(-model.intermediate_size // tensor)
        first, second = _mlp(model, inner)
        matrices += [*first, second]
        mlp = _mlp_bias(model, inner)
    vectors = [*norm, *attention, *norm, *mlp] if model.family == "gpt" else [*attention, *mlp, *norm, *norm]
    return Tensors(tuple(matrices), tuple(vectors), away)


def _norm(model: ModelSpec) -> tuple[int, ...]:
    return (model.hidden_size,) * (2 if model.has_norm_bias else 1)


def _mlp(model: ModelSpec, inner: int) -> tuple[tuple[int, ...], int]:
    """The matrices into an MLP of this width, and the one out of it."""
    return (model.hidden_size * inner,) * (2 if model.has_gated_mlp else 1), model.hidden_size * inner


def _mlp_bias(model: ModelSpec, inner: int) -> list[int]:
    return [*[inner] * (2 if model.has_gated_mlp else 1), model.hidden_size] if model.has_bias else []
