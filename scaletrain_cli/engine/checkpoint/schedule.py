"""When a checkpoint is due: at the steps that the spec names, or as often as what saves cost makes best. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Literal

from scaletrain_cli.plan.reliability.durability import best_interval_steps

_SAVES_KEPT = 8
_STEPS_KEPT = 64


class Cadence:
    """``every``: steps, or ``auto``, which begins with the plan's interval and goes on with the one that is best by
    what steps and saves really take. Rank 0's decides, and the step agreement tells the others.
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
