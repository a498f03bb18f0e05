"""Compose a model with its parallelism: pipeline stage, tensor, experts, sequence, weights, compile, DeepSpeed.

The steps depend on each other; this is the only order that works.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from scaletrain_cli.engine.checkpoint.flat_shards import ShardedState
from scaletrain_cli.engine.deepspeed_engine import (
    ModelParallelUnit,
    deepspeed_config,
    forward_dtype,
    load_async_io,
    prepare_deepspeed,
    start_deepspeed,
)
from scaletrain_cli.engine.eager import prepare_compiler
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.adapters import AdapterInitialization
from scaletrain_cli.engine.model.attention import assign_dropout_keys
from scaletrain_cli.engine.model.base import CausalLM, TrainedModel, VisionModel
from scaletrain_cli.engine.model.linear import use_fp8_linears
from scaletrain_cli.engine.model.loss import choose_cross_entropy
from scaletrain_cli.engine.model.materialization import (
    BaseWeights,
    WeightsOfParts,
    WeightSource,
    materialize,
    named_weights,
    zero3_partition,
)
from scaletrain_cli.engine.model.peft_files import PeftFolder
from scaletrain_cli.engine.model.quantization import quantize_when_loaded
from scaletrain_cli.engine.model.safetensors import HuggingFaceFolder
from scaletrain_cli.engine.model.vision.batch_norm import synchronize
from scaletrain_cli.engine.objectives import build_objective
from scaletrain_cli.engine.objectives.base import Objective
from scaletrain_cli.engine.optim.deepspeed_optimizer import (
    allow_fp16_on_cpu,
    average_over_copies,
    fix_loss_scale,
    master_weights,
)
from scaletrain_cli.engine.optim.muon import Muon, connect_muon
from scaletrain_cli.engine.optim.optimizers import build_optimizer, freeze, keep_within_limits, parameter_groups
from scaletrain_cli.engine.parallel.expert import (
    count_replicated_experts_once,
    mark_experts_for_deepspeed,
    shard_experts,
    with_expert_groups,
)
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.engine.parallel.pipeline import (
    PipelineStage,
    keep_stage,
    missing_groups,
    pipeline_module,
    trains_before,
)
from scaletrain_cli.engine.parallel.sequence import place_dropout, shard_attention_over_sequence
from scaletrain_cli.engine.parallel.tensor import attach_adapters, shard_over_tensor_ranks
from scaletrain_cli.plan.adapters import quantized_weights, trains_in_fp32
from scaletrain_cli.plan.parameters import modules_with_adapter
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.trained_parameters import Stage, base_names
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.training import LayoutSpec
from scaletrain_cli.spec.weight_files import is_drawn

Forward = Callable[..., Any]


def wrap_blocks(
    model: TrainedModel, layout: LayoutSpec, mode: str, *, compiled: bool = False, pin_memory: bool = False
) -> None:
    """Replace the forward passes of the blocks of this rank, or of their attention.

    ``mode``: none, selective or full activation checkpointing. ``pin_memory``: for offloaded activations. Whole blocks
    are recomputed around the compiled graph, because a checkpoint within the graph sends MoE layers back to eager
    execution. Head and embedding, which may share a weight that ZeRO-3 shards, are not compiled.
    """
    attention_only = mode == "selective" and layout.selective_scope == "attention"
    every = {"none": 0, "selective": layout.selective_every, "full": 1}[mode]
    block: Any
    for index, block in enumerate(model.blocks.values()):
        if attention_only:
            block.attention.forward = _recomputed(block.attention.forward)
        if compiled:
            block.forward = torch.compile(block.forward)
        if every and not attention_only and index % every == 0:
            block.forward = _recomputed(block.forward)
        if layout.activation_offload:
            block.forward = _on_host(block, pin_memory)


def _recomputed(forward: Forward) -> Forward:
    """Return a recomputed forward pass; non-reentrant, because ZeRO-3's hooks break DeepSpeed's own variant.

    Random states are not kept, because dropout is keyed and draws from no generator. A closure, because dynamo skips a
    partial.
    """

    @functools.wraps(forward)
    def wrapped(*arguments: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False)

    return wrapped


def _on_host(block: nn.Module, pin_memory: bool) -> Forward:
    """Return a forward pass whose saved activations are kept on the host; weights are not, they stay on the device."""
    forward, weights = block.forward, list(block.parameters())
    away = save_on_cpu(pin_memory=pin_memory)

    def pack(tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):
            return tensor
        address = tensor.untyped_storage().data_ptr()  # a view of a weight has its address
        return tensor if any(w.untyped_storage().data_ptr() == address for w in weights) else away.pack_hook(tensor)

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else away.unpack_hook(packed)

    @functools.wraps(forward)
    def wrapped(*arguments: Any) -> Any:
        with saved_tensors_hooks(pack, unpack):
            return forward(*arguments)

    return wrapped


@dataclass
class Composed:
    """This rank's part of the model, the objective, DeepSpeed's engine around both, and the optimizer inside that.

    All are replaced where other parameters begin to train (``stages.StageSwitch``), so that nothing keeps them.
    """

    model: TrainedModel
    objective: Objective
    engine: Any
    optimizer: torch.optim.Optimizer
    stage: PipelineStage | None  # None without a pipeline
    averages_statistics: bool = False  # those of BatchNorm, which differ from rank to rank


def compose(
    spec: RunSpec,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    *,
    swap_folder: Path = Path(),
    resuming: bool = False,
    trained: Stage | None = None,
    source: WeightSource | None = None,
) -> Composed:
    """Build this rank's part of the model and start DeepSpeed around it. Collective.

    ``swap_folder``: on a local disk of the node, for NVMe offload. ``resuming``: a checkpoint replaces the weights, so
    that of the files in ``model.weights`` only those are read that no checkpoint has. ``trained``: the parameters that
    train; None for all. ``source``: of the weights, instead of those of the spec.
    """
    prepare_compiler(layout.compile)
    prepare_deepspeed(device)
    if spec.training.precision == "fp16" and device.type == "cpu":
        allow_fp16_on_cpu()
    if layout.offload != "none" and spec.layout.offload_device == "nvme":
        load_async_io()
    model = _sharded_model(spec, layout, mesh, device)
    unit = ModelParallelUnit.of(mesh)
    dtype, partition = forward_dtype(spec.training.precision), None
    if isinstance(model, CausalLM):
        if spec.transformer.quantization != "none":
            weights = quantized_weights(spec.transformer).keys()
            partition = quantize_when_loaded(model, weights, spec.transformer.quantization)
        own = spec.transformer
        if own.adapter is not None:  # after everything that replaces layers or their forward passes
            in_fp32 = torch.float32 if trains_in_fp32(spec) else None
            attach_adapters(model, own.adapter, modules_with_adapter(own), mesh, spec.training.seed, in_fp32)
    if trained is not None:
        freeze(model, trained)
    config = deepspeed_config(spec, layout, model, swap_folder)
    if layout.zero_stage == 3:
        partition = zero3_partition(config, unit)
    materialize(model, source or _weights(spec, model, device, resuming), device, dtype, partition)
    if layout.compile and spec.training.compile == "auto":  # what cannot be compiled runs eagerly, with a warning
        torch._dynamo.config.suppress_errors = True
    wrap_blocks(
        model, spec.layout, layout.activation_checkpointing, compiled=layout.compile, pin_memory=device.type == "cuda"
    )
    objective = build_objective(spec, mesh)
    groups = with_expert_groups(parameter_groups(model, spec.training.optimizer, trained))
    stage = None
    if layout.pipeline_parallel > 1:
        assert isinstance(model, CausalLM)
        needed, anchors = True, 0
        if trained is not None:
            needed = trains_before(spec.transformer, mesh.pipeline, trained.since, layout.pipeline_split)
            anchors = missing_groups(len(groups), mesh.pipeline, device)
        stage = PipelineStage(model, mesh.pipeline, objective, trains_before=needed, anchors=anchors)
        groups += [{"params": [anchor], "weight_decay": 0.0} for anchor in stage.anchors]
    module = model if stage is None else pipeline_module(stage, mesh)
    mark_experts_for_deepspeed(model, mesh)
    optimizer = build_optimizer(spec, groups, layout, device)
    keep_within_limits(optimizer)
    engine = start_deepspeed(config, module, optimizer, unit)
    if isinstance(optimizer, Muon):
        shards = ShardedState(engine, model, mesh).shards
        connect_muon(optimizer, shards, master_weights(engine), model, spec, layout, mesh, device)
    fix_loss_scale(engine)
    average_over_copies(engine, mesh.copies)
    count_replicated_experts_once(engine, mesh)
    synchronized = spec.training.synchronizes_batch_norm(layout.micro_batch_size, mesh.data.size)
    averages = isinstance(model, VisionModel) and not synchronized
    return Composed(model, objective, engine, optimizer, stage, averages)


def _sharded_model(spec: RunSpec, layout: Layout, mesh: Mesh, device: torch.device) -> TrainedModel:
    """Return this rank's part of the model on the meta device."""
    if isinstance(spec.model, ModelSpec):
        causal = outline(spec.transformer)
        keep_stage(causal, mesh.pipeline, layout.pipeline_split)
        assign_dropout_keys(causal, spec.training.seed)
        place_dropout(causal, mesh)
        shard_over_tensor_ranks(causal, mesh.tensor)
        shard_experts(causal, mesh)
        shard_attention_over_sequence(causal, mesh)
        if causal.lm_head is not None:
            choose_cross_entropy(causal.lm_head, layout.cross_entropy, spec.training.label_smoothing, device)
        if spec.training.precision == "fp8":
            use_fp8_linears(causal, device)
        return causal
    model = outline(spec.model)
    assign_dropout_keys(model, spec.training.seed)
    if model.language is not None:
        choose_cross_entropy(model.language.lm_head, layout.cross_entropy, spec.training.label_smoothing, device)
    if spec.training.synchronizes_batch_norm(layout.micro_batch_size, mesh.data.size):
        synchronize(model, mesh.data)
    return model


# The part of a LLaVA whose first weights are in files of their own.
_MODULES = {"model.vision_weights": "vision_tower", "model.text_weights": "language_model"}


def _weights(spec: RunSpec, model: TrainedModel, device: torch.device, resuming: bool) -> WeightSource:
    weights = drawn = model.first_weights(spec.training.seed, device)
    folder = None if spec.weights is None else expand_home(spec.weights)
    if folder is not None and not resuming:
        weights = HuggingFaceFolder(folder, outline(spec.model))
        whole = named_weights(model)
        loaded = frozenset(name for name in whole if not is_drawn(spec.model, name))
        if len(loaded) < len(whole):
            weights = BaseWeights(loaded, weights, drawn)
    elif folder is not None and (
        base := frozenset(name for name in base_names(spec) if not is_drawn(spec.model, name))
    ):
        weights = BaseWeights(base, HuggingFaceFolder(folder, outline(spec.model)), drawn)
    elif folder is None and not resuming and spec.initial_weights:
        whole_model = outline(spec.model)
        parts = {_MODULES[part.key]: part for part in spec.initial_weights}
        weights = WeightsOfParts(
            {
                module: HuggingFaceFolder(expand_home(part.path), whole_model.get_submodule(module), part)
                for module, part in parts.items()
            },
            drawn,
        )
    adapter = spec.model.adapter if isinstance(spec.model, ModelSpec) else None
    if adapter is None:
        return weights
    modules = modules_with_adapter(spec.transformer)
    before = None if resuming or adapter.weights is None else expand_home(adapter.weights)
    return AdapterInitialization(
        weights,
        spec.training.seed,
        device,
        {module.name: module for module in modules},
        forward_dtype(spec.training.precision),
        None if before is None else PeftFolder(before, adapter, modules),
    )
