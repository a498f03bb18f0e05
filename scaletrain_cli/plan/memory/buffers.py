"""The sizes of DeepSpeed's buffers, and what exists of them in each phase of a step.

The engine configures DeepSpeed with the sizes of this module, so the planner counts what runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scaletrain_cli.plan.memory.states import gradient_bytes, uses_bf16_optimizer, weight_bytes
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.stages import Stage

_FP32_BYTES = 4
# DeepSpeed allocates the full reduce bucket even for a small model (stage_1_and_2.py setup_buckets, stage3.py
# _setup_for_real_optimizer); its default of 5e8 elements would take 2 GB of a 24 GB device. With 2e8 a collective still
# moves hundreds of megabytes, far more than is needed to be bound by bandwidth rather than latency.
_LARGEST_BUCKET_ELEMENTS = 200_000_000
_PREFETCH_ELEMENTS = 50_000_000
# DeepSpeed's default (zero/config.py stage3_max_live_parameters); smaller models use their own size.
_LARGEST_LIVE_ELEMENTS = 1_000_000_000
# DeepSpeed's default (zero/config.py stage3_max_reuse_distance): weights stay if they are used again within as many.
REUSE_ELEMENTS = 10**9
# DeepSpeed's default (stage3_param_persistence_threshold): stage 3 keeps parameters of up to this many elements
# unsharded on every rank.
PERSISTENT_ELEMENTS = 100_000
# DeepSpeed's default (zero/config.py sub_group_size): elements that stage 3 updates at once.
SUB_GROUP_ELEMENTS = 10**9
# Offload to NVMe, DeepSpeed's defaults (zero/offload_config.py): the number of buffers as large as a sub-group
# (weights, gradient and two moments), the number of buffers as large as the largest parameter, and the elements of
# weights that stay in host memory.
NVME_OPTIMIZER_BUFFERS = 4
NVME_PARAMETER_BUFFERS = 5
NVME_WEIGHTS_IN_MEMORY = 10**9
# Without ZeRO, gradients are flattened and reduced in pieces of this size (engine.py MEMORY_OPT_ALLREDUCE_SIZE).
_FLATTENED_ELEMENTS = 500_000_000
_REDUCED_BYTES = 2  # of an element of 16 bits


@dataclass(frozen=True)
class ZeroBuffers:
    """Elements per buffer, as DeepSpeed's ``zero_optimization`` section names them."""

    reduce_bucket_size: int
    prefetch_bucket_size: int
    max_live_parameters: int
    overlap_comm: bool


def zero_buffers(
    parameters: int, zero_stage: int, *, pipeline: bool, trained: int | None = None, bucket_elements: int | None = None
) -> ZeroBuffers:
    """Return the buffer settings for a rank with ``parameters`` parameters; ``pipeline``: with pipeline stages.

    ``trained``: the parameters that have gradients (None: all); stage 3 gathers the others, too. ``bucket_elements``:
    the size of the gradient buckets in another program on DeepSpeed; None: as this project's engine sets it.

    ``overlap_comm`` is on where DeepSpeed can overlap gradient reduction with the backward pass: of each micro-batch in
    stages 2 and 3, of the last micro-batch in stage 1 (``stage_1_and_2.py process_gradients``). It is off in stage 0,
    which reduces after the last micro-batch, and in stage 1 with a pipeline, whose engine turns it off
    (``engine.py _configure_zero_optimizer``).
    """
    bucket = bucket_elements or max(2, min(parameters if trained is None else trained, _LARGEST_BUCKET_ELEMENTS))
    bucket += bucket % 2  # NCCL's 4-byte alignment of 16-bit elements (nccl_start_alignment_factor)
    return ZeroBuffers(
        reduce_bucket_size=bucket,
        prefetch_bucket_size=min(max(2, min(parameters, _LARGEST_BUCKET_ELEMENTS)), _PREFETCH_ELEMENTS),
        max_live_parameters=min(max(parameters, 1), _LARGEST_LIVE_ELEMENTS),
        overlap_comm=zero_stage >= 2 or (zero_stage == 1 and not pipeline),
    )


class BufferBytes(NamedTuple):
    """Bytes of DeepSpeed's buffers in the phases of a step: the loss, the backward passes, the optimizer's update.

    ``head``: when the gradient of the head is reduced, the first of a backward pass, with that gradient. ``copied``:
    the part of ``backward`` that exists only while a full bucket is reduced, for the first time after the gradients of
    ``full_after`` elements.
    """

    loss: int
    backward: int
    step: int
    head: int = 0
    copied: int = 0
    full_after: int = 0

    def plus(self, bytes_: int) -> "BufferBytes":
        """Return these buffers beside others of ``bytes_`` bytes, which the update does not need."""
        return self._replace(loss=self.loss + bytes_, backward=self.backward + bytes_, head=self.head + bytes_)


def communication_buffer_bytes(
    parameters: int,
    largest_block: int,
    zero_stage: int,
    weight_bytes: int,
    gradient_bytes: int,
    data_parallel: int,
    *,
    pipeline: bool,
    gathered: int | None = None,
    bucket_elements: int | None = None,
    bf16_optimizer: bool = False,
    before_the_loss: bool = False,
    stage_3_buckets: int = 1,
    head: int = 0,
) -> BufferBytes:
    """Return the bytes of gradient buckets and, in stage 3, of gathered weights.

    ``parameters`` and ``largest_block``: elements on the rank that train, and of its largest block; ``weight_bytes``
    and ``gradient_bytes``: bytes per element; ``data_parallel``: the ranks that share the states; ``gathered``: all
    elements on the rank, which stage 3 gathers (None: all train; 0: the caller adds those that a replay finds,
    gathered_weights.py); ``bucket_elements``: see ``zero_buffers``; ``bf16_optimizer``: DeepSpeed's BF16_Optimizer
    runs, which has no buckets (``uses_bf16_optimizer``); ``head``: elements of the head's matrix, 0 if none trains.

    Stages 1 and 2 allocate their buckets when the first gradient of a backward pass arrives, which is after the peak of
    the loss, and free them after it (``stage_1_and_2.py`` process_gradients, setup_buckets, _release_ipg_buffers).
    ``before_the_loss``: versions before 0.18.3 allocated them before the backward pass (``backward``). Stage 3 keeps
    its only one (``stage3.py`` _setup_for_real_optimizer); versions before 0.6 had two (``stage_3_buckets``). A
    gradient that a bucket has no room for starts the reduction of what is in it, which is copied into one tensor more
    (allreduce_bucket: ``flatten``; ``coalesced_collectives.py`` reduce_scatter_coalesced: ``cat``). Without
    ``overlap_comm`` stage 1 reduces only after the last backward pass. A gradient that is larger than a bucket goes to
    no bucket and is flattened in pieces, each as many whole partitions as exceed a bucket
    (reduce_independent_p_g_buckets_and_remove_grads, average_tensor, allreduce_and_scatter).

    Stage 3 gathers weights ahead only up to stage3_max_live_parameters, with those that it holds
    (``partitioned_param_coordinator.py`` fetch_sub_module: max_params_to_prefetch).

    In stage 3 the gradient of a head that is larger than the bucket stays until the next gradient arrives, beside the
    bucket (``stage3.py`` reduce_independent_p_g_buckets_and_remove_grads). It is reduced as it is.
    """
    if data_parallel == 1 and zero_stage == 0:
        return BufferBytes(0, 0, 0)
    every = parameters if gathered is None else gathered
    buffers = zero_buffers(every, zero_stage, pipeline=pipeline, trained=parameters, bucket_elements=bucket_elements)
    if zero_stage == 0:
        flattened = min(parameters, _FLATTENED_ELEMENTS) * weight_bytes
        return BufferBytes(flattened, flattened, 0)
    if bf16_optimizer:
        return BufferBytes(0, 0, 0)
    element = gradient_bytes if zero_stage == 1 else weight_bytes  # stage 1 has buckets in the accumulation dtype
    bucket = buffers.reduce_bucket_size * element
    copied = min(bucket, parameters * element)
    full_after = parameters
    if buffers.overlap_comm:
        in_bucket = head if head <= buffers.reduce_bucket_size else 0
        full_after = min(parameters, buffers.reduce_bucket_size - in_bucket)
    if zero_stage < 3:
        buckets = bucket * (2 if buffers.overlap_comm else 1)
        reduced = 0
        if head * weight_bytes > bucket:
            partition = -(-parameters // data_parallel)
            pieces = buffers.reduce_bucket_size // partition + 1
            reduced = weight_bytes * min(head, pieces * partition)
        first = buckets + weight_bytes * head + reduced if zero_stage == 2 else 0
        return BufferBytes(buckets if before_the_loss else 0, buckets + copied, 0, first, copied, full_after)
    weights = min(every, max(buffers.max_live_parameters, 2 * largest_block)) * weight_bytes
    bucket *= stage_3_buckets
    first = bucket + weights + weight_bytes * head
    return BufferBytes(bucket + weights, bucket + copied + weights, bucket, first, copied, full_after)


def flat_reduction_bytes(groups: Sequence[int]) -> int:
    """Return the temporary bytes of BF16_Optimizer's gradients, flat in fp32 for each group, while they are reduced.

    ``groups``: their elements, in order. DeepSpeed joins groups until they exceed 5e8 elements together (``engine.py``
    allreduce_no_retain), copies them into one tensor unless it is one, and casts that to 16 bits (allreduce_bucket). So
    a small group before a large one, as that of the embedding before Muon's, costs a copy of the large one.
    """
    most = elements = count = 0
    for group in groups:
        elements, count = elements + group, count + 1
        most = max(most, elements * (_REDUCED_BYTES + (_FP32_BYTES if count > 1 else 0)))
        if elements > _FLATTENED_ELEMENTS:
            elements = count = 0
    return most


def second_gradient_bytes(
    parameters: int, precision: str, grad_dtype: str, zero_stage: int, data_parallel: int, micro_batches: int
) -> int:
    """Return the bytes of the newest micro-batch's gradients, which stage 2 holds until it adds them to the others."""
    accumulated = gradient_bytes(precision, grad_dtype)
    if zero_stage != 2 or micro_batches == 1 or accumulated != weight_bytes(precision):
        return 0
    return -(-parameters // data_parallel) * accumulated


def step_temporary_bytes(
    parameters: int,
    precision: str,
    grad_dtype: str,
    zero_stage: int,
    data_parallel: int,
    optimizer: str = "adamw",
    *,
    foreach: bool = False,
    casts: bool = True,
    reduced: int | None = None,
) -> int:
    """Return the bytes of temporary tensors of the optimizer's update, when no activations exist.

    torch's ``foreach`` AdamW, which ranks on CPUs use, allocates one fp32 tensor as large as what it updates, for the
    root of the second moment; its fused AdamW on GPUs allocates none. ZeRO flattens the gradients of the partition, and
    casts them to fp32 (``stage_1_and_2.py step``, ``stage3.py _prepare_fp32_grad_for_sub_group``: ``flatten`` and
    ``.to``): 6 bytes per element of 16-bit gradients, 4 of fp32 ones. Stage 3 does so for one sub-group at a time.
    Stages 1 and 2 accumulate 16-bit gradients in fp32 in one flat tensor, which they use as it is. BF16_Optimizer
    copies no partition, but reduces all its gradients before the update (``flat_reduction_bytes``). Without ZeRO,
    FP16_Optimizer casts each 16-bit gradient to fp32 and then flattens all of them (``fused_optimizer.py step``).
    ``casts``: master weights are fp32. ``reduced``: the bytes of that reduction; None: of two groups, matrices and few
    vectors.
    """
    root = _FP32_BYTES if foreach and optimizer in ("adamw", "adam") else 0
    sixteen = weight_bytes(precision) == 2
    accumulated = gradient_bytes(precision, grad_dtype)
    if zero_stage == 0:
        return (2 * _FP32_BYTES if sixteen else root) * parameters
    partition = -(-parameters // data_parallel)
    if zero_stage == 1 and sixteen and accumulated == _FP32_BYTES:
        reduced = flat_reduction_bytes((parameters, 0)) if reduced is None else reduced
        return max(root * partition, reduced if data_parallel > 1 else 0)
    if zero_stage == 3:
        partition = min(partition, SUB_GROUP_ELEMENTS)
    elif sixteen and accumulated == _FP32_BYTES:
        return root * partition
    if not casts:
        return (accumulated + root) * partition
    copied = accumulated if accumulated < _FP32_BYTES else 0
    return (_FP32_BYTES + max(copied, root)) * partition


def cast_gradient_bytes(parameters: int, precision: str, grad_dtype: str, zero_stage: int, data_parallel: int) -> int:
    """Return the bytes of the largest tensor of ``step_temporary_bytes``: 16-bit gradients, flattened and cast to fp32.

    Of BF16_Optimizer, gradients cast to 16 bits to be reduced; 0 where gradients accumulate in fp32.
    """
    if weight_bytes(precision) != 2:
        return 0
    if uses_bf16_optimizer(precision, grad_dtype, zero_stage):
        return _REDUCED_BYTES * parameters if data_parallel > 1 else 0
    if gradient_bytes(precision, grad_dtype) == _FP32_BYTES and zero_stage:
        return 0
    partition = -(-parameters // data_parallel) if zero_stage else parameters
    return _FP32_BYTES * (min(partition, SUB_GROUP_ELEMENTS) if zero_stage == 3 else partition)


# Compute the bytes of hidden states and their gradients that a pipeline stage holds to exchange them with others.
#
# These are beside the activations that autograd saves.
#
# From DeepSpeed 0.19.8, ``pipe/engine.py``, and counts of live tensors before and after each of its instructions:
#
# * One buffer receives activations and gradients (``_allocate_or_extend_buffers`` returns the same for both), for
#   good.
# * ``_exec_recv_activations`` copies what arrives, and ``_exec_forward_pass`` that copy, which is the input of the
#   first block. Both exist until the gradient is sent (``_exec_send_grads``).
# * ``_exec_forward_pass`` keeps the output until its backward pass has ended. On the last stage it stays until
#   another micro-batch replaces it, with the graph behind it, which holds the received copy and its gradient; of its
#   two buffers (``num_pipe_buffers``) one is that of another micro-batch.
# * Tensor ranks send and keep a share each (PartitionedTensor). A stage joins what arrives, into the input of the
#   first block itself, and for the backward pass its output and the gradient of that.


class PipelineBuffers(NamedTuple):
    """Bytes while a micro-batch runs forward or through the loss, while blocks run backward, and in the update."""

    forward: int
    backward: int
    update: int


def pipeline_buffers(layout: Layout, stage: Stage, payload: int, in_flight: int) -> PipelineBuffers:
    """Return the bytes of a stage with ``in_flight`` micro-batches; ``payload``: hidden states of one, in bytes."""
    if layout.pipeline_parallel == 1:
        return PipelineBuffers(0, 0, 0)
    ranks = layout.tensor_parallel
    share = payload // ranks
    received = 0 if stage.first or ranks > 1 else in_flight * payload
    if stage.last:
        several = layout.gradient_accumulation_steps > 1
        left = 3 * payload  # output, input and its gradient of a micro-batch that has run backward
        forward = share + received + (left if several else 0)
        return PipelineBuffers(forward, forward + payload, share + left * (2 if several else 1))
    forward = share + received + in_flight * share
    return PipelineBuffers(forward, forward + (2 * payload if ranks > 1 else 0), share)
