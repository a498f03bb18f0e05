"""Plan a run for the engine on every number of nodes of its range, and take the size that the scheduler gives."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.errors import InfeasibleError, UsageError
from scaletrain_cli.launch.submit import plan_for_engine, submit_lock
from scaletrain_cli.plan.reliability.node_sizes import NodeSize
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, add_revision, read_record, read_size_plans
from scaletrain_cli.spec import RunSpec


@dataclass(frozen=True)
class PlannedRun:
    """The run on its largest usable size, with its plan; ``sizes``: every size of the range, empty without a range."""

    spec: RunSpec
    plan: RunPlan
    sizes: tuple[NodeSize, ...] = ()

    @property
    def size_plans(self) -> Mapping[int, RunPlan]:
        """Return the plans of the sizes on which an attempt may start, by number of nodes, fewest first.

        Empty if there is one size only: the job is then the same as without a range.
        """
        from scaletrain_cli.plan.reliability.node_sizes import usable_plans

        found = usable_plans(self.sizes)
        return found if len(found) > 1 else {}


def plan_run(spec: RunSpec, file: Path | str) -> PlannedRun:
    """Return the plans of a run for the engine. Raises InfeasibleError if it cannot run on the fewest nodes."""
    if spec.cluster.node_range is None:
        return PlannedRun(spec, plan_for_engine(spec, file))
    from scaletrain_cli.launch.calibration import read_measurements
    from scaletrain_cli.plan import submittable
    from scaletrain_cli.plan.planning import plan_or_raise
    from scaletrain_cli.plan.reliability.node_sizes import at_size, least_size_problem, plan_sizes, usable_sizes

    measurements = read_measurements(spec)

    def planned(one: RunSpec) -> RunPlan:
        plan = plan_or_raise(one, measurements, compared=False)
        if broken := submittable(one, plan):
            problems = tuple(rule.problem(one.where(rule.key)) for rule in broken)
            raise InfeasibleError(Reason("runs.not-runnable", {"file": str(file)}), problems)
        return plan

    sizes = plan_sizes(spec, planned)
    if (problem := least_size_problem(spec, sizes)) is not None:
        raise InfeasibleError(Reason("runs.not-runnable", {"file": str(file)}), (problem,))
    largest = at_size(spec, usable_sizes(sizes)[-1])
    return PlannedRun(largest, plan_for_engine(largest, file), sizes)


def take_size(run: RunDir, record: RunRecord, nodes: int, job_id: str) -> RunRecord:
    """Return the record with the plan for ``nodes`` nodes, one of ``record.sizes``; written as a revision if it is new.

    Raises UsageError if the run was changed by someone else meanwhile.
    """
    if record.spec.cluster.nodes == nodes:
        return record
    from scaletrain_cli.plan.reliability.node_sizes import at_size

    plan = read_size_plans(run, record)[nodes]
    with submit_lock(run):
        if read_record(run).revision != record.revision:
            raise UsageError(Reason("launch.resume-resized-meanwhile", {"run": run.run_id}))
        before = record.spec.cluster.nodes
        revised = add_revision(run, record, at_size(record.spec, nodes), plan, ())
        why = Reason("launch.resized", {"job": job_id, "nodes": nodes, "before": before, "sizes": list(record.sizes)})
        record_event(
            run,
            "resized",
            nodes=nodes,
            before=before,
            revision=revised.revision,
            job_id=job_id,
            why=str(why),
            **why.to_document(),
        )
    return revised
