"""Pure arithmetic from a run spec to a run plan. Standard library only; imports the spec and the errors.

``make_plan`` sizes and chooses a layout, ``submittable`` says what keeps a plan from being run by this engine, and
``zero_buffers`` gives the engine the buffer sizes that the plan has counted.

architecture -> states, activations, zero_buffers -> memory -> communication -> timing -> search -> planning; beside
them hardware (devices), layouts, layout_rules and search_space (what may be tried), bounds (what need not be), choice
(which to take), durability, cost, engine_support, advice, infeasible and ways_out. sizing plans many clusters.
"""

from scaletrain_cli.plan.architecture import parameter_count, training_flops_per_token
from scaletrain_cli.plan.engine_support import submittable, unsupported
from scaletrain_cli.plan.hardware import Accelerator, accelerator_names, find_accelerator
from scaletrain_cli.plan.infeasible import PlanInfeasibleError
from scaletrain_cli.plan.planning import make_plan
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.plan.states import ModelStates, model_state_bytes
from scaletrain_cli.plan.zero_buffers import ZeroBuffers, zero_buffers

__all__ = [
    "Accelerator",
    "ModelStates",
    "PlanInfeasibleError",
    "RunPlan",
    "ZeroBuffers",
    "accelerator_names",
    "find_accelerator",
    "make_plan",
    "model_state_bytes",
    "parameter_count",
    "submittable",
    "training_flops_per_token",
    "unsupported",
    "zero_buffers",
]
