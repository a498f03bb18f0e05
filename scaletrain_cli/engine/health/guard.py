"""The loss guard: detects spikes, a collapsing loss scale, dead gradients and a flat loss, and marks healthy steps.

Pure: all ranks see the same numbers and have the same state. ``rollback`` acts on what the guard finds.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Literal, NamedTuple

from scaletrain_cli.diagnosis.curves import deviation, median

# Loss and gradient-norm spikes.


StepStatus = Literal["fine", "suspicious", "spike"]

_WINDOW_STEPS = 64
_FEWEST_LOSSES = 8  # a falling loss has no useful median before
_FEWEST_NORMS = 32  # gradient norms of a new model change by orders of magnitude at first
# A late loss varies by a few percent, so a spike from 2.2 to 5 stays below three times the median but far beyond the
# spread. Hence the limit of seven standard deviations, and at least 1.25 times the median, which the hardest batches
# and changes of the learning rate do not exceed.
_FEWEST_LOSSES_FOR_SPREAD = 32
_LOSS_DEVIATIONS = 7.0
_LOSS_RATIO = 1.25
_USUAL_FACTOR = 3.0  # the default of guard.spike.factor
# Norms have heavy tails: three times the median is an ordinary step. OLMo 2 calls seven standard deviations from the
# running mean a spike (arXiv:2501.00656, spike score); where norms hardly vary that is little, so the norm must also be
# ten times the median. SPAM's spikes have a squared gradient of 50 times its mean (arXiv:2501.06842).
_NORM_DEVIATIONS = 7.0
_NORM_RATIO = 10.0
# After this many outliers in a row, without a rollback, their level is the new normal.
_NEW_LEVEL_STEPS = 32
_HEALTHY_STEPS = 10


class Outlier(NamedTuple):
    """A step with an unusual loss or norm; ``grad_norm`` is None if fp16 skipped the step."""

    step: int
    loss: float
    grad_norm: float | None


class _Detector:
    """``saved_attributes``: those that checkpoints keep, by their key there; a window of steps is a list."""

    saved_attributes: ClassVar[Mapping[str, str]]

    def state_dict(self) -> dict[str, Any]:
        attributes = {key: getattr(self, name) for key, name in self.saved_attributes.items()}
        return {key: list(value) if isinstance(value, deque | list) else value for key, value in attributes.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key, name in self.saved_attributes.items():
            own, value = getattr(self, name), state[key]
            setattr(self, name, deque(value, own.maxlen) if isinstance(own, deque) else copy(value))


class SpikeGuard(_Detector):
    """Compares losses and norms with medians of recent steps; outliers do not enter the medians.

    ``patience`` outliers in a row are a spike, reported once. After 32 in a row their level is the new normal. Losses
    are compared with ``least_loss`` where their median is below it, because ratios of small losses mean nothing.
    """

    saved_attributes: ClassVar = {
        "losses": "losses",
        "norms": "norms",
        "outliers": "outliers",
        "healthy": "healthy_steps",
    }

    def __init__(self, factor: float, patience: int, least_loss: float = 0.0) -> None:
        self._factor, self._patience, self._least_loss = factor, patience, least_loss
        self.losses: deque[float] = deque(maxlen=_WINDOW_STEPS)  # recent ones without outliers, oldest first
        self.norms: deque[float] = deque(maxlen=_WINDOW_STEPS)
        self.outliers: list[Outlier] = []  # in a row up to the last step; empty if that was healthy
        self.healthy_steps = 0

    @property
    def median_loss(self) -> float | None:
        """Median of recent losses; None for fewer than 8."""
        return median(self.losses) if len(self.losses) >= _FEWEST_LOSSES else None

    @property
    def median_norm(self) -> float | None:
        """Median of recent norms; None for fewer than 32."""
        return median(self.norms) if len(self.norms) >= _FEWEST_NORMS else None

    @property
    def steps_until_clean(self) -> int:
        """Healthy steps after which earlier weights are known to be clean: a spike begins before it shows."""
        return max(_HEALTHY_STEPS, self._patience)

    def observe(self, step: int, loss: float, grad_norm: float | None) -> StepStatus:
        """Return the status of a step, compared with those before it. Both values are finite, if not None."""
        if not (self._is_loss_outlier(loss) or (grad_norm is not None and self._is_norm_outlier(grad_norm))):
            self.losses.append(loss)
            if grad_norm is not None:
                self.norms.append(grad_norm)
            self.outliers, self.healthy_steps = [], self.healthy_steps + 1
            return "fine"
        self.outliers.append(Outlier(step, loss, grad_norm))
        self.healthy_steps = 0
        status: StepStatus = "spike" if len(self.outliers) == self._patience else "suspicious"
        if len(self.outliers) == max(_NEW_LEVEL_STEPS, self._patience + 1):
            for window, values in (
                (self.losses, [outlier.loss for outlier in self.outliers]),
                (self.norms, [outlier.grad_norm for outlier in self.outliers if outlier.grad_norm is not None]),
            ):
                window.clear()
                window.extend(values)
            self.outliers = []
        return status

    def _is_loss_outlier(self, loss: float) -> bool:
        median = self.median_loss
        if median is None:
            return False
        median = max(median, self._least_loss)
        if len(self.losses) < _FEWEST_LOSSES_FOR_SPREAD:
            return loss > self._factor * median
        lenient = max(1.0, self._factor / _USUAL_FACTOR)  # a larger factor widens the spread, too
        if loss <= min(median + lenient * ((_LOSS_RATIO - 1) * median), self._factor * median):
            return False  # whatever the deviation is, which takes longer to find
        spread = lenient * max((_LOSS_RATIO - 1) * median, _LOSS_DEVIATIONS * deviation(self.losses, median))
        return loss > min(median + spread, self._factor * median)

    def _is_norm_outlier(self, norm: float) -> bool:
        median = self.median_norm
        if median is None:
            return False
        return norm > _NORM_RATIO * median and norm > median + _NORM_DEVIATIONS * deviation(self.norms, median)

    def expect_new_level(self) -> None:
        """Forget the level of losses and norms so far, because the next step trains on other data."""
        self.losses.clear()
        self.norms.clear()
        self.outliers = []

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.outliers = [Outlier(*outlier) for outlier in state["outliers"]]  # lists, in JSON


# Slow failures: a collapsing loss scale, dead gradients, a loss that does not fall. Each is reported once in a run.


_SCALE_WINDOW_STEPS = 100
_HALVINGS = 5  # dynamic scaling itself halves once per window of growth, by default 1000 steps
_DEAD_NORM = 1e-6  # of the running median
_FIRST_LOSSES = 16
_FLAT_AFTER_STEPS = 200
_RECENT_LOSSES = 64
_FLAT_SHARE = 0.02  # of the first losses; learning the frequencies of tokens alone lowers the loss by far more


class LossScaleCollapse(_Detector):
    """Detects that the dynamic loss scale of fp16 fell 32-fold or more within 100 steps.

    Steps before the first one that was applied do not count: the scale has to find its level.
    """

    saved_attributes: ClassVar = {"scales": "_scales", "settled": "_settled", "told": "_reported"}

    def __init__(self) -> None:
        self._scales: deque[float] = deque(maxlen=_SCALE_WINDOW_STEPS)
        self._settled = self._reported = False

    def observe(self, scale: float, *, skipped: bool) -> dict[str, Any] | None:
        """Return the details when it is first detected, else None."""
        self._settled |= not skipped
        if not self._settled:
            return None
        self._scales.append(scale)
        largest = max(self._scales)
        if self._reported or scale <= 0 or math.log2(largest / scale) < _HALVINGS:
            return None
        self._reported = True
        return {"loss_scale": scale, "fell_from": largest, "within_steps": len(self._scales)}


class DeadGradients(_Detector):
    """Detects gradient norms of zero or a millionth of the median, for ``patience`` steps in a row."""

    saved_attributes: ClassVar = {"norms": "_norms", "told": "_reported"}

    def __init__(self, patience: int) -> None:
        self._patience, self._norms, self._reported = patience, list[float](), False

    @staticmethod
    def is_dead(norm: float, median: float | None) -> bool:
        """Compare a norm with the running median, which dead norms do not enter: recovery would look like a spike."""
        return norm <= _DEAD_NORM * (median or 0.0)

    def observe(self, norm: float, *, dead: bool) -> dict[str, Any] | None:
        """Return the details when it is first detected, else None."""
        self._norms = [*self._norms, norm] if dead and not self._reported else []
        if len(self._norms) < self._patience:
            return None
        norms, self._norms, self._reported = self._norms, [], True
        return {"norms": norms}


class FlatLoss(_Detector):
    """Detects a new model that learns nothing: checked once, 200 steps in, or 64 steps after a longer warm-up.

    Flat is a loss that fell by less than its own noise *and* by less than 2 % since the first steps. Later a loss may
    be flat because nothing is left to learn, so it is not checked again, nor for loaded weights.
    """

    saved_attributes: ClassVar = {"first": "_first"}

    def __init__(self, warmup_steps: int) -> None:
        self._checked_at = max(_FLAT_AFTER_STEPS, warmup_steps + _RECENT_LOSSES)
        self._first: list[float] = []

    def observe(self, step: int, loss: float, recent: Sequence[float]) -> dict[str, Any] | None:
        """Return the details when it is first detected, else None; ``recent``: the latest losses without outliers."""
        if len(self._first) < _FIRST_LOSSES:
            self._first.append(loss)
        if step != self._checked_at or len(recent) < _RECENT_LOSSES:
            return None
        first, now = median(self._first), median(recent)
        noise = deviation(recent, now)
        fall = first - now
        if fall > noise or fall > _FLAT_SHARE * first:
            return None
        return {"first_losses": first, "recent_losses": now, "noise": noise}


class Guard:
    """``fresh_warmup_steps``: warm-up of a model with random weights; None for loaded weights, adapters, and dpo.

    ``least_loss``: see ``SpikeGuard``.
    """

    def __init__(
        self, *, factor: float, patience: int, fresh_warmup_steps: int | None, least_loss: float = 0.0
    ) -> None:
        self._spikes = SpikeGuard(factor, patience, least_loss)
        self._scale, self._dead = LossScaleCollapse(), DeadGradients(patience)
        self._flat = FlatLoss(fresh_warmup_steps) if fresh_warmup_steps is not None else None
        self._parts = {"spikes": self._spikes, "scale": self._scale, "dead": self._dead, "flat": self._flat}

    def observe(self, step: int, measured: Mapping[str, float]) -> tuple[StepStatus, dict[str, dict[str, Any]]]:
        """Return the status of a step, and new findings: their details by the name of the event.

        ``measured``: finite values of ``loss``, of ``grad_norm`` unless fp16 skipped the step, and with fp16 of
        ``loss_scale`` and ``skipped``.
        """
        loss, norm, by_event = measured["loss"], measured.get("grad_norm"), dict[str, dict[str, Any] | None]()
        if "loss_scale" in measured:
            collapse = self._scale.observe(measured["loss_scale"], skipped=bool(measured["skipped"]))
            by_event["loss-scale-collapsed"] = collapse
        if norm is not None:
            dead = self._dead.is_dead(norm, self._spikes.median_norm)
            by_event["dead-gradients"] = self._dead.observe(norm, dead=dead)
            norm = None if dead else norm
        status = self._spikes.observe(step, loss, norm)
        if self._flat is not None:
            by_event["flat-loss"] = self._flat.observe(step, loss, self._spikes.losses)
        return status, {event: evidence for event, evidence in by_event.items() if evidence}

    def expect_new_level(self) -> None:
        """Forget the level of losses and norms so far, because the next step trains on another mixture of data."""
        self._spikes.expect_new_level()

    def clean_step(self, step: int) -> int | None:
        """Return the step up to which checkpoints are clean after step ``step``; None if unknown."""
        needed = self._spikes.steps_until_clean
        return step - needed if self._spikes.healthy_steps >= needed and step > needed else None

    def first_outlier(self, step: int) -> int:
        """Return the first of the outliers in a row that end at ``step``; ``step`` itself if it is the first."""
        return min([outlier.step for outlier in self._spikes.outliers] + [step])

    def evidence(self) -> dict[str, Any]:
        """Return the outliers in a row, and the medians."""
        outliers = self._spikes.outliers
        return {
            "steps": [outlier.step for outlier in outliers],
            "losses": [outlier.loss for outlier in outliers],
            "grad_norms": [outlier.grad_norm for outlier in outliers],
            "median_loss": self._spikes.median_loss,
            "median_grad_norm": self._spikes.median_norm,
        }

    def state_dict(self) -> dict[str, Any]:
        return {name: None if part is None else part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            if part is not None:
                part.load_state_dict(state[name])
