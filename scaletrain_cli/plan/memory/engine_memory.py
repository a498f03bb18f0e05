"""Bytes of a pipeline stage as this project's engine runs it, on DeepSpeed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from scaletrain_cli.plan.block_graph import backward_products
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.memory.activations import (
    LOSS_CHUNK_TOKENS,
    Recomputation,
    TokenActivations,
    attends_by_document,
    block_backward_bytes,
    fuses_attention,
    has_documents,
    loss_bytes,
    padded_head_bytes,
    repeats_keys,
    stage_activation_bytes,
    token_activations,
)
from scaletrain_cli.plan.memory.block_activations import BlockKernels, materializes_scores
from scaletrain_cli.plan.memory.buffers import (
    BufferBytes,
    cast_gradient_bytes,
    communication_buffer_bytes,
    flat_reduction_bytes,
    pipeline_buffers,
    second_gradient_bytes,
    step_temporary_bytes,
    zero_buffers,
)
from scaletrain_cli.plan.memory.engine_states import engine_states, offload_step_bytes, trained_bytes
from scaletrain_cli.plan.memory.gathered_weights import GatheredWeights, gathered_weights
from scaletrain_cli.plan.memory.parameter_groups import stage_tensors
from scaletrain_cli.plan.memory.peak import PhaseMemory, cached_bytes, outside_allocator_bytes, peak_memory
from scaletrain_cli.plan.memory.states import ModelStates, saved_weight_bytes, uses_bf16_optimizer, weight_bytes
from scaletrain_cli.plan.muon import muon_temporary_bytes
from scaletrain_cli.plan.result import Layout, StageMemory
from scaletrain_cli.plan.stages import (
    MOST_BLOCKS,
    Stage,
    chunks_in_flight,
    engine_stages,
    local_tokens,
    rank_architecture,
    rows_per_sample,
    stage_shard,
    stages_in,
    zero_shards,
)
from scaletrain_cli.plan.trained_parameters import has_muon
from scaletrain_cli.plan.trained_stages import BlockRun, TrainedStage, stage_of_step, trained_stages
from scaletrain_cli.spec import RunSpec

# Fragmentation, because the caching allocator rounds and splits blocks: a twentieth of what is allocated and freed in a
# step. An assumption, not measured. States are allocated once and do not fragment.
_FRAGMENTATION_DIVISOR = 20
_FP32 = 4  # bytes


@dataclass(frozen=True)
class Program:
    """Settings of a training program that decide its memory under DeepSpeed; the defaults are those of our engine."""

    bucket_elements: int | None = None  # reduce_bucket_size; None: ``zero_buffers``
    loss_entry_bytes: int | None = None  # of a whole loss per token and vocabulary entry; None: ``loss_bytes``
    # Whether BF16_Optimizer keeps the 16-bit gradients beside the fp32 ones (bf16.immediate_grad_update is off).
    keeps_16_bit_gradients: bool = False
    foreach: bool = False  # whether AdamW is torch's foreach instead of a fused one
    fused_norms: bool = True  # whether RMSNorm saves no fp32 values, as Megatron-LM's
    keeps_activated: bool = False  # whether a gated MLP saves its activated gate, as modules of transformers do
    # Whether DeepSpeed allocates its gradient buckets before the loss runs backward, as earlier versions did.
    buckets_before_loss: bool = False
    stage_3_buckets: int = 1
    forward_entry_bytes: int = 0  # of a loss per token and entry in the forward pass, when no bucket exists
    live_elements: int | None = None  # that stage 3 holds gathered all the time; None: those that a replay finds
    # Whether linear layers keep their gathered weights until they run backward: memory_efficient_linear is off, so
    # autograd saves a view of each weight, whose memory DeepSpeed's release of the parameter does not free.
    keeps_gathered: bool = False


ENGINE_PROGRAM = Program()


class ActivationPhases(NamedTuple):
    """Bytes of one micro-batch: saved by all blocks, those that exist only while one runs backward, and the loss."""

    saved: int
    backward: int
    loss: int


class _StateBytes(NamedTuple):
    """Bytes of a pipeline stage that depend neither on the micro-batch nor on recomputation."""

    states: ModelStates
    host: int  # states in the node's memory
    buffers: BufferBytes
    second: int  # gradients of one micro-batch, before they are added to those of others
    step: int  # temporary memory of the optimizer's update
    cast: int  # the part of ``step`` in one tensor: gradients, cast to fp32 or to be reduced
    initial: int  # gradients with which the optimizer is initialized
    kept_weights: int  # elements of the weights that ``Program.keeps_gathered`` keeps, 0 for programs that do not
    dequantized: int  # elements of the largest quantized matrix
    copies_from: int  # how many blocks have not run backward yet when the first full bucket is copied


def saved_activation_bytes(spec: RunSpec, layout: Layout, device: Accelerator, stage: int, step: int = 1) -> int:
    """Return the bytes that the blocks of a stage keep on the device for one micro-batch's backward pass of a step."""
    return 0 if spec.layout.activation_offload else kept_activation_bytes(spec, layout, device, stage, step)


def kept_activation_bytes(spec: RunSpec, layout: Layout, device: Accelerator, stage: int, step: int = 1) -> int:
    """Return the same bytes on whichever side they are kept: with activation offload in host memory."""
    held = next(candidate for candidate in stages_in(spec, layout) if candidate.position == stage)
    model, trained = spec.transformer, stage_of_step(spec, step)
    saved = _Activations(spec, layout, device).saved(held, trained, 1)
    runs = trained.blocks_of(model, held)
    if not any(backward_products(model, run.training, run.experts).attention for run in runs):
        return saved
    tables = _table_bytes(spec, layout, _saving_blocks(spec, layout, held))
    return saved + tables + _saved_mask_bytes(spec, layout, device, held)


def activation_phases(spec: RunSpec, layout: Layout, device: Accelerator, trained: TrainedStage) -> ActivationPhases:
    """Return the activations of a model without a pipeline while the run trains what ``trained`` states."""
    whole, activations = engine_stages(spec.transformer, 1)[0], _Activations(spec, layout, device)
    saved = activations.saved(whole, trained, 1) + _shared_bytes(spec, layout, device)
    element, tokens = weight_bytes(spec.training.precision), local_tokens(spec, layout)
    loss = loss_bytes(spec.transformer, element, tokens, 1, layout.cross_entropy, trains_head=trained.head)
    if not device.is_cpu:
        loss += padded_head_bytes(spec.transformer, element, 1, layout.cross_entropy)
    return ActivationPhases(saved, activations.backward(whole, trained, copied=False), loss)


def recomputation(spec: RunSpec, layout: Layout) -> Recomputation:
    """Return what the engine's backward pass recomputes under this layout."""
    return Recomputation(layout.activation_checkpointing, spec.layout.selective_scope, spec.layout.selective_every)


class _Activations:
    """The activations of the blocks of one layout."""

    def __init__(self, spec: RunSpec, layout: Layout, device: Accelerator, program: Program = ENGINE_PROGRAM) -> None:
        self._model, adapter = spec.transformer, spec.transformer.adapter
        self._recompute, self._tokens = recomputation(spec, layout), local_tokens(spec, layout)
        self._kernels = BlockKernels(
            weight_bytes(spec.training.precision),
            layout.tensor_parallel,
            layout.sequence_parallel,
            layout.context_parallel,
            fuses_attention(spec, device),
            compiled=spec.training.compile is True,  # auto falls back to eager blocks, which must fit too
            keeps_inputs=layout.zero_stage == 3,
            adapter_dropout=adapter is not None and adapter.dropout > 0,
            adapter_element=trained_bytes(spec)[0] if adapter is not None else 0,
            dora=adapter is not None and adapter.dora,
            repeats=repeats_keys(spec, device),
            fused_norms=program.fused_norms,
            keeps_activated=program.keeps_activated,
        )

    def per_token(self, run: BlockRun) -> TokenActivations:
        """Return the activations per token of one block of a run."""
        return token_activations(self._model, self._kernels, experts=run.experts, training=run.training)

    def saved(self, stage: Stage, trained: TrainedStage, micro_batches: int) -> int:
        """Return the bytes that the blocks of a stage keep for the backward passes of the micro-batches in flight."""
        return sum(
            stage_activation_bytes(self.per_token(run), self._tokens, run.blocks, self._recompute, micro_batches, first)
            for run in trained.blocks_of(self._model, stage)
            for first in [run.start - stage.start]
        )

    def backward(self, stage: Stage, trained: TrainedStage, *, copied: bool) -> int:
        """Return the bytes that exist only while a block runs backward, of the block that needs most.

        ``copied``: activations are copied back from the host when the block runs backward, or recomputed.
        """
        most = 0
        for run in trained.blocks_of(self._model, stage):
            kind = self.per_token(run)
            bytes_ = block_backward_bytes(kind, self._tokens, stage.blocks, self._recompute)
            most = max(most, bytes_, self._tokens * (kind.working + kind.saved) if copied else 0)
        return most


def engine_stage_memory(
    spec: RunSpec, layout: Layout, device: Accelerator, program: Program = ENGINE_PROGRAM
) -> Callable[[Stage], StageMemory]:
    """Return a function from a pipeline stage of this layout to its bytes on one rank.

    If stages of the run train different parameters, the bytes are those of the one with the highest peak.
    """
    sizes = [_size_of_stage(spec, layout, device, trained, program) for trained in trained_stages(spec)]
    if len(sizes) == 1:
        return sizes[0]
    return lambda stage: max((size(stage) for size in sizes), key=lambda memory: memory.peak)


def trained_stage_memory(
    spec: RunSpec, layout: Layout, device: Accelerator, trained: TrainedStage
) -> tuple[StageMemory, ...]:
    """Return the bytes on one rank of each pipeline stage while the run trains what ``trained`` states."""
    return tuple(map(_size_of_stage(spec, layout, device, trained, ENGINE_PROGRAM), stages_in(spec, layout)))


def gathered_on_rank(spec: RunSpec, layout: Layout, elements: int) -> GatheredWeights:
    """Return what stage 3 gathers on a rank with ``elements`` parameters."""
    sizes = zero_buffers(elements, 3, pipeline=False)
    return gathered_weights(
        spec.transformer,
        layout.tensor_parallel,
        layout.expert_parallel,
        recomputation(spec, layout),
        sizes.max_live_parameters,
        sizes.prefetch_bucket_size,
    )


def _state_bytes(
    spec: RunSpec, layout: Layout, device: Accelerator, stage: Stage, trained: TrainedStage, program: Program
) -> _StateBytes:
    training, model = spec.training, spec.transformer
    element, shards, zero = weight_bytes(training.precision), zero_shards(layout), layout.zero_stage
    own, grads = trained_bytes(spec)
    per_rank = rank_architecture(spec, layout)
    shard = stage_shard(per_rank, stage)
    precision, grad_dtype = training.precision, training.grad_dtype
    if own != element:  # adapters in fp32
        precision = grad_dtype = "fp32"
    tensors = stage_tensors(spec, layout, stage, trained)
    groups = [(group.elements, experts) for group, experts, *_ in tensors.trained]  # experts: fewer ranks share them
    count = sum(elements for elements, _ in groups)
    buffers, second, kept_weights = BufferBytes(0, 0, 0), 0, 0
    bf16_optimizer = layout.offload == "none" and uses_bf16_optimizer(precision, grad_dtype, zero)
    if count:  # a stage of a pipeline that trains nothing has no optimizer
        head = -(-model.vocab_size // layout.tensor_parallel) * model.hidden_size
        buffers = communication_buffer_bytes(
            count,
            shard.largest_block,
            zero,
            element if zero == 3 else own,
            grads,
            shards,
            pipeline=layout.pipeline_parallel > 1,
            gathered=0,
            bucket_elements=program.bucket_elements,
            bf16_optimizer=bf16_optimizer,
            before_the_loss=program.buckets_before_loss,
            stage_3_buckets=program.stage_3_buckets,
            head=head if stage.last and trained.head else 0,
        )
        if program.keeps_gathered and zero == 3:
            elements = shard.parameters - (per_rank.embedding if stage.first else 0)
            kept_weights = max(0, elements - (program.live_elements or 0))
        if bf16_optimizer and program.keeps_16_bit_gradients:
            buffers = buffers.plus(element * count)
        if layout.offload == "none":  # an offloaded optimizer has its gradients added up on the host
            accumulation = layout.gradient_accumulation_steps
            second = second_gradient_bytes(count, precision, grad_dtype, zero, shards, accumulation)
    if layout.offload == "none":
        step = step_temporary_bytes(
            count,
            precision,
            grad_dtype,
            zero,
            shards,
            training.optimizer.name,
            foreach=device.is_cpu or program.foreach,
            casts=training.optimizer.master_weights,
            reduced=max(
                flat_reduction_bytes([elements for elements, experts in groups if experts is kind])
                for kind in (False, True)
            ),
        )
    else:
        step = offload_step_bytes(spec, layout, stage, trained)
    if has_muon(spec):
        step += muon_temporary_bytes(model, training.optimizer.muon, layout, stage.start, stage.blocks)
    if layout.zero_shard_size:  # the gradient of the shards, while it is averaged over their copies
        step = max(step, -(-count // shards) * grads)
    states, host = engine_states(spec, layout, stage, trained=trained)
    states = states._replace(parameters=states.parameters - saved_weight_bytes(spec, layout, stage))
    cast = 0 if layout.offload != "none" else cast_gradient_bytes(count, precision, grad_dtype, zero, shards)
    copies_from = stage.blocks - min(stage.blocks, buffers.full_after // max(1, shard.largest_block))
    # stage_1_and_2.py and stage3.py initialize_optimizer_states: zeros as large as the gradients of an update
    initial = 0 if bf16_optimizer else cast
    return _StateBytes(
        states, host, buffers, second, step, cast, initial, kept_weights, tensors.largest_quantized, copies_from
    )


def _gathered(spec: RunSpec, layout: Layout, stage: Stage, program: Program) -> GatheredWeights:
    if layout.zero_stage < 3:
        return GatheredWeights(0, 0, 0, 0, ((stage.blocks, 0),))
    shard = stage_shard(rank_architecture(spec, layout), stage)
    if program.live_elements is None:
        return gathered_on_rank(spec, layout, shard.parameters)
    live = min(shard.parameters, max(program.live_elements, 2 * shard.largest_block))
    return GatheredWeights(shard.parameters, shard.parameters, live, live, ((stage.blocks, live),))


def _size_of_stage(
    spec: RunSpec, layout: Layout, device: Accelerator, trained: TrainedStage, program: Program
) -> Callable[[Stage], StageMemory]:
    training, model = spec.training, spec.transformer
    element = weight_bytes(training.precision)
    tokens = local_tokens(spec, layout)
    activations = _Activations(spec, layout, device, program)
    loss = loss_bytes(
        model,
        element,
        tokens,
        layout.tensor_parallel,
        layout.cross_entropy,
        trains_head=trained.head,
        entry_bytes=program.loss_entry_bytes,
    )
    if not device.is_cpu and program.loss_entry_bytes is None:
        loss += padded_head_bytes(model, element, layout.tensor_parallel, layout.cross_entropy)
    offloaded = spec.layout.activation_offload
    framework = outside_allocator_bytes(layout, spec.cluster.gpus_per_node, device.is_cpu)
    payload = element * model.hidden_size * tokens  # what stages of a pipeline send each other
    shared = _shared_bytes(spec, layout, device)
    entries, zero = -(-model.vocab_size // layout.tensor_parallel), layout.zero_stage
    forward = program.forward_entry_bytes * tokens * entries
    # Stage 3 has its bucket and the gathered weights already while the gradient of all logits still exists.
    in_chunks = layout.cross_entropy != "whole"
    largest_logits = _FP32 * min(tokens, LOSS_CHUNK_TOKENS if in_chunks else tokens) * entries
    head_logits = 0 if zero < 3 or in_chunks or not trained.head else element * tokens * entries
    known: dict[Stage, tuple[_StateBytes, int]] = {}  # with the bytes of ``_Activations.backward``

    def size(stage: Stage) -> StageMemory:
        """Return the bytes of the stage in its fullest phase: the loss, a backward pass, or the optimizer step."""
        placed = bool(trained.runs) or bool(model.block_types)
        alike = stage._replace(position=0) if placed else stage._replace(position=0, start=0)
        if alike not in known:
            states = _state_bytes(spec, layout, device, stage, trained, program)
            known[alike] = states, activations.backward(stage, trained, copied=offloaded)
        held, backward = known[alike]
        kept_weights = element * held.kept_weights if layout.activation_checkpointing == "none" else 0
        buffers = held.buffers.plus(kept_weights + element * held.dequantized)
        host, gathered = held.host, _gathered(spec, layout, stage, program)
        chunks = chunks_in_flight(layout, stage.position)
        saved = (activations.saved(stage, trained, chunks) + chunks * shared) // layout.virtual_pipeline
        kept = saved - saved // chunks  # after the backward pass of one micro-batch
        if offloaded:
            host, saved, kept = host + saved, 0, 0
        between = pipeline_buffers(layout, stage, payload, chunks)
        # A loss in chunks computes its gradients in the forward pass.
        at_loss, at_head = element * (gathered.loss if in_chunks else gathered.head), element * gathered.head
        phases = [
            PhaseMemory(saved, loss if stage.last else 0, buffers.loss + between.forward, 0, at_loss),
            PhaseMemory(saved, forward if stage.last else 0, buffers.loss if zero == 3 else 0, 0, at_loss),
            PhaseMemory(saved, head_logits, buffers.head + between.forward if stage.last else 0, 0, at_head),
        ]
        running = buffers.backward - buffers.copied + between.backward
        for left, weights in gathered.backward:
            weights *= element
            phases.append(PhaseMemory(saved * left // max(1, stage.blocks) + backward, 0, running, 0, weights))
            # Only gradients of the last micro-batch in flight are reduced and copied.
            with_copy = (saved - kept) * min(left, held.copies_from) // max(1, stage.blocks) + backward
            phases.append(PhaseMemory(with_copy, 0, running, 0, weights, buffers.copied))
        last_copy = 0 if kept else buffers.copied
        phases.append(PhaseMemory(kept + backward, 0, running + held.second, 0, 0, last_copy))
        update = PhaseMemory(0, 0, buffers.step + between.update, held.step)
        worst = max(*phases, update, key=sum)
        # Matrices from 10 MB on have segments of their own (c10/cuda/CUDACachingAllocator.cpp kMinLargeAlloc).
        split = sum(worst) - (kept_weights if worst is not update else 0)
        cached = 0 if device.is_cpu else cached_bytes(phases, update, held.cast, held.initial, largest_logits)
        return peak_memory(held.states, worst, split // _FRAGMENTATION_DIVISOR, framework, host, cached)

    return size


def _shared_bytes(spec: RunSpec, layout: Layout, device: Accelerator) -> int:
    """Return the bytes that all blocks share until the backward pass of a micro-batch has ended."""
    blocks = range(min(spec.transformer.num_hidden_layers, MOST_BLOCKS))
    return kept_mask_bytes(spec, layout, device) + _table_bytes(spec, layout, blocks)


def _saving_blocks(spec: RunSpec, layout: Layout, stage: Stage) -> list[int]:
    """Return the blocks of a stage whose attention is not recomputed, so that it saves what it needs."""
    again = recomputation(spec, layout)
    places = () if again.attention_only else range(min(stage.blocks, MOST_BLOCKS))
    return [stage.start + place for place in places if not again.blocks(1, place)]


def _table_bytes(spec: RunSpec, layout: Layout, blocks: Iterable[int]) -> int:
    """Return the bytes of the rotary tables of one micro-batch that these blocks use.

    A pair of tables in fp32 of this rank's positions, shared by all blocks, and another one for layers with a window
    if those have a base of their own (engine/model/rope.py ``tables_of_layers``). Rows with several documents have
    tables each; other rows share them. Recomputed blocks keep all pairs, because they need them again.
    """
    model, tokens = spec.transformer, local_tokens(spec, layout)
    if model.positions != "rotary":
        return 0
    if not has_documents(spec):
        tokens //= layout.micro_batch_size * rows_per_sample(spec)
    pairs = len({model.rope_local_base_freq is not None and model.slides(block) for block in blocks})
    return pairs * 2 * _FP32 * model.rotary_dim * tokens


def kept_mask_bytes(spec: RunSpec, layout: Layout, device: Accelerator) -> int:
    """Return the bytes of the attention masks of one micro-batch that exist until its backward pass has ended.

    One element of the compute dtype per pair of positions (engine/model/attention.py ``attention_mask``), shared by all
    blocks; each sequence rank has whole masks. Rows with several documents have a mask each, and another one for
    sliding windows; otherwise all rows share that of the windows. Recomputed blocks keep all masks, because they need
    them again; others those that their kernels save. 0 where attention needs no mask (``attends_by_document``).
    """
    model = spec.transformer
    if layout.activation_checkpointing == "none":
        return _saved_mask_bytes(spec, layout, device, engine_stages(model, 1)[0])
    if attends_by_document(spec, device):
        return 0
    return _mask_bytes(spec, layout, has_documents(spec) + (model.windowed_layers > 0))


def _saved_mask_bytes(spec: RunSpec, layout: Layout, device: Accelerator, stage: Stage) -> int:
    """Return the bytes of the masks that attention kernels save; unfused attention saves none (``score_bytes``)."""
    model, blocks = spec.transformer, _saving_blocks(spec, layout, stage)
    if not blocks or materializes_scores(model) or attends_by_document(spec, device):
        return 0
    windowed = sum(map(model.is_local, blocks)) if model.windowed_layers else 0
    return _mask_bytes(spec, layout, (has_documents(spec) and windowed < len(blocks)) + (windowed > 0))


def _mask_bytes(spec: RunSpec, layout: Layout, masks: int) -> int:
    rows = layout.micro_batch_size * rows_per_sample(spec) if has_documents(spec) else 1
    return masks * weight_bytes(spec.training.precision) * rows * spec.transformer.seq_len**2
