"""The errors of a run that cannot be laid out, in numbers. Decides nothing and computes no way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scaletrain_cli.errors import InfeasibleError, Problem
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.result import SCHEMA, RunPlan
from scaletrain_cli.plan.search.layouts import describe
from scaletrain_cli.spec import RunSpec


class PlanInfeasibleError(InfeasibleError):
    """No layout divides or fits (exit 3). ``plan`` is the smallest one sized, with ``fits`` false; None if none was."""

    def __init__(self, message: str, problems: tuple[Problem, ...] = (), plan: RunPlan | None = None) -> None:
        super().__init__(message, problems)
        self.plan = plan


def refusal(error: InfeasibleError) -> dict[str, Any]:
    """The JSON object of a run without any plan: ``feasible`` and ``problems`` as a plan's has them."""
    return {"schema": SCHEMA, "feasible": False, "problems": [problem.to_json() for problem in error.problems]}


def does_not_divide(spec: RunSpec, problems: list[Problem]) -> PlanInfeasibleError:
    """The error for degrees and batches that do not divide."""
    return PlanInfeasibleError(f"{_shown(spec.name)} cannot be laid out on {_gpus(spec)}", tuple(problems))


def does_not_fit(
    spec: RunSpec, device: Accelerator, plan: RunPlan, ways_out: Sequence[Problem] = ()
) -> PlanInfeasibleError:
    """The error for a smallest layout that is too large: its parts against the device, and the ways out."""
    memory, layout = plan.memory, plan.layout
    parts = (
        ("weights", memory.parameters),
        ("gradients", memory.gradients),
        ("optimizer states", memory.optimizer_states),
        ("optimizer step", memory.step_temporaries),
        ("activations", memory.activations),
        ("logits and loss", memory.logits),
        ("communication buffers", memory.communication_buffers),
        ("framework", memory.framework),
        ("fragmentation", memory.fragmentation),
    )
    listed = " + ".join(f"{name} {_gb(size)}" for name, size in parts if size)
    problems = [
        Problem("needed", "memory", f"{listed} = {_gb(memory.peak)}; {device.name} has {_gb(memory.capacity)}."),
        Problem("smallest", "layout", f"{describe(layout)}."),
        *ways_out,
    ]
    return PlanInfeasibleError(
        f"{_shown(spec.name)} does not fit on {_gpus(spec)}: the smallest layout needs {_gb(memory.peak)} per rank "
        f"and a rank has {_gb(memory.capacity)}",
        tuple(problems),
        plan,
    )


def _gpus(spec: RunSpec) -> str:
    name = spec.cluster.gpu if isinstance(spec.cluster.gpu, str) else spec.cluster.gpu.name
    return f"{spec.cluster.nodes} x {spec.cluster.gpus_per_node} {_shown(name)}"


def _shown(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii")[:80]


def _gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"
