"""The recomputation of activation checkpointing: as a number of forward passes, in seconds and in FLOPs."""

from scaletrain_cli.plan.architecture import (
    attention_matmul_flops,
    block_attention_flops,
    head_flops,
    training_flops_per_token,
)
from scaletrain_cli.plan.frameworks.profile import Selective
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.activations import Recomputation
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.speed.block_time import PartTime
from scaletrain_cli.plan.trained_stages import TrainedStage, reached_blocks
from scaletrain_cli.spec import RunSpec

# Share of a block's forward pass that torchtitan's selective checkpointing recomputes: it saves attention and every
# second matrix product (distributed/activation_checkpoint.py).
_OPERATIONS = 0.5


def recomputed_forwards(spec: RunSpec, layout: Layout) -> float:
    """Return how many forward passes of a block its backward pass recomputes, on average over blocks: 0 to 1.

    Used for kernel launches and collectives, of which the attention module has half and its core alone almost none.
    """
    mode, layers = layout.activation_checkpointing, spec.transformer.num_hidden_layers
    if mode == "none":
        return 0.0
    if mode == "selective":
        kind = framework_of(spec).selective(spec)
        if kind != "blocks":
            return {"attention core": 0.0, "operations": _OPERATIONS, "attention module": 0.5}[kind]
    return Recomputation(mode, "block", framework_of(spec).selective_every(spec)).blocks(layers) / layers


def recompute_seconds(spec: RunSpec, layout: Layout, part: PartTime) -> float:
    """Return the GPU seconds of recomputation per block and micro-batch; ``part``: the block's times."""
    kind = _selective(spec, layout)
    if kind == "attention core":
        return part.attention_core_forward
    if kind == "attention module":
        return part.attention_core_forward + part.attention_products_forward
    return recomputed_forwards(spec, layout) * part.forward


def recompute_flops_per_token(spec: RunSpec, layout: Layout, trained: TrainedStage) -> float:
    """Return the FLOPs per token of recomputation, which hardware FLOPs utilization (HFU) counts and MFU does not.

    Blocks without a backward pass are not recomputed; ``trained``: what trains.
    """
    model, kind = spec.transformer, _selective(spec, layout)
    logits = head_flops(model) if computes_logits_again(spec, layout) else 0
    if layout.activation_checkpointing == "none":
        return float(logits)
    layers = reached_blocks(model, trained)
    if kind == "attention core":
        return float(layers * block_attention_flops(model) + logits)
    if kind == "attention module":
        return float(layers * (block_attention_flops(model) + attention_matmul_flops(model)) + logits)
    blocks = training_flops_per_token(model) / 3 - head_flops(model)
    return recomputed_forwards(spec, layout) * blocks * layers / model.num_hidden_layers + logits


def computes_logits_again(spec: RunSpec, layout: Layout) -> bool:
    """Return whether the backward pass of the loss computes the logits again: that of ``dpo`` in chunks."""
    return spec.training.objective == "dpo" and layout.cross_entropy == "chunked"


def _selective(spec: RunSpec, layout: Layout) -> Selective | None:
    """Return what selective checkpointing recomputes; None if the layout has another mode of checkpointing."""
    return framework_of(spec).selective(spec) if layout.activation_checkpointing == "selective" else None
