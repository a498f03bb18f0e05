"""The summary before a submission or a resume is confirmed: the job, its cost, its expected start, and what changed."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.text import Text

from scaletrain_cli.launch.backends.base import PreflightResult, Start, SubmissionSummary
from scaletrain_cli.launch.branch import Branch
from scaletrain_cli.launch.node.inspection import NodeFacts
from scaletrain_cli.launch.replan import NewSchedule, Resize
from scaletrain_cli.launch.resume import ResumeReport
from scaletrain_cli.launch.sweep import Point
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.spec import ClusterSpec, RunSpec
from scaletrain_cli.text import bytes_text, counted, dollars_text, seconds_text, whole_text
from scaletrain_cli.ui.console import escaped_text, grid, plain, say, show, stderr_console, titled_table, warn
from scaletrain_cli.ui.plan import AXES, headline, sanity_view, summary_rows, warning_rows
from scaletrain_cli.ui.tables import Row, labelled


def show_probe(nodes: Sequence[NodeFacts]) -> None:
    """Print the minimum over the nodes of each resource, and the package versions."""
    least = min(nodes, key=lambda node: node.free_bytes)
    names = ", ".join(node.hostname for node in nodes[:4]) + (", ..." if len(nodes) > 4 else "")
    resources = [
        f"{min(node.gpus for node in nodes)} GPUs",
        f"{min(node.cores for node in nodes)} cores",
        f"{bytes_text(min(node.memory_bytes for node in nodes))} of memory",
    ]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(least.packages.items()))
    say(
        f"probed {counted(len(nodes), 'node')} ({names}): at least {', '.join(resources)}; {versions}; "
        f"{bytes_text(least.free_bytes)} free in the runs root, which they share"
    )


_NOW_SECONDS = 90.0  # schedulers run about every 30 s
_MOST_LINES, _LONGEST_LINE = 20, 100


def show_before_submission(prospect: SubmissionSummary, run_id: str | None) -> None:
    """Print the plan summary and the job to stderr."""
    spec, plan = prospect.spec, prospect.plan
    rows = [*summary_rows(spec, plan), *job_rows(prospect, run_id), *warning_rows(plan)]
    show(stderr_console(), Group(headline(spec, plan), labelled(rows)))
    if prospect.sizes:
        from scaletrain_cli.ui.plan_answer import show_sizes

        show_sizes(prospect.sizes, console=stderr_console())


def show_before_resuming(prospect: SubmissionSummary, changed: Sequence[str] | None) -> None:
    """Print the job and its differences from the last submission to stderr."""
    show(stderr_console(), labelled([*job_rows(prospect), *change_rows(changed)]))


def show_changes(changed: Sequence[str] | None) -> None:
    """Print the differences from the last submission to stderr."""
    if changed is not None:
        show(stderr_console(), labelled(change_rows(changed)))


def show_outlook(outlook: PreflightResult) -> None:
    """Print the warnings about a job and its expected start to stderr."""
    for note in outlook.notes:
        warn(note)
    show(stderr_console(), labelled([("Start", start_view(outlook.start))]))


def job_rows(prospect: SubmissionSummary, run_id: str | None = None) -> list[Row]:
    """Return the rows Job, Code, Cost and Start; no cost of this machine if no price is known."""
    cluster = prospect.spec.cluster
    sent = f"submitted as {cluster.traits.rendered_as}; --dry-run prints it"
    named = f"{run_id}: " if run_id is not None else ""
    has_cost = prospect.usd_per_hour is not None or not cluster.traits.runs_here
    return [
        ("Job", Group(escaped_text(f"{named}{size_text(cluster)} {cluster.place}"), escaped_text(sent, "dim"))),
        *([("Code", escaped_text(prospect.code.shown))] if prospect.code is not None else []),
        *([("Cost", escaped_text(cost_text(prospect)))] if has_cost else []),
        ("Start", start_view(prospect.start)),
    ]


def sweep_rows(points: Sequence[tuple[RunSpec, RunPlan]], start: Start, at_once: int) -> list[Row]:
    """Return the rows Jobs, Cost, Start and Recipe (warnings) of a sweep; ``at_once`` of its runs are concurrent."""
    cluster = points[0][0].cluster
    sizes = list(dict.fromkeys(size_text(spec.cluster) for spec, _ in points))
    size = f"{sizes[0]} each" if len(sizes) == 1 else f"from {sizes[0]} to {sizes[-1]}"
    pace = "all at once" if at_once == len(points) else f"{at_once} at a time"
    first = "" if at_once == len(points) else " (first runs; the others start as these end)"
    unusual = [*dict.fromkeys(check for _, plan in points for check in plan.sanity if check.verdict == "warning")]
    return [
        ("Jobs", escaped_text(f"{len(points)} runs, {pace}, {size} {cluster.place}")),
        ("Cost", escaped_text(_cost_of_all(points, start, at_once))),
        ("Start", Text.assemble(start_view(start), first)),
        *([("Recipe", sanity_view(unusual))] if unusual else []),
    ]


def _cost_of_all(points: Sequence[tuple[RunSpec, RunPlan]], start: Start, at_once: int) -> str:
    prospects = [SubmissionSummary(spec, plan, start) for spec, plan in points]
    hourly = sorted((one.usd_per_hour for one in prospects if one.usd_per_hour is not None), reverse=True)
    whole = [one.expected_usd for one in prospects if one.expected_usd is not None]
    if len(hourly) < len(points):
        return next(str(plan.cost.price_source) for _, plan in points if plan.cost.price_per_gpu_hour is None)
    rate = f"{dollars_text(sum(hourly[:at_once]))} per hour"
    if len(whole) < len(points):
        return f"some runs never finish: interruptions arrive faster than a restart takes; {rate}"
    return f"{dollars_text(sum(whole))} expected in total, {rate}"


def change_rows(changed: Sequence[str] | None) -> list[Row]:
    """Return the row of differences from the last submission; no row if there was none."""
    if changed is None:
        return []
    if not changed:
        return [("Changed", escaped_text("none (identical to the last submission)"))]
    lines = [escaped_text("differences from the last submission:")]
    for line in changed[:_MOST_LINES]:
        short = line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}..."
        lines.append(escaped_text(short, "green" if line.startswith("+") else "red"))
    if len(changed) > _MOST_LINES:
        lines.append(
            escaped_text(f"{counted(len(changed) - _MOST_LINES, 'more line')}; --dry-run prints the whole job", "dim")
        )
    return [("Changed", Group(*lines))]


def size_text(cluster: ClusterSpec) -> str:
    """Return ``4 nodes × 8 GPUs = 32``."""
    device = "CPU process" if cluster.gpu == "cpu" else "GPU"
    plural = ("es" if device == "CPU process" else "s") if cluster.gpus_per_node != 1 else ""
    per_node = f"{cluster.gpus_per_node} {device}{plural}"
    spare = f", and {counted(cluster.spare_nodes, 'spare node')}" if cluster.spare_nodes else ""
    if (given := cluster.node_range) is not None:
        return f"{given.min} to {given.max} nodes × {per_node}, now planned on {whole_text(cluster.nodes)}{spare}"
    if cluster.nodes == 1:
        return f"1 node with {per_node}{spare}"
    return f"{cluster.nodes} nodes × {per_node} = {whole_text(cluster.nodes * cluster.gpus_per_node)}{spare}"


def cost_text(prospect: SubmissionSummary) -> str:
    """Return the expected cost of the remaining steps, and the cost per hour."""
    cost, hourly = prospect.plan.cost, prospect.usd_per_hour
    if hourly is None or cost.price_per_gpu_hour is None:
        return str(cost.price_source)
    price = f"{dollars_text(cost.price_per_gpu_hour)} per GPU-hour: {cost.price_source}"
    rates = f"{dollars_text(hourly)} per hour ({price})"
    if prospect.expected_usd is None:
        return f"never finishes: interruptions arrive faster than a restart takes; {rates}"
    steps = f" for the remaining {counted(prospect.steps_left, 'step')}" if prospect.step else " for the whole run"
    return f"{dollars_text(prospect.expected_usd)} expected{steps}, {rates}"


def start_view(start: Start) -> Text:
    """Return the expected start and its source: ``now``, ``today 14:30, in 2 h`` or ``unknown``."""
    when = start_text(start, time.time())
    return Text.assemble((when, "bold" if start.at is not None else "bold yellow"), f": {plain(start.why)}")


def start_text(start: Start, now: float) -> str:
    """Return the expected start: ``now``, ``today 14:30, in 2 h`` or ``unknown``."""
    if start.at is None:
        return "unknown"
    if start.at - now < _NOW_SECONDS:
        return "now"
    days = _day(start.at) - _day(now)
    day = {0: "today", 1: "tomorrow"}.get(days) or time.strftime("%Y-%m-%d", time.localtime(start.at))
    minutes = round((start.at - now) / 60) * 60.0
    return f"{day} {time.strftime('%H:%M', time.localtime(start.at))}, in {seconds_text(minutes)}"


def _day(moment: float) -> int:
    return int((moment + (time.localtime(moment).tm_gmtoff or 0)) // 86400)


def show_points(points: Sequence[Point], start: Start, at_once: int) -> None:
    """Print the points of a sweep to stderr before confirmation. ``start`` is that of the first runs."""
    table = titled_table(("point", "step", "to train", "cost"), "wrrr")
    for point in points:
        time, cost = point.plan.time, point.plan.cost.expected_usd
        price = dollars_text(cost) if cost is not None else ""
        name = escaped_text(", ".join(point.overrides))
        table.add_row(name, seconds_text(time.step), seconds_text(time.to_train), price)
    show(stderr_console(), table)
    show(stderr_console(), labelled(sweep_rows([(point.spec, point.plan) for point in points], start, at_once)))


def show_resume(run_id: str, report: ResumeReport, resize: Resize | None) -> None:
    """Print the report of a resume with ``resize`` to stderr."""
    table = grid("lw", first_style="dim")
    table.add_row("run", escaped_text(run_id, "bold"))
    table.add_row("state" if report.active else "ended", escaped_text(str(report.why_ended)))
    if not (report.finished_for(resize) or report.active):  # else not resumed: no checkpoint to show
        table.add_row("resumes", escaped_text(_from(report)))
        if report.checkpoint or report.had_checkpoint or report.steps_lost:
            steps = counted(report.steps_lost, "step")
            lost = (
                f"{steps}, up to step {report.last_step_logged}, will be repeated" if report.steps_lost else "nothing"
            )
            table.add_row("lost", escaped_text(lost, "yellow" if report.steps_lost else ""))
        for problem in report.passed_over:
            table.add_row("damaged", escaped_text(problem, "yellow"))
    show(stderr_console(), table)


def show_resize(resize: Resize) -> None:
    """Print the old and the new layout side by side to stderr."""
    if not resize.changes:
        show(stderr_console(), escaped_text("these settings are already in effect; the layout is unchanged", "dim"))
        return
    table = grid("lrr", first_style="dim")
    table.add_row("", escaped_text("was", "dim"), escaped_text("now", "dim"))
    old, new = _rows(resize.before), _rows(resize.after)
    for name, was in old.items():
        if name in _ALWAYS_SHOWN or was != new[name]:
            table.add_row(name, escaped_text(was), escaped_text(new[name], "bold" if was != new[name] else ""))
    show(stderr_console(), table)
    for key, (was, now) in resize.changes.items():
        if not key.startswith(("cluster.nodes", "cluster.gpus_per_node")):
            show(stderr_console(), escaped_text(f"{key} was {was}, now {now}"))
    for line in schedule_lines(resize.schedule):
        show(stderr_console(), escaped_text(line))


def schedule_lines(schedule: NewSchedule | None) -> list[str]:
    """Return what another length or learning-rate schedule means, as lines of text."""
    if schedule is None or schedule.learning_rate is None or schedule.step is None:
        return []
    step, rate = schedule.step, schedule.learning_rate
    lines = [f"learning rate of step {step + 1:,} was {_rate_text(rate.was)}, now {_rate_text(rate.now)}"]
    if step and schedule.same_past:
        lines.append(f"the learning rates up to step {step:,} are those of a run with the new schedule from the start")
    elif step:
        lines.append(
            f"the learning rates up to step {step:,} differ from those of a run with the new schedule from the start, "
            "so the result differs from its result"
        )
    return lines


def _rate_text(rate: float | None) -> str:
    return "none, after the last step" if rate is None else f"{rate:.4g}"


def resume_json(run: RunDir, report: ResumeReport, resize: Resize | None) -> dict[str, Any]:
    """Return the same as a JSON object."""
    return {
        "run_id": run.run_id,
        "run_dir": str(run.path),
        "why_ended": str(report.why_ended),
        **report.why_ended.to_document(),
        "checkpoint_step": report.checkpoint.step if report.checkpoint else None,
        "checkpoint": str(report.checkpoint.path) if report.checkpoint else None,
        "checkpoints_unseen": report.unseen,
        "steps_lost": report.steps_lost,
        "passed_over": report.passed_over,
        "resize": None if resize is None else _resize_json(resize),
    }


def branch_json(branch: Branch, resize: Resize) -> dict[str, Any]:
    """Return where a new run begins, and what differs from the other run, as a JSON object."""
    changed = _resize_json(resize) if resize.changes else None
    return {"branch_of": asdict(branch.point), "passed_over": list(branch.passed_over), "resize": changed}


_ALWAYS_SHOWN = {"GPUs", "data parallel", "micro-batch", "accumulation", "global batch", "step", "memory per GPU"}


def _rows(record: RunRecord) -> dict[str, str]:
    cluster, plan = record.spec.cluster, record.plan
    layout, memory = plan.layout, plan.memory
    return {
        "GPUs": f"{cluster.nodes} x {cluster.gpus_per_node} = {whole_text(layout.world_size)}",
        **{f"{name} parallel": str(getattr(layout, field)) for name, field in AXES.items() if name != "virtual"},
        "ZeRO stage": str(layout.zero_stage),
        "activation checkpointing": layout.activation_checkpointing,
        "offload": layout.offload,
        "micro-batch": str(layout.micro_batch_size),
        "accumulation": str(layout.gradient_accumulation_steps),
        "global batch": whole_text(layout.global_batch_size),
        "step": seconds_text(plan.time.step),
        "memory per GPU": f"{bytes_text(memory.peak)} of {bytes_text(memory.capacity)}",
    }


def _resize_json(resize: Resize) -> dict[str, Any]:
    records = {"before": resize.before, "after": resize.after}
    schedule = resize.schedule
    return {
        "schedule": None if schedule is None else schedule.to_json(),
        "changes": {
            key: {"was": json.loads(was), "now": json.loads(now)} for key, (was, now) in resize.changes.items()
        },
    } | {
        name: {
            "revision": record.revision,
            "layout": asdict(record.plan.layout),
            "step_seconds": record.plan.time.step,
            "memory_peak_bytes": record.plan.memory.peak,
            "memory_capacity_bytes": record.plan.memory.capacity,
        }
        for name, record in records.items()
    }


def _from(report: ResumeReport) -> str:
    checkpoint = report.checkpoint
    if report.unseen:
        reached = f"; its pods last printed step {report.job.progress['step']:.0f}" if report.job.progress else ""
        return f"from the latest valid checkpoint on the pods' volume, which is not visible here{reached}"
    if checkpoint is None:
        return f"from the start; there is no {'valid ' if report.had_checkpoint else ''}checkpoint"
    return f"after step {checkpoint.step}, from {checkpoint.path} ({bytes_text(checkpoint.size_bytes)}, verified)"
