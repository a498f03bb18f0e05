"""The screen of `resume`: why the run ended, the checkpoint, the steps lost, the new layout and schedule."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rich.table import Table

from scaletrain_cli.launch.branch import Branch
from scaletrain_cli.launch.replan import NewSchedule, Resize
from scaletrain_cli.launch.resume import ResumeReport
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.text import bytes_text, counted, seconds_text, whole_text
from scaletrain_cli.ui.console import escaped_text, show, stderr_console


def show_resume(run_id: str, report: ResumeReport, resize: Resize | None) -> None:
    """Print the report of a resume with ``resize`` to stderr."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("run", escaped_text(run_id, "bold"))
    table.add_row("state" if report.active else "ended", escaped_text(str(report.why_ended)))
    if report.finished_for(resize) or report.active:  # not resumed: no checkpoint to show
        show(stderr_console(), table)
        return
    table.add_row("resumes", escaped_text(_from(report)))
    if report.checkpoint or report.had_checkpoint:
        table.add_row("lost", escaped_text(_lost(report), "yellow" if report.steps_lost else ""))
    for problem in report.passed_over:
        table.add_row("damaged", escaped_text(problem, "yellow"))
    show(stderr_console(), table)


def show_resize(resize: Resize) -> None:
    """Print the old and the new layout side by side to stderr."""
    if not resize.changes:
        show(stderr_console(), escaped_text("these settings are already in effect; the layout is unchanged", "dim"))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
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
        "data parallel": str(layout.data_parallel),
        "tensor parallel": str(layout.tensor_parallel),
        "pipeline parallel": str(layout.pipeline_parallel),
        "sequence parallel": str(layout.sequence_parallel),
        "context parallel": str(layout.context_parallel),
        "expert parallel": str(layout.expert_parallel),
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


def _lost(report: ResumeReport) -> str:
    if not report.steps_lost:
        return "nothing"
    steps = counted(report.steps_lost, "step")
    return f"{steps}, up to step {report.last_step_logged}, will be repeated"
