"""Bytes of weights, gradients and optimizer states on one rank, and the sizes of DeepSpeed's buffers.

The engine configures DeepSpeed with the buffer sizes of this module, so the planner counts what runs.

DeepSpeed 0.19 by ZeRO stage, from its source, confirmed by counting the live tensors of two ranks at every stage:

* Stage 0, fp32: ``engine.py _do_optimizer_sanity_check`` returns no wrapper; AdamW updates the weights themselves.
* Stage 0, 16 bits: ``_do_optimizer_sanity_check`` raises NotImplementedError with fp32 gradient accumulation, and
  otherwise uses FP16_UnfusedOptimizer, which was measured to be less exact. The planner uses stage 1 instead.
* Stages 1 and 2: ``zero/stage_1_and_2.py __init__`` clones the rank's partition into
  ``single_partition_of_fp32_groups`` at every precision, so fp32 runs hold a second copy of their partition.
* Stage 1, bf16 with fp32 gradients: ``bf16_optimizer.py _setup_for_real_optimizer`` allocates
  ``fp32_groups_gradients_flat``, the full fp32 gradients on every rank. With ``bf16.immediate_grad_update`` each bf16
  gradient is freed as soon as it is added (``accumulate_hp_grads_and_remove_lp``); without it all of them stay.
* Stage 2: the gradients of the rank's own partition. With fp32 accumulation of bf16 gradients they are in one fp32
  buffer (``_build_compact_grad_partition_buffer``). Otherwise each micro-batch after the first allocates a second set,
  which ``independent_gradient_partition_epilogue`` adds to the first.
* Stage 3: the partition, with an fp32 clone as master weights, also for fp32 weights: ``stage3.py
  _create_fp32_partitions`` skips the clone only if a ``torch.device`` equals a string, which is never true.
  ``grad_partitions_flat_buffer`` holds the rank's gradients in the accumulation dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from scaletrain_cli.plan.architecture import Architecture
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.stages import Shard, Stage, zero_shards
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.extensions import optimizer_extension
from scaletrain_cli.spec.training import LocalSGDSpec

# DeepSpeed allocates the full reduce bucket even for a small model (stage_1_and_2.py setup_buckets, stage3.py
# _setup_for_real_optimizer); its default of 5e8 elements would take 2 GB of a 24 GB device. With 2e8 a collective still
# moves hundreds of megabytes, far more than is needed to be bound by bandwidth rather than latency.
_LARGEST_BUCKET_ELEMENTS = 200_000_000
_PREFETCH_ELEMENTS = 50_000_000
# DeepSpeed's default (zero/config.py stage3_max_live_parameters); smaller models use their own size.
_LARGEST_LIVE_ELEMENTS = 1_000_000_000
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


@dataclass(frozen=True)
class ZeroBuffers:
    """Elements per buffer, as DeepSpeed's ``zero_optimization`` section names them."""

    reduce_bucket_size: int
    allgather_bucket_size: int
    prefetch_bucket_size: int
    max_live_parameters: int
    param_persistence_threshold: int
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
    gathered = max(2, min(parameters, _LARGEST_BUCKET_ELEMENTS))
    return ZeroBuffers(
        reduce_bucket_size=bucket,
        allgather_bucket_size=bucket,
        prefetch_bucket_size=min(gathered, _PREFETCH_ELEMENTS),
        max_live_parameters=min(max(parameters, 1), _LARGEST_LIVE_ELEMENTS),
        param_persistence_threshold=PERSISTENT_ELEMENTS,
        overlap_comm=zero_stage >= 2 or (zero_stage == 1 and not pipeline),
    )


class BufferBytes(NamedTuple):
    """Bytes of DeepSpeed's buffers in the phases of a step: the loss, the backward passes, the optimizer's update."""

    loss: int
    backward: int
    step: int

    def plus(self, bytes_: int) -> BufferBytes:
        """Return these buffers beside others of ``bytes_`` bytes, which the update does not need."""
        return BufferBytes(self.loss + bytes_, self.backward + bytes_, self.step)


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
) -> BufferBytes:
    """Return the bytes of gradient buckets and, in stage 3, of gathered weights.

    ``parameters`` and ``largest_block``: elements on the rank that train, and of its largest block; ``weight_bytes``
    and ``gradient_bytes``: bytes per element; ``data_parallel``: the ranks that share the states; ``gathered``: all
    elements on the rank, which stage 3 gathers (None: all train); ``bucket_elements``: see ``zero_buffers``;
    ``bf16_optimizer``: DeepSpeed's BF16_Optimizer runs, which has no buckets (``uses_bf16_optimizer``).

    Stages 1 and 2 allocate their buckets before each backward pass and free them after it (``stage_1_and_2.py``
    setup_buckets, _release_ipg_buffers); stage 3 keeps its only one (``stage3.py`` _setup_for_real_optimizer). The
    reduction copies the gradients of a full bucket into one tensor more (allreduce_bucket: ``flatten``;
    ``coalesced_collectives.py`` reduce_scatter_coalesced: ``cat``).
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
    # Stage 1 has buckets in the accumulation dtype.
    bucket = buffers.reduce_bucket_size * (gradient_bytes if zero_stage == 1 else weight_bytes)
    copied = min(bucket, parameters * (gradient_bytes if zero_stage == 1 else weight_bytes))
    if zero_stage < 3:
        buckets = bucket * (2 if buffers.overlap_comm else 1)
        return BufferBytes(buckets, buckets + copied, 0)
    live = min(every, max(buffers.max_live_parameters, 2 * largest_block))
    weights = (live + buffers.prefetch_bucket_size) * weight_bytes
    return BufferBytes(bucket + weights, bucket + copied + weights, bucket)


# Bytes per parameter. AdamW keeps two fp32 moments (arXiv:1711.05101); mixed precision adds an fp32 copy of the
# weights, the master weights (arXiv:1710.03740).
MOMENT_BYTES = 8
MASTER_BYTES = 4
# Moments of each optimizer. 8-bit AdamW has one fp32 scale per block of 256 values beside them (bitsandbytes,
# functional.py quantize_blockwise).
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
# 8-bit AdamW keeps fp32 moments for tensors below this size (bitsandbytes, optim/optimizer.py min_8bit_size). The two
# lookup tables from 8 bits to 256 fp32 values exist once (name2qmap).
_SMALLEST_SCALED = 4096
_SCALE_TABLES = 2 * 4 * 256

# fp8 and fp4 are for products; weights have 16 bits.
_DTYPE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "fp4": 2}
_STATE_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}
# Bytes per element of stored matrices, with their scales: fp32 per 128 x 128 weights (DeepSeek-V3, arXiv:2412.19437,
# section 3.3), a byte per 32 (OCP Microscaling Formats, version 1.0), a byte per 16 (NVFP4, arXiv:2509.25149).
_STORED_BYTES = {"fp8": 1 + 4 / 128**2, "mxfp8": 1 + 1 / 32, "mxfp4": 0.5 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
_FP32_BYTES = 4


# bitsandbytes: 8-bit rows have one fp32 scale each (LLM.int8(), arXiv:2208.07339). NF4 has 4 bits, and one fp32 scale
# per block of 64; double quantization stores these scales in 8 bits, with one fp32 scale per 256 (QLoRA,
# arXiv:2305.14314, section 3).
_NF4_BLOCK, _SCALES_BLOCK = 64, 256


def quantized_bytes(quantization: str, elements: int, rows: int) -> int:
    """Return the bytes of a quantized matrix with ``elements`` elements in ``rows`` rows.

    Raises LookupError for an unknown format.
    """
    scales = -(-elements // _NF4_BLOCK)
    if quantization == "int8":
        return elements + _FP32_BYTES * rows
    if quantization == "nf4":
        return -(-elements // 2) + _FP32_BYTES * scales
    if quantization == "nf4_double":
        return -(-elements // 2) + scales + _FP32_BYTES * -(-scales // _SCALES_BLOCK)
    raise LookupError(f"unknown quantization: {quantization}")


class MasterWeights(Enum):
    """The fp32 copy of the weights that the optimizer updates."""

    OF_EACH_PARTITION = "a copy for 16-bit weights; with ZeRO a copy of each rank's partition at every precision"
    BESIDE_16_BIT = "a copy for 16-bit weights"
    THE_WEIGHTS = "none: the weights are fp32 themselves"
    OF_16_BITS = "a 16-bit copy of each rank's partition"  # DeepSpeed's bf16_master_weights_and_grads
    NONE = "none: the 16-bit weights are updated"


class ModelStates(NamedTuple):
    """Bytes on one rank. ``optimizer_states``: moments, and fp32 master weights if there are any."""

    parameters: int
    gradients: int
    optimizer_states: int


def weight_bytes(precision: str) -> int:
    """Return the bytes of one weight or activation element at a precision."""
    return _DTYPE_BYTES[precision]


def gradient_bytes(precision: str, grad_dtype: str) -> int:
    """Return the bytes of one accumulated gradient element."""
    return _DTYPE_BYTES[grad_dtype] if weight_bytes(precision) == 2 else 4


def chosen_master(spec: RunSpec, usual: MasterWeights, *, engine: bool) -> MasterWeights:
    """Return the master weights of a run: the ``usual`` ones of its framework, or what the spec has instead.

    ``engine``: the framework is DeepSpeed, which keeps a copy of each partition in 16 bits then (zero/stage_1_and_2.py
    ``master_weights_and_grads_dtype``).
    """
    training = spec.training
    if training.optimizer.master_weights or weight_bytes(training.precision) != 2:
        return usual
    return MasterWeights.OF_16_BITS if engine else MasterWeights.NONE


def master_bytes(precision: str, zero_stage: int, master: MasterWeights) -> int:
    """Return the bytes per parameter of the copy of the weights that the optimizer updates; 0 if there is none."""
    if master is MasterWeights.OF_16_BITS:
        return 2 if zero_stage else 0
    if master in (MasterWeights.THE_WEIGHTS, MasterWeights.NONE):
        return 0
    copied = weight_bytes(precision) == 2 or (master is MasterWeights.OF_EACH_PARTITION and zero_stage > 0)
    return MASTER_BYTES if copied else 0


def saved_weight_bytes(spec: RunSpec, layout: Layout, per_rank: Architecture, stage: Stage) -> int:
    """Return by how many bytes the weights of a stage are smaller on a rank in ``training.weight_dtype``.

    The matrices of the blocks have it, not routers, norms, embedding and head. ``per_rank``: the parameters that one
    rank holds under tensor and expert parallelism, of all stages.
    """
    stored = _STORED_BYTES.get(spec.training.weight_dtype)
    if stored is None:
        return 0
    shards = (zero_shards(layout), expert_shards(spec, layout)) if layout.zero_stage == 3 else (1, 1)
    kinds = per_rank.kinds(stage.start, stage.blocks)
    matrices = sum(times * (block.attention + block.dense_mlp) for block, times in kinds) // shards[0]
    matrices += sum(times * block.routed for block, times in kinds) // shards[1]
    return int(matrices * (weight_bytes(spec.training.precision) - stored))


def lighter_update_bytes(spec: RunSpec) -> int:
    """Return by how many bytes per parameter an update reads and writes less than with fp32 moments and weights.

    Without fp32 master weights it reads and writes 16-bit ones.
    """
    name, optimizer = spec.training.optimizer.name, spec.training.optimizer
    moments = moment_bytes_per_parameter(name) - moment_bytes_per_parameter(name, optimizer.state_dtype)
    return 2 * moments + (0 if optimizer.master_weights else 2 * (MASTER_BYTES - 2))


def gathered_weight_bytes(spec: RunSpec) -> float:
    """Return the bytes per weight that ZeRO gathers: those of ``training.weight_dtype``, or of the precision."""
    return _STORED_BYTES.get(spec.training.weight_dtype, weight_bytes(spec.training.precision))


def uses_bf16_optimizer(precision: str, grad_dtype: str, zero_stage: int) -> bool:
    """Return whether DeepSpeed's BF16_Optimizer runs: in stage 1 with bf16 weights and fp32 gradients."""
    return (
        zero_stage == 1 and precision in ("bf16", "fp8", "fp4") and gradient_bytes(precision, grad_dtype) == _FP32_BYTES
    )


def moment_bytes_per_parameter(optimizer: str, state_dtype: str = "fp32") -> int:
    """Return the bytes of an optimizer's states per parameter, without the fp32 master weight.

    ``state_dtype``: ``training.optimizer.state_dtype``. Raises LookupError for an unknown optimizer.
    """
    if optimizer in _MOMENT_BYTES:
        return _MOMENT_BYTES[optimizer] * _STATE_BYTES[state_dtype] // _FP32_BYTES
    found = optimizer_extension(optimizer)
    if found is None:
        raise LookupError(f"unknown optimizer: {optimizer}")
    return found.moment_bytes * _STATE_BYTES[state_dtype] // _FP32_BYTES


def optimizer_state_bytes_per_parameter(
    precision: str,
    zero_stage: int,
    optimizer: str = "adamw",
    master: MasterWeights = MasterWeights.OF_EACH_PARTITION,
    state_dtype: str = "fp32",
) -> int:
    """Return the bytes of moments and master weights per parameter.

    DeepSpeed keeps master weights except in stage 0 of fp32; Megatron-LM and nanotron keep them for 16-bit weights; the
    weights of FSDP are fp32 themselves (torch, MixedPrecisionPolicy).
    """
    return moment_bytes_per_parameter(optimizer, state_dtype) + master_bytes(precision, zero_stage, master)


def moment_bytes(optimizer: str, elements: int, state_dtype: str = "fp32") -> int:
    """Return the bytes of the moments of one flat tensor with ``elements`` parameters."""
    if optimizer != "adamw_8bit":
        return elements * moment_bytes_per_parameter(optimizer, state_dtype)
    if elements < _SMALLEST_SCALED:
        return elements * MOMENT_BYTES
    return 2 * elements + 2 * _FP32_BYTES * -(-elements // _SCALED_VALUES)


def optimizer_constant_bytes(optimizer: str, largest: int) -> int:
    """Return the bytes that an optimizer allocates once; ``largest`` is the size of its largest tensor."""
    return _SCALE_TABLES if optimizer == "adamw_8bit" and largest >= _SMALLEST_SCALED else 0


def outer_bytes_per_parameter(settings: LocalSGDSpec) -> int:
    """Return the bytes of the outer weights of local SGD per parameter, with their momentum."""
    return MASTER_BYTES * (2 if settings.outer_optimizer == "nesterov" else 1)


def checkpoint_bytes_per_parameter(
    precision: str,
    zero_stage: int,
    optimizer: str = "adamw",
    master: MasterWeights = MasterWeights.OF_EACH_PARTITION,
    state_dtype: str = "fp32",
) -> int:
    """Return the bytes that a checkpoint has per parameter: weights, moments and master weights.

    In stage 3 the master weights are the only weights in the checkpoint.
    """
    states = optimizer_state_bytes_per_parameter(precision, zero_stage, optimizer, master, state_dtype)
    alone = zero_stage == 3 and master is not MasterWeights.NONE
    return states if alone else weight_bytes(precision) + states


def model_state_bytes(
    parameters: int,
    precision: str,
    grad_dtype: str,
    zero_stage: int,
    data_parallel: int,
    optimizer: str = "adamw",
    master: MasterWeights = MasterWeights.OF_EACH_PARTITION,
    state_dtype: str = "fp32",
) -> ModelStates:
    """Return the bytes that one rank holds of ``parameters`` parameters that ``data_parallel`` ranks share (ZeRO).

    A partition is the parameters divided by the ranks, rounded up, because DeepSpeed pads the last one. Stage 1 shards
    optimizer states, stage 2 gradients too, stage 3 weights too (arXiv:1910.02054, section 5). Megatron-LM's
    distributed optimizer and nanotron's ZeRO are stage 1: every rank has full gradients (Megatron-LM,
    distributed/param_and_grad_buffer.py). FSDP holds weights and gradients in fp32.
    """
    partition = -(-parameters // data_parallel)
    held_weights = partition if zero_stage >= 3 else parameters
    held_gradients = partition if zero_stage >= 2 else parameters
    held_states = partition if zero_stage >= 1 else parameters
    states = held_states * optimizer_state_bytes_per_parameter(precision, zero_stage, optimizer, master, state_dtype)
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
) -> int:
    """Return the bytes of temporary tensors of the optimizer's update, when no activations exist.

    torch's ``foreach`` AdamW, which ranks on CPUs use, allocates one fp32 tensor as large as what it updates, for the
    root of the second moment; its fused AdamW on GPUs allocates none. ZeRO flattens the gradients of the partition, and
    casts them to fp32 (``stage_1_and_2.py step``, ``stage3.py _prepare_fp32_grad_for_sub_group``: ``flatten`` and
    ``.to``): 6 bytes per element of 16-bit gradients, 4 of fp32 ones. Stage 3 does so for one sub-group at a time.
    Stages 1 and 2 accumulate 16-bit gradients in fp32 in one flat tensor, which they use as it is. BF16_Optimizer
    copies no partition; before the update it casts all its fp32 gradients to 16 bits to reduce them (``engine.py
    allreduce_bucket``: ``tensor.to(communication_data_type)``). Without ZeRO, FP16_Optimizer casts each 16-bit gradient
    to fp32 and then flattens all of them (``fused_optimizer.py step``). ``casts``: master weights are fp32.
    """
    root = _FP32_BYTES if foreach and optimizer in ("adamw", "adam") else 0
    sixteen = weight_bytes(precision) == 2
    accumulated = gradient_bytes(precision, grad_dtype)
    if zero_stage == 0:
        return (2 * _FP32_BYTES if sixteen else root) * parameters
    partition = -(-parameters // data_parallel)
    if zero_stage == 1 and sixteen and accumulated == _FP32_BYTES:
        return max(root * partition, 2 * parameters if data_parallel > 1 else 0)
    if zero_stage == 3:
        partition = min(partition, SUB_GROUP_ELEMENTS)
    elif sixteen and accumulated == _FP32_BYTES:
        return root * partition
    if not casts:
        return (accumulated + root) * partition
    copied = accumulated if accumulated < _FP32_BYTES else 0
    return (_FP32_BYTES + max(copied, root)) * partition


# Bytes per element that an offloaded optimizer keeps on the host beside its states: fp32 gradients of its partition,
# and a pinned 16-bit copy of the weights (DeepSpeed zero/stage_1_and_2.py, ops/adam/cpu_adam.py).
_HOST_COPIES = 6
# Pinned host memory for offload to NVMe: five buffers of 1e8 fp32 elements (DeepSpeed zero/offload_config.py,
# buffer_count and buffer_size).
_NVME_BUFFERS = 5 * 4 * 10**8


def rank_states(spec: RunSpec, layout: Layout, shard: Shard, master: MasterWeights) -> ModelStates:
    """Return the bytes of weights, gradients and optimizer states on one rank's device, without offloaded parts."""
    return device_and_host_states(spec, layout, shard, master)[0]


def expert_tensor_parallel(spec: RunSpec, layout: Layout) -> int:
    """Return the number of ranks that shard the width of an expert (layout.expert_tensor_parallel)."""
    wanted = spec.layout.expert_tensor_parallel
    return layout.tensor_parallel if wanted == "auto" else wanted


def expert_shards(spec: RunSpec, layout: Layout) -> int:
    """Return the number of ranks over which ZeRO shards the parameters of experts."""
    ranks = zero_shards(layout) * layout.tensor_parallel
    return max(1, ranks // (layout.expert_parallel * expert_tensor_parallel(spec, layout)))


def device_and_host_states(
    spec: RunSpec, layout: Layout, shard: Shard, master: MasterWeights
) -> tuple[ModelStates, int]:
    """Return the states on one rank's device, and the bytes of one rank that are offloaded to the node's memory."""
    training, optimizer = spec.training, spec.training.optimizer
    zero, master = layout.zero_stage, chosen_master(spec, master, engine=False)
    precisions = training.precision, training.grad_dtype
    groups = [
        model_state_bytes(count, *precisions, zero, ranks, optimizer.name, master, optimizer.state_dtype)
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
    """Return the states that stay on the device, and the bytes in the node's memory instead.

    ``elements``: the parameters of the rank.
    """
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
