"""Exact bytes of weights, gradients and optimizer states on one rank of this project's engine.

states.py explains what DeepSpeed 0.19 keeps in each ZeRO stage; this module adds its padding and rounding, from its
source and from counts of live tensors. DeepSpeed flattens, pads and shards parameters group by group, so exact bytes
need the number of elements of every parameter on a rank, in the order of the engine's modules:

* Stages 1 and 2 flatten each parameter group and pad it to a multiple of twice the number of ranks that share it
  (``zero/stage_1_and_2.py`` flatten_dense_tensors_aligned with nccl_start_alignment_factor; ``bf16_optimizer.py``).
* Stage 1 keeps gradients in the parameters, unpadded, until they are reduced. BF16_Optimizer has a flat fp32 buffer.
* Stage 2 accumulates 16-bit gradients in fp32 in a flat partition. If gradients have the dtype of the weights, it keeps
  the complete gradient of every parameter that its partition overlaps (copy_grads_in_partition), and the padding.
* Stage 3 shards each parameter by itself, rounded up (``partition_parameters.py`` _aligned_size). With more than one
  rank it also keeps small parameters gathered (stage3_param_persistence_threshold).
* An offloaded optimizer has on the host: its states, their fp32 gradients and, in stages 1 and 2, a copy of the new
  weights. Gradients that accumulate in the dtype of the weights are on the host too; fp32 ones are not.
* With NVMe the host has the accumulated gradients, and the buffers through which states and weights are copied.
* Frozen parameters are in no group: stages 1 and 2 leave them as they are, stage 3 shards them as all others.

Gradients are counted at their maximum: after the last backward pass and, in stages 0 and 1, before their reduction.
"""

from collections.abc import Callable
from functools import lru_cache

from scaletrain_cli.plan.adapters import trains_in_fp32
from scaletrain_cli.plan.memory.buffers import (
    NVME_OPTIMIZER_BUFFERS,
    NVME_PARAMETER_BUFFERS,
    NVME_WEIGHTS_IN_MEMORY,
    PERSISTENT_ELEMENTS,
    SUB_GROUP_ELEMENTS,
)
from scaletrain_cli.plan.memory.parameter_groups import Group, SharedGroup, StageTensors, most_groups, stage_tensors
from scaletrain_cli.plan.memory.states import (
    MASTER_BYTES,
    MasterWeights,
    ModelStates,
    chosen_master,
    expert_shards,
    gradient_bytes,
    master_bytes,
    moment_bytes,
    optimizer_constant_bytes,
    outer_bytes_per_parameter,
    weight_bytes,
)
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.stages import Stage, stages_in, zero_shards
from scaletrain_cli.plan.trained_stages import TrainedStage, stage_of_step
from scaletrain_cli.spec import RunSpec

# With more replicas than this, only a sample is compared to find the fullest: replicas differ by less than a parameter.
_MOST_REPLICAS = 256


def engine_states(
    spec: RunSpec, layout: Layout, stage: Stage, replica: int | None = None, trained: TrainedStage | None = None
) -> tuple[ModelStates, int]:
    """Return the states on one rank's device, and the bytes of one rank that are offloaded to the node's memory.

    ``replica``: the rank's index among the data x sequence ranks of its stage; None for the fullest of them.
    ``trained``: what trains; None: what the first step trains.
    """
    trained = trained or stage_of_step(spec, 1)
    tensors = stage_tensors(spec, layout, stage, trained)
    if trained.runs and layout.pipeline_parallel > 1:
        sizes = layout.tensor_parallel, layout.expert_parallel
        missing = most_groups(spec.transformer, *sizes, stages_in(spec, layout), trained) - len(tensors.trained)
        tensors = tensors._replace(trained=tensors.trained + (SharedGroup(_ANCHOR),) * missing)
    return states_of_tensors(spec, layout, tensors, replica)


def states_of_tensors(
    spec: RunSpec, layout: Layout, tensors: StageTensors, replica: int | None = None
) -> tuple[ModelStates, int]:
    """Return the same for any model, from its tensors on one rank."""
    ranks = _ranks(spec, layout)
    # A pipeline stage that trains nothing has an optimizer of one number; see also ``most_groups``.
    shared_groups = tensors.trained or (SharedGroup(_ANCHOR),)
    shared = [(group, ranks(experts)) for group, experts, *_ in shared_groups]
    frozen = [(group, ranks(experts)) for group, experts, *_ in tensors.frozen]
    training, zero = spec.training, layout.zero_stage
    (element, gradient), own = trained_bytes(spec), weight_bytes(training.precision)
    # The tensors that the optimizer updates, as (elements, number of such tensors), for each group.
    parts: list[list[tuple[int, int]]]
    if zero == 3:
        parts = [[(group.pieces(ranks), 1)] for group, ranks in shared]
        held = sum(size for [(size, _)] in parts)
        weights = element * _held_in_stage_3(layout, shared)
        gradients = gradient * held
    elif zero == 0:
        parts = [[(size, times) for sizes, times in group.runs for size in sizes] for group, *_ in shared]
        held = sum(size * times for part in parts for size, times in part)
        weights, gradients = element * held, gradient * held
    else:
        padded = [_padded(group.elements, ranks) for group, ranks in shared]
        parts = [[(size // ranks, 1)] for size, (_, ranks) in zip(padded, shared, strict=True)]
        held = sum(size for [(size, _)] in parts)
        weights = element * sum(padded)
        gradients = gradient * _gradient_elements(spec, layout, shared_groups, replica, sum(padded), held)
    frozen_elements = _held_in_stage_3(layout, frozen) if zero == 3 else sum(group.elements for group, _ in frozen)
    weights += tensors.quantized + own * frozen_elements
    optimizer, largest_part = training.optimizer.name, max(size for part in parts for size, _ in part)
    dtype = training.optimizer.state_dtype
    states = sum(
        moment_bytes(optimizer if optimizer != "muon" or group.orthogonalized else "adamw", size, dtype) * times
        for group, part in zip(shared_groups, parts, strict=True)
        for size, times in part
    )
    states += optimizer_constant_bytes(optimizer, largest_part)
    master = chosen_master(spec, MasterWeights.OF_EACH_PARTITION, engine=True)
    # FP16_Optimizer, DeepSpeed's of stage 0 in 16 bits, has master weights too (fused_optimizer.py __init__).
    states += (master_bytes(training.precision, zero, master) if zero or element < MASTER_BYTES else 0) * held
    states += 0 if training.averaging.name == "none" else MASTER_BYTES * held  # the averaged weights, in fp32
    if layout.local_sgd_groups > 1:  # outer weights, and their momentum
        states += outer_bytes_per_parameter(training.local_sgd) * held
    if layout.offload == "none":
        return ModelStates(weights, gradients, states), 0
    states += MASTER_BYTES * held  # the gradient that the optimizer reads, beside its master weights
    if zero == 3:
        kept, offloaded = weights, 0
        if layout.offload == "optimizer+params":  # gathered parameters that stay on the device
            kept = element * sum(_persistent(group, ranks) for group, ranks in shared)
            kept += own * sum(_persistent(group, ranks) for group, ranks in frozen)
            offloaded = element * held + own * sum(group.pieces(ranks) for group, ranks in frozen)
        if spec.layout.offload_device == "nvme":
            largest = max(-(-group.largest // ranks) for group, ranks in shared)
            states = NVME_OPTIMIZER_BUFFERS * MASTER_BYTES * min(largest_part, SUB_GROUP_ELEMENTS)
            offloaded = (
                min(offloaded, element * (NVME_PARAMETER_BUFFERS * largest + NVME_WEIGHTS_IN_MEMORY))
                if offloaded
                else 0
            )
        return ModelStates(kept, 0, 0), states + gradients + offloaded
    # Host copies of the new weights before they go to the device, and of one gradient that arrives from it.
    host = states + element * (held + max(group.largest for group, *_ in shared))
    if zero == 2 and gradient == element:  # gradients accumulate on the host
        gradients = 0
        if layout.gradient_accumulation_steps > 1:
            host += gradient * _touched(shared_groups, ranks(False), ranks(True), replica, padded=False)
    return ModelStates(weights, gradients, 0), host


def trained_bytes(spec: RunSpec) -> tuple[int, int]:
    """Return the bytes of one trained weight, and of one accumulated gradient element.

    Adapters of frozen 16-bit weights train in fp32, if nothing else trains.
    """
    if trains_in_fp32(spec):
        return MASTER_BYTES, MASTER_BYTES
    training = spec.training
    return weight_bytes(training.precision), gradient_bytes(training.precision, training.grad_dtype)


# What trains on a pipeline stage whose parameters are all frozen (engine/parallel/pipeline.py).
_ANCHOR = Group((((1,), 1),))


def _ranks(spec: RunSpec, layout: Layout) -> Callable[[bool], int]:
    """Return a function from "are experts" to the number of ranks that share such parameters."""
    replicas, holders = zero_shards(layout), expert_shards(spec, layout)
    return lambda experts: holders if experts else replicas


def _held_in_stage_3(layout: Layout, groups: list[tuple[Group, int]]) -> int:
    """Return the elements of groups, each shared by a number of ranks, on one of them: its share, and what is whole."""
    held = sum(group.pieces(ranks) + (_persistent(group, ranks) if ranks > 1 else 0) for group, ranks in groups)
    if (size := layout.zero_secondary_shard_size) > 1:
        held += sum(_second_copy(group, ranks, size) for group, ranks in groups)
    return held


def offload_step_bytes(spec: RunSpec, layout: Layout, stage: Stage, trained: TrainedStage | None = None) -> int:
    """Return the temporary device bytes of an offloaded optimizer between backward pass and update.

    That is the largest gradient while it is copied to the host. Stage 1 first accumulates its partition in fp32 beside
    the gradients in the dtype of the weights (``stage_1_and_2.py`` _build_compact_grad_partition_buffer).
    """
    if layout.zero_stage == 3:
        return 0
    ranks = _ranks(spec, layout)
    element, gradient = trained_bytes(spec)
    groups = stage_tensors(spec, layout, stage, trained or stage_of_step(spec, 1)).trained
    partition = sum(_padded(group.elements, ranks(experts)) // ranks(experts) for group, experts, *_ in groups)
    added = gradient * partition if layout.zero_stage == 1 and gradient != element else 0
    return added + element * max((group.largest for group, *_ in groups), default=0)


def _gradient_elements(
    spec: RunSpec, layout: Layout, groups: tuple[SharedGroup, ...], replica: int | None, padded: int, partition: int
) -> int:
    """Return the gradient elements that a rank holds in ZeRO stages 1 and 2.

    ``padded`` and ``partition``: elements of all trained parameters and of the rank's partition, with padding.
    """
    element, gradient = trained_bytes(spec)
    same_type = element == gradient
    if layout.zero_stage == 2:
        if not same_type:
            return partition
        return _touched(groups, zero_shards(layout), expert_shards(spec, layout), replica, padded=True)
    flat = spec.training.precision in ("bf16", "fp8", "fp4") and not same_type and layout.offload == "none"
    return padded if flat else sum(group.elements for group, *_ in groups)


def _padded(elements: int, ranks: int) -> int:
    return -(-elements // (2 * ranks)) * 2 * ranks


def _persistent(group: Group, ranks: int) -> int:
    """Return the elements of small parameters that stage 3 keeps gathered, padded to a multiple of the ranks."""
    small = ((size, times) for sizes, times in group.runs for size in sizes if size <= PERSISTENT_ELEMENTS)
    return ranks * sum(-(-size // ranks) * times for size, times in small)


def _second_copy(group: Group, ranks: int, size: int) -> int:
    """Return the elements of a rank's part of the copy that ``size`` ranks have of all parameters that are not small.

    Each is padded to a multiple of all ``ranks`` (``partition_parameters.py`` _partition_param_sec).
    """
    large = ((elements, times) for sizes, times in group.runs for elements in sizes if elements > PERSISTENT_ELEMENTS)
    return sum(-(-elements // ranks) * ranks // size * times for elements, times in large)


@lru_cache(maxsize=4096)
def _touched(groups: tuple[SharedGroup, ...], replicas: int, holders: int, replica: int | None, padded: bool) -> int:
    """Return the elements of all parameters that the partitions of a rank overlap.

    ``holders``: ranks that share the same experts; ``replica``: see ``engine_states``; ``padded``: count padding
    too.
    """
    apart = max(1, replicas // holders)  # distance between ranks that hold the same experts
    if replica is None:
        step = -(-replicas // _MOST_REPLICAS)
        ranks = {*range(0, replicas, step), replicas - 1}
        return max(_touched(groups, replicas, holders, rank, padded) for rank in ranks)
    return sum(
        _touched_of(group, holders, replica // apart, padded)
        if experts
        else _touched_of(group, replicas, replica, padded)
        for group, experts, *_ in groups
    )


def _touched_of(group: Group, ranks: int, rank: int, padded: bool) -> int:
    elements = group.elements
    partition = _padded(elements, ranks) // ranks
    begin, end = min(rank * partition, elements), min((rank + 1) * partition, elements)
    padding = partition - (end - begin) if padded else 0
    if begin == end:
        return padding
    return group.tensor_at(end - 1)[1] - group.tensor_at(begin)[0] + padding
