"""When to stop because the validation loss no longer falls. Pure: losses in, a verdict out."""

from __future__ import annotations

import math
from collections.abc import Iterable

from scaletrain_cli.spec import TrainingSpec
from scaletrain_cli.spec.training import EarlyStoppingSpec

# Learning rate as a pure function of the step.


# torch's OneCycleLR: the rate begins at a 25th of the peak and, unless told otherwise, climbs for 30 % of the run.
_ONE_CYCLE_DIVISOR = 25.0
_ONE_CYCLE_RISE = 0.3
_COOLDOWN_DIVISOR = 10  # wsd without cooldown_steps


def learning_rate(step: int, total_steps: int, training: TrainingSpec) -> float:
    """Rate of optimizer step ``step`` (1-based), which reaches the peak at the end of the warm-up.

    The warm-up is linear, but for ``onecycle``, where it is the cycle's own climb. The decays that end, end at
    ``min_lr`` in the last step.
    """
    schedule, peak = training.schedule, training.optimizer.lr
    warmup = schedule.warmup_steps
    if schedule.name == "onecycle":
        warmup = warmup or round(_ONE_CYCLE_RISE * total_steps)
        if step < warmup:
            return _between(peak / _ONE_CYCLE_DIVISOR, peak, 1 - _cosine((step - 1) / (warmup - 1)))
    elif step <= warmup:
        return peak * step / warmup
    done, after = step - warmup, max(1, total_steps - warmup)
    if schedule.name == "constant":
        return peak
    if schedule.name == "step":
        return max(schedule.min_lr, peak * schedule.gamma ** ((done - 1) // schedule.step_size))
    if schedule.name == "wsd":
        cooldown = min(schedule.cooldown_steps or max(1, total_steps // _COOLDOWN_DIVISOR), after)
        cooled = max(0, step - (total_steps - cooldown)) / cooldown
        return _between(schedule.min_lr, peak, 1 - math.sqrt(cooled))  # the best form of arXiv:2405.18392
    share = 1 - done / after if schedule.name == "linear" else _cosine(done / after)
    return _between(schedule.min_lr, peak, share)


def _cosine(progress: float) -> float:
    """From 1 to 0: SGDR, arXiv:1608.03983, eq. 5, without restarts."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def should_stop(validation_losses: Iterable[float], spec: EarlyStoppingSpec) -> bool:
    """Whether the newest ``patience`` losses all failed to beat the best one before them by more than ``min_delta``.

    The losses of the whole run in order, so that it is the same verdict after a resume. A loss that is not a number
    is no improvement.
    """
    best, since = float("inf"), 0
    for loss in validation_losses:
        improved = loss < best - spec.min_delta
        best, since = (loss, 0) if improved else (best, since + 1)
    return 0 < spec.patience <= since
