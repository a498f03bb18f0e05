"""All checks of a run, in one table, and the diagnosis that they make together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.diagnosis import data, durability, gradients, learning_rate, loss, memory, speed
from scaletrain_cli.diagnosis.case import Case, read_case
from scaletrain_cli.diagnosis.findings import Finding
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.spec import ModelSpec

Check = Callable[[Case], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (
    loss.not_finite,
    loss.diverging,
    learning_rate.too_high,
    learning_rate.warm_up_too_short,
    learning_rate.too_low,
    loss.first_loss,
    loss.rising,
    loss.flat,
    loss.oscillating,
    loss.spiking,
    data.overfitting,
    data.source_stands_still,
    gradients.dead_gradients,
    gradients.loss_scale,
    gradients.norm_trend,
    gradients.norm_spikes,
    gradients.always_clipped,
    speed.slow_rank,
    speed.data_wait,
    speed.slower_than_plan,
    speed.slowing_down,
    memory.nearly_full,
    memory.growing,
    memory.above_plan,
    durability.restarts,
    durability.slow_saves,
    durability.interval,
)
# Checks of settings, plans and records of the built-in engine, which a program of the user's need not follow.
_OF_THE_ENGINE: tuple[Check, ...] = (
    *(learning_rate.too_high, learning_rate.warm_up_too_short, learning_rate.too_low),
    *(gradients.loss_scale, gradients.always_clipped, speed.slower_than_plan, memory.above_plan),
    *(durability.slow_saves, durability.interval),
)
# Symptoms that a finding explains; they are left out beside it.
_EXPLAINS = {
    "diagnosis.learning-rate-too-high": ("diagnosis.loss-spikes", "diagnosis.gradient-norm-spikes"),
    "diagnosis.warm-up-too-short": ("diagnosis.loss-spikes", "diagnosis.gradient-norm-spikes"),
    "diagnosis.learning-rate-too-low": ("diagnosis.loss-flat",),
    "diagnosis.gradients-dead": ("diagnosis.loss-flat", "diagnosis.gradient-vanishes"),
    "diagnosis.loss-above-start": ("diagnosis.loss-rising", "diagnosis.loss-flat"),
    "diagnosis.loss-above-uninformed": ("diagnosis.loss-flat",),
}
_FEWEST_STEPS = 32


@dataclass(frozen=True)
class Diagnosis:
    """``findings``: errors first, then by confidence. ``not_concluded``: what the record does not allow to judge.

    ``last_step``: the last measured step; ``measured_steps``: how many were read.
    """

    run_id: str
    last_step: int
    measured_steps: int
    findings: tuple[Finding, ...]
    not_concluded: tuple[Reason, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the stable JSON object (docs/json.md)."""
        return {
            "schema": "scaletrain.diagnose/v1",
            "run_id": self.run_id,
            "last_step": self.last_step,
            "measured_steps": self.measured_steps,
            "findings": [finding.to_json() for finding in self.findings],
            "not_concluded": [{**reason.to_document(), "text": str(reason)} for reason in self.not_concluded],
        }


def diagnose_run(run: RunDir, record: RunRecord) -> Diagnosis:
    """Return the diagnosis of a run, from its directory alone. Raises UsageError for a damaged record."""
    return diagnose(run.run_id, read_case(run, record))


def diagnose(run_id: str, case: Case) -> Diagnosis:
    """Return the diagnosis of a case."""
    found: list[Finding] = []
    failed: list[Reason] = []
    for check in CHECKS:
        if check in _OF_THE_ENGINE and case.spec.code.own_program:
            continue
        try:
            found += check(case)
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError):  # a damaged or foreign record
            failed.append(Reason("diagnosis.check-failed", {"check": f"{check.__module__.rpartition('.')[2]}"}))
    explained = {code for finding in found for code in _EXPLAINS.get(finding.code, ())}
    kept = sorted((finding for finding in found if finding.code not in explained), key=lambda each: each.rank)
    return Diagnosis(run_id, case.history.last_step, len(case.history), tuple(kept), (*failed, *_not_concluded(case)))


def _not_concluded(case: Case) -> Iterator[Reason]:
    """Yield what is not judged, and why."""
    spec, history = case.spec, case.history
    if len(history) < _FEWEST_STEPS:
        yield Reason("diagnosis.few-steps", {"steps": len(history), "needed": _FEWEST_STEPS})
    if not history.is_whole:
        yield Reason("diagnosis.sampled", {"read": len(history), "last": history.last_step})
    if not case.is_fresh_text and isinstance(spec.model, ModelSpec):
        yield Reason("diagnosis.not-from-scratch")
    elif not isinstance(spec.model, ModelSpec):
        yield Reason("diagnosis.not-text")
    if not history.validations:
        yield Reason("diagnosis.no-validation")
    if case.on_cpu:
        yield Reason("diagnosis.on-cpu")
    yield Reason("diagnosis.rate-needs-trial")
    yield Reason("diagnosis.not-recorded")
