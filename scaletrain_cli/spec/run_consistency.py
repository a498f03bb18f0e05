"""Contradictions between the sections of a run spec."""

from collections.abc import Iterator

from scaletrain_cli.spec.cluster import LEAST_IDLE_SECONDS
from scaletrain_cli.spec.corpus_files import EMBEDDED, EMBEDDED_SOURCES, IMAGE_FORMATS, PYTHON_STDLIB, SKLEARN_DIGITS
from scaletrain_cli.spec.data import NO_DATA
from scaletrain_cli.spec.evaluation import cluster_problems
from scaletrain_cli.spec.losses import LOSSES_OF
from scaletrain_cli.spec.model import ModelSpec
from scaletrain_cli.spec.model_consistency import divisors
from scaletrain_cli.spec.notify import notify_inconsistencies
from scaletrain_cli.spec.quantities import MOST_EPOCHS
from scaletrain_cli.spec.run import RunSpec
from scaletrain_cli.spec.sources import format_inconsistencies, stage_order_problems
from scaletrain_cli.spec.vision_model import OBJECTIVES_OF, ClipSpec, LlavaSpec, image_channels

SAMPLES_OF_IDLE = 10  # of the use of the GPUs in cluster.idle_timeout


def run_inconsistencies(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, message) for each contradiction between sections."""
    yield from (
        _transformer_inconsistencies(spec) if isinstance(spec.model, ModelSpec) else _vision_inconsistencies(spec)
    )
    if spec.training.epochs is not None:
        if spec.code.own_program:
            key = "code.command" if spec.code.command else "code.engine"
            yield "training.epochs", f"counts data of the built-in engine. Set training.steps with {key}."
        of_sources = max((source.epochs or 1 for source in spec.data.sources), default=1)
        if spec.training.epochs * of_sources > MOST_EPOCHS:
            yield "training.epochs", f"must not be more than {MOST_EPOCHS:,.0f} with those of data.sources multiplied."
    else:  # of the steps, which are not known before
        yield from _group_inconsistencies(spec)
    if spec.cluster.node_range is not None and spec.training.optimizer.name == "adamw_8bit":
        yield (
            "cluster.nodes",
            "must be one number with optimizer.name: adamw_8bit, whose states cannot be loaded in another layout.",
        )
    if spec.training.early_stopping.patience and not spec.evaluation.every:
        yield "training.early_stopping.patience", "requires a validation loss. Set evaluation.every above 0."
    elif spec.training.early_stopping.patience:
        names = [name for name in _metric_names(spec) if name.startswith("validation_")]
        if spec.training.early_stopping.metric not in names:
            yield "training.early_stopping.metric", f"must be a metric of the validation. Use {' or '.join(names)}."
    if spec.evaluation.tasks:
        yield from _evaluation_inconsistencies(spec)
    if spec.checkpoint.in_memory != "off" and spec.code.own_program:
        key = "code.command" if spec.code.command else "code.engine"
        yield "checkpoint.in_memory", f"needs the built-in engine. Remove it, or {key}."
    if spec.checkpoint.keep_best is not None:
        yield from _keep_best_inconsistencies(spec, spec.checkpoint.keep_best)
    both = sorted(set(spec.secret_env) & spec.env.keys())
    if both:
        yield "secret_env", f"{', '.join(both)} is also in env, where its value is visible; remove it from env."
    idle = spec.cluster.idle_timeout
    if idle is not None and LEAST_IDLE_SECONDS <= idle < SAMPLES_OF_IDLE * spec.telemetry.interval:
        least = SAMPLES_OF_IDLE * spec.telemetry.interval
        yield (
            "cluster.idle_timeout",
            f"must be at least {least:g} s with telemetry.interval = {spec.telemetry.interval:g} s.",
        )
    if spec.cluster.gpu_slice is not None and spec.world_size > 1 and not spec.code.own_program:
        key = "cluster.gpus_per_node" if spec.cluster.gpus_per_node > 1 else "cluster.nodes"
        yield key, f"must be 1: NCCL does not connect parts of GPUs ({spec.cluster.section.gpu_kind}, MIG)."
    yield from notify_inconsistencies(spec.notify, spec.env, own_program=spec.code.own_program)
    yield from spec.cluster.section.run_inconsistencies(env=spec.env, secret_env=spec.secret_env)


def _group_inconsistencies(spec: RunSpec) -> Iterator[tuple[str, str]]:
    for number, group in enumerate(spec.training.trainable):
        for key in ("start_step", "end_step"):
            if (step := getattr(group, key)) is not None and step > spec.total_steps:
                yield (
                    f"training.trainable.{number}.{key}",
                    f"must not exceed the {spec.total_steps} steps of the run.",
                )


def _evaluation_inconsistencies(spec: RunSpec) -> Iterator[tuple[str, str]]:
    if not isinstance(spec.model, ModelSpec):
        yield "evaluation.tasks", "are for language models. Remove them."
    if spec.code.own_program:
        key = "code.command" if spec.code.command else "code.engine"
        yield "evaluation.tasks", f"need checkpoints of the built-in engine. Remove them, or {key}."
    yield from cluster_problems(spec.cluster, spec.evaluation.job)


def _metric_names(spec: RunSpec) -> tuple[str, ...]:
    objective = spec.training.objective
    loss = spec.training.loss.of(objective) if objective in LOSSES_OF else ""
    return spec.evaluation.metric_names(objective, loss, getattr(spec.model, "num_labels", 0))


def _keep_best_inconsistencies(spec: RunSpec, metric: str) -> Iterator[tuple[str, str]]:
    names = _metric_names(spec)
    if not any(metric == name or (name.endswith("/") and metric.startswith(name)) for name in names):
        known = ", ".join(f"{name}..." if name.endswith("/") else name for name in names) or "none"
        yield "checkpoint.keep_best", f"must be a metric of an evaluation. This spec has: {known}."


def _transformer_inconsistencies(spec: RunSpec) -> Iterator[tuple[str, str]]:
    model, layout, schedule = spec.transformer, spec.layout, spec.training.schedule
    if spec.training.tokens is not None:
        ramps = schedule.warmup_steps + (schedule.cooldown_steps if schedule.name == "wsd" else 0)
        if schedule.warmup_steps > spec.total_steps:
            message = f"must not exceed {spec.total_steps} steps, derived from training.tokens."
            yield "training.schedule.warmup_steps", message
        elif ramps > spec.total_steps:
            message = f"must not exceed {spec.total_steps} steps together with warmup_steps."
            yield "training.schedule.cooldown_steps", message
    if spec.training.objective in LOSSES_OF:
        yield "training.objective", f"must be causal_lm, sft or dpo with family: {model.family}."
        return
    if SKLEARN_DIGITS in (path for _, path in spec.data.paths()):
        yield "data.source", f"is a source of images. Use {PYTHON_STDLIB} or files with text."
    if spec.training.samples is not None:
        yield "training.samples", "counts images. Set training.steps or training.tokens for a language model."
    yield from spec.data.objective_inconsistencies(spec.training.objective)
    yield from _mixture_inconsistencies(spec)
    if spec.training.objective == "dpo":
        for key in ("hidden_dropout", "attention_dropout"):
            if getattr(model, key):
                yield f"model.{key}", "must be 0 with training.objective: dpo, whose reference has no dropout."
    if spec.planner.autocast:
        yield "planner.autocast", "must be false for a language model, which is planned with 16-bit weights."
    if model.block_types and (spec.training.trainable or spec.training.optimizer.layer_decay != 1):
        key = "trainable" if spec.training.trainable else "optimizer.layer_decay"
        yield f"training.{key}", "must be left out with model.block_types, whose blocks are planned as a whole."
    trains_tokenizer = spec.data.source != NO_DATA and not spec.data.may_be_prepared  # else checked with the files
    if trains_tokenizer and spec.data.tokenizer.kind == "bpe" and spec.data.tokenizer.vocab_size > model.vocab_size:
        yield "data.tokenizer.vocab_size", f"must not exceed model.vocab_size = {model.vocab_size}."
    for key in ("tensor_parallel", "sequence_parallel"):
        degree = getattr(layout, key)
        if degree != "auto" and model.num_attention_heads % degree:
            yield (
                f"layout.{key}",
                f"must divide {model.num_attention_heads} attention heads. Use {divisors(model.num_attention_heads)}.",
            )
    if layout.pipeline_split:
        split, layers = spec.layout.pipeline_split, model.num_hidden_layers
        if spec.layout.pipeline_parallel != len(split):
            yield "layout.pipeline_parallel", f"must be {len(split)}, as many as layout.pipeline_split has stages."
        if sum(split) != layers:
            yield "layout.pipeline_split", f"must add up to num_hidden_layers = {layers}; it has {sum(split)} blocks."
        if spec.layout.virtual_pipeline != 1:
            yield "layout.virtual_pipeline", "must be 1 with layout.pipeline_split."
    elif layout.pipeline_parallel != "auto" and layout.pipeline_parallel > model.num_hidden_layers:
        yield "layout.pipeline_parallel", f"must not exceed {model.num_hidden_layers} layers."
    if layout.expert_parallel not in ("auto", 1) and model.num_experts % int(layout.expert_parallel or 1):
        yield "layout.expert_parallel", f"must divide num_experts = {model.num_experts}."


def _vision_inconsistencies(spec: RunSpec) -> Iterator[tuple[str, str]]:
    family = spec.model.family
    allowed = OBJECTIVES_OF[family]
    if spec.training.objective not in allowed:
        yield "training.objective", f"must be {' or '.join(allowed)} with family: {family}."
    yield from _image_inconsistencies(spec)
    if spec.data.prepare:
        yield "data.prepare", f"must be empty: {family} is not trained on text."
    pairs = isinstance(spec.model, ClipSpec)
    labels = ("label",) if spec.training.objective != "contrastive" else ()
    if spec.data.sources and isinstance(spec.model, LlavaSpec):
        yield "data.sources", "must be empty: rows have one source. Set data.source."
    else:
        yield from _mixture_inconsistencies(spec, "image", *labels, *(("caption",) if pairs else ()))
    for key, path in spec.data_paths():
        if isinstance(spec.model, LlavaSpec) and path in EMBEDDED_SOURCES:
            yield key, f"has no conversations about images. Use files with rows, with family: {family}."
        elif path in EMBEDDED:
            message = f"is a source of text. Use {SKLEARN_DIGITS}, or files with images, with family: {family}."
            yield key, message
    if spec.training.tokens is not None:
        yield "training.tokens", f"counts tokens of text. Set training.samples with family: {family}."
    if spec.training.samples is not None and spec.training.schedule.warmup_steps > spec.total_steps:
        message = f"must not exceed {spec.total_steps} steps, derived from training.samples."
        yield "training.schedule.warmup_steps", message
    if spec.training.precision in ("fp8", "fp4"):
        precision = spec.training.precision
        yield "training.precision", f"must be bf16, fp16, tf32 or fp32: {family} has no layers in {precision}."
    if spec.training.weight_dtype != "auto":
        yield "training.weight_dtype", f"must be auto with family: {family}."
    if spec.layout.pipeline_split:
        yield "layout.pipeline_split", f"must be [] with family: {family}."
    if spec.training.cross_entropy != "auto":
        why = "" if isinstance(spec.model, LlavaSpec) else ", which has no logits of tokens"
        yield "training.cross_entropy", f"must be auto with family: {family}{why}."
    axes = ("tensor", "pipeline", "sequence", "context", "expert")
    for key in (*(f"{axis}_parallel" for axis in axes), "virtual_pipeline"):
        if getattr(spec.layout, key) not in ("auto", 1):
            yield f"layout.{key}", f"must be 1 or auto: {family} is planned with data parallelism and ZeRO only."
    if spec.layout.offload not in ("auto", "none"):
        yield "layout.offload", f"must be none or auto: {family} is planned with all states on the device."
    if spec.layout.activation_offload:
        yield "layout.activation_offload", f"must be false: {family} is planned with activations on the device."
    if spec.layout.activation_checkpointing == "selective":
        yield "layout.activation_checkpointing", f"must be none, full or auto with family: {family}."


def _mixture_inconsistencies(spec: RunSpec, *parts: str) -> Iterator[tuple[str, str]]:
    """``parts``: of a sample of images that the run reads; none for text."""
    problems = [*format_inconsistencies(spec.data.sources, parts)]
    if spec.training.epochs is None:
        problems += stage_order_problems(spec.data.stages, spec.total_steps)
    yield from ((f"data.{key}", message) for key, message in problems)


def _image_inconsistencies(spec: RunSpec) -> Iterator[tuple[str, str]]:
    model, training, images = spec.model, spec.training, spec.data.images
    assert not isinstance(model, ModelSpec)
    channels, size = image_channels(model), training.micro_batch_size
    yield from ((f"data.images.{key}", message) for key, message in images.problems_with(channels))
    if isinstance(model, LlavaSpec):
        yield from spec.data.conversation_inconsistencies()
        if spec.data.loss_on == "all" and spec.evaluation.sample_answers:
            yield "evaluation.sample_answers", "must be 0 with data.loss_on: all, which has no answers."
        return
    if spec.data.format not in ("auto", *IMAGE_FORMATS):
        yield "data.format", f"must be auto, {', '.join(IMAGE_FORMATS)} with family: {model.family}."
    mixes = images.augment.mixes
    if mixes and training.objective != "classification":
        yield "data.images.augment", "mixes classes. Set mixup and cutmix to 0, or objective: classification."
    if mixes and size != "auto" and size % 2:
        yield "training.micro_batch_size", "must be even with mixup or cutmix, which mix pairs of images."
    if mixes and training.global_batch_size % 2:
        yield "training.global_batch_size", "must be even with mixup or cutmix, which mix pairs of images."
    if training.objective == "contrastive":
        name, pairs = training.loss.of("contrastive"), isinstance(model, ClipSpec)
        allowed = ("auto", "info_nce", "sigmoid") if pairs else ("nt_xent",)
        if training.loss.name not in allowed:
            yield "training.loss.name", f"must be {' or '.join(allowed)} with family: {model.family}."
        elif name == "nt_xent" and spec.evaluation.every:
            yield "evaluation.every", "must be 0 with training.loss: nt_xent: images have one view in evaluation."
        if pairs and name == "sigmoid" and getattr(model, "logit_bias_init_value", None) is None:
            yield "model.logit_bias_init_value", "is required with training.loss: sigmoid. SigLIP has -10."
    weights = training.loss.pos_weight
    labels = getattr(model, "num_labels", 0)
    if isinstance(weights, tuple) and len(weights) != labels:
        yield "training.loss.pos_weight", f"must have {labels} numbers, one for each label, or be one number."
