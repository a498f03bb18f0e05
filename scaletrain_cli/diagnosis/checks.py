"""All checks of a run, in one table, and the diagnosis that they make together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.diagnosis import (
    data,
    durability,
    gradients,
    hardware,
    learning_rate,
    loss,
    memory,
    speed,
    targets,
    utilization,
)
from scaletrain_cli.diagnosis.case import Case, read_case
from scaletrain_cli.diagnosis.findings import Finding
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, is_elsewhere
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
    loss.swinging,
    loss.spiking,
    targets.targets_visible,
    targets.order_not_learned,
    targets.repeated_passages,
    targets.stairs,
    targets.many_epochs,
    data.overfitting,
    data.validation_above_training,
    data.underfitting,
    data.source_stands_still,
    gradients.dead_gradients,
    gradients.loss_scale,
    gradients.norm_trend,
    gradients.norm_spikes,
    gradients.always_clipped,
    gradients.dead_layers,
    gradients.exploding_layers,
    gradients.update_ratio,
    hardware.gpu_errors,
    hardware.memory_short,
    hardware.cpu_throttled,
    utilization.throttled,
    speed.slow_rank,
    utilization.slow_work,
    speed.data_wait,
    speed.slower_than_plan,
    speed.slowing_down,
    utilization.communication,
    utilization.host_bound,
    utilization.small_micro_batches,
    utilization.needless_recomputation,
    utilization.low_utilization,
    learning_rate.batch_too_large,
    memory.nearly_full,
    memory.growing,
    memory.above_plan,
    durability.restarts,
    durability.hangs,
    durability.corruption,
    durability.slow_saves,
    durability.interval,
    durability.mirror,
)
# Checks of settings, plans and records of the built-in engine, which a program of the user's need not follow.
_OF_THE_ENGINE: tuple[Check, ...] = (
    *(learning_rate.too_high, learning_rate.warm_up_too_short, learning_rate.too_low),
    *(gradients.loss_scale, gradients.always_clipped, speed.slower_than_plan, memory.above_plan),
    *(durability.slow_saves, durability.interval, learning_rate.batch_too_large, loss.swinging),
    *(utilization.small_micro_batches, utilization.needless_recomputation),
)
_OF_A_HIGH_RATE = ("diagnosis.loss-spikes", "diagnosis.gradient-norm-spikes", "diagnosis.loss-swings")
# Symptoms that a finding explains; they are left out beside it.
_EXPLAINS = {
    "diagnosis.learning-rate-too-high": (*_OF_A_HIGH_RATE, "diagnosis.order-not-learned", "diagnosis.underfitting"),
    "diagnosis.warm-up-too-short": _OF_A_HIGH_RATE,
    "diagnosis.learning-rate-too-low": ("diagnosis.loss-flat", "diagnosis.underfitting"),
    "diagnosis.gradients-dead": ("diagnosis.loss-flat", "diagnosis.gradient-vanishes", "diagnosis.layer-dead"),
    "diagnosis.overfitting": ("diagnosis.validation-far-above", "diagnosis.data-repeated", "diagnosis.loss-stairs"),
    "diagnosis.validation-far-above": ("diagnosis.loss-stairs",),
    "diagnosis.data-duplicated": ("diagnosis.targets-visible", "diagnosis.loss-stairs"),
    "diagnosis.data-repeated": ("diagnosis.loss-stairs",),
    "diagnosis.loss-falls-at-resume": ("diagnosis.loss-spikes", "diagnosis.loss-rising"),
    "diagnosis.order-not-learned": ("diagnosis.underfitting",),
    "diagnosis.loss-flat": ("diagnosis.underfitting",),
    "diagnosis.loss-oscillating": ("diagnosis.loss-swings",),
    "diagnosis.loss-above-start": ("diagnosis.loss-rising", "diagnosis.loss-flat", "diagnosis.loss-swings"),
    "diagnosis.data-wait": ("diagnosis.utilization-low",),
    "diagnosis.communication-bound": ("diagnosis.utilization-low",),
    "diagnosis.host-bound": ("diagnosis.utilization-low",),
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


def diagnose_run(run: RunDir, record: RunRecord, case: Case | None = None) -> Diagnosis:
    """Return the diagnosis of a run, from its directory alone. Raises UsageError for a damaged record.

    ``case``: as it was read just now.
    """
    if is_elsewhere(run, record):
        return Diagnosis(run.run_id, 0, 0, (), (Reason("diagnosis.elsewhere", {"run": run.run_id}),))
    return diagnose(run.run_id, read_case(run, record) if case is None else case)


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
    # A finding is left out if another one that is as severe explains it.
    explained = [(code, other.rank[0]) for other in found for code in _EXPLAINS.get(other.code, ())]
    kept = [each for each in found if not any(each.code == code and rank <= each.rank[0] for code, rank in explained)]
    kept.sort(key=lambda each: each.rank)
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
    telemetry = case.telemetry
    if not telemetry.ranks and not telemetry.gpus:
        yield Reason("diagnosis.no-telemetry")
    elif not telemetry.gpus and not case.on_cpu:
        yield Reason("diagnosis.no-gpu-telemetry")
    if not telemetry.layers:
        yield Reason("diagnosis.no-layers")
    if not any("noise_scale" in series.mean for series in telemetry.ranks.values()):
        yield Reason("diagnosis.no-noise-scale")
    if case.is_fresh_text and (case.dataset is None or case.dataset.token_entropy is None):
        yield Reason("diagnosis.no-dataset")
