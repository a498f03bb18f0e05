"""Learning rate as a pure function of the step. Knows no optimizer."""

from __future__ import annotations

import math

from scaletrain_cli.spec import TrainingSpec


def learning_rate(step: int, total_steps: int, training: TrainingSpec) -> float:
    """Rate of optimizer step ``step`` (1-based): linear warm-up, then the schedule's decay to ``min_lr`` at the end.

    Cosine: SGDR, arXiv:1608.03983, eq. 5, without restarts.
    """
    schedule, peak = training.schedule, training.optimizer.lr
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    progress = (step - schedule.warmup_steps) / max(1, total_steps - schedule.warmup_steps)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1 - progress
    return schedule.min_lr + (peak - schedule.min_lr) * share
