"""When to stop because the validation loss no longer falls. Pure: losses in, a verdict out."""

from __future__ import annotations

from collections.abc import Iterable

from scaletrain_cli.spec.training import EarlyStoppingSpec


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
