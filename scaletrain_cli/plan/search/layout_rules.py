"""Which degrees a spec, its model and its cluster allow, each rule with what would do. Knows no sizes or times."""

from __future__ import annotations

from collections.abc import Iterator

from scaletrain_cli.errors import Problem
from scaletrain_cli.plan.search.layouts import Axes, offload_stage
from scaletrain_cli.plan.search.rejections import Rule, divisors, near
from scaletrain_cli.plan.stages import loss_stage
from scaletrain_cli.spec import ModelSpec, RunSpec

# Of the degrees that would do, so many are named.
_MOST_NAMED = 8


def division_problems(spec: RunSpec, axes: Axes) -> list[Problem]:
    """Everything that does not divide, with what would."""
    return [
        Problem(spec.where(rule.key), rule.key, rule.message, str(rule.given), rule.hint or None)
        for rule in broken_rules(spec, axes)
    ]


def broken_rules(spec: RunSpec, axes: Axes) -> Iterator[Rule]:
    """What forbids these degrees, one rule after another."""
    if axes.data * axes.model_parallel != spec.world_size:
        yield _wrong_product(spec, axes)
    if isinstance(spec.model, ModelSpec):
        yield from _transformer_rules(spec.model, axes)
        if spec.planner.framework == "nanotron":
            yield from _nanotron_rules(spec, axes)
    yield from _sharding_rules(spec, axes)
    yield from _batch_rules(spec, axes)


def _wrong_product(spec: RunSpec, axes: Axes) -> Rule:
    world = spec.world_size
    parts = f"data {axes.data} x tensor {axes.tensor} x pipeline {axes.pipeline} x sequence {axes.sequence}"
    total = f"{parts} x context {axes.context} = {axes.data * axes.model_parallel} ranks"
    cluster = f"{spec.cluster.nodes} x {spec.cluster.gpus_per_node} = {world}"
    hint = f"Change the degrees so that their product divides {world}."
    if world % axes.model_parallel == 0:
        hint = f"Use {world // axes.model_parallel}, or auto."
    return Rule("layout.data_parallel", spec.layout.data_parallel, f"{total}, but the cluster has {cluster}.", hint)


def _transformer_rules(model: ModelSpec, axes: Axes) -> Iterator[Rule]:
    kv_heads, heads = model.num_key_value_heads, model.num_attention_heads
    if kv_heads % axes.tensor and axes.tensor % kv_heads:
        message = f"must divide {kv_heads} key-value heads or be a multiple of them."
        yield Rule("layout.tensor_parallel", axes.tensor, message, near(heads, axes.tensor))
    if heads % axes.tensor:
        message = f"must divide {heads} attention heads."
        yield Rule("layout.tensor_parallel", axes.tensor, message, near(heads, axes.tensor))
    inner = (model.moe_intermediate_size if model.num_experts else 0) or model.intermediate_size
    if inner % axes.tensor:
        message = f"must divide intermediate_size = {inner}."
        yield Rule("layout.tensor_parallel", axes.tensor, message, near(inner, axes.tensor))
    local_heads = max(1, heads // axes.tensor)
    if local_heads % axes.sequence:
        message = f"must divide the {local_heads} attention heads of a tensor rank."
        yield Rule("layout.sequence_parallel", axes.sequence, message, near(local_heads, axes.sequence))
    if model.seq_len % (axes.sequence * axes.context):
        message = f"must be a multiple of sequence x context parallel = {axes.sequence * axes.context}."
        yield Rule("model.seq_len", model.seq_len, message)
    layers = model.num_hidden_layers
    if axes.pipeline > layers:
        yield Rule("layout.pipeline_parallel", axes.pipeline, f"must not exceed {layers} layers.", f"Use {layers}.")
    if axes.virtual > 1 and (axes.pipeline == 1 or layers % (axes.pipeline * axes.virtual)):
        message = f"needs pipeline_parallel > 1 and {layers} layers that divide by pipeline x virtual."
        legal = [n for n in divisors(layers // axes.pipeline) if n > 1] if layers % axes.pipeline == 0 else []
        named = ["1", *map(str, legal[:_MOST_NAMED] if axes.pipeline > 1 else [])]
        hint = f"Use {', '.join(named[:-1])} or {named[-1]}." if len(named) > 1 else "Use 1."
        yield Rule("layout.virtual_pipeline", axes.virtual, message, hint)
    if axes.expert > 1 and not model.num_experts:
        yield Rule("layout.expert_parallel", axes.expert, "needs a model with experts.", "Use 1 or auto.")
    elif model.num_experts and model.num_experts % axes.expert:
        message = f"must divide {model.num_experts} experts."
        yield Rule("layout.expert_parallel", axes.expert, message, near(model.num_experts, axes.expert))
    elif axes.data * axes.sequence % axes.expert:
        ranks = axes.data * axes.sequence
        message = f"must divide data x sequence parallel = {ranks}."
        yield Rule("layout.expert_parallel", axes.expert, message, near(ranks, axes.expert))


def _nanotron_rules(spec: RunSpec, axes: Axes) -> Iterator[Rule]:
    """What its pipeline asserts (pipeline_parallel/engine.py, 1F1B), and stages that it would leave empty."""
    stages = axes.pipeline
    if 1 < stages <= spec.transformer.num_hidden_layers and loss_stage(spec.transformer, stages) < stages - 1:
        message = "leaves the last stages empty, spread by cost with the head's."
        yield Rule("layout.pipeline_parallel", stages, message, "Use fewer.")
    micro_batch = spec.training.micro_batch_size
    least = 1 if micro_batch == "auto" else micro_batch
    if stages > 1 and spec.training.global_batch_size // (axes.data * least) < stages - 1:
        message = f"needs at least {stages - 1} micro-batches a step."
        yield Rule("layout.pipeline_parallel", stages, message, "Use fewer, or a smaller micro-batch.")


def _sharding_rules(spec: RunSpec, axes: Axes) -> Iterator[Rule]:
    stage, offload = spec.layout.zero_stage, spec.layout.offload
    own = spec.planner.framework == "deepspeed"
    if own and axes.pipeline > 1 and (stage in (2, 3) or offload_stage(spec, offload) == 3):
        yield Rule("layout.zero_stage", stage, "DeepSpeed refuses it with pipeline parallelism.", "Use 1 or auto.")
    needed = offload_stage(spec, offload) if offload != "auto" else 0
    if stage != "auto" and stage < needed:
        message = f"layout.offload = {offload} needs ZeRO-{needed} or higher."
        yield Rule("layout.zero_stage", stage, message, f"Use {needed} or auto.")


def _batch_rules(spec: RunSpec, axes: Axes) -> Iterator[Rule]:
    batch, micro_batch = spec.training.global_batch_size, spec.training.micro_batch_size
    per_rank = batch // axes.data
    if batch % axes.data:
        up = (per_rank + 1) * axes.data
        hint = f"Use {per_rank * axes.data} or {up}." if per_rank else f"Use {up}."
        message = f"must be a multiple of {axes.data} data-parallel ranks."
        yield Rule("training.global_batch_size", batch, message, hint)
    elif micro_batch != "auto" and per_rank % micro_batch:
        message = f"must divide the {per_rank} sequences per data-parallel rank ({batch} / {axes.data})."
        yield Rule("training.micro_batch_size", micro_batch, message, near(per_rank, micro_batch))
