"""All checks of a run, found in the modules of their themes, and the diagnosis that they make together."""

from collections.abc import Iterator
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
from scaletrain_cli.diagnosis.case import Case, Check, read_case
from scaletrain_cli.diagnosis.findings import Finding
from scaletrain_cli.reasons import Reason, Texts
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, is_elsewhere
from scaletrain_cli.spec import ModelSpec

# In the order of findings of the same severity and confidence: causes before what they cause.
THEMES = (learning_rate, loss, targets, data, gradients, hardware, speed, utilization, memory, durability)
CHECKS = [
    member
    for theme in THEMES
    for member in vars(theme).values()
    if isinstance(member, Check) and member.findings.__module__ == theme.__name__
]
TEXTS: Texts = {
    "check-failed": "{check}: this version cannot read the record",
    "few-steps": "{steps:of step} measured; the loss is judged from {needed} on",
    "sampled": "{read:whole} of {last:of step} were read; what lasts a few steps is known from events of the guard "
    "only",
    "not-from-scratch": "the first loss and the learning rate: those of a new model do not apply to given weights, "
    "adapters and preference pairs",
    "not-text": "the first loss: it is that of equal outputs for new language models only",
    "no-validation": "overfitting: no validation has been measured",
    "on-cpu": "the step time beside the plan: planned times are rough for CPUs",
    "rate-needs-trial": "whether another learning rate would be better, as long as the loss falls: that needs a trial",
    "elsewhere": "the run directory is on a volume of the cluster that is not mounted here; run `scaletrain diagnose "
    "{run}` in a pod that mounts it",
    "no-telemetry": "utilization and clocks of GPUs, time in communication and on the host, other ranks' memory: "
    "there is no telemetry",
    "no-gpu-telemetry": "utilization, clocks and errors of GPUs: the telemetry has none",
    "no-layers": "dead and exploding layers: norms by layer were not measured",
    "no-noise-scale": "whether the batch is too large: the gradient noise scale was not measured",
    "no-dataset": "labels shifted twice, duplicates and epochs: no prepared text of one source is here",
}
for _theme in THEMES:
    TEXTS |= _theme.TEXTS
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
    raised: list[Finding] = []
    failed: list[Reason] = []
    for check in CHECKS:
        if check.of_engine and case.spec.code.own_program:
            continue
        try:
            raised += check(case)
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError):  # a damaged or foreign record
            failed.append(Reason("diagnosis.check-failed", {"check": check.findings.__module__.rpartition(".")[2]}))
    # A finding is left out if another one that is as severe explains it.
    explains = {f"diagnosis.{code}": symptoms for check in CHECKS for code, symptoms in check.explains.items()}
    explained = [(f"diagnosis.{code}", other.rank[0]) for other in raised for code in explains.get(other.code, ())]
    kept = [
        finding
        for finding in raised
        if not any(finding.code == code and rank <= finding.rank[0] for code, rank in explained)
    ]
    kept.sort(key=lambda finding: finding.rank)
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
