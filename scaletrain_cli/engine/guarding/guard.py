"""One guard over a run's numbers: spikes, slow illnesses, and from when on a checkpoint is known to be clean.

Pure: all ranks see the same numbers and hold the same state. Knows nothing of what is done about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.engine.guarding.spikes import Judgement, SpikeGuard
from scaletrain_cli.engine.guarding.symptoms import DeadGradients, FlatLoss, LossScaleCollapse


@dataclass(frozen=True)
class Finding:
    """Something to tell: the name of an event, and the evidence."""

    event: str
    evidence: dict[str, Any]


class Guard:
    """``fresh_warmup_steps``: of a model that starts from random weights; None for one that has been trained before."""

    def __init__(self, *, factor: float, patience: int, fresh_warmup_steps: int | None) -> None:
        self._spikes = SpikeGuard(factor, patience)
        self._scale, self._dead = LossScaleCollapse(), DeadGradients(patience)
        self._flat = FlatLoss(fresh_warmup_steps) if fresh_warmup_steps is not None else None

    def observe(self, step: int, measured: Mapping[str, float]) -> tuple[Judgement, list[Finding]]:
        """Judge one step by its finite measures: loss; grad_norm, but for a skipped step; loss_scale and skipped."""
        loss, norm, found = measured["loss"], measured.get("grad_norm"), list[Finding]()
        if "loss_scale" in measured:
            collapse = self._scale.observe(measured["loss_scale"], skipped=bool(measured["skipped"]))
            found += [Finding("loss-scale-collapsed", collapse)] if collapse else []
        if norm is not None:
            dead = self._dead.is_dead(norm, self._spikes.median_norm)
            died = self._dead.observe(norm, dead=dead)
            found += [Finding("dead-gradients", died)] if died else []
            norm = None if dead else norm
        judgement = self._spikes.observe(step, loss, norm)
        if self._flat is not None:
            flat = self._flat.observe(step, loss, self._spikes.recent_losses)
            found += [Finding("flat-loss", flat)] if flat else []
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
