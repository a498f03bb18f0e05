"""Mixture of experts (MoE): a router sends each token to a few of many MLPs.

Expert parallelism replaces two attributes: ``dispatch``, which brings tokens to experts, and ``tally``, which counts
over a whole sequence. All decisions are made per sequence, so that they are the same for every micro-batch size and
layout.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from scaletrain_cli.engine.eager import never_compiled
from scaletrain_cli.engine.model.linear import gated
from scaletrain_cli.engine.model.router import Router, balance_loss, token_weights, z_loss
from scaletrain_cli.spec import ModelSpec


class Routing(NamedTuple):
    """The routing of n tokens: ``chosen`` [n, k] experts with weights [n, k]; ``kept`` [n, k], None for all."""

    chosen: Tensor
    weights: Tensor
    kept: Tensor | None


class RoutingMeasures(NamedTuple):
    """Measures of one layer and micro-batch, before coefficients: scalars on the device, not differentiable."""

    balance_loss: Tensor  # 1 for an even load
    z_loss: Tensor
    dropped: Tensor  # share of assignments beyond an expert's capacity
    busiest: Tensor  # load of the busiest expert of a sequence, over the mean load


class Experts(nn.Module):
    """SwiGLU MLPs with stacked matrices, for one grouped product instead of one product per expert.

    Grouped products need rows of multiples of 16 bytes. ``members`` are the numbers of the experts on this rank.
    ``limit``: see ``clamped_swiglu``; None: SwiGLU. ``share_bias`` returns what a rank adds, [experts, hidden], of the
    bias of the second product, whose sum over tensor ranks is the output.
    """

    joined: ClassVar = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # by rows

    def __init__(
        self, experts: int, hidden: int, intermediate: int, *, bias: bool = False, limit: float | None = None
    ) -> None:
        super().__init__()
        self.members = range(experts)  # ZeRO-3 empties parameters that are not in use, so no shape has their number
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate))
        self.limit, self.has_bias = limit, bias
        if bias:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * intermediate))
            self.down_proj_bias = nn.Parameter(torch.empty(experts, hidden))
        self.share_bias: Callable[[Tensor], Tensor] = lambda bias: bias
        self.updates: dict[str, Update] = {}  # of adapters, by the name of the stack

    def matrices(self, parameter: str) -> list[list[str]]:
        """Return the Hugging Face names of the matrices in a parameter: for each expert, those joined by rows."""
        if parameter.endswith("_bias"):
            names = self.joined[parameter.removesuffix("_bias")]
            return [[f"{number}.{matrix}.bias" for matrix in names] for number in self.members]
        stack, _, factor = parameter.partition("_lora_")
        if factor == "A":
            return [[f"{number}.{stack}.lora_A.weight"] for number in self.members]
        last = "lora_B.weight" if factor else "weight"
        return [[f"{number}.{matrix}.{last}" for matrix in self.joined[stack]] for number in self.members]

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs of rows [n, hidden], sorted by expert; ``counts`` [experts] counts each expert's rows."""
        ends = counts.cumsum(0).to(torch.int32)
        gate_up = self._product("gate_up_proj", rows, ends)
        if self.has_bias:
            gate_up = _Biased.apply(gate_up, self.gate_up_proj_bias, ends)  # type: ignore[no-untyped-call]
        if self.limit is None:
            gate, up = gate_up.chunk(2, dim=-1)
            activated = gated(gate, up)
        else:
            activated = clamped_swiglu(gate_up, self.limit)
        result = self._product("down_proj", activated, ends)
        if self.has_bias:
            result = _Biased.apply(result, self.share_bias(self.down_proj_bias), ends)  # type: ignore[no-untyped-call]
        return result

    def _product(self, stack: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Return the products of rows with the matrices of their experts, and with those of an adapter."""
        product = _Product.apply if rows.dtype == torch.bfloat16 else _uncompiled_product
        result: Tensor = product(rows, getattr(self, stack), ends)
        return result + self.updates[stack](rows, product, ends) if stack in self.updates else result


# What an adapter adds to a grouped product: rows [n, in], the product, the ends of each expert's rows -> [n, out]
Update = Callable[[Tensor, Callable[..., Tensor], Tensor], Tensor]
Dispatch = Callable[[Experts, Tensor, Routing], Tensor]
Tally = Callable[[Tensor], tuple[Tensor, Tensor]]


class MoELayer(nn.Module):
    """Replaces a block's MLP, [batch, length, hidden] in and out; ``shared`` is an MLP for every token.

    With a gate (Qwen2-MoE) the output of ``shared`` is multiplied by the sigmoid of a product with the token.

    The router losses reach the gradient without passing through the model's own loss, see ``_WithLoss``.
    """

    def __init__(self, spec: ModelSpec, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.gate = Router(spec)
        self.experts = Experts(
            spec.num_experts, spec.hidden_size, spec.expert_size, bias=spec.has_bias, limit=spec.swiglu_limit
        )
        self.shared_expert_gate = None
        self.add_module(spec.shared_expert_name, shared)
        if spec.shared_expert_gate:
            self.shared_expert_gate = nn.Linear(spec.hidden_size, 1, bias=False)
        self._shared = spec.shared_expert_name
        self.num_experts = spec.num_experts
        self.capacity_factor = spec.capacity_factor
        self.balance_coefficient, self.z_coefficient = spec.router_aux_loss_coef, spec.router_z_loss_coef
        self.loss_scale, self.sequence_ranks = 1.0, 1
        self.replicas: dist.ProcessGroup | None = None  # the ranks whose loads of experts are summed
        self.bias_update_speed = spec.bias_update_speed
        self.step_load: Tensor | None = None  # how often each expert was chosen since the last step
        self.measures: RoutingMeasures | None = None
        self.dispatch: Dispatch = dispatch_here
        self.tally: Tally = tally_here

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """``real`` [batch, length]: False for padding, which no routed expert gets; None: no padding."""
        routed = self.dispatch(self.experts, x.flatten(0, 1), self.route(x, real)).view_as(x)
        shared = getattr(self, self._shared)
        if shared is None:
            return routed
        every: Tensor = shared(x)
        return routed + (every if self.shared_expert_gate is None else self.shared_expert_gate(x).sigmoid() * every)

    def route(self, x: Tensor, real: Tensor | None = None) -> Routing:
        """Return the experts that the router chooses for each token; beyond an expert's capacity they are dropped.

        Padding has no expert, and counts neither in loads and capacities nor in losses and measures.
        """
        logits = self.gate(x)
        chosen, weights, probabilities, balanced = self.gate.choose(logits)
        load = self._load(chosen, real)
        earlier, total = self.tally(load)
        kept = None if real is None else real.unsqueeze(-1).expand_as(chosen)
        if self.capacity_factor:
            capacity = torch.ceil(self.capacity_factor * total.sum(dim=-1, keepdim=True).double() / self.num_experts)
            within = self._places(chosen, real, load, earlier) < capacity.unsqueeze(-1)
            kept = within if kept is None else within & kept
        parts = None if real is None else token_weights(real, total.sum(dim=-1) / chosen.shape[-1], self.sequence_ranks)
        even = total if balanced is chosen else self.tally(self._load(balanced, real))[1]
        balance = balance_loss(probabilities if self.balance_coefficient else probabilities.detach(), even, parts)
        z = z_loss(logits if self.z_coefficient else logits.detach(), parts)  # measured only, without a gradient
        loss = self.balance_coefficient * balance + self.z_coefficient * z
        if self.bias_update_speed and self.gate.weight.requires_grad:  # the bias of a frozen router stays
            weights = _counted(weights, self, load.sum(dim=0))
        weights = _WithLoss.apply(weights, loss, self.loss_scale)  # type: ignore[no-untyped-call]
        self._measure(balance, z, kept, total, parts)
        return Routing(chosen.flatten(0, 1), weights.flatten(0, 1), None if kept is None else kept.flatten(0, 1))

    @torch.no_grad()
    def update_bias(self, applied: Tensor | float) -> None:
        """Make overloaded experts less likely and others more likely, by their loads in the step. Collective.

        ``applied``: 1, or 0 to discard the loads. arXiv:2412.19437, section 2.1.2: the bias of each expert changes by
        ``bias_update_speed``, with the sign of the mean load minus its own.
        """
        bias = self.gate.e_score_correction_bias
        if not self.bias_update_speed or bias is None:
            return
        load = torch.zeros_like(bias, dtype=torch.int64) if self.step_load is None else self.step_load
        if self.replicas is not None:
            dist.all_reduce(load, group=self.replicas)
        under = torch.sign(load.sum() - load * self.num_experts)  # exact, in whole numbers
        bias.add_(under * (self.bias_update_speed * applied))
        self.step_load = None

    def _load(self, chosen: Tensor, real: Tensor | None) -> Tensor:
        """Return how often each sequence chooses each expert, [batch, experts]."""
        if real is None:
            return count(chosen.flatten(1), self.num_experts)
        return count(self._without_padding(chosen, real), self.num_experts + 1)[:, :-1]

    def _places(self, chosen: Tensor, real: Tensor | None, load: Tensor, earlier: Tensor) -> Tensor:
        """Return the place of each assignment in its expert's queue, [batch, length, k]; any number for padding."""
        if real is None:
            return places(chosen.flatten(1), load, earlier).view_as(chosen)
        queues = self._without_padding(chosen, real)  # padding has a queue of its own
        return places(queues, F.pad(load, (0, 1)), F.pad(earlier, (0, 1))).view_as(chosen)

    def _without_padding(self, chosen: Tensor, real: Tensor) -> Tensor:
        """Return the choices of each sequence, [batch, assignments], those of padding as one expert more."""
        return chosen.masked_fill(~real.unsqueeze(-1), self.num_experts).flatten(1)

    @torch.no_grad()
    def _measure(self, balance: Tensor, z: Tensor, kept: Tensor | None, total: Tensor, parts: Tensor | None) -> None:
        """Overwrite the measures, because a recomputed forward pass comes here a second time."""
        dropped = torch.zeros_like(z)
        if kept is not None and self.capacity_factor:
            lost = 1 - kept.float().mean(dim=-1)
            dropped = lost.mean() if parts is None else (lost * parts).sum(dim=1).mean()
        busiest = (total.amax(dim=-1) * self.num_experts / total.sum(dim=-1).clamp(min=1)).mean()
        self.measures = RoutingMeasures(balance.detach(), z.detach(), dropped, busiest)


def count(chosen: Tensor, experts: int) -> Tensor:
    """Return how often each expert is in the last dimension of ``chosen``; int64 [..., experts]; no host sync."""
    empty = torch.zeros(*chosen.shape[:-1], experts, dtype=torch.int64, device=chosen.device)
    return empty.scatter_add_(-1, chosen, torch.ones_like(chosen))


def places(chosen: Tensor, load: Tensor, earlier: Tensor) -> Tensor:
    """Return each assignment's position, from 0, in its expert's queue of the sequence; [batch, assignments].

    Earlier tokens come first, so that no token is dropped because of a later one, which is unknown in generation.
    ``load`` [batch, experts] counts these assignments, ``earlier`` those of tokens before them.
    """
    order = chosen.argsort(dim=-1, stable=True)
    first = load.cumsum(dim=-1) - load - earlier  # where an expert's assignments begin in that order
    ranked = torch.arange(chosen.shape[-1], device=chosen.device) - first.gather(-1, chosen.gather(-1, order))
    return torch.empty_like(chosen).scatter_(-1, order, ranked)


def tally_here(load: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loads [batch, experts] of earlier parts of the sequences, and of whole sequences, on one rank."""
    return torch.zeros_like(load), load


def dispatch_here(experts: Experts, tokens: Tensor, routing: Routing) -> Tensor:
    """Return the weighted sum of each token's expert outputs, on one rank; tokens and result [n, hidden]."""
    order, counts = by_expert(routing, len(experts.members))
    return combine(experts(rows_of(tokens, order, routing), counts), order, routing)


def by_expert(routing: Routing, experts: int) -> tuple[Tensor, Tensor]:
    """Return the kept assignments sorted by expert, as indices into n x k, and the number of each expert."""
    chosen = routing.chosen.flatten()
    if routing.kept is None:
        return chosen.argsort(stable=True), count(chosen, experts)
    kept = routing.kept.flatten()
    counts = count(chosen.masked_fill(~kept, experts), experts + 1)[:experts]
    return chosen.masked_fill(~kept, experts).argsort(stable=True)[: int(kept.sum())], counts


def rows_of(tokens: Tensor, order: Tensor, routing: Routing) -> Tensor:
    """Return the token of each assignment in ``order``."""
    return _Rows.apply(tokens, order, routing.chosen.shape[1])  # type: ignore[no-any-return, no-untyped-call]


def combine(rows: Tensor, order: Tensor, routing: Routing) -> Tensor:
    """Return the weighted sum of each token's rows, [n, hidden]; dropped assignments count as zero."""
    n, k = routing.chosen.shape
    # index_put, because index_copy would save the rows for its backward pass, only for their shape
    spread = rows.new_zeros(n * k, rows.shape[-1]).index_put((order,), rows).view(n, k, -1)
    return torch.bmm(routing.weights.to(rows.dtype).unsqueeze(1), spread).squeeze(1)


def moe_layers_of(model: nn.Module) -> Iterator[MoELayer]:
    return (module for module in model.modules() if isinstance(module, MoELayer))


def scale_router_losses(model: nn.Module, scale: float) -> None:
    """Set the factor of a micro-batch's router losses in the gradient: 1 / accumulation, times the fp16 loss scale."""
    for layer in moe_layers_of(model):
        layer.loss_scale = scale


def update_correction_biases(model: nn.Module, applied: Tensor | float = 1.0) -> None:
    """Update the correction biases of all routers after a step, see ``MoELayer.update_bias``. Collective."""
    for layer in moe_layers_of(model):
        layer.update_bias(applied)


def routing_measures(model: nn.Module) -> RoutingMeasures | None:
    """Return the means over layers for the latest micro-batch on this rank; None without experts."""
    figures = [layer.measures for layer in moe_layers_of(model) if layer.measures is not None]
    return RoutingMeasures(*(torch.stack(values).mean() for values in zip(*figures, strict=True))) if figures else None


class _Product(Function):
    """Rows [n, in], sorted by expert, times the matrices of their experts [experts, out, in]: [n, out].

    Autograd's own product would save a transposed view of the weights, and so all that ZeRO-3 has gathered; a parameter
    that is saved itself may be emptied, and gathered again for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, ends)
        if not len(rows):  # no token of this rank has an expert; not all kernels take a product without rows
            return rows.new_zeros(0, weights.shape[1])
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights, ends = ctx.saved_tensors
        if not len(rows):
            return rows.new_zeros(rows.shape), weights.new_zeros(weights.shape), None
        gradient = gradient.contiguous()
        return F.grouped_mm(gradient, weights, offs=ends), F.grouped_mm(gradient.t(), rows, offs=ends), None


@never_compiled  # torch.compile supports grouped products in bf16 only
def _uncompiled_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    product: Tensor = _Product.apply(rows, weights, ends)  # type: ignore[no-untyped-call]
    return product


_BIAS_COLUMNS = 8  # a row of 16 bytes in 16 bits


class _Biased(Function):
    """Rows [n, out], sorted by expert, plus the bias of their expert [experts, out].

    The gradient of a bias is a sum over its rows: as a grouped product, in a fixed order; indexing would use atomics.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, biases: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        numbers = torch.arange(len(rows), device=rows.device, dtype=ends.dtype)
        return rows + biases.index_select(0, torch.searchsorted(ends, numbers, right=True))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (ends,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return gradient, None, None
        if not len(gradient):
            return gradient, gradient.new_zeros(len(ends), gradient.shape[1]), None
        gradient = gradient.contiguous()
        ones = gradient.new_ones(len(gradient), _BIAS_COLUMNS)
        return gradient, F.grouped_mm(gradient.t(), ones, offs=ends)[..., 0].contiguous(), None


_SIGMOID_SCALE = 1.702  # of GPT-OSS: gate * sigmoid(1.702 gate) is close to GELU (arXiv:1606.08415)


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """Return g sigmoid(1.702 g) (u + 1) [n, width], for gates g at most ``limit`` and u within it on both sides.

    ``gate_up``: [n, 2 x width], gates first (arXiv:2508.10925, section 2.2).
    """
    return _ClampedSwiGLU.apply(gate_up, limit)  # type: ignore[no-any-return, no-untyped-call]


class _ClampedSwiGLU(Function):
    """Saves its input alone."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.limit = limit
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(gate * _SIGMOID_SCALE) * (up.clamp(-limit, limit) + 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        raw_gate, raw_up = gate_up.chunk(2, dim=-1)
        gate, up = raw_gate.clamp(max=ctx.limit), raw_up.clamp(-ctx.limit, ctx.limit)
        share = torch.sigmoid(gate * _SIGMOID_SCALE)
        slope = share * (1 + _SIGMOID_SCALE * gate * (1 - share))
        of_gate = (gradient * (up + 1) * slope).masked_fill_(raw_gate > ctx.limit, 0.0)
        of_up = (gradient * gate * share).masked_fill_(raw_up.abs() > ctx.limit, 0.0)
        return torch.cat((of_gate, of_up), dim=-1), None


class _WithLoss(Function):
    """Gives a loss its gradient where ``carrier`` gets one, as if it were added to the model's own loss.

    So the loss needs no path through checkpointed blocks and pipeline stages, and cannot count twice (Megatron-LM,
    MoEAuxLossAutoScaler). Called per layer and micro-batch: the sum over layers is minimized.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, gradient.new_full((), ctx.scale), None


class _WithCount(Function):
    """Adds the loads of experts to those of the step where ``carrier`` gets a gradient.

    So a pass for evaluation does not count, and a recomputed one counts once.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, layer: MoELayer, load: Tensor) -> Tensor:
        ctx.layer, ctx.load = layer, load
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        before = ctx.layer.step_load
        ctx.layer.step_load = ctx.load if before is None else before + ctx.load
        return gradient, None, None


@never_compiled  # the backward pass changes the layer, which torch.compile does not trace
def _counted(weights: Tensor, layer: nn.Module, load: Tensor) -> Tensor:
    counted: Tensor = _WithCount.apply(weights, layer, load)  # type: ignore[no-untyped-call]
    return counted


class _Rows(Function):
    """``tokens[order // k]``, whose gradient adds a token's rows in a fixed order; indexing would use atomics."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.n, ctx.k = tokens.shape[0], k
        return tokens.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        spread = gradient.new_zeros(ctx.n * ctx.k, gradient.shape[-1]).index_copy_(0, order, gradient)
        return spread.view(ctx.n, ctx.k, -1).sum(dim=1), None, None
