"""Activation bytes of a block, of which some weights may be frozen or have adapters: what autograd saves, per token.

* A product saves its input for the gradient of its weight only, so a frozen layer saves none. With ZeRO-3 it does, if
  the input has a gradient, because DeepSpeed replaces the product (``zero/linear.py`` LinearFunctionForZeroStage3).
* RMSNorm saves its input and an inverse root if that or its own weight has a gradient.
* Attention, activation functions and LayerNorm save nothing if nothing before them trains.
* An adapter (arXiv:2106.09685) saves the input of its layer, and its own low-rank intermediate value. That input is a
  copy of its own if the adapter computes in another dtype, or has dropout, which also saves a mask.
* DoRA (arXiv:2402.09353) saves both the layer's output and the update, for the gradient of the magnitudes.

Compilation is counted where all weights train; other compiled blocks save at most as much as without it.
"""

from dataclasses import dataclass

from scaletrain_cli.plan.block_graph import BlockTraining, Linear, block_graph
from scaletrain_cli.spec import ModelSpec

_FP32 = 4


@dataclass(frozen=True)
class BlockKernels:
    """Bytes per activation element, the ranks that share a block, and the kernels with which one runs it."""

    element: int
    tensor: int = 1
    sequence: int = 1
    context: int = 1
    fused: bool = True  # attention has a fused kernel and no dropout
    compiled: bool = False
    keeps_inputs: bool = False  # frozen layers save their inputs, too
    adapter_dropout: bool = False
    adapter_element: int = 0  # bytes per element of adapters; 0: as all others
    dora: bool = False
    repeats: bool = False  # keys and values are repeated for attention with a mask (``repeats_keys``)
    fused_norms: bool = True  # RMSNorm saves no fp32 values
    keeps_activated: bool = False  # an eager gated MLP saves its activated gate, too, which the engine's does not

    @property
    def adapter_bytes(self) -> int:
        return self.adapter_element or self.element

    @property
    def copies_inputs(self) -> bool:
        """Return whether an adapter keeps a copy of its layer's input."""
        return self.adapter_dropout or self.adapter_bytes != self.element


def score_bytes(model: ModelSpec, element: int, heads: int) -> int:
    """Return the bytes per token that unfused attention saves of its scores, with ``heads`` heads on the rank.

    The weights after softmax, in fp32; with a cap the output of tanh; with dropout the dropped weights and the mask.
    Under a cap without dropout, 16-bit weights are a copy. A sink is one more score. There is no log-sum-exp.
    """
    per_score, capped = _FP32, model.attn_logit_softcapping is not None
    per_score += element if capped else 0
    if model.attention_dropout:
        per_score += element + 1
    elif capped and element < _FP32:
        per_score += element
    sink = _FP32 if model.attention_sinks else 0
    return heads * (model.seq_len * per_score + sink) - (_FP32 * heads if materializes_scores(model) else 0)


def score_gradient_bytes(model: ModelSpec, element: int) -> int:
    """Return the bytes per score by which the backward pass of unfused attention exceeds what it has saved.

    At most when the softmax has the gradients of its output and of its input, both in fp32. By then the 16-bit copy of
    the weights is free, with dropout also its mask. Dropout in fp32 needs more bytes before, where it masks a gradient.
    """
    if not materializes_scores(model):  # the unfused kernel of torch
        return 2 * _FP32
    if model.attention_dropout:
        return _FP32 if element == _FP32 else 2 * _FP32 - element - 1
    return 2 * _FP32 if element == _FP32 else 2 * _FP32 - element


def latent_core_bytes(model: ModelSpec, element: int, heads: int, sequence: int, *, kept: bool) -> int:
    """Return the bytes per token that the core of latent attention saves, without its scores.

    As engine/model/attention.py computes it: queries, keys, values and output, with zeros up to the size of the larger
    heads, and one log-sum-exp per head; its output is the input of the next layer, which is ``kept``: a copy without
    the zeros, or from Ulysses' all-to-all.
    """
    score, value = model.qk_head_dim, model.value_head_dim
    if materializes_scores(model):
        return element * heads * (2 * score + (2 if kept else 1) * value) + _FP32 * heads
    wide = max(score, value)
    copied = kept and (value != wide or sequence > 1)
    return element * heads * (4 * wide + (value if copied else 0)) + _FP32 * heads


def indexer_bytes(model: ModelSpec, element: int) -> int:
    """Return the bytes per token that the indexer of DeepSeek-V3.2 saves, whose scores its fused kernel does not keep.

    Its queries, its key before and after the LayerNorm, the weights of its heads, and the 4-byte numbers of the tokens
    that it chooses (arXiv:2512.02556, section 2.1). Not measured.
    """
    if not model.index_topk:
        return 0
    heads, size = model.index_n_heads, model.index_head_dim
    return element * (heads * size + 2 * size + heads) + 2 * _FP32 + 4 * min(model.index_topk, model.seq_len)


def mamba_bytes(model: ModelSpec, element: int, tensor: int) -> tuple[int, int]:
    """Return the bytes per token of a state-space layer on one tensor rank: (saved, gradients alive at once).

    As the fused kernels of the mamba_ssm package: the output of the input projection, the channels after the scan and
    after the gated norm, and one fp32 inverse root per group; the backward pass computes convolution and scan again,
    with one fp32 state per chunk of tokens (ops/triton/ssd_combined.py MambaSplitConv1dScanCombinedFn). Mamba has no
    norm of its output, but keeps the convolved channels, time steps and their projection
    (ops/selective_scan_interface.py MambaInnerFn). Without its input, which the norm before it saves. Not measured.
    """
    mamba = model.mamba
    if mamba is None:
        return 0, 0
    inner, projected = -(-mamba.inner_size // tensor), -(-mamba.projected_size // tensor)
    states = _FP32 * inner * -(-mamba.state_size // mamba.chunk_size)
    if mamba.dt_rank:
        low = mamba.dt_rank + 2 * mamba.state_size
        return element * (projected + 3 * inner + low), element * (projected + 2 * inner + low) + states
    groups = -(-mamba.groups // tensor)
    return element * (projected + 2 * inner) + _FP32 * groups, element * (projected + 2 * inner) + states


def materializes_scores(model: ModelSpec) -> bool:
    """Return whether this engine's attention is unfused on every device: with dropout, or with a cap of scores."""
    return model.attention_dropout > 0 or model.attn_logit_softcapping is not None


@dataclass(frozen=True)
class BlockBytes:
    """The bytes per token that one block saves on one rank."""

    model: ModelSpec
    training: BlockTraining
    experts: bool
    kernels: BlockKernels

    def of_block(self) -> tuple[int, int]:
        """Return (all bytes, those that the attention module saves, which are not kept if only that is recomputed)."""
        model, training, graph = self.model, self.training, block_graph(self.model, self.experts)
        hidden, element = model.hidden_size, self.kernels.element
        entering = training.reached
        normed = entering or training.trains(graph.attention_norm)
        reads_norm = any(self._keeps_input(chain[0], normed) for chain in graph.branches)
        saved = self.norm(graph.attention_norm, entering, kept=reads_norm)
        attention, mixed = self.attention(normed)
        saved += attention
        if graph.after_attention:
            saved += self.norm(graph.after_attention, mixed, kept=False)
            mixed = mixed or training.trains(graph.after_attention)
        if model.hidden_dropout and mixed:
            saved += hidden  # a mask is a byte
        between = entering or mixed
        normed = between or training.trains(graph.mlp_norm)
        first = (*graph.mlp, *graph.routed)
        readers = (*graph.mlp, *([graph.shared_gate] if graph.shared_gate is not None else []))
        kept = any(self._keeps_input(layer, normed) for layer in readers)
        if self.experts and (normed or any(training.learns(linear.name) for linear in first)):
            # Compiled, only the router's fp32 copy of the norm's output is saved.
            kept = not self.kernels.compiled or bool(graph.mlp) or element == _FP32
        saved += self.norm(graph.mlp_norm, between, kept=kept)
        mlp, after = self.mlp(normed)
        if graph.after_mlp:
            mlp += self.norm(graph.after_mlp, after, kept=False)
            after = after or training.trains(graph.after_mlp)
        saved += mlp + (hidden if model.hidden_dropout and after else 0)
        if not reads_norm and saved:
            attention -= element * hidden  # a recomputed attention module keeps its input
        return saved, attention

    def _keeps_input(self, layer: Linear, arriving: bool) -> bool:
        if self.training.rank(layer.name) and self.kernels.copies_inputs:
            return self.training.trains(layer.name) or (self.kernels.keeps_inputs and arriving)
        return self.training.learns(layer.name) or (self.kernels.keeps_inputs and arriving)

    def _adapter(self, layer: Linear, inputs: int, outputs: int) -> int:
        """Return what an adapter saves beside its layer's input; ``inputs``, ``outputs``: features on this rank."""
        rank, kernels = self.training.rank(layer.name), self.kernels
        if not rank:
            return 0
        if layer.copies > 1:  # of stacked experts: in the dtype of the tokens
            return layer.copies * kernels.element * rank
        saved = kernels.adapter_bytes * rank + (kernels.adapter_bytes * inputs if kernels.copies_inputs else 0)
        saved += inputs if kernels.adapter_dropout else 0  # a mask is a byte
        return saved + (outputs * (kernels.element + kernels.adapter_bytes) if kernels.dora else 0)

    def norm(self, name: str, arriving: bool, *, kept: bool) -> int:
        """Return what a norm saves; ``kept``: a layer that reads its output saves that."""
        size, element = self.model.hidden_size, self.kernels.element
        output = element * size if kept else 0
        if not name:  # the layers read the hidden states
            return output
        if self.model.norm_kind == "layernorm":
            return output + (element * size + 2 * _FP32 if arriving or self.training.trains(name) else 0)
        # One that is not fused also saves the fp32 input and the normalized value.
        unfused = 0 if self.kernels.fused_norms or self.kernels.compiled else _FP32 * size
        return output + self._rms(name, arriving, size, 1) + unfused

    def _rms(self, name: str, arriving: bool, size: int, rows: int) -> int:
        """Return what RMSNorm saves of ``rows`` rows in all ``size`` channels, without its output."""
        kept = arriving or self.training.trains(name)
        return self.kernels.element * size + _FP32 * rows if kept else 0

    def attention(self, normed: bool) -> tuple[int, bool]:
        """Return (bytes that the attention module saves, whether its output has a gradient)."""
        model, training, graph = self.model, self.training, block_graph(self.model, self.experts)
        element, t, compiled = self.kernels.element, self.kernels.tensor, self.kernels.compiled
        heads = -(-model.num_attention_heads // t)
        queries = heads * model.head_dim
        keys = max(-(-model.num_key_value_heads // t), 1) * model.head_dim
        saved, arrived = 0, []
        for branch, chain in enumerate(graph.branches):
            arriving = normed
            for number, layer in enumerate(chain):
                if number:
                    norm = graph.latent_norm(branch)
                    saved += self._rms(norm, arriving, layer.inputs, 1)
                    arriving = arriving or training.trains(norm)
                    if arriving and branch > 0 and not compiled:  # the rotated key beside the latent, a view of both
                        saved += element * model.qk_rope_head_dim
                    saved += element * layer.inputs if self._keeps_input(layer, arriving) else 0
                whole = number + 1 < len(chain)  # latents are on every tensor rank
                saved += self._adapter(layer, layer.inputs, layer.outputs if whole else -(-layer.outputs // t))
                arriving = arriving or training.learns(layer.name)
            arrived.append(arriving)
        arrived = arrived * 3 if model.fused_projections else arrived
        over_heads = model.qk_norm_scope == "head"
        for index, (name, size) in enumerate(zip(graph.head_norms, (queries, keys), strict=False)):
            if t == 1 or compiled or model.qk_norm_scope != "projection":
                saved += self._rms(name, arrived[index], size, size // model.head_dim if over_heads else 1)
            elif arrived[index] or training.trains(name):
                # A norm over the channels of all tensor ranks (``NormOverRanks``) saves its fp32 input and, if its
                # weight trains, the normalized value.
                normalized = _FP32 if model.zero_centered_norm else element
                saved += size * (_FP32 + (normalized if training.trains(name) else 0)) + _FP32
            arrived[index] = arrived[index] or training.trains(name)
        mixing, output = any(arrived) or training.trains(graph.sinks), graph.output
        reads = self._keeps_input(output, mixing)
        if model.kv_lora_rank:
            queries = heads * model.value_head_dim
            core = latent_core_bytes(model, element, heads, self.kernels.sequence, kept=reads)
            saved += core if mixing else element * queries if reads else 0
            if mixing:
                saved += indexer_bytes(model, element)
                saved += 0 if self.kernels.fused else score_bytes(model, element, heads)
        elif mixing:
            repeated = self.kernels.sequence > 1 and keys // model.head_dim % self.kernels.sequence
            repeated = repeated or self.kernels.repeats
            saved += element * (2 * queries + 2 * (queries if repeated else keys)) + _FP32 * heads
            saved += element * queries if self.kernels.sequence > 1 and reads else 0
            if materializes_scores(model) and not reads:
                saved -= element * queries  # its output is saved only as the input of the next layer
            if not self.kernels.fused:
                saved += score_bytes(model, element, heads)
        elif reads:
            saved += element * queries
        return saved + self._adapter(output, queries, model.hidden_size), mixing or training.learns(output.name)

    def mlp(self, normed: bool) -> tuple[int, bool]:
        """Return (bytes that the MLP saves, whether its output has a gradient)."""
        model, training, graph = self.model, self.training, block_graph(self.model, self.experts)
        element, t = self.kernels.element, self.kernels.tensor
        saved, after = 0, False
        if graph.down is not None:
            width = -(-graph.down.inputs // t)
            arrived = [normed or training.learns(layer.name) for layer in graph.mlp]
            arrived = arrived * 2 if model.fused_projections and model.has_gated_mlp else arrived
            saved += element * width * self._gates(arrived, self._keeps_input(graph.down, any(arrived)))
            saved += sum(self._adapter(layer, model.hidden_size, width) for layer in graph.mlp)
            saved += self._adapter(graph.down, width, model.hidden_size)
            after = any(arrived) or training.learns(graph.down.name)
        if graph.shared_gate is not None:
            scales = normed or training.learns(graph.shared_gate.name)
            saved += element * ((model.hidden_size if scales else 0) + (1 if scales or after else 0))
            saved += self._adapter(graph.shared_gate, model.hidden_size, 1)
            after = after or scales
        if graph.routed_down is not None and graph.router is not None:
            # The grouped product of experts (engine/model/moe.py) saves its input whether or not its weight trains.
            layer, down = graph.routed[0], graph.routed_down
            width = -(-down.inputs // t)
            routes = normed or training.learns(graph.router.name)
            arriving = normed or training.learns(layer.name)
            learns = arriving or training.learns(down.name)
            # dispatched input and output; compiled: also the output before its return
            rows = (arriving + routes + self.kernels.compiled) * model.hidden_size
            arrived = [arriving] * (2 if model.has_gated_mlp else 1)
            saved += (
                layer.copies * element * (rows + width * self._gates(arrived, learns, activated=not model.swiglu_limit))
            )
            saved += self._adapter(layer, model.hidden_size, 0) + self._adapter(down, width, 0)
            saved += 2 * _FP32 * model.num_experts if routes else 0
            if element < _FP32 and training.learns(graph.router.name):
                saved += _FP32 * model.hidden_size
            after = after or learns or routes
        return saved, after

    def _gates(self, arrived: list[bool], kept: bool, *, activated: bool = True) -> int:
        """Return how many values of the MLP's width are saved, of which the last product's input only if ``kept``.

        ``activated``: an eager MLP may save its activated gate.
        """
        if len(arrived) == 1:  # the input of GELU
            return arrived[0] + kept
        gate, up = arrived  # gate and up, or the gate alone for the gradient of up
        activated = activated and gate and self.kernels.keeps_activated and not self.kernels.compiled
        return (2 if gate else 1 if up else 0) + kept + activated
