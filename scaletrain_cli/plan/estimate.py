"""Size, memory and time of one layout, whatever kind of network the spec describes. Computes nothing itself.

What only vision networks need is imported for them alone: a plan of a transformer should not wait for it.
"""

from __future__ import annotations

from scaletrain_cli.plan import architecture
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.memory import device_memory
from scaletrain_cli.plan.result import Layout, Memory, ModelSize, Network, Time
from scaletrain_cli.plan.speed import timing
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.run import AnyModel


def plan_memory(spec: RunSpec, layout: Layout, device: Accelerator) -> Memory:
    """Memory of the worst rank against the device, and of each pipeline stage."""
    if isinstance(spec.model, ModelSpec):
        return device_memory.plan_memory(spec, layout, device)
    from scaletrain_cli.plan.vision.memory import plan_vision_memory

    return plan_vision_memory(spec, layout, device)


def plan_time(spec: RunSpec, layout: Layout, device: Accelerator) -> tuple[Time, Network]:
    """Seconds per optimizer step by cause, and what follows; and the traffic of the busiest rank."""
    if isinstance(spec.model, ModelSpec):
        return timing.plan_time(spec, layout, device)
    from scaletrain_cli.plan.vision.timing import plan_vision_time

    return plan_vision_time(spec, layout, device)


def model_size(model: AnyModel) -> ModelSize:
    """Parameters, and training FLOPs per token, image or pair."""
    if not isinstance(model, ModelSpec):
        from scaletrain_cli.plan.vision.networks import vision_size

        return vision_size(model)
    return ModelSize(
        parameters=architecture.parameter_count(model),
        active_parameters=architecture.active_parameter_count(model),
        flops_per_token=float(architecture.training_flops_per_token(model)),
    )


def parameter_count(model: AnyModel) -> int:
    """Every trainable parameter, a tied head counted once."""
    if isinstance(model, ModelSpec):
        return architecture.parameter_count(model)
    return model_size(model).parameters
