"""What the engine of this version can run. The planner sizes more than that; what stands here may be submitted."""

from __future__ import annotations

from collections.abc import Iterator

from scaletrain_cli.plan.result import Layout, RunPlan
from scaletrain_cli.spec import ModelSpec, RunSpec

_PRECISIONS = ("fp32", "tf32", "bf16")
_SCHEDULES = ("cosine", "linear", "constant")
_SCHEDULERS = ("local", "slurm")
_AXES_OF_ONE = (
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline",
    "sequence_parallel",
    "context_parallel",
    "expert_parallel",
)


def unsupported(spec: RunSpec, layout: Layout) -> list[str]:
    """One line per thing that this engine cannot run, with what to do; empty when it can run the layout."""
    training, on_cpu = spec.training, spec.cluster.gpu == "cpu"
    found = [
        f"layout.{axis} = {getattr(layout, axis)}: this engine runs data parallelism with ZeRO only. Use 1 or auto."
        for axis in _AXES_OF_ONE
        if getattr(layout, axis) != 1
    ]
    if spec.transformer.num_experts:
        found.append(
            f"model.num_experts = {spec.transformer.num_experts}: this engine trains dense models only. Use 0."
        )
    found += [f"model.{key}: {what}" for key, what in _other_architecture(spec.transformer)]
    if training.optimizer.name != "adamw":
        found.append(f"training.optimizer.name = {training.optimizer.name}: not in this engine. Use adamw.")
    if training.precision not in _PRECISIONS:
        found.append(f"training.precision = {training.precision}: not in this engine. Use {_one_of(_PRECISIONS)}.")
    if training.precision == "tf32" and on_cpu:
        found.append("training.precision = tf32: needs an NVIDIA GPU. Use fp32 or bf16 with cluster.gpu: cpu.")
    if training.precision == "bf16" and training.grad_dtype == "fp16":
        found.append("training.grad_dtype = fp16: bf16 gradients accumulate in fp32 or bf16. Use fp32.")
    if training.schedule.name not in _SCHEDULES:
        found.append(
            f"training.schedule.name = {training.schedule.name}: not in this engine. Use {_one_of(_SCHEDULES)}."
        )
    if layout.offload != "none":
        found.append(f"layout.offload = {layout.offload}: not in this engine. Use none.")
    if spec.guard.spike.action != "warn":
        found.append(f"guard.spike.action = {spec.guard.spike.action}: not in this engine. Use warn.")
    if spec.checkpoint.dir != "auto":
        found.append("checkpoint.dir: this engine keeps checkpoints in the run directory. Use auto.")
    if spec.planner.framework != "deepspeed":
        found.append(f"planner.framework = {spec.planner.framework}: for comparison only. Use deepspeed to submit.")
    if spec.cluster.scheduler not in _SCHEDULERS:
        found.append(f"cluster.scheduler = {spec.cluster.scheduler}: not in this version. Use {_one_of(_SCHEDULERS)}.")
    return found


def _other_architecture(model: ModelSpec) -> Iterator[tuple[str, str]]:
    """What departs from the two families as the engine builds them."""
    own = model.model_copy(update=dict.fromkeys(("gated_mlp", "norm", "norm_bias", "bias", "position_embedding")))
    for key, wanted, built in (
        ("gated_mlp", model.has_gated_mlp, own.has_gated_mlp),
        ("norm", model.norm_kind, own.norm_kind),
        ("norm_bias", model.has_norm_bias, own.has_norm_bias),
        ("bias", model.has_bias, own.has_bias),
        ("position_embedding", model.positions, own.positions),
        ("embedding_norm", model.embedding_norm, False),
    ):
        if wanted != built:
            yield key, f"this engine's {model.family} has {str(built).lower()}. Leave it out."
    if model.family == "gpt" and model.qk_norm:
        yield "qk_norm", "this engine's gpt has none. Use false."
    if model.kv_lora_rank:
        yield "kv_lora_rank", "latent attention is not in this engine. Use 0."
    for key in ("hidden_dropout", "attention_dropout"):
        if getattr(model, key):
            yield key, "dropout is not in this engine. Use 0."


def submittable(spec: RunSpec, plan: RunPlan) -> list[str]:
    """Why the planned run may not be submitted, one line each; empty when it may."""
    found = unsupported(spec, plan.layout)
    if not plan.memory.fits:
        gigabytes = f"{plan.memory.peak / 1e9:,.1f} GB of {plan.memory.capacity / 1e9:,.1f} GB"
        found.insert(0, f"the layout does not fit: one rank needs {gigabytes}. See `scaletrain plan`.")
    return found


def _one_of(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
