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

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from scaletrain_cli.plan.adapters import trains_in_fp32
from scaletrain_cli.plan.architecture import Architecture, architecture
from scaletrain_cli.plan.memory.states import (
    MASTER_BYTES,
    NVME_OPTIMIZER_BUFFERS,
    NVME_PARAMETER_BUFFERS,
    NVME_WEIGHTS_IN_MEMORY,
    PERSISTENT_ELEMENTS,
    SUB_GROUP_ELEMENTS,
    MasterWeights,
    ModelStates,
    chosen_master,
    expert_shards,
    gradient_bytes,
    master_bytes,
    moment_bytes,
    optimizer_constant_bytes,
    outer_bytes_per_parameter,
    quantized_bytes,
    weight_bytes,
)
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.stages import Stage, stages_in, zero_shards
from scaletrain_cli.plan.trained_stages import GroupNumber, PartTensors, TrainedStage, stage_of_step
from scaletrain_cli.spec import ModelSpec, RunSpec


class Tensors(NamedTuple):
    """Elements of each parameter tensor in a part of the model, by the optimizer's parameter groups.

    Matrices have weight decay, vectors do not. ``experts`` are matrices that fewer ranks replicate than the others, and
    ``expert_biases`` their vectors.
    """

    matrices: tuple[int, ...] = ()
    vectors: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    expert_biases: tuple[int, ...] = ()


class Group(NamedTuple):
    """One parameter group: its tensors in order, run-length encoded as (sizes, number of repetitions)."""

    runs: tuple[tuple[tuple[int, ...], int], ...]

    @property
    def elements(self) -> int:
        return sum(sum(sizes) * times for sizes, times in self.runs)

    @property
    def largest(self) -> int:
        """Elements of the group's largest tensor."""
        return max(max(sizes) for sizes, _ in self.runs)

    def pieces(self, ranks: int) -> int:
        """Return the elements on one of ``ranks`` ranks if each tensor is sharded by itself, rounded up (stage 3)."""
        return sum(sum(-(-size // ranks) for size in sizes) * times for sizes, times in self.runs)

    def tensor_at(self, element: int) -> tuple[int, int]:
        """Return (start, end) of the tensor that contains this element of the flattened group.

        Raises IndexError behind the last element.
        """
        start = 0
        for sizes, times in self.runs:
            length = sum(sizes)
            if element < start + length * times:
                start += (element - start) // length * length
                for size in sizes:
                    if element < start + size:
                        return start, start + size
                    start += size
            start += length * times
        raise IndexError(element)


class SharedGroup(NamedTuple):
    """A group, and whether its tensors are experts, which fewer ranks share than the others.

    ``orthogonalized``: Muon updates it, and AdamW the other groups.
    """

    group: Group
    experts: bool = False
    orthogonalized: bool = False


class StageTensors(NamedTuple):
    """The tensors of one pipeline stage: the optimizer's parameter groups, and what is frozen; none is empty.

    ``quantized``: bytes of frozen linear layers in 8 or 4 bits; ``largest_quantized``: elements of the largest.
    """

    trained: tuple[SharedGroup, ...]
    frozen: tuple[SharedGroup, ...] = ()
    quantized: int = 0
    largest_quantized: int = 0


class StageGroups(NamedTuple):
    """The parameter groups of one pipeline stage if everything trains; DeepSpeed skips empty ones."""

    matrices: Group
    vectors: Group
    experts: Group
    expert_biases: Group

    @property
    def shared(self) -> tuple[SharedGroup, ...]:
        """Return the groups that are not empty."""
        marked = zip(self, (False, False, True, True), strict=True)
        return tuple(SharedGroup(group, experts) for group, experts in marked if group.runs)


def stage_tensors(spec: RunSpec, layout: Layout, stage: Stage, trained: TrainedStage) -> StageTensors:
    """Return the tensors of one rank of a pipeline stage while it trains what ``trained`` states."""
    model, tensor, expert = spec.transformer, layout.tensor_parallel, layout.expert_parallel
    if not trained.runs:
        if model.block_types:
            return StageTensors(_hybrid_groups(model, tensor, expert, stage.start, stage.blocks, ends_of(stage)).shared)
        kinds = model.block_runs(stage.start, stage.blocks)
        return StageTensors(stage_groups(model, tensor, expert, kinds, ends_of(stage)).shared)
    return _named_tensors(model, tensor, expert, stage._replace(position=min(stage.position, 1)), trained)


@lru_cache(maxsize=4096)
def _named_tensors(model: ModelSpec, tensor: int, expert: int, stage: Stage, trained: TrainedStage) -> StageTensors:
    parts: list[tuple[PartTensors, int]] = [(run.part, run.blocks) for run in trained.blocks_of(model, stage)]
    if stage.first:
        parts.insert(0, (trained.opening, 1))
    elif stage.last and model.tie_word_embeddings:
        parts.insert(0, (trained.opening.only_first(), 1))
    if stage.last:
        parts.append((trained.closing, 1))
    runs: dict[tuple[GroupNumber, bool], list[tuple[tuple[int, ...], int]]] = {}
    quantization = model.quantization
    quantized = largest = 0
    for part, times in parts:
        sizes: dict[tuple[GroupNumber, bool], list[int]] = {}
        for each, number in zip(part.tensors, part.groups, strict=True):
            elements = each.on_rank(tensor, expert)
            if number is None and quantization != "none" and each.is_linear:
                quantized += times * quantized_bytes(quantization, elements, each.rows_on_rank(tensor))
                largest = max(largest, elements)
            else:
                sizes.setdefault((number, expert > 1 and each.experts > 0), []).append(elements)
        for key, found in sizes.items():
            runs.setdefault(key, []).append((tuple(found), times))
    groups = [
        (number, SharedGroup(Group(tuple(found)), experts, number in trained.orthogonalized))
        for (number, experts), found in runs.items()
    ]
    return StageTensors(
        tuple(group for number, group in groups if number is not None),
        tuple(group for number, group in groups if number is None),
        quantized,
        largest,
    )


@lru_cache(maxsize=4096)
def stage_groups(
    model: ModelSpec, tensor: int, expert: int, kinds: tuple[tuple[bool, int], ...], ends: str
) -> StageGroups:
    """Return the parameter groups of blocks if all train; ``kinds``: runs of blocks, as (has experts, blocks).

    ``tensor`` and ``expert``: degrees of parallelism. ``ends``: see ``ends_of``.
    """
    per_rank = architecture(model, tensor, expert)
    opening, closing = _ends(model, per_rank, ends)
    parts = (
        (opening, 1),
        *((_block(model, tensor, expert, experts=experts), blocks) for experts, blocks in kinds),
        (closing, 1),
    )
    return _grouped(parts)


def _hybrid_groups(model: ModelSpec, tensor: int, expert: int, first: int, count: int, ends: str) -> StageGroups:
    """Return the parameter groups of a hybrid model, with one matrix and one vector for each block.

    The engine builds no such blocks, so its tensors are not counted one by one.
    """
    per_rank = architecture(model, tensor, expert)
    opening, closing = _ends(model, per_rank, ends)
    parts = [(opening, 1)]
    for block, times in per_rank.kinds(first, count):
        stacked = (block.routed,) if block.routed else ()
        matrices = (block.shared - block.vectors, *(() if expert > 1 else stacked))
        parts.append((Tensors(matrices, (block.vectors,), stacked if expert > 1 else ()), times))
    parts.append((closing, 1))
    return _grouped(parts)


def _grouped(parts: Sequence[tuple[Tensors, int]]) -> StageGroups:
    """Return the parameter groups of parts, each repeated some times."""
    return StageGroups(
        *(
            Group(tuple((part[kind], times) for part, times in parts if times and part[kind]))
            for kind in range(len(Tensors._fields))
        )
    )


def ends_of(stage: Stage) -> str:
    """Return which ends of the model a stage holds: ``first``, ``last``, ``both`` or ``none``."""
    return {(True, True): "both", (True, False): "first", (False, True): "last"}.get((stage.first, stage.last), "none")


def _ends(model: ModelSpec, per_rank: Architecture, ends: str) -> tuple[Tensors, Tensors]:
    """Return the tensors before and after the blocks; with a tied head, the last stage has a copy of the embedding."""
    opening = closing = Tensors()
    norm = _norm(model)
    if ends in ("first", "both"):
        positions = per_rank.embedding - per_rank.table - (sum(norm) if model.embedding_norm else 0)
        opening = Tensors(
            (per_rank.table, positions) if positions else (per_rank.table,), norm if model.embedding_norm else ()
        )
    elif ends == "last" and model.tie_word_embeddings:
        opening = Tensors((per_rank.table,))
    if ends in ("last", "both"):
        closing = Tensors((per_rank.head,) if per_rank.head else (), norm)
    return opening, closing


@lru_cache(maxsize=1024)
def _block(model: ModelSpec, tensor: int, expert: int, experts: bool) -> Tensors:
    """Return the tensors of one block, in the order of the engine's modules."""
    hidden, norm = model.hidden_size, _norm(model)
    local_heads = -(-model.num_attention_heads // tensor)
    heads = local_heads * model.head_dim
    keys = max(-(-model.num_key_value_heads // tensor), 1) * model.head_dim
    bias = (hidden,) if model.has_output_bias else ()
    qkv_bias = [heads, keys, keys] if model.has_qkv_bias else []
    if model.kv_lora_rank:
        matrices, attention = _latent_attention(model, -(-model.num_attention_heads // tensor))
    elif model.has_fused_qkv or model.fused_projections:  # one fused matrix
        matrices = [hidden * (heads + 2 * keys), heads * hidden]
        attention = [*([sum(qkv_bias)] if qkv_bias else []), *bias]
    else:
        matrices = [hidden * heads, hidden * keys, hidden * keys, heads * hidden]
        attention = [*qkv_bias, *bias]
    sinks = [local_heads] if model.attention_sinks else []
    if model.qk_norm:
        attention += {"head": [model.head_dim] * 2, "projection": [heads, keys], "unweighted": []}[model.qk_norm_scope]
    offloaded: tuple[int, ...] = ()
    biases: list[int] = []
    if experts and model.num_experts:
        inner, held = -(-model.expert_size // tensor), -(-model.num_experts // expert)
        joined, down = _mlp(model, inner)
        stacked = (held * sum(joined), held * down)
        offloaded = stacked if expert > 1 else ()
        shared = model.shared_expert_intermediate_size
        first, second = _mlp(model, -(-shared // tensor)) if shared else ((), 0)
        matrices += [hidden * model.num_experts, *(() if offloaded else stacked), *first, *([second] if shared else [])]
        matrices += [hidden] if model.shared_expert_gate else []
        *ahead, behind = _mlp_bias(model, inner) or [0]
        biases = [held * sum(ahead), held * -(-behind // tensor)] if behind else []
        mlp = [model.num_experts] if model.router_bias else []
        mlp += [] if expert > 1 else biases
        mlp += _mlp_bias(model, -(-shared // tensor)) if shared else []
    else:
        inner = -(-model.intermediate_size // tensor)
        first, second = _mlp(model, inner)
        matrices += [*first, second]
        mlp = _mlp_bias(model, inner)
    vectors = [*norm, *attention, *norm, *mlp]
    if not model.has_fused_qkv:
        vectors = [*sinks, *attention, *mlp, *norm * model.norms_per_block]
    return Tensors(tuple(matrices), tuple(vectors), offloaded, tuple(biases) if offloaded else ())


def _latent_attention(model: ModelSpec, heads: int) -> tuple[list[int], list[int]]:
    """Return the matrices and norms of latent attention with ``heads`` heads on this rank; latents are whole."""
    hidden, latent, query = model.hidden_size, model.kv_lora_rank, model.q_lora_rank
    queries = heads * model.qk_head_dim
    matrices = [hidden * query, query * queries] if query else [hidden * queries]
    matrices += [hidden * (latent + model.qk_rope_head_dim), latent * heads * (model.head_dim + model.value_head_dim)]
    vectors = [query, latent] if query else [latent]
    if model.index_topk:
        index_heads, size = model.index_n_heads, model.index_head_dim
        matrices += [(query or hidden) * index_heads * size, hidden * size, hidden * index_heads]
        vectors += [size, size]
    return [*matrices, heads * model.value_head_dim * hidden], vectors


def _norm(model: ModelSpec) -> tuple[int, ...]:
    return (model.hidden_size,) * (2 if model.has_norm_bias else 1)


def _mlp(model: ModelSpec, inner: int) -> tuple[tuple[int, ...], int]:
    """Return the elements of the input matrices and of the output matrix of an MLP of width ``inner``."""
    joined = model.hidden_size * inner * (2 if model.has_gated_mlp else 1)
    if model.fused_projections or not model.has_gated_mlp:
        return (joined,), model.hidden_size * inner
    return (joined // 2,) * 2, model.hidden_size * inner


def _mlp_bias(model: ModelSpec, inner: int) -> list[int]:
    if not model.has_bias:
        return []
    inputs = [inner] * (2 if model.has_gated_mlp else 1)
    return [*([sum(inputs)] if model.fused_projections else inputs), model.hidden_size]


# With more replicas than this, only a sample is compared to find the fullest: replicas differ by less than a parameter.
_MOST_REPLICAS = 256


def rank_model_states(
    spec: RunSpec, layout: Layout, stage: int = 0, replica: int | None = None, step: int = 1
) -> ModelStates:
    """Return the bytes of states on the device of one rank of pipeline stage ``stage``, without offloaded parts.

    ``replica``: the rank's index among the data x sequence ranks of its stage; None for the fullest of them. ``step``:
    at which they are counted, because what trains may change.
    """
    found = next(each for each in stages_in(spec, layout) if each.position == stage)
    return engine_states(spec, layout, found, replica, stage_of_step(spec, step))[0]


def engine_states(
    spec: RunSpec,
    layout: Layout,
    stage: Stage,
    replica: int | None = None,
    trained: TrainedStage | None = None,
) -> tuple[ModelStates, int]:
    """Return the states on one rank's device, and the bytes of one rank that are offloaded to the node's memory.

    ``trained``: what trains; None: what the first step trains.
    """
    trained = trained or stage_of_step(spec, 1)
    tensors = stage_tensors(spec, layout, stage, trained)
    if trained.runs and layout.pipeline_parallel > 1:
        sizes = layout.tensor_parallel, layout.expert_parallel
        missing = _most_groups(spec.transformer, *sizes, stages_in(spec, layout), trained) - len(tensors.trained)
        tensors = tensors._replace(trained=tensors.trained + (SharedGroup(_ANCHOR),) * missing)
    return states_of_tensors(spec, layout, tensors, replica)


@lru_cache(maxsize=1024)
def _most_groups(model: ModelSpec, tensor: int, expert: int, stages: tuple[Stage, ...], trained: TrainedStage) -> int:
    """Return the parameter groups of the stage with most; others have a number in place of each that they lack."""
    return max(
        len(_named_tensors(model, tensor, expert, stage._replace(position=min(stage.position, 1)), trained).trained)
        for stage in stages
    )


def states_of_tensors(
    spec: RunSpec, layout: Layout, tensors: StageTensors, replica: int | None = None
) -> tuple[ModelStates, int]:
    """Return the same for any model, from its tensors on one rank."""
    ranks = _ranks(spec, layout)
    # A pipeline stage that trains nothing has an optimizer of one number; see also ``_most_groups``.
    shared_groups = tensors.trained or (SharedGroup(_ANCHOR),)
    shared = [(group, ranks(experts)) for group, experts, *_ in shared_groups]
    training, zero = spec.training, layout.zero_stage
    frozen = _frozen_bytes(spec, layout, tensors, weight_bytes(training.precision))
    element, gradient = trained_bytes(spec)
    # The tensors that the optimizer updates, as (elements, number of such tensors), for each group.
    parts: list[list[tuple[int, int]]]
    if zero == 3:
        parts = [[(group.pieces(ranks), 1)] for group, ranks in shared]
        held = sum(size for [(size, _)] in parts)
        weights = element * (held + sum(_persistent(group, ranks) for group, ranks in shared if ranks > 1))
        if (size := layout.zero_secondary_shard_size) > 1:
            weights += element * sum(_second_copy(group, ranks, size) for group, ranks in shared)
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
    weights += frozen
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
            frozen_groups = [(group, ranks(experts)) for group, experts, *_ in tensors.frozen]
            own = weight_bytes(training.precision)
            kept = element * sum(_persistent(group, ranks) for group, ranks in shared)
            kept += own * sum(_persistent(group, ranks) for group, ranks in frozen_groups)
            offloaded = element * held + own * sum(group.pieces(ranks) for group, ranks in frozen_groups)
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


def trained_parameters(spec: RunSpec, layout: Layout, stage: Stage, trained: TrainedStage) -> tuple[int, int]:
    """Return (elements of trained parameters on one rank, elements of the largest quantized matrix)."""
    tensors = stage_tensors(spec, layout, stage, trained)
    return sum(group.elements for group, *_ in tensors.trained), tensors.largest_quantized


# What trains on a pipeline stage whose parameters are all frozen (engine/parallel/pipeline.py).
_ANCHOR = Group((((1,), 1),))


def _ranks(spec: RunSpec, layout: Layout) -> Callable[[bool], int]:
    """Return a function from "are experts" to the number of ranks that share such parameters."""
    replicas, holders = zero_shards(layout), expert_shards(spec, layout)
    return lambda experts: holders if experts else replicas


def _frozen_bytes(spec: RunSpec, layout: Layout, tensors: StageTensors, element: int) -> int:
    """Return the bytes of frozen weights; ``element``: bytes of one that is not quantized."""
    ranks = _ranks(spec, layout)
    frozen = [(group, ranks(experts)) for group, experts, *_ in tensors.frozen]
    if layout.zero_stage < 3:
        return tensors.quantized + element * sum(group.elements for group, *_ in frozen)
    shards = sum(group.pieces(ranks) + (_persistent(group, ranks) if ranks > 1 else 0) for group, ranks in frozen)
    if (size := layout.zero_secondary_shard_size) > 1:
        shards += sum(_second_copy(group, ranks, size) for group, ranks in frozen)
    return tensors.quantized + element * shards


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
    spec: RunSpec,
    layout: Layout,
    groups: tuple[SharedGroup, ...],
    replica: int | None,
    padded: int,
    partition: int,
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
    small = (
        sum(-(-size // ranks) for size in sizes if size <= PERSISTENT_ELEMENTS) * times for sizes, times in group.runs
    )
    return ranks * sum(small)


def _second_copy(group: Group, ranks: int, size: int) -> int:
    """Return the elements of a rank's part of the copy that ``size`` ranks have of all parameters that are not small.

    Each is padded to a multiple of all ``ranks`` (``partition_parameters.py`` _partition_param_sec).
    """
    large = (
        sum(-(-each // ranks) * ranks // size for each in sizes if each > PERSISTENT_ELEMENTS) * times
        for sizes, times in group.runs
    )
    return sum(large)


@lru_cache(maxsize=4096)
def _touched(groups: tuple[SharedGroup, ...], replicas: int, holders: int, replica: int | None, padded: bool) -> int:
    """Return the elements of all parameters that the partitions of a rank overlap.

    ``holders``: ranks that share the same experts; ``replica``: see ``rank_model_states``; ``padded``: count padding
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
