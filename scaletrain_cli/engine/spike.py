"""Watch the loss for spikes: a value far above the running median. Only reports; knows nothing of checkpoints."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

_WINDOW_STEPS = 64
_FEWEST_STEPS = 8  # below this a median of a falling loss says little


class SpikeWatch:
    """Median of the recent losses. A spike never enters the window, so it cannot hide the next one."""

    def __init__(self, factor: float, recent_losses: Iterable[float] = ()) -> None:
        self._factor = factor
        self._window: deque[float] = deque(recent_losses, maxlen=_WINDOW_STEPS)

    def median_if_spike(self, loss: float) -> float | None:
        """The running median if ``loss`` is more than ``factor`` times it, else None and the loss joins the window."""
        if len(self._window) >= _FEWEST_STEPS:
            median = statistics.median(self._window)
            if loss > self._factor * median:
                return median
        self._window.append(loss)
        return None
