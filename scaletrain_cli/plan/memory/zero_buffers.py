"""Sizes of DeepSpeed's buffers: the numbers that the planner counts and the engine configures, so that they agree.

Pure arithmetic on parameter counts; writes no DeepSpeed configuration itself.
"""

from __future__ import annotations

from dataclasses import dataclass

# DeepSpeed allocates the reduce bucket whole, however small the model (stage_1_and_2.py setup_buckets, stage3.py
# _setup_for_real_optimizer); its default of 5e8 elements would take 2 GB from a 24 GB device. 2e8 still moves
# hundreds of megabytes per collective, far above where a ring stops being bound by latency.
_LARGEST_BUCKET_ELEMENTS = 200_000_000
_PREFETCH_ELEMENTS = 50_000_000
# DeepSpeed's default (zero/config.py stage3_max_live_parameters), where the model is not smaller.
_LARGEST_LIVE_ELEMENTS = 1_000_000_000
# Its default too: stage 3 keeps parameters up to this size whole on every rank, instead of gathering each when it is
# needed (stage3_param_persistence_threshold).
PERSISTENT_ELEMENTS = 100_000
# DeepSpeed's default (zero/config.py sub_group_size): what stage 3 updates in one piece.
SUB_GROUP_ELEMENTS = 10**9
# With offload to NVMe: buffers as large as a sub-group, for weights, gradient and two moments; buffers as large as the
# largest parameter, and weights that stay in memory, DeepSpeed's defaults (zero/offload_config.py).
NVME_OPTIMIZER_BUFFERS = 4
NVME_PARAMETER_BUFFERS = 5
NVME_WEIGHTS_IN_MEMORY = 10**9
# engine.py MEMORY_OPT_ALLREDUCE_SIZE: without ZeRO, gradients are flattened and reduced in pieces of this size.
_FLATTENED_ELEMENTS = 500_000_000


@dataclass(frozen=True)
class ZeroBuffers:
    """Elements per buffer, as DeepSpeed's ``zero_optimization`` section names them."""

    reduce_bucket_size: int
    allgather_bucket_size: int
    prefetch_bucket_size: int
    max_live_parameters: int
    param_persistence_threshold: int
    overlap_comm: bool


def zero_buffers(parameters: int, zero_stage: int, *, pipeline: bool) -> ZeroBuffers:
    """Settings for a rank that computes with ``parameters``; ``pipeline``: with more than one stage.

    Reduction overlaps the backward pass where DeepSpeed can: of each micro-batch in stages 2 and 3, of the last one in
    stage 1 (``stage_1_and_2.py process_gradients``). Stage 0 reduces after the last micro-batch, and so does stage 1
    under a pipeline, whose engine turns the overlap off (``engine.py _configure_zero_optimizer``).
    """
    bucket = max(2, min(parameters, _LARGEST_BUCKET_ELEMENTS))
    bucket += bucket % 2  # NCCL's 4-byte alignment of 16-bit elements (nccl_start_alignment_factor)
    return ZeroBuffers(
        reduce_bucket_size=bucket,
        allgather_bucket_size=bucket,
        prefetch_bucket_size=min(bucket, _PREFETCH_ELEMENTS),
        max_live_parameters=min(max(parameters, 1), _LARGEST_LIVE_ELEMENTS),
        param_persistence_threshold=PERSISTENT_ELEMENTS,
        overlap_comm=zero_stage >= 2 or (zero_stage == 1 and not pipeline),
    )


def communication_buffer_bytes(
    parameters: int,
    largest_block: int,
    zero_stage: int,
    weight_bytes: int,
    gradient_bytes: int,
    data_parallel: int,
    *,
    pipeline: bool,
) -> int:
    """Bytes of gradient buckets and, under stage 3, of gathered weights, during the backward pass."""
    if data_parallel == 1 and zero_stage == 0:
        return 0
    buffers = zero_buffers(parameters, zero_stage, pipeline=pipeline)
    if zero_stage == 0:
        return min(parameters, _FLATTENED_ELEMENTS) * weight_bytes
    if zero_stage == 1:
        # Buckets in the accumulation dtype, two where communication overlaps. BF16_Optimizer has none, which leaves
        # this a little high.
        return buffers.reduce_bucket_size * gradient_bytes * (2 if buffers.overlap_comm else 1)
    buckets = buffers.reduce_bucket_size * weight_bytes * 2  # two, because communication overlaps
    if zero_stage == 2:
        return buckets
    live = min(parameters, max(buffers.max_live_parameters, 2 * largest_block))
    return buckets // 2 + (live + buffers.prefetch_bucket_size) * weight_bytes  # stage 3 has one bucket
