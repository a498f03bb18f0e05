"""What the engine of this version can run. The planner sizes more than that; what stands here may be submitted.

``ENGINE`` is the one declaration: the search proposes within it, and ``submittable`` refuses what lies outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scaletrain_cli.plan.result import Layout, RunPlan
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.run import AnyModel

_PRECISIONS = ("fp32", "tf32", "bf16")
_SCHEDULES = ("cosine", "linear", "constant")
_SCHEDULERS = ("local", "slurm")
AXES = (
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline",
    "sequence_parallel",
    "context_parallel",
    "expert_parallel",
)


@dataclass(frozen=True)
class Capabilities:
    """What a framework runs: the axes beside data that may exceed 1, ZeRO stages, what may be offloaded."""

    axes: frozenset[str]
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    offload: tuple[str, ...] = ("none",)

    @property
    def runs(self) -> str:
        """In words."""
        return " and ".join(["data", *(axis.removesuffix("_parallel") for axis in AXES if axis in self.axes)])


ENGINE = Capabilities(axes=frozenset())

# What each framework could run, whatever this engine does. FSDP shards nothing, gradients and states, or all
# (torch ShardingStrategy NO_SHARD, SHARD_GRAD_OP, FULL_SHARD); Megatron-LM's distributed optimizer and nanotron's
# are ZeRO-1. Ranks that trade heads for tokens (Ulysses, our sequence axis) are no axis of either: their "sequence
# parallel" cuts norms over the tensor ranks, and Megatron-LM does such an all-to-all within its context ranks
# (cp_comm_type). nanotron has no interleaved pipeline (pipeline_parallel/engine.py).
_NO_ULYSSES = frozenset(AXES) - {"sequence_parallel"}
_EVERYTHING = {
    "deepspeed": Capabilities(frozenset(AXES), (0, 1, 2, 3), ("none", "optimizer", "optimizer+params")),
    "fsdp": Capabilities(frozenset(AXES), (0, 2, 3), ("none", "optimizer+params")),
    "megatron": Capabilities(_NO_ULYSSES, (0, 1), ("none", "optimizer")),
    "nanotron": Capabilities(_NO_ULYSSES - {"virtual_pipeline"}, (0, 1)),
}


def capabilities(spec: RunSpec) -> Capabilities:
    """What the search may propose: what this engine runs, unless the spec asks to see everything."""
    if spec.planner.framework == "deepspeed" and spec.planner.search == "engine":
        return ENGINE
    return _EVERYTHING[spec.planner.framework]


def opened(spec: RunSpec) -> RunSpec:
    """With ``planner.search: everything``, axes that the spec does not speak of are open, whatever their default."""
    layout = spec.layout
    left_alone = {axis: "auto" for axis in AXES if axis not in layout.model_fields_set}
    if spec.planner.search != "everything" or not left_alone:
        return spec
    return spec.model_copy(update={"layout": layout.model_copy(update=left_alone)})


def unsupported(spec: RunSpec, layout: Layout) -> list[str]:
    """One line per thing that this engine cannot run, with what to do; empty when it can run the layout."""
    training, on_cpu = spec.training, spec.cluster.gpu == "cpu"
    found = [
        f"layout.{axis} = {getattr(layout, axis)}: this engine runs {ENGINE.runs} parallelism with ZeRO only. "
        "Use 1 or auto."
        for axis in AXES
        if getattr(layout, axis) != 1 and axis not in ENGINE.axes
    ]
    found += [f"model.{key}: {what}" for key, what in _other_architecture(spec.model)]
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
    if layout.offload not in ENGINE.offload:
        found.append(f"layout.offload = {layout.offload}: not in this engine. Use {_one_of(ENGINE.offload)}.")
    if spec.guard.spike.action != "warn":
        found.append(f"guard.spike.action = {spec.guard.spike.action}: not in this engine. Use warn.")
    if spec.checkpoint.dir != "auto":
        found.append("checkpoint.dir: this engine keeps checkpoints in the run directory. Use auto.")
    if spec.planner.framework != "deepspeed":
        found.append(f"planner.framework = {spec.planner.framework}: for comparison only. Use deepspeed to submit.")
    if spec.cluster.scheduler not in _SCHEDULERS:
        found.append(f"cluster.scheduler = {spec.cluster.scheduler}: not in this version. Use {_one_of(_SCHEDULERS)}.")
    return found


def _other_architecture(model: AnyModel) -> Iterator[tuple[str, str]]:
    """What departs from the two families as the engine builds them."""
    if not isinstance(model, ModelSpec):
        yield f"family = {model.family}", "this engine trains transformers of text only. Use llama or gpt."
        return
    if model.num_experts:
        yield f"num_experts = {model.num_experts}", "this engine trains dense models only. Use 0."
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
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
