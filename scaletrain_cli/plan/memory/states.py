"""Bytes of weights, gradients and optimizer states that a rank holds.

What DeepSpeed 0.19 keeps, read in its source and confirmed by counting the live tensors of two ranks at every stage:

* Stage 0, fp32: ``engine.py _do_optimizer_sanity_check`` returns no wrapper, so the user's AdamW works on the weights.
* Stage 0, 16 bits: ``_do_optimizer_sanity_check`` raises NotImplementedError with fp32 gradient accumulation, and
  otherwise takes FP16_UnfusedOptimizer, which was measured to be less exact. The planner uses stage 1 instead.
* Stages 1 and 2: ``zero/stage_1_and_2.py __init__`` clones the rank's partition into
  ``single_partition_of_fp32_groups`` whatever the precision, so fp32 runs hold a second copy of their partition.
* Stage 1, bf16 with fp32 gradients: ``bf16_optimizer.py _setup_for_real_optimizer`` allocates
  ``fp32_groups_gradients_flat``, a whole fp32 gradient on every rank. The bf16 gradients beside it go as soon as they
  are added, given ``bf16.immediate_grad_update`` (``accumulate_hp_grads_and_remove_lp``); without it they stay.
* Stage 2: the gradients of the rank's own partition. With fp32 accumulation of bf16 gradients they live in one fp32
  buffer (``_build_compact_grad_partition_buffer``); otherwise each later micro-batch brings a second set, which
  ``independent_gradient_partition_epilogue`` then adds to the first.
* Stage 3: ``stage3.py _create_fp32_partitions`` means to take the partition itself as master where it is fp32 already,
  but compares a ``torch.device`` with a string, which is never equal, so it clones it too.
  ``grad_partitions_flat_buffer`` holds the rank's gradients in the accumulation dtype.

The sizes of DeepSpeed's buffers stand here too: the engine configures the numbers that the planner counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.stages import Shard, zero_shards
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.extensions import optimizer_extension

# DeepSpeed allocates the reduce bucket whole, however small the model (stage_1_and_2.py setup_buckets, stage3.py
# _setup_for_real_optimizer); its default of 5e8 elements would take 2 GB from a 24 GB device. 2e8 still moves
# hundreds of megabytes per collective, far above where a ring stops being bound by latency.
_LARGEST_BUCKET_ELEMENTS = 200_000_000
_PREFETCH_ELEMENTS = 50_000_000
# DeepSpeed's default (zero/config.py stage3_max_live_parameters), where the model is not smaller.
_LARGEST_LIVE_ELEMENTS = 1_000_000_000
# DeepSpeed's default (stage3_param_persistence_threshold): stage 3 keeps parameters up to this size whole on every
# rank.
PERSISTENT_ELEMENTS = 100_000
# DeepSpeed's default (zero/config.py sub_group_size): elements that stage 3 updates at once.
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
    """Return the settings for a rank that computes with ``parameters``; ``pipeline``: with more than one stage.

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
    """Return the bytes of gradient buckets and, under stage 3, of gathered weights, during the backward pass."""
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


# AdamW keeps two fp32 moments (arXiv:1711.05101); mixed precision adds an fp32 master copy (arXiv:1710.03740).
MOMENT_BYTES = 8
MASTER_BYTES = 4
# Other optimizers. In 8 bits each moment has one fp32 scale per block (bitsandbytes, functional.py
# quantize_blockwise: 256 values).
_MOMENT_BYTES = {
    "adamw": MOMENT_BYTES,
    "adam": MOMENT_BYTES,
    "momentum": 4,
    "sgd": 0,
    "adamw_8bit": 2,
    "lion": 4,
    "muon": 4,
}
_SCALED_VALUES = 256
# Smaller tensors have fp32 moments after all (bitsandbytes, optim/optimizer.py min_8bit_size), and the two tables of
# 256 values that the 8 bits stand for exist once (name2qmap).
_SMALLEST_SCALED = 4096
_SCALE_TABLES = 2 * 4 * 256

_DTYPE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}  # fp8 products; weights stay in 16 bits
_FP32_BYTES = 4


class MasterWeights(Enum):
    """The fp32 copy of the weights that the optimizer updates."""

    OF_EACH_PARTITION = "a copy beside 16-bit weights, and with ZeRO of each rank's partition whatever the precision"
    BESIDE_16_BIT = "a copy beside 16-bit weights"
    THE_WEIGHTS = "none: the weights are fp32 themselves"


class ModelStates(NamedTuple):
    """Bytes on one rank. ``optimizer_states``: moments and the fp32 master weights, where there are any."""

    parameters: int
    gradients: int
    optimizer_states: int


def weight_bytes(precision: str) -> int:
    """Return the bytes of one weight, and of one activation element, at a precision."""
    return _DTYPE_BYTES[precision]


def gradient_bytes(precision: str, grad_dtype: str) -> int:
    """Return the bytes of one accumulated gradient element."""
    return _DTYPE_BYTES[grad_dtype] if weight_bytes(precision) == 2 else 4


def moment_bytes_per_parameter(optimizer: str) -> int:
    """Return the bytes of an optimizer's states per parameter, without the fp32 master weight.

    Raises LookupError for an unknown optimizer.
    """
    if optimizer in _MOMENT_BYTES:
        return _MOMENT_BYTES[optimizer]
    found = optimizer_extension(optimizer)
    if found is None:
        raise LookupError(f"unknown optimizer: {optimizer}")
    return found.moment_bytes


def optimizer_state_bytes_per_parameter(
    precision: str,
    zero_stage: int,
    optimizer: str = "adamw",
    master: MasterWeights = MasterWeights.OF_EACH_PARTITION,
) -> int:
    """Return moments, and the fp32 master copy: DeepSpeed keeps one but in stage 0 of fp32, others for 16-bit weights.

    FSDP's weights are the fp32 master themselves (torch, MixedPrecisionPolicy).
    """
    moments = moment_bytes_per_parameter(optimizer)
    if master is MasterWeights.THE_WEIGHTS:
        return moments
    copied = weight_bytes(precision) == 2 or (master is MasterWeights.OF_EACH_PARTITION and zero_stage > 0)
    return moments + (MASTER_BYTES if copied else 0)


def moment_bytes(optimizer: str, elements: int) -> int:
    """Return the bytes of the moments of one flat tensor of parameters."""
    if optimizer != "adamw_8bit":
        return elements * moment_bytes_per_parameter(optimizer)
    if elements < _SMALLEST_SCALED:
        return elements * MOMENT_BYTES
    return 2 * elements + 2 * _FP32_BYTES * -(-elements // _SCALED_VALUES)


def optimizer_constant_bytes(optimizer: str, largest: int) -> int:
    """Return the bytes that an optimizer allocates once; ``largest`` is the size of its largest tensor."""
    return _SCALE_TABLES if optimizer == "adamw_8bit" and largest >= _SMALLEST_SCALED else 0


def checkpoint_bytes_per_parameter(precision: str, zero_stage: int, optimizer: str = "adamw") -> int:
    """Return the bytes that DeepSpeed saves: weights, moments and master; under stage 3 no weights but the master."""
    states = optimizer_state_bytes_per_parameter(precision, zero_stage, optimizer)
    return states if zero_stage == 3 else weight_bytes(precision) + states


def model_state_bytes(
    parameters: int,
    precision: str,
    grad_dtype: str,
    zero_stage: int,
    data_parallel: int,
    optimizer: str = "adamw",
    master: MasterWeights = MasterWeights.OF_EACH_PARTITION,
) -> ModelStates:
    """Return the bytes that one rank holds during a step, of ``parameters`` sharded over ``data_parallel`` ranks.

    A ZeRO partition is the parameters divided by the ranks, rounded up: DeepSpeed pads the last one. Megatron-LM's
    distributed optimizer and nanotron's ZeRO are stage 1: gradients stay whole on every rank (Megatron-LM,
    distributed/param_and_grad_buffer.py). FSDP holds weights and gradients in fp32.
    """
    partition = -(-parameters // data_parallel)
    held_weights = partition if zero_stage >= 3 else parameters
    held_gradients = partition if zero_stage >= 2 else parameters
    held_states = partition if zero_stage >= 1 else parameters
    states = held_states * optimizer_state_bytes_per_parameter(precision, zero_stage, optimizer, master)
    if optimizer == "adamw_8bit":
        states += 2 * _FP32_BYTES * -(-held_states // _SCALED_VALUES)
    if master is MasterWeights.THE_WEIGHTS:
        return ModelStates(held_weights * _FP32_BYTES, held_gradients * _FP32_BYTES, states)
    return ModelStates(
        parameters=held_weights * weight_bytes(precision),
        gradients=held_gradients * gradient_bytes(precision, grad_dtype),
        optimizer_states=states,
    )


def second_gradient_bytes(
    parameters: int, precision: str, grad_dtype: str, zero_stage: int, data_parallel: int, micro_batches: int
) -> int:
    """Return the gradients of the newest micro-batch that stage 2 holds beside the accumulated ones before adding
    them.
    """
    accumulated = gradient_bytes(precision, grad_dtype)
    if zero_stage != 2 or micro_batches == 1 or accumulated != weight_bytes(precision):
        return 0
    return -(-parameters // data_parallel) * accumulated


def step_temporary_bytes(
    parameters: int, precision: str, grad_dtype: str, zero_stage: int, data_parallel: int, optimizer: str = "adamw"
) -> int:
    """Return the memory that exists only between the last backward pass and the next forward one, when activations do
    not.

    AdamW's foreach form makes one fp32 copy of what it updates (the root of the second moment). ZeRO adds an fp32 copy
    of the gradient partition (``stage_1_and_2.py step``: flatten and ``.to``); stage 3 does both one sub-group at a
    time. BF16_Optimizer copies no partition, but reduces its fp32 gradients as 16 bits, group by group in one piece
    (``engine.py allreduce_bucket``: ``tensor.to(communication_data_type)``), before the step.
    """
    root = _FP32_BYTES if optimizer in ("adamw", "adam") else 0
    if zero_stage == 0:
        return root * parameters
    partition = -(-parameters // data_parallel)
    if zero_stage == 1 and weight_bytes(precision) == 2 and gradient_bytes(precision, grad_dtype) == 4:
        return max(root * partition, 2 * parameters if data_parallel > 1 else 0)
    return (root + _FP32_BYTES) * (min(partition, SUB_GROUP_ELEMENTS) if zero_stage == 3 else partition)


# Beside what leaves the device, an offloaded optimizer keeps the fp32 gradients of its partition and a pinned 16-bit
# copy of the weights on the host (DeepSpeed zero/stage_1_and_2.py, ops/adam/cpu_adam.py).
_HOST_COPIES = 6
# What passes through pinned memory on its way to NVMe: five buffers of 1e8 fp32 elements (DeepSpeed
# zero/offload_config.py, buffer_count and buffer_size).
_NVME_BUFFERS = 5 * 4 * 10**8


def rank_states(spec: RunSpec, layout: Layout, shard: Shard, master: MasterWeights) -> ModelStates:
    """Return weights, gradients and optimizer states on one rank's device, offloaded parts left out."""
    return device_and_host_states(spec, layout, shard, master)[0]


def expert_tensor_parallel(spec: RunSpec, layout: Layout) -> int:
    """Return the number of ranks that shard the width of an expert: as for other matrices, unless pinned."""
    wanted = spec.layout.expert_tensor_parallel
    return layout.tensor_parallel if wanted == "auto" else wanted


def expert_shards(spec: RunSpec, layout: Layout) -> int:
    """Return the number of ranks over which ZeRO shards the parameters of experts."""
    ranks = zero_shards(layout) * layout.tensor_parallel
    return max(1, ranks // (layout.expert_parallel * expert_tensor_parallel(spec, layout)))


def device_and_host_states(
    spec: RunSpec, layout: Layout, shard: Shard, master: MasterWeights
) -> tuple[ModelStates, int]:
    """Return the states on the device, and the bytes that are offloaded to the node's memory."""
    training, optimizer = spec.training, spec.training.optimizer.name
    zero = layout.zero_stage
    groups = [
        model_state_bytes(count, training.precision, training.grad_dtype, zero, ranks, optimizer, master)
        for count, ranks in ((shard.dense, zero_shards(layout)), (shard.experts, expert_shards(spec, layout)))
        if count
    ]
    states = ModelStates(
        sum(group.parameters for group in groups),
        sum(group.gradients for group in groups),
        sum(group.optimizer_states for group in groups),
    )
    return _offloaded(spec, layout, states, shard.parameters)


def _offloaded(spec: RunSpec, layout: Layout, states: ModelStates, elements: int) -> tuple[ModelStates, int]:
    """Return the states of ``parameters`` that remain on the device, and the bytes in the node's memory instead."""
    if layout.offload == "none":
        return states, 0
    parameters, gradients, optimizer_states = states
    stage = layout.zero_stage
    # zero/stage_1_and_2.py and stage3.py move the optimizer's partition and its gradients to the host.
    host = optimizer_states + _HOST_COPIES * -(-elements // (zero_shards(layout) if stage else 1))
    gradients = 0 if stage >= 2 else gradients
    if layout.offload == "optimizer+params":
        host += parameters
        parameters = 0
    if spec.layout.offload_device == "nvme":
        host = min(host, _NVME_BUFFERS)
    return ModelStates(parameters, gradients, 0), host
