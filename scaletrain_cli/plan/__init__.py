"""Pure arithmetic from a run spec to a run plan. Standard library only; imports the spec and the errors.

``make_plan`` sizes and chooses a layout, and ``submittable`` returns the reasons why this engine cannot run a plan. For
the engine: ``blocks_per_stage`` divides a pipeline into stages, ``zero_buffers`` returns the buffer sizes that the plan
counts, and ``rank_model_states`` the model states of a rank. planning combines the parts: architecture (exact sizes),
stages (what a rank holds), memory and speed of one layout (workloads has an object per kind of network, frameworks one
per training framework), search over layouts and clusters, catalogue (devices, networks, prices, recipes), reliability
(checkpoints, goodput, cost), and advice (warnings, checks).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scaletrain_cli.plan.architecture import parameter_count, training_flops_per_token
    from scaletrain_cli.plan.catalogue.hardware import Accelerator, accelerator_names, find_accelerator
    from scaletrain_cli.plan.memory.engine_states import rank_model_states
    from scaletrain_cli.plan.memory.states import ModelStates, ZeroBuffers, model_state_bytes, zero_buffers
    from scaletrain_cli.plan.planning import make_plan
    from scaletrain_cli.plan.result import RunPlan
    from scaletrain_cli.plan.search.engine_support import submittable, unsupported
    from scaletrain_cli.plan.search.infeasible import PlanInfeasibleError
    from scaletrain_cli.plan.stages import blocks_per_stage

__all__ = [
    "Accelerator",
    "ModelStates",
    "PlanInfeasibleError",
    "RunPlan",
    "ZeroBuffers",
    "accelerator_names",
    "blocks_per_stage",
    "find_accelerator",
    "make_plan",
    "model_state_bytes",
    "parameter_count",
    "rank_model_states",
    "submittable",
    "training_flops_per_token",
    "unsupported",
    "zero_buffers",
]

# The module of each public name. A module is imported on first use, so that one part loads without the others.
_HOMES = {
    "Accelerator": "catalogue.hardware",
    "ModelStates": "memory.states",
    "PlanInfeasibleError": "search.infeasible",
    "RunPlan": "result",
    "ZeroBuffers": "memory.states",
    "accelerator_names": "catalogue.hardware",
    "blocks_per_stage": "stages",
    "find_accelerator": "catalogue.hardware",
    "make_plan": "planning",
    "model_state_bytes": "memory.states",
    "parameter_count": "architecture",
    "rank_model_states": "memory.engine_states",
    "submittable": "search.engine_support",
    "training_flops_per_token": "architecture",
    "unsupported": "search.engine_support",
    "zero_buffers": "memory.states",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
