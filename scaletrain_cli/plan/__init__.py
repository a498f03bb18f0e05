"""The planner: arithmetic from a run spec to a run plan. Standard library only; imports the spec and the errors.

Read planning.py first: ``make_plan`` calls the parts in this order.

* search/: layouts.py and search_space.py list the layouts that a spec allows, layout_search.py finds the fastest that
  fits, infeasible.py says what would fit otherwise. sizing.py chooses the number of GPUs.
* workloads/: one object per kind of network, frameworks/: one per training framework. They own all rules that differ.
* architecture.py and stages.py: parameters and FLOPs of a transformer, and of one rank of a pipeline stage.
* memory/: bytes of a rank; the entry is device_memory.plan_memory. speed/: seconds of a step; the entry is
  step_time.plan_time. vision/ has both for vision networks.
* catalogue/: accelerators, networks, prices, published recipes and the planner's measured errors, as data with sources.
* ranges.py: 10th to 90th percentiles of a plan's figures; calibration.py: the user's own measurements.
* reliability/: checkpoints, goodput, cost, spot traces. advice/: warnings, checks of the recipe, explanations.
* result.py: the data of a plan, and its JSON.

For the engine there are ``submittable`` (why it cannot run a plan) and ``zero_buffers`` (DeepSpeed's buffer sizes).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scaletrain_cli.plan.catalogue.hardware import accelerator_names as accelerator_names
    from scaletrain_cli.plan.catalogue.hardware import find_accelerator as find_accelerator
    from scaletrain_cli.plan.memory.buffers import zero_buffers as zero_buffers
    from scaletrain_cli.plan.planning import make_plan as make_plan
    from scaletrain_cli.plan.result import RunPlan as RunPlan
    from scaletrain_cli.plan.search.engine_support import submittable as submittable
    from scaletrain_cli.plan.search.infeasible import PlanInfeasibleError as PlanInfeasibleError

# The module of each public name. A module is imported on first use, so that one part loads without the others.
_HOMES = {
    "PlanInfeasibleError": "search.infeasible",
    "RunPlan": "result",
    "accelerator_names": "catalogue.hardware",
    "find_accelerator": "catalogue.hardware",
    "make_plan": "planning",
    "submittable": "search.engine_support",
    "zero_buffers": "memory.buffers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
