"""Carrying drills out: the spec made small, submitted as any run is, waited for, resumed where that is part of it.

Knows schedulers only through launch/; what to think of the outcome is in verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli import safe_files
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.launch.drills.kinds import DrillKind
from scaletrain_cli.launch.drills.verdict import Course, course_of
from scaletrain_cli.launch.resumption import resume
from scaletrain_cli.launch.scheduler import Scheduler
from scaletrain_cli.launch.status import RunStatus, exit_code_of
from scaletrain_cli.launch.submission import create_run, submit_run
from scaletrain_cli.launch.waiting import wait_for_end
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.spec import RunSpec, override_spec

FEWEST_STEPS = 12


@dataclass(frozen=True)
class Range:
    """Where the drills of one call take place: every run of it in one folder, with one plan."""

    folder: Path
    spec: RunSpec
    plan: RunPlan
    scheduler: Scheduler
    timeout_seconds: float

    def strike(self, kind: DrillKind) -> int:
        """The step that is hit: two checkpoints are there or, ``in_save``, the second is being written."""
        every = checkpoint_interval(self.spec.total_steps)
        return 2 * every + 1 + (0 if kind.in_save else every // 2)


def checkpoint_interval(steps: int) -> int:
    """Steps between checkpoints in a drill."""
    return steps // 4


def drill_spec(spec: RunSpec, steps: int) -> RunSpec:
    """The spec cut down to ``steps``, with four checkpoints and one validation. Raises SpecError where that is none."""
    if steps < FEWEST_STEPS:
        raise UsageError(f"--steps {steps}: a drill needs at least {FEWEST_STEPS}, for four checkpoints.")
    schedule, every = spec.training.schedule, checkpoint_interval(steps)
    settings = {
        "name": "drill",
        "training.tokens": "null",
        "training.steps": steps,
        "training.schedule.warmup_steps": min(schedule.warmup_steps, every),
        "training.early_stopping.patience": 0,
        "evaluation.every": steps if spec.evaluation.every else 0,
        "checkpoint.every": every,
        "checkpoint.keep": 3,
        "checkpoint.dir": "auto",
        "restarts": "{preemption: unlimited, node: 10, crash: 3, oom: 0}",
        "tracking.log_every": 1,
        "tracking.wandb.mode": "disabled",
    }
    if spec.evaluation.every:
        settings["evaluation.batches"] = 1
    if schedule.name == "wsd":
        settings["training.schedule.cooldown_steps"] = min(schedule.cooldown_steps, every)
    return override_spec(spec, [f"{key}={value}" for key, value in settings.items()], file="the drills' spec")


def make_folder() -> Path:
    """``drills-<time>`` below the runs root. Raises UsageError where it cannot be made."""
    root = runs_root()
    folder, datasets = root / f"drills-{time.strftime('%Y%m%d-%H%M%S')}", root / "datasets"
    try:
        safe_files.make_folder(root, mode=0o777)
        safe_files.make_folder(folder, exist_ok=False)
        safe_files.make_shared_folder(datasets)
        (folder / "datasets").symlink_to(datasets)  # runs look beside themselves; one corpus does for all of them
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror or error}. $SCALETRAIN_RUNS moves it.") from error
    return folder


def run_drill(place: Range, kind: DrillKind, on_look: Callable[[RunStatus], None]) -> tuple[RunDir, Course]:
    """One run from its submission to its end; ``on_look`` is told of every look at it. Cancelled when out of time."""
    settings = kind.settings(step=place.strike(kind), world_size=place.spec.world_size)
    spec = override_spec(place.spec, settings, file="the drills' spec")
    made = create_run(spec, place.plan, kind.name, root=place.folder)
    submit_run(made.run, made.record, place.scheduler)
    status = wait_for_end(made.run, place.scheduler, place.timeout_seconds, on_look)
    stopped = status.state == "failed" and exit_code_of(made.run, status) == ExitCode.DO_NOT_REQUEUE
    by_hand = stopped and kind.ending == "stopped"
    if by_hand:
        resume(made.run, scheduler=place.scheduler)
        status = wait_for_end(made.run, place.scheduler, place.timeout_seconds, on_look)
    return made.run, course_of(made.run, status, resumed_by_hand=by_hand)
