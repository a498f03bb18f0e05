"""What activation checkpointing computes again, by framework. Knows no kernels' times beyond those it is given."""

from __future__ import annotations

from scaletrain_cli.plan.architecture import block_attention_flops, head_flops, training_flops_per_token
from scaletrain_cli.plan.memory.activations import checkpointed_blocks
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.speed.block_time import PartTime
from scaletrain_cli.spec import RunSpec

# torchtitan's selective checkpointing saves every second matrix product and the attention (torchtitan,
# distributed/activation_checkpoint.py): about half of a block's forward pass runs again.
_FSDP_SELECTIVE = 0.5


def recomputed_forwards(spec: RunSpec, layout: Layout) -> float:
    """Whole forward passes of a block that run again in its backward pass, on average over blocks.

    Selective: our engine and nanotron checkpoint every second block; FSDP see above; Megatron recomputes the attention
    core alone (arXiv:2205.05198, section 5), which counts here as none.
    """
    mode, layers = layout.activation_checkpointing, spec.transformer.num_hidden_layers
    if mode == "selective" and spec.planner.framework == "megatron":
        return 0.0
    if mode == "selective" and spec.planner.framework == "fsdp":
        return _FSDP_SELECTIVE
    return checkpointed_blocks(layers, mode) / layers


def recompute_seconds(spec: RunSpec, layout: Layout, part: PartTime) -> float:
    """GPU seconds per block and micro-batch."""
    if layout.activation_checkpointing == "selective" and spec.planner.framework == "megatron":
        return part.again_attention
    return recomputed_forwards(spec, layout) * part.forward


def recompute_flops_per_token(spec: RunSpec, layout: Layout) -> float:
    """FLOPs per token that recomputation adds to those of the model."""
    model = spec.transformer
    if layout.activation_checkpointing == "none":
        return 0.0
    if layout.activation_checkpointing == "selective" and spec.planner.framework == "megatron":
        return float(model.num_hidden_layers * block_attention_flops(model))
    blocks = training_flops_per_token(model) / 3 - head_flops(model)
    return recomputed_forwards(spec, layout) * blocks
