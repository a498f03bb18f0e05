"""What activation checkpointing computes again, by framework. Knows no kernels' times beyond those it is given."""

from __future__ import annotations

from scaletrain_cli.plan.architecture import (
    attention_matmul_flops,
    block_attention_flops,
    head_flops,
    training_flops_per_token,
)
from scaletrain_cli.plan.memory.activations import Recomputation
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.speed.block_time import PartTime
from scaletrain_cli.spec import RunSpec

# torchtitan's selective checkpointing saves every second matrix product and the attention (torchtitan,
# distributed/activation_checkpoint.py): about half of a block's forward pass runs again.
_FSDP_SELECTIVE = 0.5


def recomputed_forwards(spec: RunSpec, layout: Layout) -> float:
    """Whole forward passes of a block that run again in its backward pass, on average over blocks.

    Selective: nanotron checkpoints every second block, our engine every n-th or the attention module of each, which is
    half of the block's kernels and collectives; FSDP see above; Megatron recomputes the attention core alone
    (arXiv:2205.05198, section 5), which counts as none.
    """
    mode, layers, framework = layout.activation_checkpointing, spec.transformer.num_hidden_layers, _framework(spec)
    if mode == "selective" and framework == "megatron":
        return 0.0
    if mode == "selective" and framework == "fsdp":
        return _FSDP_SELECTIVE
    if _recomputes_attention(spec, layout):
        return 0.5
    if framework == "deepspeed":
        return Recomputation(mode, spec.layout.selective_scope, spec.layout.selective_every).blocks(layers) / layers
    return Recomputation(mode).blocks(layers) / layers


def recompute_seconds(spec: RunSpec, layout: Layout, part: PartTime) -> float:
    """GPU seconds per block and micro-batch."""
    if layout.activation_checkpointing == "selective" and _framework(spec) == "megatron":
        return part.again_attention
    if _recomputes_attention(spec, layout):
        return part.again_attention + part.forward_attention_products
    return recomputed_forwards(spec, layout) * part.forward


def recompute_flops_per_token(spec: RunSpec, layout: Layout) -> float:
    """FLOPs per token that recomputation adds to those of the model."""
    model = spec.transformer
    if layout.activation_checkpointing == "none":
        return 0.0
    if layout.activation_checkpointing == "selective" and _framework(spec) == "megatron":
        return float(model.num_hidden_layers * block_attention_flops(model))
    if _recomputes_attention(spec, layout):
        return float(model.num_hidden_layers * (block_attention_flops(model) + attention_matmul_flops(model)))
    blocks = training_flops_per_token(model) / 3 - head_flops(model)
    return recomputed_forwards(spec, layout) * blocks


def _recomputes_attention(spec: RunSpec, layout: Layout) -> bool:
    """Our engine's other kind of selective checkpointing: the whole attention module, projections included."""
    scope, mode = spec.layout.selective_scope, layout.activation_checkpointing
    return _framework(spec) == "deepspeed" and mode == "selective" and scope == "attention"


def _framework(spec: RunSpec) -> str:
    return spec.planner.framework
