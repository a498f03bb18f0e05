"""Bytes of weights, gradients and optimizer states on one rank.

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

from enum import Enum
from typing import NamedTuple

from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.stages import Shard, Stage, rank_architecture, zero_shards
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.extensions import optimizer_traits
from scaletrain_cli.spec.training import LocalSGDSpec

# Bytes per parameter. AdamW keeps two fp32 moments (arXiv:1711.05101); mixed precision adds an fp32 copy of the
# weights, the master weights (arXiv:1710.03740).
MOMENT_BYTES = 8
MASTER_BYTES = 4
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
    """Return the bytes of a quantized matrix with ``elements`` elements in ``rows`` rows."""
    scales = -(-elements // _NF4_BLOCK)
    if quantization == "int8":
        return elements + _FP32_BYTES * rows
    if quantization == "nf4":
        return -(-elements // 2) + _FP32_BYTES * scales
    return -(-elements // 2) + scales + _FP32_BYTES * -(-scales // _SCALES_BLOCK)  # nf4_double


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
    """Return the bytes per parameter of the copy of the weights that the optimizer updates; 0 if there is none.

    DeepSpeed keeps one except in stage 0 of fp32; Megatron-LM and nanotron keep one for 16-bit weights; the weights of
    FSDP are fp32 themselves (torch, MixedPrecisionPolicy).
    """
    if master is MasterWeights.OF_16_BITS:
        return 2 if zero_stage else 0
    if master in (MasterWeights.THE_WEIGHTS, MasterWeights.NONE):
        return 0
    copied = weight_bytes(precision) == 2 or (master is MasterWeights.OF_EACH_PARTITION and zero_stage > 0)
    return MASTER_BYTES if copied else 0


def saved_weight_bytes(spec: RunSpec, layout: Layout, stage: Stage) -> int:
    """Return by how many bytes the weights of a stage are smaller on a rank in ``training.weight_dtype``.

    The matrices of the blocks have it, not routers, norms, embedding and head.
    """
    if (stored := _STORED_BYTES.get(spec.training.weight_dtype)) is None:
        return 0
    shards = (zero_shards(layout), expert_shards(spec, layout)) if layout.zero_stage == 3 else (1, 1)
    kinds = rank_architecture(spec, layout).kinds(stage.start, stage.blocks)
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
    if (traits := optimizer_traits(optimizer)) is None:
        raise LookupError(f"unknown optimizer: {optimizer}")
    return traits.moment_bytes * _STATE_BYTES[state_dtype] // _FP32_BYTES


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
    states = moment_bytes_per_parameter(optimizer, state_dtype) + master_bytes(precision, zero_stage, master)
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
    per_value = moment_bytes_per_parameter(optimizer, state_dtype) + master_bytes(precision, zero_stage, master)
    states = held_states * per_value
    if optimizer == "adamw_8bit":
        states += 2 * _FP32_BYTES * -(-held_states // _SCALED_VALUES)
    if master is MasterWeights.THE_WEIGHTS:
        return ModelStates(held_weights * _FP32_BYTES, held_gradients * _FP32_BYTES, states)
    return ModelStates(
        parameters=held_weights * weight_bytes(precision),
        gradients=held_gradients * gradient_bytes(precision, grad_dtype),
        optimizer_states=states,
    )


# Bytes per element that an offloaded optimizer keeps on the host beside its states: fp32 gradients of its partition,
# and a pinned 16-bit copy of the weights (DeepSpeed zero/stage_1_and_2.py, ops/adam/cpu_adam.py).
_HOST_COPIES = 6
# Pinned host memory for offload to NVMe: five buffers of 1e8 fp32 elements (DeepSpeed zero/offload_config.py,
# buffer_count and buffer_size).
_NVME_BUFFERS = 5 * 4 * 10**8


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
    none = ModelStates(0, 0, 0)  # a stage of nanotron may be empty
    states = ModelStates(*map(sum, zip(none, *groups, strict=True)))
    if layout.offload == "none":
        return states, 0
    parameters, gradients, optimizer_states = states
    # zero/stage_1_and_2.py and stage3.py move the optimizer's partition and its gradients to the host.
    host = optimizer_states + _HOST_COPIES * -(-shard.parameters // (zero_shards(layout) if zero else 1))
    gradients = 0 if zero >= 2 else gradients
    if layout.offload == "optimizer+params":
        host += parameters
        parameters = 0
    if spec.layout.offload_device == "nvme":
        host = min(host, _NVME_BUFFERS)
    return ModelStates(parameters, gradients, 0), host
