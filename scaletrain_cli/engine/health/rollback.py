"""Act on what the guard finds: record it, stop the run, or roll back to a clean checkpoint and skip the bad data.

All ranks see the same numbers and have the same state, so all act alike at the same step; rank 0 records it.
"""

import math
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.data.stages import SkipRange, batch_number, merged_skip_ranges
from scaletrain_cli.engine.checkpoint.checkpointing import Checkpointer
from scaletrain_cli.engine.context import RankContext
from scaletrain_cli.engine.health.guard import Guard
from scaletrain_cli.engine.metrics.goodput_ledger import LedgerClock
from scaletrain_cli.engine.metrics.reporting import MetricsLog, log_event
from scaletrain_cli.engine.metrics.step_measures import StepMeasures
from scaletrain_cli.engine.stages import StageSwitch
from scaletrain_cli.errors import DoNotRequeueError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import json_number
from scaletrain_cli.rundir.evaluations import forget_newer
from scaletrain_cli.rundir.journal import Rollback, record_rollback


class NonFiniteGradientError(DoNotRequeueError):
    """The gradient is NaN or infinite on some rank; the weights are unchanged (exit 93)."""

    failure_reason = "nan"


class SpikeError(DoNotRequeueError):
    """The loss spiked again after every rollback to one checkpoint (exit 93)."""

    failure_reason = "spike"


@dataclass
class GuardActions:
    """``rollbacks``: those of the run so far. ``long_consensus``: a consensus with a longer timeout than a hang.

    ``mixture_batches``: the batches at which the sources of the data get other shares.
    """

    context: RankContext
    checkpointer: Checkpointer
    guard: Guard
    rollbacks: list[Rollback]
    ledger: LedgerClock
    stages: StageSwitch
    mixture_batches: tuple[int, ...] = ()

    @property
    def skipped(self) -> tuple[SkipRange, ...]:
        """Ranges of batches that are skipped: by the spec, and by rollbacks."""
        return merged_skip_ranges([*self.context.spec.data.skip, *(rollback.skip for rollback in self.rollbacks)])

    def batch_number(self, step: int) -> int:
        return batch_number(step, self.skipped)

    def check(self, measures: list[StepMeasures], trained: int, metrics: MetricsLog) -> int:
        """Check the measures of steps and log them, after ``trained`` steps; return the step of the run. Collective.

        That is ``trained``, or the step of the checkpoint that the run was rolled back to. Raises
        NonFiniteGradientError and SpikeError.
        """
        spec = self.context.spec
        for step, seconds, measured in measures:
            tokens = measured.pop("tokens", None)
            units = spec.training.global_batch_size * spec.units_per_sample
            if tokens is not None and spec.unit == "tokens":
                units = int(tokens)
            if measured.get("skipped"):
                del measured["grad_norm"]  # infinite, because of the overflow
            loss, norm = measured["loss"], measured.get("grad_norm", 0.0)
            if not (
                math.isfinite(loss) and math.isfinite(norm)
            ):  # a loss that is not finite is unrelated to the loss scale
                return self._after_non_finite(step, trained, loss, norm, metrics)
            if step == 1:
                self._report_first_loss(loss)
            if any(self.batch_number(step - 1) < batch <= self.batch_number(step) for batch in self.mixture_batches):
                self.guard.expect_new_level()
            status, findings = self.guard.observe(step, measured)
            for event, evidence in findings.items():
                self.context.report(event, step=step, **evidence)
            if step % spec.tracking.log_every == 0 or step in (1, spec.total_steps):
                # a source without a label in this batch has no loss; the noise scale takes many steps to be known
                may_lack = [key for key in measured if "/" in key or key == "noise_scale"]
                known = {key: value for key, value in measured.items() if math.isfinite(value) or key not in may_lack}
                metrics.log(step, units=units, step_seconds=seconds, tokens=tokens, **known)
            if status == "spike" and (back := self._after_spike(step, trained, metrics)) is not None:
                return back
            if (clean := self.guard.clean_step(step)) is not None:
                self.checkpointer.mark_clean_up_to(clean)
        return trained

    def _after_spike(self, step: int, trained: int, metrics: MetricsLog) -> int | None:
        """Return the step that the run was rolled back to; None if training continues."""
        spike, evidence = self.context.spec.guard.spike, self.guard.evidence()
        then = "training continues: guard.spike.action is warn"
        if spike.action == "rollback":
            with self.ledger.during("rollback"):
                back = self._roll_back(step, trained, spike.patience, "spike", evidence, metrics)
            if back is not None:
                return back
            then = "training continues: no checkpoint is known to be clean yet"
        self.context.report("spike", step=step, then=then, **evidence)
        return None

    def _after_non_finite(self, step: int, trained: int, loss: float, norm: float, metrics: MetricsLog) -> int:
        """Return the step that the run was rolled back to, at the first value that is not finite."""
        evidence = {"loss": json_number(loss), "grad_norm": json_number(norm), **self.guard.evidence()}
        if self.context.spec.guard.nan == "rollback":
            with self.ledger.during("rollback"):
                back = self._roll_back(step, trained, 1, "nan", evidence, metrics)
            if back is not None:
                return back
        self.context.heartbeat.beat(trained, "save")
        self.checkpointer.finish()  # an earlier save in flight is valid
        params = {"step": step, "batch": self.batch_number(step)}
        params |= {name: evidence[name] for name in ("loss", "grad_norm")}
        raise NonFiniteGradientError(Reason("engine.gradient-not-finite", params))

    def _roll_back(
        self, step: int, trained: int, margin: int, cause: str, evidence: dict[str, Any], metrics: MetricsLog
    ) -> int | None:
        """Roll back to the latest clean checkpoint and return its step; None if there is none.

        The batches from ``margin`` before the first outlier to the last one trained on are skipped. The event is
        recorded after newer checkpoints are deleted and before a step is trained, so that after a kill in between
        either the decision is made again or the rollback is complete.
        """
        self.context.heartbeat.beat(trained, "rollback")
        self.checkpointer.finish()
        if (target := self.checkpointer.latest_clean()) is None:
            return None
        allowed = self.context.spec.guard.spike.retries
        retry = 1 + sum(rollback.to_step == target.step for rollback in self.rollbacks)
        if retry > allowed:
            nan = cause == "nan"
            error = NonFiniteGradientError if nan else SpikeError
            code = "engine.gradient-not-finite-again" if nan else "engine.loss-spike"
            params: dict[str, Any] = {"step": step, "rollbacks": allowed, "to_step": target.step, "evidence": evidence}
            params["losses"] = [round(loss, 4) for loss in evidence["losses"]]
            params["skipped"] = [list(skip) for skip in self.skipped]
            raise error(Reason(code, params))
        from_batch = max(self.guard.first_outlier(step) - margin, target.step + 1)
        skip = self.batch_number(from_batch), self.batch_number(trained)
        rollback = Rollback(from_step=trained, to_step=target.step, skip=skip)
        self.checkpointer.forget_copies(target.step)
        if self.context.rank == 0:
            self.checkpointer.delete_newer(target.step)
            forget_newer(self.context.run, target.step)
            metrics.flush()  # the event records where these lines end in the file
            record_rollback(self.context.run, rollback, cause=cause, retry=retry, retries=allowed, **evidence)
            log_event("rolled-back", **vars(rollback), cause=cause, retry=retry, **evidence)
        self.context.long_consensus.barrier()
        self.rollbacks.append(rollback)
        self.stages.prepare_restore(target.step)
        self.guard.load_state_dict(self.checkpointer.restore(target)["guard"])
        return target.step

    def _report_first_loss(self, loss: float) -> None:
        """Report whether the first loss of a new model is near that of a uniform guess, ln(vocab_size)."""
        spec = self.context.spec
        of_tokens = spec.training.objective in ("causal_lm", "sft")
        if not of_tokens or not spec.is_from_scratch:
            return  # not a loss of tokens, or not a new model
        expected = math.log(spec.language_model.vocab_size)
        plausible = abs(loss - expected) < 0.1 * expected
        self.context.report("first-loss", loss=loss, ln_vocab_size=expected, plausible=plausible)
