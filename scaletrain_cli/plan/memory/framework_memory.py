"""What each framework keeps in memory around a transformer's blocks, as frozen data. Knows no model and no layout.

Each figure is counted in the framework's source, which its comment names, or calibrated on a whole set of published
runs, and then it says so. Bytes per element are for 16-bit elements.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FrameworkMemory:
    """One framework's habits."""

    # Elements per inner channel that a gated MLP keeps: gate, up, activated gate and product; fused: gate, up, product.
    gated_mlp: int
    # The projected queries and keys stay beside the rotated ones, because the values are a view of the same storage.
    keeps_projected: bool
    # Keys and values are repeated to the number of query heads before attention.
    repeats_keys: bool
    # Elements per channel of a micro-batch that tensor parallelism holds whole beside its shares: gather buffers.
    gathered: int
    # Bytes per vocabulary entry and token when the loss is computed.
    logits: int
    # Bytes per parameter of the data-parallel reducer's buckets, where there are replicas.
    bucket: int
    # Bytes per parameter of the gradients that one backward pass makes before they are added.
    fresh_gradient: int
    # Bytes per parameter updated that exist only during the optimizer's step.
    step_temporary: int
    # Blocks whose weights are gathered at once under ZeRO-3.
    gathered_blocks: int
    # What selective checkpointing recomputes: every second block ("blocks"), the attention core of each ("attention"),
    # or all but the attention and every second product ("operations").
    selective: str
    # cuBLAS and Transformer Engine workspaces, in the allocator, and what they take more from Hopper on; bytes.
    workspace: int
    hopper_workspace: int
    # Share of what comes and goes that the caching allocator cannot use: rounding and split blocks.
    fragmentation: float
    # A stage keeps its output for the backward pass after it has sent it.
    keeps_stage_output: bool
    # Tensors of a micro-batch's tokens and channels that have been freed but are still in use by tensor-parallel
    # collectives: the host runs ahead of the GPU, and the allocator waits (record_stream) before it reuses them.
    backlog: int = 0


_MIB = 2**20

# PyTorch FSDP with models as torchtitan writes them: eager SwiGLU, repeat_kv, the selective checkpointing of
# distributed/activation_checkpoint.py, and a prefetch of the next block. The loss holds the 16-bit logits, and in fp32
# the log-probabilities and the gradients of two losses. AdamW's foreach form makes the root of the second moment.
_FSDP = FrameworkMemory(
    gated_mlp=4,
    keeps_projected=False,
    repeats_keys=True,
    gathered=2,
    logits=14,
    bucket=0,
    fresh_gradient=0,
    step_temporary=4,
    gathered_blocks=2,
    selective="operations",
    workspace=8 * _MIB,
    hopper_workspace=24 * _MIB,
    fragmentation=0.04,
    keeps_stage_output=True,
)
# Megatron-LM: fused SwiGLU; vocab_parallel_cross_entropy exponentiates the fp32 copy of the logits in place; gradients
# are added to the fp32 buffer by the product itself (gradient accumulation fusion); FusedAdam works in place.
_MEGATRON = FrameworkMemory(
    gated_mlp=3,
    keeps_projected=True,
    repeats_keys=False,
    gathered=2,
    logits=6,
    bucket=0,
    fresh_gradient=0,
    step_temporary=0,
    gathered_blocks=2,
    selective="attention",
    workspace=64 * _MIB,
    hopper_workspace=28 * _MIB,
    fragmentation=0.08,
    keeps_stage_output=False,
)
# nanotron: eager SwiGLU (models/llama.py GLUActivation); 16-bit logits, their fp32 copy and the shifted one
# (parallel/tensor_parallel/functional.py sharded_cross_entropy); DistributedDataParallel's buckets beside the fp32
# gradients, and the 16-bit gradients of a whole backward pass before they are added (optim/gradient_accumulator.py);
# two gather buffers (MemoryBuffer) and the gradient of one; fused AdamW. Tensor-parallel collectives run beside the
# products: with a full launch queue about fifty tensors wait for them, calibrated on the Ultra-Scale sweep.
_NANOTRON = FrameworkMemory(
    gated_mlp=4,
    keeps_projected=False,
    repeats_keys=False,
    gathered=3,
    logits=10,
    bucket=2,
    fresh_gradient=2,
    step_temporary=0,
    gathered_blocks=0,
    selective="blocks",
    workspace=8 * _MIB,
    hopper_workspace=24 * _MIB,
    fragmentation=0.06,
    keeps_stage_output=True,
    backlog=45,
)

FRAMEWORK_MEMORY = {"fsdp": _FSDP, "megatron": _MEGATRON, "nanotron": _NANOTRON}
