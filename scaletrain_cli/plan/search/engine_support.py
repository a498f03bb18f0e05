"""The subset of planned layouts and settings that this project's engine can run.

``ENGINE`` (frameworks/deepspeed.py) declares the supported axes and offload modes: the search proposes only those, and
``submittable`` lists what a planned run needs beyond them.
"""

from collections.abc import Iterator
from dataclasses import replace

from scaletrain_cli.plan.adapters import quantized_layout_rules
from scaletrain_cli.plan.axes import AXES, Axes, Capabilities, Rule, nearest_divisors
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.frameworks.deepspeed import ENGINE
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.parameters import has_adapter, model_parameters
from scaletrain_cli.plan.result import Layout, RunPlan
from scaletrain_cli.plan.trained_parameters import has_muon, training_stages, trains_everything
from scaletrain_cli.plan.trained_stages import orthogonalized_by_stage
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.text import either

_LEAST_FP8_CAPABILITY = 8.9  # Ada and Hopper, the first with fp8 tensor cores


def searches_engine(spec: RunSpec) -> bool:
    """Return whether the search is limited to layouts that the engine runs."""
    return framework_of(spec).is_engine and spec.planner.search == "engine"


def capabilities(spec: RunSpec) -> Capabilities:
    """Return what the search may propose: what the engine runs, or all with ``planner.search: everything``."""
    if not searches_engine(spec):
        return framework_of(spec).capabilities
    if spec.layout.zero_shard_size or spec.layout.offload_device not in spec.training.optimizer.traits.offload:
        return replace(ENGINE, offload=("none",))
    return replace(ENGINE, offload=("none", "optimizer")) if spec.layout.zero_secondary_shard_size > 1 else ENGINE


def opened(spec: RunSpec) -> RunSpec:
    """Return the spec with every axis that it does not set on auto, if ``planner.search`` is ``everything``."""
    layout = spec.layout
    left_alone = {axis: "auto" for axis in AXES if axis not in layout.model_fields_set}
    if spec.planner.search != "everything" or not left_alone:
        return spec
    return spec.with_changes("layout", **left_alone)


def unsupported(spec: RunSpec, layout: Layout) -> list[Rule]:
    """Return a rule with its remedy for each setting that the engine cannot run; empty if it can run the layout.

    A program of the user's own (``code.engine``, ``code.command``) is assumed to run every layout.
    """
    rules = [] if spec.code.own_program else list(_beyond_this_engine(spec, layout))
    if spec.checkpoint.dir != "auto" and not expand_home(spec.checkpoint.dir).is_absolute():
        rules.append(Rule("checkpoint.dir", spec.checkpoint.dir, "relative-checkpoint-dir"))
    return rules


def submittable(spec: RunSpec, plan: RunPlan) -> list[Rule]:
    """Return the rules that forbid to submit the planned run, most important first; empty if it may be submitted."""
    rules = unsupported(spec, plan.layout)
    if not plan.memory.fits:
        sizes = {"peak": plan.memory.peak, "capacity": plan.memory.capacity}
        rules.insert(0, Rule("layout", None, "layout-does-not-fit", sizes))
    return rules


def axis_rules(spec: RunSpec, axes: Axes) -> Iterator[Rule]:
    """Yield the rules on degrees that the engine cannot run with this model, or with the groups of shards."""
    yield from workload_of(spec.model).engine_rules(spec, axes.tensor, axes.context)
    # engine/optim/deepspeed_optimizer.py average_over_copies does not support pipeline or expert parallelism.
    size = spec.layout.zero_shard_size or axes.shards
    for axis in ("pipeline", "expert") if size != axes.shards else ():
        if getattr(axes, axis) > 1:
            yield Rule("layout.zero_shard_size", size, "engine-shard-group-axis", {"axis": f"layout.{axis}_parallel"})
    # DeepSpeed divides all ranks of the run into groups for the second copy, each with every weight once
    # (deepspeed/utils/groups.py _create_zero_param_parallel_group): all ranks must have the same weights.
    size = spec.layout.zero_secondary_shard_size
    for axis in ("tensor", "pipeline", "expert") if size > 1 else ():
        if getattr(axes, axis) > 1:
            params = {"axis": f"layout.{axis}_parallel"}
            yield Rule("layout.zero_secondary_shard_size", size, "engine-secondary-axis", params)


def _beyond_this_engine(spec: RunSpec, layout: Layout) -> Iterator[Rule]:
    """Yield a rule for each part of the layout, model and training settings that the engine cannot run."""
    known = either(["data", *(axis.removesuffix("_parallel") for axis in AXES if axis in ENGINE.axes)], "and")
    for axis in AXES:
        if getattr(layout, axis) != 1 and axis not in ENGINE.axes:
            yield Rule(f"layout.{axis}", getattr(layout, axis), "engine-axis", {"axes": known})
    workload = workload_of(spec.model)
    yield from axis_rules(spec, Axes.of(layout))
    yield from workload.engine_problems(spec)
    yield from workload.engine_layout_rules(spec, layout)
    yield from _about_precision(spec)
    yield from _about_optimizer(spec, layout)
    yield from _about_local_sgd(spec, layout)
    yield from _about_what_trains(spec, layout)
    yield from _about_shard_groups(spec, layout)
    if spec.training.precision == "fp8" and layout.zero_stage == 3:
        yield Rule("layout.zero_stage", 3, "engine-fp8-zero-3")
    if spec.training.cross_entropy == "liger" and spec.cluster.gpu == "cpu":
        yield Rule("training.cross_entropy", "liger", "engine-liger-gpu")
    if spec.layout.tensor_sequence_parallel is True and layout.tensor_parallel > 1:
        yield Rule("layout.tensor_sequence_parallel", "true", "engine-whole-norms")
    if spec.guard.replay and layout.data_parallel == layout.local_sgd_groups:
        yield Rule("guard.replay", spec.guard.replay, "engine-replay-alone")
    if spec.guard.replay and layout.offload != "none" and spec.layout.offload_device == "nvme":
        yield Rule("guard.replay", spec.guard.replay, "engine-replay-nvme")
    if spec.planner.attention != "auto":
        yield Rule("planner.attention", spec.planner.attention, "engine-attention")
    if not framework_of(spec).is_engine:
        yield Rule("planner.framework", spec.planner.framework, "framework-for-comparison")


def _about_shard_groups(spec: RunSpec, layout: Layout) -> Iterator[Rule]:
    """Yield what groups of ZeRO's shards exclude beside axes; offloaded weights would be copied to the host."""
    second = layout.zero_secondary_shard_size
    if layout.world_size % second:
        fix = {"allowed": list(nearest_divisors(layout.world_size, second))}
        yield Rule("layout.zero_secondary_shard_size", second, "secondary-divides-ranks", fix=fix)
    if second > 1 and layout.offload == "optimizer+params":
        yield Rule("layout.zero_secondary_shard_size", second, "engine-secondary-offload")
    for name in ("zero_shard_size", "zero_secondary_shard_size"):
        others = {
            "training.local_sgd.groups": layout.local_sgd_groups > 1,
            "training.optimizer.name": spec.training.optimizer.name == "muon",
            "layout.offload": name == "zero_shard_size" and layout.offload != "none",
            "layout.zero_secondary_shard_size": name == "zero_shard_size" and second > 1,
        }
        for setting in (key for key, is_set in others.items() if is_set and getattr(layout, name) > 1):
            yield Rule(f"layout.{name}", getattr(layout, name), "engine-shard-group-axis", {"axis": setting})


def _about_precision(spec: RunSpec) -> Iterator[Rule]:
    training, on_cpu = spec.training, spec.cluster.gpu == "cpu"
    precision, gradients = training.precision, training.grad_dtype
    if precision == "tf32" and on_cpu:
        yield Rule("training.precision", "tf32", "tf32-gpu")
    if precision == "fp8":
        yield from _about_fp8(spec)
    elif precision == "fp4":
        device = find_accelerator(spec.cluster)
        if precision in device.flops:
            yield Rule("training.precision", precision, "engine-no-fp4")
        else:
            yield Rule("training.precision", precision, "fp4-device", {"device": device.name})
    if training.weight_dtype != "auto":
        yield Rule("training.weight_dtype", training.weight_dtype, "engine-weight-dtype")
    if training.optimizer.state_dtype != "fp32":
        yield Rule("training.optimizer.state_dtype", training.optimizer.state_dtype, "engine-state-dtype")
    if not training.optimizer.master_weights:
        yield Rule("training.optimizer.master_weights", "false", "engine-no-master")
    own = "fp16" if precision == "fp16" else "bf16"
    if gradients not in ("fp32", own):
        kind = "bf16" if precision in ("fp8", "fp4") else precision
        yield Rule("training.grad_dtype", gradients, "grad-dtype", {"precision": kind, "own": own})


def _about_fp8(spec: RunSpec) -> Iterator[Rule]:
    """Yield a rule if the device has no fp8 tensor cores; a GPU described in the spec is assumed to have them."""
    device = find_accelerator(spec.cluster)
    if not device.cuda_capability:
        if device.is_cpu or device.compute_capability:
            yield Rule("training.precision", "fp8", "fp8-device", {"device": device.name})
    elif device.cuda_capability < _LEAST_FP8_CAPABILITY:
        params = {"device": device.name, "compute_capability": device.compute_capability}
        yield Rule("training.precision", "fp8", "fp8-capability", params)


def _about_optimizer(spec: RunSpec, layout: Layout) -> Iterator[Rule]:
    name, away, device = spec.training.optimizer.name, layout.offload, spec.layout.offload_device
    key, offload = "training.optimizer.name", spec.training.optimizer.traits.offload
    if name == "muon" and not has_muon(spec):
        yield Rule(key, name, "engine-muon-family", {"family": spec.model.family})
    elif name == "muon" and has_adapter(spec.model):
        yield Rule(key, name, "engine-muon-adapter")
    elif name == "muon" and not any(orthogonalized_by_stage(spec)):
        yield Rule(key, name, "engine-muon-without-matrices")
    if away != "none" and not offload:
        yield Rule(key, name, "engine-offload-optimizer")
    elif away != "none" and device == "nvme" and device not in offload:
        yield Rule(key, name, "engine-nvme-optimizer")
    yield from quantized_layout_rules(spec, layout)
    averaging = spec.training.averaging.name
    if averaging != "none" and away != "none" and device == "nvme":
        yield Rule("training.averaging.name", averaging, "engine-nvme-averaging")


def _about_local_sgd(spec: RunSpec, layout: Layout) -> Iterator[Rule]:
    """Yield the settings that ranks in different groups would have to agree on in each step, or average differently."""
    training, key = spec.training, "training.local_sgd.groups"
    if training.local_sgd.groups == 1:
        return
    params = {"groups": training.local_sgd.groups}
    if training.objective != "causal_lm" or not workload_of(spec.model).counts_tokens:
        yield Rule("training.objective", training.objective, "local-sgd-objective", params)
        return
    every, inner, patience = spec.evaluation.every, training.local_sgd.inner_steps, training.early_stopping.patience
    if patience and every % inner:
        of_steps = {"every": every, "inner_steps": inner}
        yield Rule("training.early_stopping.patience", patience, "local-sgd-early-stopping", of_steps)
    if training.precision == "fp16":
        yield Rule("training.precision", "fp16", "local-sgd-fp16", params)
    if training.averaging.name != "none":
        yield Rule("training.averaging.name", training.averaging.name, "local-sgd-averaging", params)
    if training.optimizer.name == "adamw_8bit":
        yield Rule("training.optimizer.name", training.optimizer.name, "local-sgd-8-bit", params)
    if training.trainable or has_adapter(spec.model):
        yield Rule(key, params["groups"], "local-sgd-trains-everything")
    if training.gradient_clipping_by == "adaptive":
        yield Rule("training.gradient_clipping_by", "adaptive", "local-sgd-adaptive-clipping", params)
    if layout.offload != "none" and spec.layout.offload_device == "nvme":
        yield Rule("layout.offload_device", "nvme", "local-sgd-nvme", params)
    if spec.data.packing == "documents" or spec.data.loss_mask != "none":
        name = "packing" if spec.data.packing == "documents" else "loss_mask"
        yield Rule(f"data.{name}", getattr(spec.data, name), "local-sgd-all-tokens", params)
    if spec.transformer.bias_update_speed:
        yield Rule("model.bias_update_speed", spec.transformer.bias_update_speed, "local-sgd-router-bias", params)


def _about_what_trains(spec: RunSpec, layout: Layout) -> Iterator[Rule]:
    """Yield rules on frozen weights, and on stages, between which states of the optimizer move by name."""
    if trains_everything(spec):
        return
    stages, name, averaging = training_stages(spec), spec.training.optimizer.name, spec.training.averaging.name
    everything = len(model_parameters(spec.model))
    on_nvme = layout.offload != "none" and spec.layout.offload_device == "nvme"
    if on_nvme and any(len(stage.since) < everything for stage in stages):
        yield Rule("layout.offload_device", "nvme", "engine-nvme-frozen")
    if len(stages) > 1 and name == "adamw_8bit":
        yield Rule("training.optimizer.name", name, "engine-stages-8-bit")
    if len(stages) > 1 and (quantization := getattr(spec.model, "quantization", "none")) != "none":
        yield Rule("model.quantization", quantization, "engine-stages-quantized")
    if len(stages) > 1 and averaging != "none":
        yield Rule("training.averaging.name", averaging, "engine-stages-averaging")
