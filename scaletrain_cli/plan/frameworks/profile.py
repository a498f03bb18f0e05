"""Profiles of a framework: the memory and time that it adds around a transformer's blocks, for any model and layout.

Bytes and collectives are counted in the frameworks' sources; comments cite the files. Host seconds and overlaps are
calibrated on half of the published runs: nanotron's on the Ultra-Scale Playbook's sweep, Megatron-LM's on vTrain's
runs, FSDP's on LLM Foundry's. benchmarks/planner_accuracy.py prints the errors on all of them. Host seconds are for
server CPUs of 2020 to 2024; they matter if micro-batches are too small to keep a GPU busy. Those of this project's
engine are estimates between the other frameworks'.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

MIB = 2**20

# What selective activation checkpointing recomputes: every n-th block; the attention module of each block, with its
# projections; only the attention core (scores, softmax, weighted sum) of each block; or everything except attention and
# every second matrix product.
Selective = Literal["blocks", "attention module", "attention core", "operations"]


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Memory that a framework holds around a transformer's blocks. Bytes per element are for 16-bit elements."""

    # Elements per inner channel that a gated MLP saves: 4 (gate, up, activated gate, product), or 3 with a fused
    # kernel.
    gated_mlp: int
    # Whether projected queries and keys are kept beside the rotated ones, because the values share their storage.
    keeps_projected: bool
    # Whether keys and values are repeated to the number of query heads before attention.
    repeats_keys: bool
    # Buffers of tokens x channels that tensor parallelism gathers at full size, if norms are sharded.
    gathered: int
    # Bytes per token and vocabulary entry at the peak of the loss.
    logits: int
    # Bytes per parameter of the data-parallel reducer's buckets.
    bucket: int = 0
    # Bytes per parameter of the gradients that one backward pass allocates before they are added.
    fresh_gradient: int = 0
    # Bytes per updated parameter that exist only during the optimizer's step.
    step_temporary: int = 0
    # Blocks whose weights are gathered at the same time under ZeRO-3.
    gathered_blocks: int
    # Whether ZeRO-2 and 3 reduce gradients only with the last micro-batch of a step, and keep them whole until then
    # (FSDP2, set_requires_gradient_sync). With a pipeline they always do.
    accumulates_unsharded: bool = False
    # Bytes of cuBLAS and Transformer Engine workspaces in the caching allocator, and the additional bytes on Hopper and
    # later (torch, CUDABlas.cpp; Transformer Engine, cuBLAS workspace size).
    workspace: int
    hopper_workspace: int
    # Share of the bytes allocated and freed in a step that the caching allocator cannot use: rounding, split blocks.
    fragmentation: float
    # Whether a stage keeps its output for the backward pass after sending it.
    keeps_stage_output: bool
    # Tensors of tokens x channels that are freed, but reserved for tensor-parallel collectives, when the launch queue
    # is full (memory/framework_memory.py, deferred bytes).
    deferred: int = 0


@dataclass(frozen=True, kw_only=True)
class FrameworkProfile:
    """Time that a framework takes beside matrix products and attention.

    Pairs are (forward, backward). Bytes are those that memory-bound kernels read and write with 16-bit elements; fp32
    doubles them.
    """

    # Host seconds per block to launch the kernels of its forward pass, of its backward pass, and (both passes together)
    # of tensor parallelism.
    forward_host: float
    backward_host: float
    tensor_host: float
    # Host seconds per MoE block for routing (sorting, permuting and counting tokens), both passes together.
    experts_host: float
    # Host seconds per block if tensor parallelism spans both CPU sockets of a node: all ranks wait for the slowest
    # core.
    socket_host: float = 0.0
    # Host seconds per micro-batch on every stage (schedule), per micro-batch of embedding or of head and loss, and per
    # step (clipping, optimizer).
    micro_batch_host: float
    end_host: float
    step_host: float
    # Bytes per token and channel of one block's norms and residual sums, forward and backward.
    norm_forward: float
    norm_backward: float
    # Bytes per token and inner channel of the MLP's activation, gated and plain.
    gated: tuple[float, float]
    plain: tuple[float, float]
    # Bytes per token and query or key channel of the rotary embedding.
    rotary: tuple[float, float]
    # Bytes per token and vocabulary entry of the loss.
    loss: tuple[float, float]
    # The head multiplies with a copy of its weight that is padded to a multiple of this number of rows.
    head_multiple: int = 1
    # Bytes per score of unfused attention, including those of its two products.
    scores: tuple[float, float]
    # Bytes per parameter and micro-batch to add a gradient to the accumulated one.
    accumulate: float
    # Bytes per updated parameter in the optimizer's step: states, gradient, clipping, casts.
    optimizer: float
    # Number of all-gathers and reduce-scatters of one block's tensor parallelism, if norms are sharded too.
    tensor_collectives: tuple[int, int]
    # Share of the tensor-parallel communication that overlaps matrix products.
    tensor_overlap: float = 0.0
    # Bytes per parameter of a gradient when it is reduced; None: as accumulated (training.grad_dtype).
    gradient_reduced: int | None = None
    # Share of the data-parallel gradient reduction that may overlap the last backward pass.
    reduce_overlap: float = 0.0
    # Share of the weight all-gather of ZeRO-1 and 2 that may overlap the next forward pass.
    gather_overlap: float = 0.0
    # Share of the sends and receives between stages that overlaps compute.
    pipeline_overlap: float = 0.0
    # Speed of its fused attention relative to FlashAttention-2.
    attention_speed: float = 1.0
    # Host seconds per step that a sharded optimizer adds.
    zero_host: float
    # Bytes/s between nodes that the all-gathers and reduce-scatters of ZeRO-3 reach at most, and the share of them that
    # may overlap compute.
    zero_3_most: float = math.inf
    zero_3_overlap: float = 0.9
    # Host seconds per micro-batch that the schedule of a pipeline adds on every stage.
    pipeline_host: float = 0.0
    # Host seconds per block and pass in which ZeRO-3 gathers and frees the weights of its modules.
    gather_host: float = 0.0
    # Whether a token that several experts of one node need crosses the network only once.
    sends_once_per_node: bool = False
    # Host seconds per block and tensor rank that sends and receives add in the steady state of a pipeline across nodes.
    stage_stall: float = 0.0
    # Number of kernels of one block outside matrix products and attention: norms, activation, rotary embedding,
    # residuals.
    small_kernels: tuple[int, int] = (30, 50)
    # Whether fused attention skips the scores outside a sliding window, or computes and masks them.
    skips_windows: bool = True
    # Whether the rotary embedding uses complex numbers, which torch.compile leaves eager (torch/_inductor/lowering.py).
    complex_rotary: bool = False


# Bytes per score. Fused: the two products write and read the scores, and one kernel scales, masks and normalizes them
# (Megatron-LM, scaled_upper_triang_masked_softmax). Eager PyTorch under autocast scales, masks, casts to fp32,
# normalizes and casts back, each in a kernel of its own.
FUSED_SCORES = (8.0, 14.0)
EAGER_SCORES = (32.0, 40.0)


@cache
def compiled_profile(eager: FrameworkProfile) -> FrameworkProfile:
    """Return the profile with torch.compile of each block: one kernel for each chain of element-wise operations.

    Each chain reads its inputs and writes its outputs once. A residual sum and the next norm read two tensors and write
    two; the norm's backward pass reads three and writes one, and reads its inputs again for the weight gradient.
    Embedding, head and loss stay eager, as in this project's engine and torchtitan. Host seconds are an estimate: about
    15 kernel launches forward and 25 backward, of 20 us each.
    """
    return replace(
        eager,
        forward_host=min(eager.forward_host, 0.3e-3),
        backward_host=min(eager.backward_host, 0.5e-3),
        norm_forward=min(eager.norm_forward, 16.0),
        norm_backward=min(eager.norm_backward, 20.0),
        gated=_least(eager.gated, (6.0, 10.0)),
        plain=_least(eager.plain, (4.0, 6.0)),
        rotary=eager.rotary if eager.complex_rotary else _least(eager.rotary, (4.0, 4.0)),
        scores=_least(eager.scores, FUSED_SCORES),
        small_kernels=(6, 10),
    )


def _least(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return min(one[0], other[0]), min(one[1], other[1])
