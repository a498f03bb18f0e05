"""`scaletrain drill`: inject a fault into a small run, wait for its end, and compare it with an undisturbed run."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from scaletrain_cli import safe_files
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.backends.base import Backend
from scaletrain_cli.launch.cancel import wait_for_end
from scaletrain_cli.launch.preparation import prepare_data
from scaletrain_cli.launch.resume import resume
from scaletrain_cli.launch.run_status import RunStatus
from scaletrain_cli.launch.status import exit_code_of
from scaletrain_cli.launch.submit import create_run, submit_run
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.plugins import DRILLS, plugins
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import list_checkpoints
from scaletrain_cli.rundir.documents import json_number
from scaletrain_cli.rundir.journal import read_events, read_metrics
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.spec import RunSpec, override_spec
from scaletrain_cli.text import did_you_mean, either

VARIABLE = "SCALETRAIN_FAULT"

# The required reaction of a run: restart and lose the steps since its latest checkpoint; restart and lose none; restart
# from the checkpoint before the latest; continue unaffected; roll back in the same process; or stop, and continue
# after a resume.
Ending = Literal["restarted", "preempted", "older", "unharmed", "rolled-back", "stopped"]


@dataclass(frozen=True)
class DrillKind:
    """One kind of drill: the fault, and the required reaction of the run.

    ``fault`` is in the notation of engine/faults.py, with {rank} for the last rank, {step}, and {last} for three steps
    later; a rank injects it into itself, so that it works under every scheduler. ``overrides`` change the spec.
    ``in_save``: the step is the one after a save began, else the middle between two saves.
    """

    name: str
    summary: str
    fault: str
    ending: Ending
    overrides: tuple[str, ...] = ()
    in_save: bool = False

    def settings(self, *, step: int, world_size: int) -> list[str]:
        """Return overrides for the spec of a run with the fault before ``step``, in its first attempt."""
        fault = self.fault.format(rank=world_size - 1, step=step, last=step + 3)
        return [*self.overrides, f"env.{VARIABLE}={json.dumps(fault)}"] if fault else [*self.overrides]


UNDISTURBED = DrillKind("undisturbed", "nothing happens", "", "unharmed")
_HIT = "rank={rank} step={step} attempt=1"

KINDS: dict[str, DrillKind] = {
    kind.name: kind
    for kind in (
        DrillKind("exception", "a rank raises an exception", f"exception {_HIT}", "restarted"),
        DrillKind("sigterm", "a rank gets SIGTERM, as in a preemption", f"sigterm {_HIT}", "preempted"),
        DrillKind("sigkill", "a rank is killed", f"sigkill {_HIT}", "restarted"),
        DrillKind(
            "sigkill-in-save",
            "a rank is killed while every rank writes a checkpoint",
            f"slow-save seconds=1.5 attempt=1; sigkill {_HIT}",
            "restarted",
            in_save=True,
        ),
        DrillKind("sigkill-agent", "the node agent is killed", f"sigkill-agent {_HIT}", "restarted"),
        DrillKind("node", "the agent and all ranks of a node are killed at once", f"node {_HIT}", "restarted"),
        DrillKind("sigstop", "a rank is stopped (SIGSTOP), so that training hangs", f"sigstop {_HIT}", "restarted"),
        DrillKind(
            "slow-rank",
            "a rank takes 0.2 s longer for each step",
            "slow-rank rank={rank} step={step} seconds=0.2 attempt=1",
            "unharmed",
        ),
        DrillKind("disk-full", "the disk is full during a save", f"disk-full write=3 {_HIT}", "stopped"),
        DrillKind(
            "stale-attempt",
            "the attempt is superseded: its checkpoints are opened to a later attempt, and it continues",
            "stale-attempt rank=0 step={step} attempt=1",
            "stopped",
        ),
        DrillKind("nan", "a rank's gradient becomes NaN", f"nan {_HIT}", "stopped", ("guard.nan=stop",)),
        DrillKind(
            "spike",
            "the loss of four batches is multiplied by 20",
            "spike step={step}-{last} factor=20",
            "rolled-back",
            ("guard.spike.action=rollback",),
        ),
        *(
            DrillKind(
                kind,
                f"{what} in the latest checkpoint, and a rank is killed",
                f"{kind} rank=0 step={{step}} attempt=1",
                "older",
            )
            for kind, what in (
                ("truncate", "a file is truncated"),
                ("flip", "one bit is flipped"),
                ("delete", "a file is deleted"),
            )
        ),
    )
}


def drill_names() -> list[str]:
    """Return the names of every kind: those of this package, then those of others."""
    return [*KINDS, *plugins(DRILLS, KINDS)]


def drill_kind(name: str) -> DrillKind:
    """Return the kind of that name. Raises UsageError for an unknown name, PluginError for one that cannot be used."""
    if name in KINDS:
        return KINDS[name]
    if (plugin := plugins(DRILLS).get(name)) is None:
        known = drill_names()
        raise UsageError(f"unknown drill: {name}. {did_you_mean(name, known)}Available drills: {', '.join(known)}.")
    kind = plugin.load(DrillKind)
    if kind.name != name:
        raise plugin.invalid(f"has the name {kind.name}, not that of its entry point")
    if kind.ending not in get_args(Ending):
        raise plugin.invalid(f"has the ending {kind.ending}, which must be {either(get_args(Ending))}")
    with plugin.errors():
        kind.settings(step=1, world_size=1)
    return kind


# Relative tolerance of the final loss on GPUs, where the order of additions is not deterministic.
LOSS_TOLERANCE = 1e-4
# Relative tolerance of the final loss of a run that skipped batches, and so trained on other data.
ROLLED_BACK_TOLERANCE = 0.1
_BITWISE = Reason("launch.drill-match-bitwise")
_COMPARED = ("step", "loss", "grad_norm", "validation_loss")


@dataclass(frozen=True)
class Course:
    """The course of a run. ``seconds``: from its first step on, without data preparation and the first queue wait."""

    state: str
    why: str
    steps: tuple[Mapping[str, Any], ...]
    attempts: int
    ends: tuple[str, ...]
    exit_codes: tuple[int, ...]
    steps_lost: int
    passed_over: tuple[str, ...]
    rolled_back: bool
    seconds: float
    final_files: Mapping[str, str]
    resumed: bool = False


@dataclass(frozen=True)
class DrillResult:
    """One line of the table. ``failures``: how the run deviated from the required reaction; empty if it survived."""

    kind: str
    run_dir: str
    attempts: int
    steps_lost: int
    seconds_lost: float
    match: Reason  # how far the run agrees with the undisturbed one
    failures: tuple[Reason, ...]

    @property
    def survived(self) -> bool:
        """Return whether the run reacted as its kind requires."""
        return not self.failures

    @property
    def sameness(self) -> str:
        """The text of ``match``."""
        return str(self.match)

    @property
    def complaints(self) -> tuple[str, ...]:
        """The texts of ``failures``."""
        return tuple(map(str, self.failures))


def course_of(run: RunDir, status: RunStatus, *, resumed: bool = False) -> Course:
    """Return the course of a run from its directory."""
    events, attempts = read_events(run), read_attempts(run)
    times = {event["event"]: event["time"] for event in reversed(events)}  # of each kind the first
    last = events[-1]["time"] if events else 0.0
    committed = list_checkpoints(run.checkpoints)
    return Course(
        state=status.state,
        why=status.why,
        steps=tuple(read_metrics(run)),
        attempts=len(attempts),
        ends=tuple(attempt.reason or "unknown" for attempt in attempts),
        exit_codes=tuple(ExitCode.CRASHED if a.exit_code is None else a.exit_code for a in attempts),
        steps_lost=status.steps_lost_total,
        passed_over=tuple(name for event in events for name in event.get("passed_over") or ()),
        rolled_back="rolled-back" in times,
        seconds=times.get("finished", last) - times.get("started", times.get("submitted", last)),
        final_files={name: digest.sha256 for name, digest in committed[-1].files.items()} if committed else {},
        resumed=resumed,
    )


def compare_runs(kind: DrillKind, run_dir: str, faulted: Course, undisturbed: Course, *, exact: bool) -> DrillResult:
    """Compare a run with the undisturbed one; ``exact``: results must be bitwise equal, as on CPUs."""
    match, differs = _compare(kind, faulted.steps, undisturbed.steps, exact)
    if match.code == _BITWISE.code and faulted.final_files == undisturbed.final_files:
        match = Reason("launch.drill-match-bitwise-with-files")
    failures = _failures(kind, faulted)
    if faulted.state == "finished" and differs:
        failures.append(Reason("launch.drill-differs", {"difference": match}))
    return DrillResult(
        kind=kind.name,
        run_dir=run_dir,
        attempts=faulted.attempts,
        steps_lost=faulted.steps_lost,
        seconds_lost=faulted.seconds - undisturbed.seconds,
        match=match,
        failures=tuple(failures),
    )


def _failures(kind: DrillKind, faulted: Course) -> list[Reason]:
    """Return the deviations from the reaction that the kind requires."""
    deviations = []
    if faulted.state != "finished":
        deviations.append(Reason("launch.drill-not-finished", {"state": faulted.state, "why": faulted.why}))
    expected = 1 if kind.ending in ("unharmed", "rolled-back") else 2
    if faulted.attempts != expected:
        params = {"attempts": faulted.attempts, "expected": expected, "ends": list(faulted.ends) or ["none"]}
        deviations.append(Reason("launch.drill-attempts", params))
    if kind.ending == "preempted" and faulted.steps_lost:
        deviations.append(Reason("launch.drill-steps-lost", {"steps": faulted.steps_lost}))
    if kind.ending == "older" and not faulted.passed_over:
        deviations.append(Reason("launch.drill-damage-not-reported"))
    if kind.ending == "rolled-back" and not faulted.rolled_back:
        deviations.append(Reason("launch.drill-not-rolled-back"))
    if faulted.resumed and kind.ending != "stopped":
        deviations.append(Reason("launch.drill-resumed"))
    if kind.ending == "stopped" and faulted.resumed and faulted.exit_codes[0] != ExitCode.DO_NOT_REQUEUE:
        params = {"exit_code": faulted.exit_codes[0], "expected": int(ExitCode.DO_NOT_REQUEUE)}
        deviations.append(Reason("launch.drill-exit-code", params))
    return deviations


def _compare(
    kind: DrillKind, faulted: Sequence[Mapping[str, Any]], undisturbed: Sequence[Mapping[str, Any]], exact: bool
) -> tuple[Reason, bool]:
    """Return how far the two runs agree, and whether they differ too much."""
    if not faulted or not undisturbed:
        return Reason("launch.drill-match-no-steps"), True
    ours, theirs = (
        [[line.get(key) for key in ("step", *_COMPARED)] for line in lines] for lines in (faulted, undisturbed)
    )
    if ours == theirs:
        return _BITWISE, False
    at = next((mine[0] for mine, other in zip(ours, theirs, strict=False) if mine != other), None)
    final, reference = faulted[-1].get("loss", math.nan), undisturbed[-1].get("loss", math.nan)
    apart = abs(final - reference) / abs(reference) if reference else math.inf
    params = {"step": at, "loss_difference": apart, "steps": len(ours), "expected": len(theirs)}
    match = Reason("launch.drill-match-number-of-steps" if at is None else "launch.drill-match-until-step", params)
    if not math.isfinite(apart):  # which is no JSON number
        match = Reason(
            "launch.drill-match-not-finite", {"loss": json_number(final), "expected": json_number(reference)}
        )
    if kind.ending == "rolled-back":
        return match, not final <= reference * (1 + ROLLED_BACK_TOLERANCE)
    return match, exact or not apart <= LOSS_TOLERANCE or faulted[-1]["step"] != undisturbed[-1]["step"]


FEWEST_STEPS = 12


@dataclass(frozen=True)
class DrillSetup:
    """The settings that all drills of one call share: the folder of their runs, the spec, the plan and the back end."""

    folder: Path
    spec: RunSpec
    plan: RunPlan
    scheduler: Backend
    timeout_seconds: float

    def fault_step(self, kind: DrillKind) -> int:
        """Return the step of the fault: two checkpoints exist or, with ``in_save``, the second is being written."""
        every = checkpoint_interval(self.spec.total_steps)
        return 2 * every + 1 + (0 if kind.in_save else every // 2)


def checkpoint_interval(steps: int) -> int:
    """Return the number of steps between checkpoints in a drill."""
    return steps // 4


def drill_spec(spec: RunSpec, steps: int) -> RunSpec:
    """Return the spec cut down to ``steps``, with four checkpoints and one validation. Raises SpecError."""
    if steps < FEWEST_STEPS:
        raise UsageError(Reason("runs.too-few-steps", {"steps": steps, "least": FEWEST_STEPS}))
    schedule, every = spec.training.schedule, checkpoint_interval(steps)
    settings = {
        "name": "drill",
        "training.tokens": "null",
        "training.epochs": "null",
        "training.steps": steps,
        "training.schedule.warmup_steps": min(schedule.warmup_steps, every),
        "training.early_stopping": "{patience: 0}",
        "evaluation.every": steps if spec.evaluation.every else 0,
        "checkpoint.every": every,
        "checkpoint.keep": 3,
        "checkpoint.dir": "auto",
        "restarts": "{preemption: unlimited, node: 10, crash: 3, oom: 0}",
        "tracking": "[]",
        "evaluation.tasks": "[]",  # a drill trains one run at a time, and no job beside it
        "checkpoint.keep_best": "null",
        "checkpoint.mirror": "{to: null}",
    }
    if spec.evaluation.every:
        settings["evaluation.batches"] = 1
    if schedule.name == "wsd":
        settings["training.schedule.cooldown_steps"] = min(schedule.cooldown_steps, every)
    return override_spec(spec, [f"{key}={value}" for key, value in settings.items()], file="the drills' spec")


def make_jobs_folder(of: str = "drills") -> Path:
    """Return the new folder ``<of>-<time>`` below the runs root. Raises UsageError where it cannot be created."""
    root = runs_root()
    folder, datasets = root / f"{of}-{time.strftime('%Y%m%d-%H%M%S')}", root / "datasets"
    try:
        safe_files.make_folder(root, mode=0o777)
        safe_files.make_folder(folder, exist_ok=False)
        safe_files.make_shared_folder(datasets)
        (folder / "datasets").symlink_to(datasets)  # runs expect datasets beside their folder; all drills share one
    except OSError as error:
        params = {"folder": str(root), "said": error.strerror or str(error)}
        raise UsageError(Reason("runs.root-not-writable", params)) from error
    return folder


def run_drill(setup: DrillSetup, kind: DrillKind, on_status: Callable[[RunStatus], None]) -> tuple[RunDir, Course]:
    """Run one drill to its end and return its course. ``on_status`` gets every status; a late run is cancelled."""
    settings = kind.settings(step=setup.fault_step(kind), world_size=setup.spec.world_size)
    spec = override_spec(setup.spec, settings, file="the drills' spec")
    data = prepare_data(spec, root=setup.folder)
    made = create_run(spec, setup.plan, kind.name, root=setup.folder)
    data.record(made.run)
    submit_run(made.run, made.record, setup.scheduler, preparation_tasks=data.tasks)
    status = wait_for_end(made.run, setup.scheduler, setup.timeout_seconds, on_status)
    stopped = status.state == "failed" and exit_code_of(made.run, status) == ExitCode.DO_NOT_REQUEUE
    resumed = stopped and kind.ending == "stopped"
    if resumed:
        resume(made.run, scheduler=setup.scheduler)
        status = wait_for_end(made.run, setup.scheduler, setup.timeout_seconds, on_status)
    return made.run, course_of(made.run, status, resumed=resumed)
