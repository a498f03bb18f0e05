"""What the engine of this version can run. The planner sizes more than that; what stands here may be submitted.

``ENGINE`` is the one declaration: the search proposes within it, and ``submittable`` refuses what lies outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.memory.states import weight_bytes
from scaletrain_cli.plan.result import Layout, RunPlan
from scaletrain_cli.plan.search.rejections import Rule, near
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.extensions import optimizer_extension
from scaletrain_cli.spec.run import AnyModel

# Degrees of tensor parallelism that divide and that our engine cannot run all the same, and what would do.


# A vocabulary is padded to a multiple of this at most, in a hint.
_PADDED = 128
_ROW_BYTES = 16


def engine_rules(spec: RunSpec, tensor: int) -> Iterator[Rule]:
    """What forbids this degree of tensor parallelism in our engine, one rule after another."""
    if not isinstance(spec.model, ModelSpec):
        return
    if spec.model.num_experts:
        yield from _expert_rules(spec, spec.model, tensor)
    if tensor > 1:
        yield from _tensor_rules(spec, spec.model, tensor)


def _tensor_rules(spec: RunSpec, model: ModelSpec, tensor: int) -> Iterator[Rule]:
    kv_heads, vocabulary = model.num_key_value_heads, model.vocab_size
    if kv_heads % tensor:
        message = f"must divide {kv_heads} key-value heads, which this engine does not repeat."
        yield Rule("layout.tensor_parallel", tensor, message, near(gcd(kv_heads, model.num_attention_heads), tensor))
    if vocabulary % tensor:
        multiple = max(_PADDED, tensor)
        message = f"must divide model.vocab_size = {vocabulary}, because embedding and head are cut over it."
        hint = f"Pad model.vocab_size to {_up(vocabulary, multiple)}, or use 1."
        yield Rule("layout.tensor_parallel", tensor, message, hint)
    widths = {"intermediate_size": model.intermediate_size}
    widths["shared_expert_intermediate_size"] = model.shared_expert_intermediate_size
    for key, width in widths.items() if model.num_experts else ():
        if width % tensor and (key != "intermediate_size" or model.first_k_dense_replace):
            yield Rule("layout.tensor_parallel", tensor, f"must divide {key} = {width}.", near(width, tensor))
    if spec.layout.expert_tensor_parallel not in ("auto", tensor):
        message = "this engine cuts experts over the same ranks as other matrices."
        yield Rule("layout.expert_tensor_parallel", spec.layout.expert_tensor_parallel, message, "Use auto.")
    if spec.training.cross_entropy == "liger":
        message = f"needs the whole vocabulary on each rank, and tensor_parallel = {tensor} cuts it."
        yield Rule("training.cross_entropy", "liger", message, "Use chunked or auto.")


def _expert_rules(spec: RunSpec, model: ModelSpec, tensor: int) -> Iterator[Rule]:
    """Grouped products want rows of multiples of 16 bytes (torch, ``nn.functional.grouped_mm``)."""
    multiple = _ROW_BYTES // weight_bytes(spec.training.precision)
    width, key = model.expert_size // tensor, "moe_intermediate_size" if model.moe_intermediate_size else ""
    if model.hidden_size % multiple:
        message = f"must be a multiple of {multiple} with experts in {spec.training.precision}."
        yield Rule("model.hidden_size", model.hidden_size, message, f"Use {_up(model.hidden_size, multiple)}.")
    if width % multiple:
        message = f"must be a multiple of {multiple} on each of {tensor} tensor ranks, in {spec.training.precision}."
        hint = f"Use {_up(model.expert_size, multiple * tensor)}."
        yield Rule(f"model.{key or 'intermediate_size'}", model.expert_size, message, hint)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# bitsandbytes updates the states where the gradients are.
_BESIDE_GRADIENTS = ("adamw_8bit", "lion")
_LEAST_FP8_CAPABILITY = (8, 9)  # Ada and Hopper, where fp8 tensor cores begin
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
        return one_of(["data", *(axis.removesuffix("_parallel") for axis in AXES if axis in self.axes)], "and")


ENGINE = Capabilities(
    axes=frozenset({"tensor_parallel", "pipeline_parallel", "sequence_parallel", "expert_parallel"}),
    offload=("none", "optimizer", "optimizer+params"),
)

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


def is_ours(spec: RunSpec) -> bool:
    """Whether only what this engine runs may be proposed."""
    return spec.planner.framework == "deepspeed" and spec.planner.search == "engine"


def capabilities(spec: RunSpec) -> Capabilities:
    """What the search may propose: what this engine runs, unless the spec asks to see everything."""
    return ENGINE if is_ours(spec) else _EVERYTHING[spec.planner.framework]


def opened(spec: RunSpec) -> RunSpec:
    """With ``planner.search: everything``, axes that the spec does not speak of are open, whatever their default."""
    layout = spec.layout
    left_alone = {axis: "auto" for axis in AXES if axis not in layout.model_fields_set}
    if spec.planner.search != "everything" or not left_alone:
        return spec
    return spec.model_copy(update={"layout": layout.model_copy(update=left_alone)})


def unsupported(spec: RunSpec, layout: Layout) -> list[str]:
    """One line per thing that cannot be run, with what to do; empty when the layout can.

    What an engine of the user's own (``code.engine``) can run is not ours to say.
    """
    found = [] if spec.code.engine else _beyond_this_engine(spec, layout)
    if spec.checkpoint.dir != "auto" and not expand_home(spec.checkpoint.dir).is_absolute():
        found.append(f"checkpoint.dir = {spec.checkpoint.dir}: must be absolute, because nodes do not start here.")
    return found


def _beyond_this_engine(spec: RunSpec, layout: Layout) -> list[str]:
    found = [
        f"layout.{axis} = {getattr(layout, axis)}: this engine runs {ENGINE.runs} parallelism with ZeRO. Use 1 or auto."
        for axis in AXES
        if getattr(layout, axis) != 1 and axis not in ENGINE.axes
    ]
    found += [rule.text for rule in engine_rules(spec, layout.tensor_parallel)]
    found += [f"model.{key}: {what}" for key, what in _other_architecture(spec.model)]
    found += [f"training.{key}: {what}" for key, what in _about_precision(spec)]
    found += [f"{key}: {what}" for key, what in _about_optimizer(spec, layout)]
    if spec.training.precision == "fp8" and layout.zero_stage == 3:
        found.append("layout.zero_stage = 3: fp8 products keep the weights that it gathers. Use 1, 2 or auto.")
    if spec.training.cross_entropy == "liger" and spec.cluster.gpu == "cpu":
        found.append("training.cross_entropy = liger: its kernel needs a GPU. Use chunked or auto.")
    if spec.layout.tensor_sequence_parallel is True and layout.tensor_parallel > 1:
        found.append("layout.tensor_sequence_parallel = true: this engine keeps norms whole. Use false or auto.")
    if spec.planner.attention != "auto":
        what = "plans for a kernel that this engine leaves to PyTorch. Use auto to submit."
        found.append(f"planner.attention = {spec.planner.attention}: {what}")
    if spec.planner.framework != "deepspeed":
        found.append(f"planner.framework = {spec.planner.framework}: for comparison only. Use deepspeed to submit.")
    return found


def _about_precision(spec: RunSpec) -> Iterator[tuple[str, str]]:
    training, on_cpu = spec.training, spec.cluster.gpu == "cpu"
    precision, gradients = training.precision, training.grad_dtype
    if precision == "tf32" and on_cpu:
        yield "precision = tf32", "needs an NVIDIA GPU. Use fp32 or bf16 with cluster.gpu: cpu."
    if precision == "fp8" and (has := _without_fp8(spec)):
        yield "precision = fp8", f"needs an NVIDIA GPU of compute capability 8.9 or higher, and {has}. Use bf16."
    own = "fp16" if precision == "fp16" else "bf16"
    if gradients not in ("fp32", own):
        kind = "bf16" if precision == "fp8" else precision
        yield f"grad_dtype = {gradients}", f"{kind} gradients accumulate in fp32 or {own}. Use fp32."


def _without_fp8(spec: RunSpec) -> str:
    """What the device is that has no fp8 products; nothing where it has, or where the spec describes a GPU."""
    device = find_accelerator(spec.cluster)
    numbers = re.fullmatch(r"(\d+)\.(\d+)", device.compute_capability)
    if numbers is None:
        return f"this is {device.name}" if device.is_cpu or device.compute_capability else ""
    too_old = (int(numbers[1]), int(numbers[2])) < _LEAST_FP8_CAPABILITY
    return f"{device.name} has {device.compute_capability}" if too_old else ""


def _about_optimizer(spec: RunSpec, layout: Layout) -> Iterator[tuple[str, str]]:
    name, away, device = spec.training.optimizer.name, layout.offload, spec.layout.offload_device
    key = f"training.optimizer.name = {name}"
    if name == "muon":
        yield key, "turns whole matrices, which ZeRO and tensor parallelism have cut. Use adamw or lion."
    if away not in ENGINE.offload:
        yield f"layout.offload = {away}", f"not in this engine. Use {one_of(ENGINE.offload)}."
    elif away != "none" and (name in _BESIDE_GRADIENTS or ((found := optimizer_extension(name)) and not found.offload)):
        yield key, "updates its states on the device. Use adamw, adam, momentum or sgd, or layout.offload: none."
    elif away != "none" and device == "nvme" and name not in ("adamw", "adam"):
        yield key, "DeepSpeed brings Adam's two moments back from NVMe, not others. Use adamw or offload_device: cpu."
    averaging = spec.training.averaging.name
    if averaging != "none" and away != "none" and device == "nvme":
        yield f"training.averaging.name = {averaging}", "weights on NVMe are not averaged. Use none, or offload to cpu."


def _other_architecture(model: AnyModel) -> Iterator[tuple[str, str]]:
    """What departs from the two families as the engine builds them."""
    if not isinstance(model, ModelSpec):
        yield f"family = {model.family}", "this engine trains transformers of text only. Use llama or gpt."
        return
    if model.num_experts and model.base_family != "llama":
        yield f"num_experts = {model.num_experts}", f"this engine's {model.family} has none. Use 0, or family: llama."
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
    if model.base_family == "gpt" and model.num_key_value_heads != model.num_attention_heads:
        way_out = (
            f"this engine's gpt has one for each attention head. Use {model.num_attention_heads}, or family: llama."
        )
        yield f"num_key_value_heads = {model.num_key_value_heads}", way_out
    if model.base_family == "gpt" and model.qkv_bias:
        yield "qkv_bias", "this engine's gpt has all biases. Use false."
    if model.base_family == "gpt" and model.qk_norm:
        yield "qk_norm", "this engine's gpt has none. Use false."
    if model.kv_lora_rank:
        yield "kv_lora_rank", "latent attention is not in this engine. Use 0."


def submittable(spec: RunSpec, plan: RunPlan) -> list[str]:
    """Why the planned run may not be submitted, one line each; empty when it may."""
    found = unsupported(spec, plan.layout)
    if not plan.memory.fits:
        gigabytes = f"{plan.memory.peak / 1e9:,.1f} GB of {plan.memory.capacity / 1e9:,.1f} GB"
        found.insert(0, f"the layout does not fit: one rank needs {gigabytes}. See `scaletrain plan`.")
    return found


def one_of(names: Sequence[str], word: str = "or") -> str:
    """``a, b or c``."""
    return f"{', '.join(names[:-1])} {word} {names[-1]}" if len(names) > 1 else names[0]
