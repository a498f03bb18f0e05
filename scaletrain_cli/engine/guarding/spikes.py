"""Tell a spike from the noise of training by losses and gradient norms. Pure: knows no torch, no file and no remedy."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

Judgement = Literal["fine", "suspicious", "spike"]

_WINDOW_STEPS = 64
_FEWEST_LOSSES = 8  # below this a median of a falling loss says little
_FEWEST_NORMS = 32  # gradient norms of a fresh model change by orders of magnitude at first
# A late loss varies by some percent, so a spike from 2.2 to 5 stays below thrice the median and is far beyond the
# spread. As for norms, seven standard deviations; and a quarter above the median besides, which the hardest batches of
# a mixture and a change of the learning rate stay below.
_FEWEST_LOSSES_FOR_SPREAD = 32
_LOSS_DEVIATIONS = 7.0
_LOSS_RATIO = 1.25
_USUAL_FACTOR = 3.0  # the default of guard.spike.factor
# Norms have heavy tails: one that is thrice the median is an ordinary step. OLMo 2 calls seven standard deviations from
# the running mean a spike (arXiv:2501.00656, spike score); where norms hardly vary at all that is little, so it must be
# ten times the median besides. SPAM's spikes are of a squared gradient of 50 times its mean (arXiv:2501.06842).
_NORM_DEVIATIONS = 7.0
_NORM_RATIO = 10.0
_DEVIATION_PER_MAD = 1.4826  # of a normal law, whose standard deviation is so many median absolute deviations
# Outliers that go on so long are what the run is like now. Nobody rolled them back.
_NEW_LEVEL_STEPS = 32
_HEALTHY_STEPS = 10


class Outlier(NamedTuple):
    """A step that was out of the ordinary. No ``grad_norm`` where fp16 skipped it."""

    step: int
    loss: float
    grad_norm: float | None


class SpikeGuard:
    """Medians of the recent losses and norms. An outlier never enters them, so it cannot hide the next one.

    ``patience`` outliers in a row are a spike, which is told once. After 32 in a row they are the new level, so that a
    run that nothing rolls back is judged by what it has become.
    """

    def __init__(self, factor: float, patience: int) -> None:
        self._factor, self._patience = factor, patience
        self._losses: deque[float] = deque(maxlen=_WINDOW_STEPS)
        self._norms: deque[float] = deque(maxlen=_WINDOW_STEPS)
        self._outliers: list[Outlier] = []
        self._healthy = 0

    @property
    def recent_losses(self) -> Sequence[float]:
        """Without outliers, oldest first."""
        return self._losses

    @property
    def outliers(self) -> Sequence[Outlier]:
        """Those in a row that the last step ended; empty when it was fine."""
        return self._outliers

    @property
    def median_loss(self) -> float | None:
        """None until there are enough to judge by."""
        return statistics.median(self._losses) if len(self._losses) >= _FEWEST_LOSSES else None

    @property
    def median_norm(self) -> float | None:
        """None until there are enough to judge by."""
        return statistics.median(self._norms) if len(self._norms) >= _FEWEST_NORMS else None

    @property
    def healthy_steps(self) -> int:
        """How many steps in a row, up to the last one, were fine."""
        return self._healthy

    @property
    def steps_until_clean(self) -> int:
        """So many healthy steps show that the weights before them were sound: a spike begins before it shows."""
        return max(_HEALTHY_STEPS, self._patience)

    def observe(self, step: int, loss: float, grad_norm: float | None) -> Judgement:
        """Judge a step by the ones before it. Both values are finite; no norm where there is none to go by."""
        if not (self._loss_stands_out(loss) or (grad_norm is not None and self._norm_stands_out(grad_norm))):
            self._losses.append(loss)
            if grad_norm is not None:
                self._norms.append(grad_norm)
            self._outliers, self._healthy = [], self._healthy + 1
            return "fine"
        self._outliers.append(Outlier(step, loss, grad_norm))
        self._healthy = 0
        found: Judgement = "spike" if len(self._outliers) == self._patience else "suspicious"
        if len(self._outliers) == max(_NEW_LEVEL_STEPS, self._patience + 1):
            self._take_for_normal()
        return found

    def _loss_stands_out(self, loss: float) -> bool:
        median = self.median_loss
        if median is None:
            return False
        if len(self._losses) < _FEWEST_LOSSES_FOR_SPREAD:
            return loss > self._factor * median
        lenient = max(1.0, self._factor / _USUAL_FACTOR)  # who asks for a larger factor has rougher losses
        spread = lenient * max((_LOSS_RATIO - 1) * median, _LOSS_DEVIATIONS * _deviation(self._losses, median))
        return loss > min(median + spread, self._factor * median)

    def _norm_stands_out(self, norm: float) -> bool:
        median = self.median_norm
        if median is None:
            return False
        return norm > _NORM_RATIO * median and norm > median + _NORM_DEVIATIONS * _deviation(self._norms, median)

    def _take_for_normal(self) -> None:
        for window, values in (
            (self._losses, [outlier.loss for outlier in self._outliers]),
            (self._norms, [outlier.grad_norm for outlier in self._outliers if outlier.grad_norm is not None]),
        ):
            window.clear()
            window.extend(values)
        self._outliers = []

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for a checkpoint."""
        outliers = [list(outlier) for outlier in self._outliers]
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "outliers": outliers,
            "healthy": self._healthy,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from that."""
        self._losses = deque(state["losses"], maxlen=_WINDOW_STEPS)
        self._norms = deque(state["norms"], maxlen=_WINDOW_STEPS)
        self._outliers = [Outlier(*outlier) for outlier in state["outliers"]]
        self._healthy = state["healthy"]


def _deviation(values: Iterable[float], median: float) -> float:
    """The standard deviation that the median absolute deviation of ``values`` stands for."""
    return _DEVIATION_PER_MAD * statistics.median(abs(value - median) for value in values)
