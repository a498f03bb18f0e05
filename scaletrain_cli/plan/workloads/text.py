"""Language models: decoder-only transformers, dense or with experts."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, gcd
from typing import Any

from scaletrain_cli.plan import architecture
from scaletrain_cli.plan.axes import CHECKPOINTING, Axes, Rule, divisors, nearest_divisors
from scaletrain_cli.plan.catalogue.hardware import Accelerator, near_ranks
from scaletrain_cli.plan.catalogue.networks import cluster_link
from scaletrain_cli.plan.data_size import pair_count
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.activations import has_documents
from scaletrain_cli.plan.memory.device_memory import has_equal_blocks, plan_memory
from scaletrain_cli.plan.memory.engine_memory import trained_stage_memory
from scaletrain_cli.plan.memory.states import weight_bytes
from scaletrain_cli.plan.result import Layout, Memory, ModelSize, TrainingStage
from scaletrain_cli.plan.speed.communication import data_traffic
from scaletrain_cli.plan.speed.step_time import plan_time, step_seconds, trained_stage_time
from scaletrain_cli.plan.stages import Stage, rank_architecture, sequence_multiple, stage_shard
from scaletrain_cli.plan.trained_parameters import names_what_trains, trains_everything
from scaletrain_cli.plan.trained_stages import stage_flops_per_token, trained_count, trained_stages
from scaletrain_cli.plan.workloads.base import Degrees, FullStage, Workload
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.run import AnyModel

# Fewest tokens of a sequence per context rank: fewer do not fill one row of tiles of a matrix product (NVIDIA, Matrix
# Multiplication Background User's Guide: tiles of 128 x 256), so a higher degree only adds traffic.
_FEWEST_TOKENS = 128
# Most pipeline stages of a published run (Megatron-LM: 64, arXiv:2104.04473; Llama 3: 16).
_MOST_STAGES = 64
# With more layers, no virtual stages are tried.
_MOST_LAYERS = 10_000
# Maximum number of valid degrees that a remedy names.
_MOST_NAMED = 8
# Rows of grouped matrix products must be multiples of this many bytes (torch, ``nn.functional.grouped_mm``).
_ROW_BYTES = 16
# Largest head size of FlashAttention.
_LARGEST_FUSED_HEAD = 256


# Settings that only the engine's llama modules have.
_LLAMA_ONLY = (
    *("attention_bias", "fused_projections", "query_pre_attn_scalar", "attn_logit_softcapping"),
    *("final_logit_softcapping", "sliding_window", "scale_embedding", "norm_position", "zero_centered_norm"),
    *("attention_sinks", "kv_lora_rank"),
)
# Settings of blocks that the planner knows, and the engine does not build.
_PLANNED_ONLY = ("block_types", "mamba", "attention_chunk_size", "index_topk")
_NOT_LATENT = (
    *("qkv_bias", "attention_bias", "fused_projections", "qk_norm", "query_pre_attn_scalar", "attention_sinks"),
    *("attn_logit_softcapping", "sliding_window", "partial_rotary_factor", "zero_centered_norm"),
)


class TextWorkload(Workload):
    """A decoder-only transformer; samples are sequences, and training consumes tokens."""

    counts_tokens = True
    checkpointing = CHECKPOINTING
    offloads = True
    compiles = True
    time = staticmethod(plan_time)
    least_times = staticmethod(step_seconds)
    memory = staticmethod(plan_memory)

    def size(self, model: AnyModel) -> ModelSize:
        model = _text(model)
        return ModelSize(
            parameters=architecture.parameter_count(model),
            active_parameters=architecture.active_parameter_count(model),
            flops_per_token=float(architecture.training_flops_per_token(model)),
        )

    def stored_parameters(self, spec: RunSpec) -> list[tuple[int, int]]:
        """Return the same; of a model that trains as a whole without its parameters by name, which may be a billion."""
        return [(self.parameter_count(spec.model), 0)] if trains_everything(spec) else super().stored_parameters(spec)

    def unmeasured_part(self, model: AnyModel) -> str:
        text = _text(model)
        if text.mamba is not None:
            return "state-space layers"
        if text.index_topk:
            return "sparse attention"
        return "chunked attention" if text.attention_chunk_size else ""

    def training_size(self, spec: RunSpec) -> ModelSize:
        """Return the size, with the parameters of the stage that trains most, and the mean FLOPs over the steps."""
        model, stages = spec.transformer, trained_stages(spec)
        flops = sum(stage.steps * stage_flops_per_token(model, stage) for stage in stages) / spec.total_steps
        trained = max(trained_count(spec, stage) for stage in stages)
        return replace(self.size(model), trainable_parameters=trained, flops_per_token=float(flops))

    def training_stages(self, spec: RunSpec, layout: Layout, device: Accelerator) -> tuple[TrainingStage, ...]:
        stages = trained_stages(spec)
        if len(stages) == 1 or not framework_of(spec).is_engine:
            return ()
        planned = []
        for stage in stages:
            fullest = max(trained_stage_memory(spec, layout, device, stage), key=lambda memory: memory.peak)
            seconds = trained_stage_time(spec, layout, device, stage)[0].step
            trained = trained_count(spec, stage)
            planned.append(TrainingStage(stage.first_step, stage.last_step, trained, fullest.peak, seconds))
        return tuple(planned)

    def fullest_memory(self, spec: RunSpec, layout: Layout, device: Accelerator) -> Memory:
        """Return the memory of the fullest rank, and of the first of equal pipeline stages."""
        return plan_memory(spec, layout, device, every_stage=False)

    def activation_bytes(self, spec: RunSpec, layout: Layout, device: Accelerator) -> int:
        (stage,) = framework_of(spec).pipeline_stages(spec.transformer, 1)
        return framework_of(spec).stage_memory(spec, layout, device)(stage).activations

    def data_seconds(self, spec: RunSpec, layout: Layout, device: Accelerator) -> float:
        """Return the seconds of gathering weights and reducing gradients; a micro-batch takes no less.

        0 if some weights are frozen, or gathered from a second copy.
        """
        if names_what_trains(spec) or layout.zero_secondary_shard_size > 1:
            return 0.0
        framework, link = framework_of(spec), cluster_link(spec.cluster, device)
        parameters, blocks = rank_architecture(spec, layout).parameters, spec.transformer.num_hidden_layers
        traffic = data_traffic(spec, layout, link, framework.profile_on(device), parameters, blocks)
        return traffic.forward + traffic.backward

    def stages_alike(self, spec: RunSpec) -> tuple[int, bool]:
        stages = trained_stages(spec)
        return len(stages), all(stage.is_uniform for stage in stages)

    def blocks_alike(self, spec: RunSpec) -> bool:
        """Return whether all blocks have experts, or none has; of a hybrid model False."""
        model = spec.transformer
        return not model.block_types and model.moe_layers in (0, model.num_hidden_layers)

    def full_stage(self, spec: RunSpec, axes: Axes) -> FullStage | None:
        """Return the first stage with most blocks; of a model with experts, of those without other blocks or ends.

        Blocks with experts have more of a rank's experts than the whole model has on average, and ZeRO shards experts
        over fewer ranks. None if states or activations differ between blocks of a kind.
        """
        model, training = spec.transformer, spec.training
        even = training.optimizer.traits.even_states and training.weight_dtype == "auto"
        if not even or not has_equal_blocks(spec):
            return None
        alike = model.moe_layers or model.num_hidden_layers
        if axes.pipeline == 1:
            return FullStage(Stage(0, alike, 0, True, True), 1.0, alike)
        per_rank = architecture.architecture(model, axes.tensor, axes.expert)
        stages = framework_of(spec).pipeline_stages(model, axes.pipeline, spec.layout.pipeline_split)
        eligible = [
            stage for stage in stages if not stage.last and not (model.num_experts and (stage.first or stage.dense))
        ]
        if not eligible:
            return None
        stage = max(eligible, key=lambda stage: stage.blocks)
        return FullStage(stage, stage_shard(per_rank, stage).parameters / per_rank.parameters, alike)

    def block_bytes(self, spec: RunSpec, layout: Layout, device: Accelerator) -> int:
        """Return the activations of a stage without embedding and head."""
        model = spec.transformer
        blocks = model.moe_layers or model.num_hidden_layers
        dense, start = 0 if model.num_experts else blocks, model.num_hidden_layers - blocks
        stage = Stage(0, blocks, dense, first=False, last=False, start=start)
        return framework_of(spec).stage_memory(spec, layout, device)(stage).activations

    def layers(self, spec: RunSpec) -> int:
        return spec.transformer.num_hidden_layers

    def heads(self, spec: RunSpec) -> int:
        return spec.transformer.num_attention_heads

    def cross_entropy(self, spec: RunSpec, tokens: int, tensor_parallel: int, device_bytes: int) -> str:
        return framework_of(spec).cross_entropy(spec, tokens, tensor_parallel, device_bytes)

    def compiled_by_default(self, spec: RunSpec) -> bool:
        """Return whether the model has no experts, whose varying number of tokens would force recompilation."""
        return not spec.transformer.num_experts

    def degrees(self, spec: RunSpec, axis: str) -> Degrees | None:
        """Return the divisors of layers, experts or ranks, and the largest useful degree."""
        model, world = spec.transformer, spec.world_size
        layers, heads, per_node = model.num_hidden_layers, model.num_attention_heads, near_ranks(spec.cluster)
        if axis == "virtual_pipeline":
            wanted = divisors(layers) if layers <= _MOST_LAYERS else [1]
            return Degrees(wanted, layers, Reason("plan.more-chunks-than-layers", {"key": axis}))
        if axis == "expert_parallel":
            wanted = divisors(model.num_experts) if model.num_experts else [1]
            return Degrees(wanted, max(1, model.num_experts), Reason("plan.more-ranks-than-experts", {"key": axis}))
        largest, reason = {
            "tensor_parallel": (per_node, Reason("plan.leaves-the-node", {"key": axis, "gpus": per_node})),
            "pipeline_parallel": (min(_MOST_STAGES, layers), Reason("plan.too-many-stages", {"key": axis})),
            "sequence_parallel": (heads, Reason("plan.more-ranks-than-heads", {"key": axis, "heads": heads})),
            "context_parallel": (
                max(1, model.seq_len // _FEWEST_TOKENS),
                Reason("plan.too-few-tokens", {"key": axis, "tokens": _FEWEST_TOKENS}),
            ),
        }[axis]
        return Degrees(divisors(world), largest, reason)

    def rules(self, spec: RunSpec, axes: Axes) -> Iterator[Rule]:
        """Yield the broken rules: degrees must divide heads, widths, layers, sequences and experts."""
        model = spec.transformer
        kv_heads, heads = model.num_key_value_heads, model.num_attention_heads
        tensor = "layout.tensor_parallel"
        if kv_heads % axes.tensor and axes.tensor % kv_heads:
            yield Rule(tensor, axes.tensor, "divide-key-value-heads", {"heads": kv_heads}, _near(heads, axes.tensor))
        if heads % axes.tensor:
            yield Rule(tensor, axes.tensor, "divide-heads", {"heads": heads}, _near(heads, axes.tensor))
        inner = (model.moe_intermediate_size if model.num_experts else 0) or model.intermediate_size
        if inner % axes.tensor:
            params = {"name": "intermediate_size", "width": inner}
            yield Rule(tensor, axes.tensor, "divide-width", params, _near(inner, axes.tensor))
        if model.mamba is not None:  # as Megatron-LM (ssm/mamba_mixer.py)
            sharded = {"mamba.num_heads": model.mamba.num_heads}
            sharded |= {} if model.mamba.dt_rank else {"mamba.groups": model.mamba.groups}
            for name, count in sharded.items():
                if count % axes.tensor:
                    params = {"name": name, "width": count}
                    yield Rule(tensor, axes.tensor, "divide-width", params, _near(count, axes.tensor))
        local_heads = max(1, heads // axes.tensor)
        if local_heads % axes.sequence:
            fix = _near(local_heads, axes.sequence)
            yield Rule("layout.sequence_parallel", axes.sequence, "divide-local-heads", {"heads": local_heads}, fix)
        multiple = sequence_multiple(axes.sequence, axes.context)
        if model.seq_len % multiple:
            params = {"ranks": multiple}
            if axes.context == 1:
                yield Rule("model.seq_len", model.seq_len, "multiple-of-sequence-ranks", params)
            else:
                yield Rule("model.seq_len", model.seq_len, "multiple-of-chunks", params)
        yield from self._pipeline_rules(model, axes)
        if axes.expert > 1 and not model.num_experts:
            yield Rule("layout.expert_parallel", axes.expert, "needs-experts")
        elif model.num_experts and model.num_experts % axes.expert:
            fix = _near(model.num_experts, axes.expert)
            yield Rule("layout.expert_parallel", axes.expert, "divide-experts", {"experts": model.num_experts}, fix)
        elif axes.shards % axes.expert:
            fix = _near(axes.shards, axes.expert)
            yield Rule("layout.expert_parallel", axes.expert, "divide-expert-ranks", {"ranks": axes.shards}, fix)

    def _pipeline_rules(self, model: ModelSpec, axes: Axes) -> Iterator[Rule]:
        layers = model.num_hidden_layers
        if axes.pipeline > layers:
            yield Rule("layout.pipeline_parallel", axes.pipeline, "more-stages-than-layers", {"layers": layers})
        if axes.virtual > 1 and (axes.pipeline == 1 or layers % (axes.pipeline * axes.virtual)):
            legal = [n for n in divisors(layers // axes.pipeline) if n > 1] if layers % axes.pipeline == 0 else []
            fix = {"allowed": [1, *(legal[:_MOST_NAMED] if axes.pipeline > 1 else [])]}
            yield Rule("layout.virtual_pipeline", axes.virtual, "virtual-stages-divide-layers", {"layers": layers}, fix)

    def engine_rules(self, spec: RunSpec, tensor: int, context: int = 1) -> Iterator[Rule]:
        """Yield the broken rules of the engine on experts, vocabulary, heads, and attention in a ring."""
        model = spec.transformer
        if context > 1:
            yield from _context_rules(spec, context)
        if model.num_experts:
            yield from self._expert_rules(spec, model, tensor)
        if tensor > 1:
            yield from self._tensor_rules(spec, model, tensor)
        if tensor > 1 and model.quantization != "none":  # bitsandbytes has no shards of its blocks
            yield Rule("layout.tensor_parallel", tensor, "quantization-layout", {"allowed": "1"})

    def _tensor_rules(self, spec: RunSpec, model: ModelSpec, tensor: int) -> Iterator[Rule]:
        """Yield the broken rules of the engine on tensor parallelism above 1."""
        key, kv_heads, vocabulary = "layout.tensor_parallel", model.num_key_value_heads, model.vocab_size
        if kv_heads % tensor:
            fix = _near(gcd(kv_heads, model.num_attention_heads), tensor)
            yield Rule(key, tensor, "engine-divide-key-value-heads", {"heads": kv_heads}, fix)
        if ceil(vocabulary / tensor) * (tensor - 1) >= vocabulary:
            yield Rule(key, tensor, "engine-ranks-without-tokens", {"vocab_size": vocabulary})
        if model.num_experts and model.has_bias and model.hidden_size % tensor:
            own = {"name": "hidden_size", "width": model.hidden_size}
            yield Rule(key, tensor, "divide-width", own, _near(model.hidden_size, tensor))
        for name in ("intermediate_size", "shared_expert_intermediate_size") if model.num_experts else ():
            width = getattr(model, name)
            if width % tensor and (name != "intermediate_size" or model.moe_layers < model.num_hidden_layers):
                yield Rule(key, tensor, "divide-width", {"name": name, "width": width}, _near(width, tensor))
        if spec.layout.expert_tensor_parallel not in ("auto", tensor):
            given = spec.layout.expert_tensor_parallel
            yield Rule("layout.expert_tensor_parallel", given, "engine-expert-tensor-parallel")
        if spec.training.cross_entropy == "liger":
            yield Rule("training.cross_entropy", "liger", "engine-liger-whole-vocabulary", {"tensor_parallel": tensor})

    def _expert_rules(self, spec: RunSpec, model: ModelSpec, tensor: int) -> Iterator[Rule]:
        """Yield the broken rules on the widths of experts: rows must be multiples of _ROW_BYTES."""
        precision = spec.training.precision
        multiple = _ROW_BYTES // weight_bytes(precision)
        params = {"multiple": multiple, "precision": precision}
        if model.hidden_size % multiple:
            fix = {"padded": -(-model.hidden_size // multiple) * multiple}
            yield Rule("model.hidden_size", model.hidden_size, "engine-expert-rows", params, fix)
        if model.expert_size // tensor % multiple:
            key = f"model.{'moe_intermediate_size' if model.moe_intermediate_size else 'intermediate_size'}"
            fix = {"padded": -(-model.expert_size // (multiple * tensor)) * multiple * tensor}
            yield Rule(key, model.expert_size, "engine-expert-columns", {**params, "ranks": tensor}, fix)

    def engine_problems(self, spec: RunSpec) -> Iterator[Rule]:
        """Yield the settings in which the architecture differs from the engine's two model families."""
        model = spec.transformer
        if model.planned_architecture is not None:
            yield Rule("model.planned_architecture", model.planned_architecture, "engine-planned-architecture")
            return
        for key in _PLANNED_ONLY:
            if getattr(model, key) != ModelSpec.model_fields[key].default:
                # numbers as they are, a list or section by its name only
                value = getattr(model, key)
                yield Rule(f"model.{key}", str(value) if isinstance(value, int) else "set", "engine-planned-only")
        planned = {"qk_norm_scope": "unweighted", "hidden_activation": "relu2", "norm_position": "shared"}
        for key, value in planned.items():
            if getattr(model, key) == value:
                yield Rule(f"model.{key}", value, "engine-planned-only")
        family, gpt = {"family": model.family}, model.base_family == "gpt"
        if gpt and model.num_experts:
            yield Rule("model.num_experts", model.num_experts, "engine-family-no-experts", family)
        own = model.model_copy(update=dict.fromkeys(("gated_mlp", "norm", "norm_bias", "bias", "position_embedding")))
        has_biases = own.has_bias or (not gpt and model.has_bias)
        for key, wanted, default in (
            ("gated_mlp", model.has_gated_mlp, own.has_gated_mlp),
            ("norm", model.norm_kind, own.norm_kind),
            ("norm_bias", model.has_norm_bias, own.has_norm_bias),
            ("bias", model.has_bias, has_biases),
            ("position_embedding", model.positions, own.positions),
            ("embedding_norm", model.embedding_norm, False),
        ):
            if wanted != default:
                params = {**family, "built": str(default).lower()}
                yield Rule(f"model.{key}", str(wanted).lower(), "engine-family-differs", params)
        for key in _LLAMA_ONLY if gpt else ():
            if getattr(model, key) != ModelSpec.model_fields[key].default:
                yield Rule(f"model.{key}", _shown(getattr(model, key)), "engine-llama-only", family)
        activation = "gelu_pytorch_tanh" if gpt and not model.num_experts else "silu"
        if model.activation != activation and (model.num_experts or gpt):
            layers = "experts" if model.num_experts else f"{model.family} models"
            params = {"layers": layers, "activation": activation}
            yield Rule("model.hidden_activation", model.activation, "engine-activation", params)
        if model.num_experts and model.fused_projections:
            yield Rule("model.fused_projections", "true", "engine-fused-experts")
        if gpt and model.num_key_value_heads != model.num_attention_heads:
            fix = {"heads": model.num_attention_heads}
            yield Rule("model.num_key_value_heads", model.num_key_value_heads, "engine-no-grouped-queries", family, fix)
        if gpt and model.qkv_bias:
            yield Rule("model.qkv_bias", "true", "engine-all-biases", family)
        if gpt and model.qk_norm:
            yield Rule("model.qk_norm", "true", "engine-no-qk-norm", family)
        if model.kv_lora_rank:
            yield from _latent_problems(model)

    def warnings(self, spec: RunSpec) -> Iterator[Reason]:
        model = spec.transformer
        if (channels := max(model.qk_head_dim, model.value_head_dim)) > _LARGEST_FUSED_HEAD:
            yield Reason("plan.large-heads", {"head_dim": channels, "largest": _LARGEST_FUSED_HEAD})
        if model.text_of is not None:
            yield Reason("plan.text-part", {"model_type": model.text_of})
        if framework_of(spec).drops_scores(spec):
            yield Reason("plan.attention-dropout", {"attention_dropout": model.attention_dropout})

    def assumptions(self, spec: RunSpec, parameters: int) -> Iterator[Reason]:
        yield Reason("plan.assumes-text-activations", {"element_bytes": weight_bytes(spec.training.precision)})
        yield Reason("plan.assumes-logits", {"bytes_per_entry": framework_of(spec).logit_bytes})
        yield Reason("plan.assumes-text-flops")
        if spec.transformer.block_types:
            yield Reason("plan.assumes-hybrid-blocks")
        tokens = spec.total_steps * spec.training.global_batch_size * spec.units_per_sample
        yield Reason("plan.assumes-text-data", {"tokens": tokens, "per_parameter": tokens / max(1, parameters)})
        if spec.training.objective == "dpo":
            if (known := pair_count(spec)) is None:
                yield Reason("plan.assumes-pairs-of-steps")
            else:
                yield Reason("plan.assumes-counted-pairs" if known[1] else "plan.assumes-estimated-pairs")

    def matrix_widths(self, spec: RunSpec, tensor_parallel: int) -> dict[str, int]:
        model, t = spec.transformer, tensor_parallel
        widths = {
            "hidden_size": model.hidden_size,
            "intermediate_size per tensor rank": model.intermediate_size // t or 1,
            "attention width per tensor rank": model.num_attention_heads * model.qk_head_dim // t or 1,
        }
        if not framework_of(spec).is_engine or spec.training.cross_entropy == "liger":  # else padded by the head
            widths["vocab_size per tensor rank"] = model.vocab_size // t or 1
        if model.num_experts:
            widths["expert_size per tensor rank"] = model.expert_size // t or 1
        return widths


def _latent_problems(model: ModelSpec) -> Iterator[Rule]:
    """Yield the settings of a model with latent attention that the engine's does not have."""
    for key in _NOT_LATENT:
        if getattr(model, key) != ModelSpec.model_fields[key].default:
            yield Rule(f"model.{key}", _shown(getattr(model, key)), "engine-latent-setting")
    if model.has_bias:
        yield Rule("model.bias", "true", "engine-latent-setting")
    if model.num_key_value_heads != model.num_attention_heads:
        fix = {"heads": model.num_attention_heads}
        yield Rule("model.num_key_value_heads", model.num_key_value_heads, "engine-latent-key-heads", {}, fix)


def _text(model: AnyModel) -> ModelSpec:
    assert isinstance(model, ModelSpec)
    return model


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _near(number: int, wanted: int) -> dict[str, Any]:
    return {"allowed": list(nearest_divisors(number, wanted))}


def _context_rules(spec: RunSpec, context: int) -> Iterator[Rule]:
    """Yield the settings that context parallelism does not support (engine/parallel/sequence.py)."""
    model = spec.transformer
    settings = {
        "data.packing": has_documents(spec),
        "model.sliding_window": model.windowed_layers > 0,
        "model.attn_logit_softcapping": model.attn_logit_softcapping is not None,
        "model.attention_sinks": model.attention_sinks,
        "model.attention_dropout": model.attention_dropout > 0,
    }
    for setting, is_set in settings.items():
        if is_set:
            yield Rule("layout.context_parallel", context, "engine-context-attention", {"setting": setting})
    if model.capacity_factor:
        yield Rule("layout.context_parallel", context, "engine-context-capacity")
