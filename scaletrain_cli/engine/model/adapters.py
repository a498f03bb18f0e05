"""Low-rank adapters on the layers of a model: LoRA (arXiv:2106.09685), rsLoRA (arXiv:2312.03732), DoRA (2402.09353).

An adapter's factors are parameters below the layer that they change, with the names of PEFT, and the layer's forward
pass is replaced, so that the layer itself, its names and its shards stay as they are. ``parallel.adapters`` places the
factors on tensor ranks.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletrain_cli.engine.model.attention import KeyedDropout, TokenContext, dropout_key
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.model.gpt import Conv1D
from scaletrain_cli.engine.model.loss import LanguageModelHead
from scaletrain_cli.engine.model.materialization import DrawnWeights, Initial, WeightSource
from scaletrain_cli.engine.model.moe import Experts
from scaletrain_cli.engine.parallel.mesh import WHOLE_SEQUENCE, SequencePart, ShardSpec
from scaletrain_cli.spec.adapter import Adapted, AdapterSpec, is_adapter_parameter

Join = Callable[[Tensor], Tensor]
Shard = Callable[[Tensor], nn.Parameter]


def unchanged(x: Tensor) -> Tensor:
    """Return ``x``: nothing to sum on a single rank."""
    return x


@dataclass(frozen=True)
class Placement:
    """The place of an adapter's parameters on tensor ranks; by default one rank has all of them.

    ``shard_a`` and ``shard_b`` return a rank's part of A and B (and of DoRA's magnitudes, which have the rows of B).
    ``share_a`` and ``share_b`` sum the gradient of a factor that every rank has, but uses for its part of the layer.
    ``reduce`` sums products over ranks that each have some of the inputs, ``lookup`` returns columns of A by token, and
    ``first_input`` is the number of this rank's first input feature.
    """

    shard_a: Shard = nn.Parameter
    shard_b: Shard = nn.Parameter
    share_a: Join = unchanged
    share_b: Join = unchanged
    reduce: Join = unchanged
    lookup: Callable[[Tensor, Tensor], Tensor] = F.embedding
    first_input: int = 0


class Factor(nn.Module):
    """One factor, a matrix [out, in], in a module of its own: ZeRO-3 gathers it where it is used."""

    def __init__(self, weight: nn.Parameter, share: Join) -> None:
        super().__init__()
        self.weight, self._share = weight, share

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Return the product of ``x`` [..., in], computed in the factor's dtype; without ``x`` a copy of the matrix."""
        weight = self._share(self.weight)
        return weight.clone() if x is None else F.linear(x.to(weight.dtype), weight)


class LatestContext:
    """The ``TokenContext`` of the current forward pass, for dropout in linear layers, which get no context."""

    context: TokenContext | None = None


class AdapterDropout(KeyedDropout):
    """Drops channels of an adapter's input; a rank with some of the channels drops those of the whole."""

    def __init__(self, p: float, latest: LatestContext, part: SequencePart, first_channel: int) -> None:
        super().__init__(p, part, first_channel)
        self._latest = latest

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if not self.training or self.p == 0:
            return x
        assert self._latest.context is not None
        return super().forward(x, self._latest.context)


def remember_context(model: CausalLM, latest: LatestContext) -> None:
    """Let ``latest`` have the context of the block, or the attention, that is computing; also when it is recomputed."""
    block: Any
    for block in model.blocks.values():
        block.attention.forward = _remembering(block.attention.forward, latest)
        block.forward = _remembering(block.forward, latest)


def _remembering(forward: Callable[..., Any], latest: LatestContext) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*arguments: Any) -> Any:
        latest.context = next(one for one in arguments if isinstance(one, TokenContext))
        return forward(*arguments)

    return wrapped


@dataclass(frozen=True)
class AdapterSettings:
    """The spec's section, and what every adapter of a rank shares. ``dtype`` of the factors; None: the model's."""

    adapter: AdapterSpec
    seed: int
    dtype: torch.dtype | None = None
    latest: LatestContext | None = None
    part: SequencePart = WHOLE_SEQUENCE


def add_adapter(layer: nn.Module, module: Adapted, settings: AdapterSettings, place: Placement) -> None:
    """Add an adapter to a layer on the meta device. ``module`` has the name and the size of the whole layer."""
    if module.kind == "embedding":
        _add_to_embedding(layer, module, settings, place)
    elif module.kind == "experts":
        assert isinstance(layer, Experts)
        _add_to_experts(layer, module, settings, place)
    else:
        adapter, dtype = settings.adapter, settings.dtype
        layer.lora_A = Factor(_parameter((adapter.rank, module.inputs), place.shard_a, dtype), place.share_a)
        layer.lora_B = Factor(_parameter((module.outputs, adapter.rank), place.shard_b, dtype), place.share_b)
        if adapter.dropout:
            assert settings.latest is not None
            layer.lora_dropout = AdapterDropout(adapter.dropout, settings.latest, settings.part, place.first_input)
            layer.lora_dropout.key = dropout_key(settings.seed, f"{module.name}.lora_dropout")
        if adapter.dora:
            layer.lora_magnitude_vector = _parameter((module.outputs,), place.shard_b, dtype)
        if isinstance(layer, LanguageModelHead):
            _extend_head(layer, settings.adapter.scaling)
        else:
            layer.forward = _adapted(layer, settings.adapter, place)


def _parameter(shape: tuple[int, ...], shard: Shard, dtype: torch.dtype | None) -> nn.Parameter:
    with torch.device("meta"):
        parameter = shard(torch.empty(shape))
    if dtype is not None:
        parameter.own_dtype = dtype  # type: ignore[attr-defined]
    return parameter


def _adapted(layer: Any, adapter: AdapterSpec, place: Placement) -> Callable[[Tensor], Tensor]:
    base: Callable[[Tensor], Tensor] = layer.forward
    scaling = adapter.scaling

    def forward(x: Tensor) -> Tensor:
        result = base(x)
        dropped = layer.lora_dropout(x) if adapter.dropout else x
        update: Tensor = layer.lora_B(place.reduce(layer.lora_A(dropped))) * scaling
        if not adapter.dora:
            return (result + update).to(result.dtype)
        # Wx is of the dropped x, too, as in PEFT; the bias has no magnitude.
        straight = result if dropped is x else base(dropped)
        if layer.bias is not None:
            straight = straight - layer.bias
        factor = layer.lora_magnitude_vector / _row_norms(layer, scaling, place)
        scaled: Tensor = result + (factor - 1) * straight + factor * update
        return scaled.to(result.dtype)

    return forward


@torch.no_grad()
def _row_norms(layer: Any, scaling: float, place: Placement) -> Tensor:
    """Return the norms of the rows of W + scaling B A, [out], by which DoRA divides; a constant in the gradient.

    From |w|^2 + 2 s w A^T b + s^2 b A A^T b for each row w of W and b of B: no matrix [out, in] is added up, and ranks
    that have some of the inputs sum these three terms.
    """
    a, b = layer.lora_A(), layer.lora_B()
    weight = layer.weight.t() if is_transposed(layer) else layer.weight
    weight = weight.to(a.dtype)
    terms = torch.cat(((weight @ a.t()).flatten(), weight.square().sum(dim=1), (a @ a.t()).flatten()))
    rows, rank = b.shape
    terms = place.reduce(terms)
    crossed, own, gram = terms[: rows * rank], terms[rows * rank : -rank * rank], terms[-rank * rank :]
    squares: Tensor = own + 2 * scaling * (crossed.view(rows, rank) * b).sum(dim=1)
    squares += scaling**2 * ((b @ gram.view(rank, rank)) * b).sum(dim=1)
    return squares.sqrt()


def is_transposed(layer: nn.Module) -> bool:
    """Return True if the weight of a linear layer is [in, out]."""
    return bool(getattr(layer, "transposed", isinstance(layer, Conv1D)))


def _extend_head(head: Any, scaling: float) -> None:
    """Let a head read [x, A(x)] with the weight [W, scaling B], so that every loss works with an adapter."""

    def extended(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        dropped = head.lora_dropout(hidden) if hasattr(head, "lora_dropout") else hidden
        low, more = head.lora_A(dropped), head.lora_B() * scaling
        return torch.cat((hidden, low.to(hidden.dtype)), -1), torch.cat((weight, more.to(weight.dtype)), -1)

    head.extended = extended


def _add_to_embedding(layer: Any, module: Adapted, settings: AdapterSettings, place: Placement) -> None:
    adapter, dtype = settings.adapter, settings.dtype
    layer.lora_embedding_A = _parameter((adapter.rank, module.inputs), place.shard_a, dtype)
    layer.lora_embedding_B = _parameter((module.outputs, adapter.rank), place.shard_b, dtype)
    base: Callable[[Tensor], Tensor] = layer.forward

    def forward(tokens: Tensor) -> Tensor:
        result = base(tokens)
        low = place.lookup(tokens, layer.lora_embedding_A.t())
        return (result + F.linear(low, layer.lora_embedding_B) * adapter.scaling).to(result.dtype)

    layer.forward = forward


def _add_to_experts(experts: Experts, module: Adapted, settings: AdapterSettings, place: Placement) -> None:
    """Add factors of each expert on this rank, stacked as the weights are; they compute in the dtype of the tokens."""
    adapter, stack = settings.adapter, module.name.rpartition(".")[2]
    held, scaling = len(experts.members), adapter.scaling
    of_base = getattr(experts, stack).__dict__
    for letter, shape, shard in (
        ("A", (held, adapter.rank, module.inputs), place.shard_a),
        ("B", (held, module.outputs, adapter.rank), place.shard_b),
    ):
        factor = _parameter(shape, shard, settings.dtype)
        # how DeepSpeed treats an expert; the shard is the factor's own
        factor.__dict__.update({name: of_base[name] for name in _EXPERT_MARKS if name in of_base})
        setattr(experts, f"{stack}_lora_{letter}", factor)

    def update(rows: Tensor, product: Callable[..., Tensor], ends: Tensor) -> Tensor:
        a = place.share_a(getattr(experts, f"{stack}_lora_A")).to(rows.dtype)
        b = place.share_b(getattr(experts, f"{stack}_lora_B")).to(rows.dtype)
        return product(product(rows, a, ends), b, ends) * scaling

    experts.updates[stack] = update


_EXPERT_MARKS = (
    *("allreduce", "group_name", "ds_zero_placement_family", "ds_zero_partition_group_name"),
    "ds_zero_partition_process_group",
)


# The first values of the factors.


def _of_factor(name: str, shape: tuple[int, ...]) -> Initial:
    if name.endswith(".lora_A.weight"):
        return Initial(bound=1 / math.sqrt(shape[1]))
    return Initial(std=1.0 if name.endswith(".lora_embedding_B") else 0.0)


@dataclass(frozen=True)
class AdapterInitialization:
    """First values as in PEFT: A is uniform as in nn.Linear, B zero, magnitudes the norms of the rows.

    Of an embedding A is zero and B normal. Each matrix is a function of the seed and its name, so that every layout has
    the same. ``base``: source of all other parameters. ``layers``: the linear layers by name; ``dtype``: that in which
    the model has their weights. ``trained``: factors that were trained before, instead of random ones.
    """

    base: WeightSource
    seed: int
    device: torch.device
    layers: dict[str, Adapted]
    dtype: torch.dtype = torch.float32
    trained: WeightSource | None = None

    def read(self, name: str, whole_shape: tuple[int, ...], spec: ShardSpec | None) -> Tensor:
        if not is_adapter_parameter(name):
            return self.base.read(name, whole_shape, spec)
        if self.trained is not None:
            return self.trained.read(name, whole_shape, spec)
        if name.endswith(".lora_magnitude_vector"):
            return self._norms(self.layers[name.removesuffix(".lora_magnitude_vector")], spec)
        return DrawnWeights(self.seed, self.device, _of_factor).read(name, whole_shape, spec)

    def _norms(self, layer: Adapted, spec: ShardSpec | None) -> Tensor:
        """Return the norms of the rows of a weight, or of those in a shard; one matrix is in memory at a time."""
        shape = (layer.inputs, layer.outputs) if layer.transposed else (layer.outputs, layer.inputs)
        rows = None if spec is None else ShardSpec(int(layer.transposed), spec.ranks, spec.rank, spec.parts)
        values = self.base.read(layer.parameter, shape, rows).to(self.dtype).float()
        norms: Tensor = torch.linalg.vector_norm(values, dim=0 if layer.transposed else 1)
        return norms
