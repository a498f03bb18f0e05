"""Data for the plots of a plan: the timeline of the pipeline, and the run on more and fewer nodes."""

from __future__ import annotations

from dataclasses import dataclass

from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.plan.search.sizing import ScalingPoint, scaling_curve
from scaletrain_cli.plan.speed.pipeline import Timeline, timeline
from scaletrain_cli.spec import RunSpec

_HALVINGS, _DOUBLINGS = 3, 2  # multiples of the run's number of nodes


@dataclass(frozen=True)
class Pictures:
    """``pipeline`` is None without pipeline stages; ``scaling`` is empty for a run that does not fit."""

    pipeline: Timeline | None
    scaling: tuple[ScalingPoint, ...]


def pictures(spec: RunSpec, plan: RunPlan) -> Pictures:
    """Return the data of the plots; the scaling curve plans the run for each number of nodes."""
    if not plan.memory.fits:
        return Pictures(None, ())
    pipeline = None
    if plan.layout.pipeline_parallel > 1 and plan.time.by_stage:
        pipeline = timeline(stage_times(plan), plan.layout.gradient_accumulation_steps, plan.layout.virtual_pipeline)
    nodes = spec.cluster.nodes
    counts = {nodes >> power for power in range(_HALVINGS + 1)} | {nodes << power for power in range(_DOUBLINGS + 1)}
    return Pictures(pipeline, scaling_curve(spec, sorted(count for count in counts if count)))


def stage_times(plan: RunPlan) -> list[tuple[float, float]]:
    """Return (forward, backward) seconds of a micro-batch on each pipeline stage; the last known stage is repeated."""
    known = [(stage.forward, stage.backward) for stage in plan.time.by_stage]
    return known + known[-1:] * (plan.layout.pipeline_parallel - len(known))
