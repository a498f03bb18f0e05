"""The schedule of checkpoints, and the check that the disk can hold the checkpoints of a run."""

import os
from collections import deque
from pathlib import Path
from statistics import median
from typing import Literal

from scaletrain_cli.errors import DoNotRequeueError
from scaletrain_cli.plan.reliability.durability import best_interval_steps
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import list_checkpoints

_FILES_BESIDE_SHARDS = 3  # the folder, its manifest, the state that is the same on every rank


class DiskSpaceError(DoNotRequeueError):
    """The disk cannot hold the checkpoints that the run will keep (exit 93)."""

    failure_reason = "disk-full"


def check_disk_space(
    folder: Path, checkpoint_bytes: int, ranks: int, keep: int, keep_every: int | None = None, also_kept: int = 0
) -> None:
    """Raise DiskSpaceError unless ``keep`` checkpoints, a clean one and the next fit on the disk of ``folder``.

    ``also_kept``: the best one, and those that evaluations wait for.

    Existing checkpoints count towards them, because they are deleted as new ones are committed, except those that
    ``keep_every`` keeps permanently.
    """
    passing = [c for c in list_checkpoints(folder) if keep_every is None or c.step % keep_every]
    missing = max(1, keep + also_kept + 2 - len(passing))
    file_system = os.statvfs(folder)
    free_bytes, free_files = file_system.f_bavail * file_system.f_frsize, file_system.f_favail
    files = missing * (ranks + _FILES_BESIDE_SHARDS)
    if free_bytes < missing * checkpoint_bytes:
        params = {"folder": str(folder), "free_bytes": free_bytes, "checkpoint_bytes": checkpoint_bytes}
        raise DiskSpaceError(Reason("engine.disk-too-small", {**params, "checkpoints": missing, "keep": keep}))
    if file_system.f_files and free_files < files:  # file systems that allocate inodes dynamically report 0
        params = {"folder": str(folder), "free_files": free_files, "ranks": ranks, "files": files}
        raise DiskSpaceError(Reason("engine.too-few-inodes", params))


_SAVES_KEPT = 8
_STEPS_KEPT = 64


class CheckpointSchedule:
    """Decides when to save.

    ``every``: steps, or ``auto``: the plan's interval, then the best one for the measured times.
    The schedule of rank 0 decides; the step consensus passes the decision on.
    """

    def __init__(
        self, every: int | Literal["auto"], planned_interval_steps: int, seconds_between_losses: float | None
    ) -> None:
        self._every = every
        self.interval_steps = planned_interval_steps if every == "auto" else every
        self._seconds_between_losses = seconds_between_losses
        self._steps: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._saves: deque[tuple[float, float]] = deque(maxlen=_SAVES_KEPT)
        self._saved_at = 0

    @property
    def step_seconds(self) -> float | None:
        """Median time of the latest training steps; None before the first one."""
        return median(self._steps) if self._steps else None

    def begin_at(self, step: int) -> None:
        """Count from ``step``: its state is saved, or training starts there."""
        self._saved_at = step

    def is_due(self, step: int) -> bool:
        """Return True if the state after ``step`` steps is to be saved."""
        if step <= self._saved_at:
            return False
        if self._every != "auto":
            return step % self._every == 0
        return step - self._saved_at >= self.interval_steps

    def step_took(self, seconds: float) -> None:
        self._steps.append(seconds)

    def save_took(self, blocked_seconds: float, seconds: float) -> None:
        """Record a save: seconds that it blocked training, and seconds until it was committed."""
        self._saves.append((blocked_seconds, seconds))
        if self._every == "auto" and self._seconds_between_losses is not None and self._steps:
            blocked, whole = (median(parts) for parts in zip(*self._saves, strict=True))
            step, losses = median(self._steps), 1 / self._seconds_between_losses
            self.interval_steps = best_interval_steps(step, max(blocked, whole), max(blocked, 1e-6), losses)
