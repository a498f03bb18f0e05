"""The matrix products of a transformer block that need gradients if some weights are frozen, and their FLOPs.

A matrix product of a frozen weight takes 2 FLOPs per weight and token forward and 2 backward, for the gradient of its
input. A trained weight takes 2 more, for its own gradient. Below the lowest trained weight there is no backward pass.
An adapter (LoRA, arXiv:2106.09685) adds two products per layer; both of its factors train.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from scaletrain_cli.plan.architecture import block_attention_flops
from scaletrain_cli.plan.parameters import block_tensors
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.hybrid import DENSE_BLOCK, SPARSE_BLOCK


class Linear(NamedTuple):
    """A linear layer of a block; ``name``: of its module within the block; ``copies``: products per token."""

    name: str
    inputs: int
    outputs: int
    copies: int = 1

    @property
    def weights(self) -> int:
        """Weights per token: those of one copy, times the copies."""
        return self.inputs * self.outputs * self.copies


class Adapter(NamedTuple):
    """A low-rank adapter of the linear layer ``name``."""

    name: str
    rank: int


class BlockTraining(NamedTuple):
    """The modules and adapters that train in one block.

    ``reached``: a weight before the block trains, so that its input has a gradient. ``modules``: the modules whose own
    weight trains, by their names within the block; None: all.
    """

    reached: bool = True
    modules: frozenset[str] | None = None
    adapters: tuple[Adapter, ...] = ()

    def trains(self, module: str) -> bool:
        """Return whether the module's own weight trains."""
        return self.modules is None or module in self.modules

    def rank(self, module: str) -> int:
        """Return the rank of the module's adapter; 0 without one."""
        return next((adapter.rank for adapter in self.adapters if adapter.name == module), 0)

    def learns(self, module: str) -> bool:
        """Return whether the module's weight or its adapter trains, for which its input is kept."""
        return self.trains(module) or self.rank(module) > 0

    @property
    def is_whole(self) -> bool:
        """Return whether every weight trains, and no adapter."""
        return self.reached and self.modules is None and not self.adapters


WHOLE = BlockTraining()


class BlockGraph(NamedTuple):
    """The linear layers and norms of one block, by the order in which gradients pass them.

    ``branches``: chains of layers from the first norm to attention: queries, keys, values. ``mlp``: chains from the
    second norm to the last MLP product; ``routed``: those of the routed experts. ``shared_gate``: multiplies the output
    of the MLP beside the routed experts. ``head_norms``: norms after the first branches, of queries and keys.
    ``latent_norms``: for each branch, the norm between its two layers.
    ``after_attention`` and ``after_mlp``: norms before the residual sums. ``sinks``: the module with the logits of
    sinks. "" stands for what the block does not have.
    """

    attention_norm: str
    branches: tuple[tuple[Linear, ...], ...]
    output: Linear
    mlp_norm: str
    mlp: tuple[Linear, ...]
    down: Linear | None
    router: Linear | None = None
    routed: tuple[Linear, ...] = ()
    routed_down: Linear | None = None
    shared_gate: Linear | None = None
    head_norms: tuple[str, ...] = ()
    latent_norms: tuple[str, ...] = ()
    after_attention: str = ""
    after_mlp: str = ""
    sinks: str = ""

    def latent_norm(self, branch: int) -> str:
        """Return the norm between the layers of a branch, by its number; "" if it has none."""
        return self.latent_norms[branch] if self.latent_norms else ""

    @property
    def linears(self) -> tuple[Linear, ...]:
        ends = (self.output, *self.mlp, self.down, self.router, *self.routed, self.routed_down, self.shared_gate)
        return (*(layer for chain in self.branches for layer in chain), *(layer for layer in ends if layer is not None))


@lru_cache(maxsize=256)
def block_graph(model: ModelSpec, experts: bool) -> BlockGraph:
    """Return the layers of one block, by the names of the engine's modules; ``experts``: an MoE block."""
    experts = experts and model.num_experts > 0 and not model.has_fused_qkv
    all_tensors = block_tensors(model, SPARSE_BLOCK if experts else DENSE_BLOCK)
    tensors = {weight.name.removesuffix(".weight"): weight for weight in all_tensors}

    def layers(*names: str) -> Iterator[Linear]:
        """Yield those of these layers that the block has; of routed experts, as many as a token takes."""
        for name in names:
            if (tensor := tensors.get(name)) is not None:
                rows, columns = tensor.rows, tensor.elements // max(tensor.experts, 1) // tensor.rows
                inputs, outputs = (rows, columns) if model.has_fused_qkv else (columns, rows)
                copies = min(model.num_experts_per_tok, tensor.experts) if tensor.experts else 1
                yield Linear(name, inputs, outputs, copies)

    def layer(name: str) -> Linear | None:
        return next(layers(name), None)

    if model.has_fused_qkv:
        (queries, output), (first, down) = layers("attn.c_attn", "attn.c_proj"), layers("mlp.c_fc", "mlp.c_proj")
        return BlockGraph("ln_1", ((queries,),), output, "ln_2", (first,), down)
    branches: tuple[tuple[Linear, ...], ...] = tuple(
        (projection,) for projection in layers(*(f"self_attn.{name}_proj" for name in ("qkv", "q", "k", "v")))
    )
    latent_norms: tuple[str, ...] = ()
    if model.kv_lora_rank:  # arXiv:2405.04434, section 2.1
        query = tuple(layers("self_attn.q_proj", "self_attn.q_a_proj", "self_attn.q_b_proj"))
        branches = (query, tuple(layers("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj")))
        latent_norms = ("self_attn.q_a_layernorm" if model.q_lora_rank else "", "self_attn.kv_a_layernorm")
    first_norm, after_attention, second_norm, after_mlp = {
        "pre": ("input_layernorm", "", "post_attention_layernorm", ""),
        "post": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
        "pre_and_post": model.block_norms,
        "shared": ("input_layernorm", "", "", ""),
    }[model.norm_position]
    mlp = f"mlp.{model.shared_expert_name}" if experts else "mlp"
    return BlockGraph(
        first_norm,
        branches,
        next(layers("self_attn.o_proj")),
        second_norm,
        mlp=tuple(layers(*(f"{mlp}.{name}_proj" for name in ("gate_up", "gate", "up")))),
        down=layer(f"{mlp}.down_proj"),
        router=layer("mlp.gate"),
        routed=tuple(layers("mlp.experts.gate_up_proj")),
        routed_down=layer("mlp.experts.down_proj"),
        shared_gate=layer("mlp.shared_expert_gate"),
        head_norms=("self_attn.q_norm", "self_attn.k_norm") if model.qk_norm else (),
        latent_norms=latent_norms,
        after_attention=after_attention,
        after_mlp=after_mlp,
        sinks="self_attn" if model.attention_sinks else "",
    )


class BackwardProducts(NamedTuple):
    """Weights per token whose products a block's backward pass computes, in three kinds, and what it reaches.

    ``inputs``: products for the gradient of a layer's input; ``weights``: for that of a layer's weight; ``adapters``:
    for both of the factors of adapters. ``attention``: the core of attention has a backward pass. ``reached``: the
    block's output has a gradient.
    """

    inputs: int
    weights: int
    adapters: int
    attention: bool
    reached: bool


@lru_cache(maxsize=1024)
def backward_products(model: ModelSpec, training: BlockTraining, experts: bool) -> BackwardProducts:
    """Return the products of the backward pass of one block."""
    graph = block_graph(model, experts)
    inputs = weights = adapters = 0

    def through(layer: Linear, arriving: bool) -> bool:
        """Count the layer; return whether its output has a gradient, if its input has one (``arriving``)."""
        nonlocal inputs, weights, adapters
        rank = training.rank(layer.name)
        down, up = rank * layer.inputs * layer.copies, rank * layer.outputs * layer.copies
        inputs += layer.weights if arriving else 0
        weights += layer.weights if training.trains(layer.name) else 0
        adapters += (2 if arriving else 1) * down + 2 * up
        return arriving or training.learns(layer.name)

    before = training.reached
    normed = before or training.trains(graph.attention_norm)
    attention = False
    for branch, chain in enumerate(graph.branches):
        arriving = normed
        for number, layer in enumerate(chain):
            arriving = through(layer, arriving or (number > 0 and training.trains(graph.latent_norm(branch))))
        attention = attention or arriving
    attention = attention or any(map(training.trains, (*graph.head_norms, graph.sinks)))
    between = through(graph.output, attention) or training.trains(graph.after_attention) or before
    normed = between or training.trains(graph.mlp_norm)
    after = between
    for first, last in ((graph.mlp, graph.down), (graph.routed, graph.routed_down)):
        if last is not None:
            inner = [through(layer, normed) for layer in first]
            after = through(last, any(inner)) or after
    for gate in (graph.router, graph.shared_gate):
        if gate is not None:
            after = through(gate, normed) or after
    after = after or training.trains(graph.after_mlp)
    return BackwardProducts(inputs, weights, adapters, attention, after)


@lru_cache(maxsize=256)
def linear_weights(model: ModelSpec, experts: bool) -> int:
    """Return the weights per token of the forward products of a block, without adapters."""
    return sum(linear.weights for linear in block_graph(model, experts).linears)


def block_flops(model: ModelSpec, training: BlockTraining, experts: bool) -> tuple[int, int]:
    """Return the FLOPs per token of one block, (forward, backward), without recomputation.

    The backward pass of attention's core takes twice the FLOPs of its forward pass (arXiv:2204.02311, appendix B).
    """
    back, core = backward_products(model, training, experts), block_attention_flops(model)
    forward = linear_weights(model, experts)
    for linear in block_graph(model, experts).linears if training.adapters else ():
        forward += training.rank(linear.name) * (linear.inputs + linear.outputs) * linear.copies
    backward = back.inputs + back.weights + back.adapters
    return 2 * forward + core, 2 * backward + (2 * core if back.attention else 0)
