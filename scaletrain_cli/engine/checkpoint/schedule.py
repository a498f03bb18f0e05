"""When a checkpoint is due: at the steps that the spec names, or as often as what saves cost makes best. Pure."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from statistics import median
from typing import Literal

from scaletrain_cli.errors import DoNotRequeueError
from scaletrain_cli.plan.reliability.durability import best_interval_steps
from scaletrain_cli.rundir.checkpoints import list_checkpoints

# Whether a disk has room for the checkpoints to come, asked before the first step instead of found out at a save.


_FILES_BESIDE_SHARDS = 3  # the folder, its manifest, what all ranks know alike


class DiskSpaceError(DoNotRequeueError):
    """The disk cannot hold the checkpoints that the run will keep."""

    failure_reason = "disk-full"


def check_disk_space(folder: Path, checkpoint_bytes: int, ranks: int, keep: int, keep_every: int | None = None) -> None:
    """Raise NoRoomError unless the newest ``keep``, a clean one and one in the making fit beside what is there.

    What ``keep_every`` keeps for ever makes no room.
    """
    passing = [c for c in list_checkpoints(folder) if keep_every is None or c.step % keep_every]
    missing = max(1, keep + 2 - len(passing))
    found = os.statvfs(folder)
    free_bytes, free_files = found.f_bavail * found.f_frsize, found.f_favail
    files = missing * (ranks + _FILES_BESIDE_SHARDS)
    if free_bytes < missing * checkpoint_bytes:
        raise DiskSpaceError(
            f"{folder} has {free_bytes / 1e9:.1f} GB of room and checkpoints will need {missing} x "
            f"{checkpoint_bytes / 1e9:.1f} GB more: checkpoint.keep = {keep}, a clean one and the next. "
            f"Make room, lower checkpoint.keep, or set checkpoint.dir to a larger disk."
        )
    if found.f_files and free_files < files:  # some file systems make inodes as they go and say 0
        raise DiskSpaceError(
            f"{folder} can take {free_files:,} more files and checkpoints of {ranks} ranks will need {files:,}. "
            f"Delete files, or set checkpoint.dir to another disk."
        )


_SAVES_KEPT = 8
_STEPS_KEPT = 64


class CheckpointSchedule:
    """``every``: steps, or ``auto``, which begins with the plan's interval and goes on with the one that is best by
    what steps and saves really take. Rank 0's decides, and the step consensus tells the others.
    """

    def __init__(
        self, every: int | Literal["auto"], planned_interval_steps: int, seconds_between_losses: float | None
    ) -> None:
        self._every = every
        self._interval_steps = planned_interval_steps if every == "auto" else every
        self._seconds_between_losses = seconds_between_losses
        self._steps: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._saves: deque[tuple[float, float]] = deque(maxlen=_SAVES_KEPT)
        self._saved_at = 0

    @property
    def interval_steps(self) -> int:
        """Between checkpoints, as of now."""
        return self._interval_steps

    def begin_at(self, step: int) -> None:
        """The state after ``step`` steps is saved, or is that of the beginning."""
        self._saved_at = step

    def is_due(self, step: int) -> bool:
        """Whether the state after ``step`` steps is to be saved."""
        if step <= self._saved_at:
            return False
        if self._every != "auto":
            return step % self._every == 0
        return step - self._saved_at >= self._interval_steps

    def step_took(self, seconds: float) -> None:
        """Take in a step of training."""
        self._steps.append(seconds)

    def save_took(self, blocked_seconds: float, seconds: float) -> None:
        """Take in a save: seconds for which training stood still, and until it was committed."""
        self._saves.append((blocked_seconds, seconds))
        if self._every == "auto" and self._seconds_between_losses is not None and self._steps:
            blocked, whole = (median(parts) for parts in zip(*self._saves, strict=True))
            step, losses = median(self._steps), 1 / self._seconds_between_losses
            self._interval_steps = best_interval_steps(step, max(blocked, whole), max(blocked, 1e-6), losses)
