"""Did the run survive, and is it the run that it would have been? Judged by run directories alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.drills.kinds import DrillKind
from scaletrain_cli.launch.status import RunStatus
from scaletrain_cli.rundir.checkpoints import list_checkpoints
from scaletrain_cli.rundir.journal import read_events, read_metrics
from scaletrain_cli.rundir.paths import RunDir

# Of the final loss, where the arithmetic itself is not the same twice: GPUs add in no fixed order.
LOSS_TOLERANCE = 1e-4
# A run that leaves batches out is another run; it must have learnt as much.
ROLLED_BACK_TOLERANCE = 0.1
_COMPARED = ("step", "loss", "grad_norm", "validation_loss")


@dataclass(frozen=True)
class Course:
    """What a run left behind. ``seconds`` from its first step on, so without preparing data and the first queue."""

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
    resumed_by_hand: bool = False


@dataclass(frozen=True)
class Verdict:
    """One line of the table. ``complaints`` is empty when it survived as it must."""

    kind: str
    run_dir: str
    attempts: int
    steps_lost: int
    seconds_lost: float
    sameness: str
    complaints: tuple[str, ...]

    @property
    def survived(self) -> bool:
        return not self.complaints


def course_of(run: RunDir, status: RunStatus, *, resumed_by_hand: bool = False) -> Course:
    """Read what happened to a run."""
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
        resumed_by_hand=resumed_by_hand,
    )


def judge(kind: DrillKind, run_dir: str, hurt: Course, undisturbed: Course, *, exact: bool) -> Verdict:
    """Hold a run against the undisturbed one; ``exact`` where the same steps give the same bits, as on CPUs."""
    sameness, differs = _compare(kind, hurt.steps, undisturbed.steps, exact)
    if not differs and hurt.final_files == undisturbed.final_files:
        sameness = f"{sameness}, checkpoint files too"
    complaints = list(_behaviour(kind, hurt))
    if hurt.state == "finished" and differs:
        complaints.append(f"it is another run: {sameness}")
    return Verdict(
        kind=kind.name,
        run_dir=run_dir,
        attempts=hurt.attempts,
        steps_lost=hurt.steps_lost,
        seconds_lost=hurt.seconds - undisturbed.seconds,
        sameness=sameness,
        complaints=tuple(complaints),
    )


def _behaviour(kind: DrillKind, hurt: Course) -> list[str]:
    """What the run did otherwise than it must."""
    complaints = []
    if hurt.state != "finished":
        complaints.append(f"it did not finish but {hurt.state}: {hurt.why}")
    expected = 1 if kind.ending in ("unharmed", "rolled-back") else 2
    if hurt.attempts != expected:
        ends = ", ".join(hurt.ends) or "none"
        complaints.append(f"it took {hurt.attempts} attempts instead of {expected} ({ends})")
    if kind.ending == "preempted" and hurt.steps_lost:
        complaints.append(f"{hurt.steps_lost} steps were lost in spite of the warning")
    if kind.ending == "older" and not hurt.passed_over:
        complaints.append("the damaged file was not reported")
    if kind.ending == "rolled-back" and not hurt.rolled_back:
        complaints.append("it did not go back to before the spike")
    if hurt.resumed_by_hand and kind.ending != "stopped":
        complaints.append("it had to be resumed by hand")
    if kind.ending == "stopped" and hurt.resumed_by_hand and hurt.exit_codes[0] != ExitCode.DO_NOT_REQUEUE:
        complaints.append(f"it stopped with exit code {hurt.exit_codes[0]} instead of {ExitCode.DO_NOT_REQUEUE}")
    return complaints


def _compare(
    kind: DrillKind, hurt: Sequence[Mapping[str, Any]], undisturbed: Sequence[Mapping[str, Any]], exact: bool
) -> tuple[str, bool]:
    """In words how alike the two are, and whether that is not enough."""
    if not hurt or not undisturbed:
        return "nothing was logged", True
    ours, theirs = (
        [[line.get(key) for key in ("step", *_COMPARED)] for line in lines] for lines in (hurt, undisturbed)
    )
    if ours == theirs:
        return "to the bit", False
    at = next((mine[0] for mine, other in zip(ours, theirs, strict=False) if mine != other), None)
    where = f"from step {at} on" if at is not None else f"{len(ours)} steps logged instead of {len(theirs)}"
    final, reference = hurt[-1].get("loss", math.nan), undisturbed[-1].get("loss", math.nan)
    apart = abs(final - reference) / abs(reference) if reference else math.inf
    words = f"{where}, final loss {apart:.1e} apart"
    if kind.ending == "rolled-back":
        return words, not final <= reference * (1 + ROLLED_BACK_TOLERANCE)
    return words, exact or not apart <= LOSS_TOLERANCE or hurt[-1]["step"] != undisturbed[-1]["step"]
