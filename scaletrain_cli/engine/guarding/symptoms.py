"""Slow illnesses of a run, each told once: a collapsing loss scale, dead gradients, a loss that never falls. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

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
