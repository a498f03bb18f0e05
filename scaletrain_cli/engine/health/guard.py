"""One guard over a run's numbers: spikes, slow illnesses, and from when on a checkpoint is known to be clean.

Pure: all ranks see the same numbers and hold the same state. Knows nothing of what is done about it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

# Tell a spike from the noise of training by losses and gradient norms.


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


# Slow illnesses of a run, each told once: a collapsing loss scale, dead gradients, a loss that never falls.


_SCALE_WINDOW_STEPS = 100
_HALVINGS = 5  # dynamic scaling itself halves once per window of growth, by default 1000 steps
_DEAD_NORM = 1e-6  # of the running median
_FIRST_LOSSES = 16
_FLAT_AFTER_STEPS = 200
_RECENT_LOSSES = 64
_FLAT_SHARE = 0.02  # of the first losses; what has been learned once the frequencies of tokens are known is far more


class LossScaleCollapse:
    """The dynamic loss scale of fp16 fell 32-fold or more within 100 steps: gradients overflow again and again.

    Not before the first step that was not skipped, which the scale has to find.
    """

    def __init__(self) -> None:
        self._scales: deque[float] = deque(maxlen=_SCALE_WINDOW_STEPS)
        self._settled = self._told = False

    def observe(self, scale: float, *, skipped: bool) -> dict[str, Any] | None:
        """Evidence when it has just shown, else None."""
        self._settled |= not skipped
        if not self._settled:
            return None
        self._scales.append(scale)
        largest = max(self._scales)
        if self._told or scale <= 0 or math.log2(largest / scale) < _HALVINGS:
            return None
        self._told = True
        return {"loss_scale": scale, "fell_from": largest, "within_steps": len(self._scales)}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return {"scales": list(self._scales), "settled": self._settled, "told": self._told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from that."""
        self._scales = deque(state["scales"], maxlen=_SCALE_WINDOW_STEPS)
        self._settled, self._told = state["settled"], state["told"]


class DeadGradients:
    """Gradient norms of nothing, or of a millionth of what they were, for ``patience`` steps in a row."""

    def __init__(self, patience: int) -> None:
        self._patience, self._norms, self._told = patience, list[float](), False

    @staticmethod
    def is_dead(norm: float, median: float | None) -> bool:
        """Beside the running median, which such a norm must not enter: who recovers from it would seem a spike."""
        return norm <= _DEAD_NORM * (median or 0.0)

    def observe(self, norm: float, *, dead: bool) -> dict[str, Any] | None:
        """Evidence when it has just shown, else None."""
        self._norms = [*self._norms, norm] if dead and not self._told else []
        if len(self._norms) < self._patience:
            return None
        norms, self._norms, self._told = self._norms, [], True
        return {"norms": norms}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return {"norms": list(self._norms), "told": self._told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from that."""
        self._norms, self._told = list(state["norms"]), state["told"]


class FlatLoss:
    """A fresh model that has learned nothing: asked once, 200 steps in, or 64 steps after a longer warm-up.

    Flat is a loss that fell by less than its own noise *and* by less than 2 % since the first steps. Later on a loss
    may be flat because there is nothing left to learn, so it is not asked again; nor of weights that were loaded.
    """

    def __init__(self, warmup_steps: int) -> None:
        self._asked_at = max(_FLAT_AFTER_STEPS, warmup_steps + _RECENT_LOSSES)
        self._first: list[float] = []

    def observe(self, step: int, loss: float, recent: Sequence[float]) -> dict[str, Any] | None:
        """Evidence when it has just shown, else None; ``recent``: the latest losses that were no outliers."""
        if len(self._first) < _FIRST_LOSSES:
            self._first.append(loss)
        if step != self._asked_at or len(recent) < _RECENT_LOSSES:
            return None
        first, now = statistics.median(self._first), statistics.median(recent)
        noise = 1.4826 * statistics.median(abs(other - now) for other in recent)
        fall = first - now
        if fall > noise or fall > _FLAT_SHARE * first:
            return None
        return {"first_losses": first, "recent_losses": now, "noise": noise}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return {"first": list(self._first)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from that."""
        self._first = list(state["first"])


@dataclass(frozen=True)
class GuardFinding:
    """Something to tell: the name of an event, and the evidence."""

    event: str
    evidence: dict[str, Any]


class Guard:
    """``fresh_warmup_steps``: of a model that starts from random weights; None for one that has been trained before."""

    def __init__(self, *, factor: float, patience: int, fresh_warmup_steps: int | None) -> None:
        self._spikes = SpikeGuard(factor, patience)
        self._scale, self._dead = LossScaleCollapse(), DeadGradients(patience)
        self._flat = FlatLoss(fresh_warmup_steps) if fresh_warmup_steps is not None else None

    def observe(self, step: int, measured: Mapping[str, float]) -> tuple[Judgement, list[GuardFinding]]:
        """Judge one step by its finite measures: loss; grad_norm, but for a skipped step; loss_scale and skipped."""
        loss, norm, found = measured["loss"], measured.get("grad_norm"), list[GuardFinding]()
        if "loss_scale" in measured:
            collapse = self._scale.observe(measured["loss_scale"], skipped=bool(measured["skipped"]))
            found += [GuardFinding("loss-scale-collapsed", collapse)] if collapse else []
        if norm is not None:
            dead = self._dead.is_dead(norm, self._spikes.median_norm)
            died = self._dead.observe(norm, dead=dead)
            found += [GuardFinding("dead-gradients", died)] if died else []
            norm = None if dead else norm
        judgement = self._spikes.observe(step, loss, norm)
        if self._flat is not None:
            flat = self._flat.observe(step, loss, self._spikes.recent_losses)
            found += [GuardFinding("flat-loss", flat)] if flat else []
        return judgement, found

    def clean_step(self, step: int) -> int | None:
        """After step ``step``: checkpoints of up to this step are clean, if any are known to be."""
        needed = self._spikes.steps_until_clean
        return step - needed if self._spikes.healthy_steps >= needed and step > needed else None

    def first_outlier(self, step: int) -> int:
        """Where the outliers in a row began that end at ``step``; itself where it is the first."""
        return min([outlier.step for outlier in self._spikes.outliers] + [step])

    def evidence(self) -> dict[str, Any]:
        """What the outliers in a row were, beside what is usual."""
        outliers = self._spikes.outliers
        return {
            "steps": [outlier.step for outlier in outliers],
            "losses": [outlier.loss for outlier in outliers],
            "grad_norms": [outlier.grad_norm for outlier in outliers],
            "median_loss": self._spikes.median_loss,
            "median_grad_norm": self._spikes.median_norm,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for a checkpoint."""
        return {
            "spikes": self._spikes.state_dict(),
            "scale": self._scale.state_dict(),
            "dead": self._dead.state_dict(),
            "flat": self._flat.state_dict() if self._flat is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from that, exactly."""
        self._spikes.load_state_dict(state["spikes"])
        self._scale.load_state_dict(state["scale"])
        self._dead.load_state_dict(state["dead"])
        if self._flat is not None:
            self._flat.load_state_dict(state["flat"])
