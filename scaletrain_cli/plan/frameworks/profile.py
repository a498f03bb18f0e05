"""Memory and time that a framework adds around a transformer's blocks, as frozen data without model or layout.

Bytes and collectives are counted in the frameworks' sources, which the comments cite. Host seconds and overlaps are
calibrated on half of the published runs: nanotron's on the Ultra-Scale Playbook's sweep, Megatron's on vTrain's runs,
FSDP's on LLM Foundry's; benchmarks/planner_accuracy.py prints the errors on the whole of each. Host figures hold for
server CPUs of 2020 to 2024, and matter where micro-batches are too small to keep a GPU busy. Those of this project's
engine are interpolated estimates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

MIB = 2**20


@dataclass(frozen=True)
class MemoryProfile:
    """Memory that a framework holds around a transformer's blocks. Bytes per element are for 16-bit elements."""

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
    # cuBLAS and Transformer Engine workspaces, in the allocator, and what they take more from Hopper on; bytes.
    workspace: int
    hopper_workspace: int
    # Share of what comes and goes that the caching allocator cannot use: rounding and split blocks.
    fragmentation: float
    # A stage keeps its output for the backward pass after it has sent it.
    keeps_stage_output: bool
    # Tensors of a micro-batch's tokens and channels that have been freed but are still in use by tensor-parallel
    # collectives: the host runs ahead of the GPU, and the allocator waits (record_stream) before it reuses them.
    deferred: int = 0


@dataclass(frozen=True)
class FrameworkProfile:
    """Time that a framework takes beside products and attention. Bytes per element are for 16-bit elements and double
    in fp32.
    """

    # Host seconds to issue one block's forward and backward, and what tensor parallelism adds to both together.
    forward_host: float
    backward_host: float
    tensor_host: float
    # What routing tokens to experts adds per block, both ways: sorting, permuting, counting.
    experts_host: float
    # What it adds per block where the group reaches over both sockets of a node, so that all wait for the slowest core.
    socket_host: float
    # Host seconds once per micro-batch: schedule; embedding or head and loss; and once per step (clipping, optimizer).
    micro_batch_host: float
    end_host: float
    step_host: float
    # Bytes per token and channel of one block that norms and residual sums move, forward and backward.
    norm_forward: float
    norm_backward: float
    # Bytes per token and inner channel of the activation: gated and plain, forward and backward.
    gated: tuple[float, float]
    plain: tuple[float, float]
    # Bytes per token and query or key channel to rotate them, forward and backward.
    rotary: tuple[float, float]
    # Bytes per token and vocabulary entry of the loss, forward and backward.
    loss: tuple[float, float]
    # Bytes per score of attention that keeps them, forward and backward, its two products' included.
    scores: tuple[float, float]
    # Bytes per parameter and micro-batch to add its gradient to the accumulated one.
    accumulate: float
    # Bytes per parameter that the optimizer updates: states, gradient, clipping, casts.
    optimizer: float
    # Gathers and scatters of one block's tensor parallelism, forward and backward, where norms are cut too.
    tensor_collectives: tuple[int, int]
    # Share of the tensor-parallel traffic that hides behind the products beside it.
    tensor_overlap: float
    # Bytes per parameter of the reduced gradient and of the gathered weight; None: as the spec says.
    gradient_reduced: int | None
    # Share of the data-parallel reduction that may hide behind the backward pass of the last micro-batch.
    reduce_overlap: float
    # Share of the gathered weights (ZeRO-1 and 2) that hides behind the next forward pass.
    gather_overlap: float
    # Share of sends and receives between stages that hides behind compute.
    pipeline_overlap: float
    # Speed of its fused attention, as a multiple of FlashAttention-2's.
    attention_speed: float
    # Host seconds per step that sharding the optimizer adds.
    zero_host: float
    # Whether a token for several experts of one node crosses the network once.
    sends_once_per_node: bool = False
    # Host seconds per block and tensor rank while a pipeline over nodes is full, with sends and receives outstanding.
    stage_stall: float = 0.0
    # Kernels of one block outside products and attention: norms, activation, rotation, residuals; forward and backward.
    small_kernels: tuple[int, int] = (30, 50)
    # Whether it rotates complex numbers, which torch.compile leaves eager (torch/_inductor/lowering.py warns so).
    complex_rotary: bool = False


# Fused: the products write and read the scores, one kernel scales, masks and normalizes them (Megatron-LM,
# scaled_upper_triang_masked_softmax). Eager PyTorch under autocast scales, masks, casts to fp32, normalizes and casts
# back, each in a kernel of its own.
FUSED_SCORES = (8.0, 14.0)
EAGER_SCORES = (32.0, 40.0)


@cache
def compiled_profile(eager: FrameworkProfile) -> FrameworkProfile:
    """Return the profile with torch.compile of each block: one kernel for each chain of element-wise operations.

    Each chain reads its inputs and writes its outputs once. A residual sum and the norm after it: two in, two out; the
    norm's gradient: three in, one out, and its inputs once more for the weight's. Embedding, head and loss stay eager,
    as in our engine and torchtitan. Host: about 15 launches forward and 25 backward of 20 us each, an estimate.
    """
    return replace(
        eager,
        forward_host=min(eager.forward_host, 0.3e-3),
        backward_host=min(eager.backward_host, 0.5e-3),
        norm_forward=min(eager.norm_forward, 16.0),
        norm_backward=min(eager.norm_backward, 20.0),
        gated=_difference(eager.gated, (6.0, 10.0)),
        plain=_difference(eager.plain, (4.0, 6.0)),
        rotary=eager.rotary if eager.complex_rotary else _difference(eager.rotary, (4.0, 4.0)),
        scores=_difference(eager.scores, FUSED_SCORES),
        small_kernels=(6, 10),
    )


def _difference(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return min(one[0], other[0]), min(one[1], other[1])
