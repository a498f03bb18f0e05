"""The learning rate of a step, and when to stop early: pure functions of the spec, for engine and launcher."""

import math
from collections.abc import Iterable

from scaletrain_cli.spec.training import EarlyStoppingSpec, TrainingSpec

# torch's OneCycleLR: the rate starts at 1/25 of the peak and by default rises for 30 % of the run.
_ONE_CYCLE_DIVISOR = 25.0
_ONE_CYCLE_RISE = 0.3
_COOLDOWN_DIVISOR = 10  # wsd without cooldown_steps
_LAST_SHARE = 0.25  # of the steps, whose weights are averaged


def learning_rate(step: int, total_steps: int, training: TrainingSpec) -> float:
    """Return the rate of optimizer step ``step`` (1-based), which reaches the peak at the end of the warm-up.

    The warm-up is linear, except for ``onecycle``, where it is the rise of the cycle. Decays that end reach ``min_lr``
    in the last step.
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


def averaged_from(total_steps: int) -> int:
    """Return the first step (1-based) whose weights the mean of ``averaging: checkpoints`` includes.

    A mean of all weights would include those of the beginning, so it covers the last quarter of the run, as in
    stochastic weight averaging (arXiv:1803.05407).
    """
    return 1 + total_steps - max(1, int(_LAST_SHARE * total_steps))


def _cosine(progress: float) -> float:
    """Return the cosine decay from 1 to 0: SGDR, arXiv:1608.03983, eq. 5, without restarts."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def should_stop(values: Iterable[float], spec: EarlyStoppingSpec) -> bool:
    """Return True if none of the last ``patience`` values is lower than the best one before by more than ``min_delta``.

    ``values``: validation losses, or another metric, negated if its greatest is the best; of the whole run, so that the
    result is the same after a resume. NaN is no improvement.
    """
    best, since = float("inf"), 0
    for value in values:
        improved = value < best - spec.min_delta
        best, since = (value, 0) if improved else (best, since + 1)
    return 0 < spec.patience <= since
