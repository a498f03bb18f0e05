"""The training loop: what happens between two step boundaries, and what is decided at each."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scaletrain_cli.engine.checkpoint.checkpointing import Checkpointer
from scaletrain_cli.engine.data.batches import BatchReader
from scaletrain_cli.engine.data.dataset import DatasetInfo
from scaletrain_cli.engine.data.prefetch import Feed
from scaletrain_cli.engine.events import say, tell
from scaletrain_cli.engine.faults import Faults
from scaletrain_cli.engine.health.garbage_collection import GarbageCollection
from scaletrain_cli.engine.health.rollback import Judge
from scaletrain_cli.engine.health.stragglers import Stragglers
from scaletrain_cli.engine.metrics.goodput_ledger import LedgerClock
from scaletrain_cli.engine.metrics.metrics import LateMetrics, MetricsLog, StepMeasures
from scaletrain_cli.engine.metrics.out_of_memory import reporting_out_of_memory
from scaletrain_cli.engine.metrics.plan_check import PlanCheck
from scaletrain_cli.engine.model.attention import attention_kernel_of
from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.engine.model.moe import routing_measures
from scaletrain_cli.engine.optim.averaging import WeightAverage
from scaletrain_cli.engine.optim.schedules import learning_rate, should_stop
from scaletrain_cli.engine.process_group import Ranks, StepDecision
from scaletrain_cli.engine.resume_point import ResumePoint
from scaletrain_cli.engine.step import Stepper
from scaletrain_cli.engine.step_sync import Boundary
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.rundir.goodput import run_goodput
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.worker.heartbeat import Heartbeat


@dataclass
class Trainer:
    """One rank's parts, put together by assembly.assemble()."""

    run: RunDir
    record: RunRecord
    ranks: Ranks
    attempt: int
    begin: ResumePoint
    device: torch.device
    model: CausalLM
    stepper: Stepper
    average: WeightAverage | None
    optimizer: torch.optim.Optimizer
    checkpointer: Checkpointer
    dataset: DatasetInfo
    feed: Feed
    validation: BatchReader
    faults: Faults
    judge: Judge
    late: LateMetrics
    ledger: LedgerClock
    plan_check: PlanCheck
    boundary: Boundary
    heartbeat: Heartbeat
    stragglers: Stragglers
    _validation_losses: list[float] = field(init=False)

    def fit(self) -> ExitCode:
        """Train from the newest checkpoint to the last step, or until a signal asks to leave."""
        spec, total = self.record.spec, self.record.spec.total_steps
        begin = self.resume()
        self.boundary.cadence.begin_at(begin.step)
        step, evaluated, last = begin.step, begin.evaluated, total
        self._validation_losses = list(begin.validation_losses)
        self.ledger.set_up_is_done()
        with (
            contextlib.closing(self.ledger),
            MetricsLog(self.run, self.record, self.ranks.rank, self.attempt, self.device) as metrics,
            GarbageCollection() as garbage,
            contextlib.closing(self.feed),
            reporting_out_of_memory(
                self.run, self.record.plan, self.attempt, self.ranks.rank, self.plan_check.composed.engine
            ),
        ):
            if evaluated and self._should_stop():
                last = step
            while True:
                verdict, due = self.boundary.meet(step, self.late.due(step))
                if verdict is StepDecision.PREEMPT:
                    break
                saving = verdict is StepDecision.SAVE or step == last
                evaluating = self._evaluation_is_due(step) and not evaluated
                if saving or evaluating or step == last:  # which want all that was measured
                    due += self._rest()
                stands, due = self._judge(due, step, metrics), []
                if stands < step:
                    step, evaluated, last = stands, True, total
                    continue
                if saving:
                    metrics.flush()  # whoever resumes there logs none of these steps again
                    self._save(step, wait=not spec.checkpoint.asynchronous)
                if evaluating:
                    with self.ledger.during("evaluation"):
                        evaluated = self.evaluate(step, metrics)
                    if not evaluated:
                        continue
                    if self._should_stop():
                        last = step
                        self._event("stopped-early", step=step, validation_losses=self._validation_losses[-5:])
                if step == last:
                    break
                step, evaluated = step + 1, False
                with self.ledger.during("step"):
                    self.step(step)
                self.ledger.step_trained()
                self.checkpointer.allocate()
                garbage.after_step(step)
            step = self._judge([*due, *self._rest()], step, metrics)
            metrics.flush()
            done = metrics.finished = step == last and (evaluated or not self._evaluation_is_due(step))
            saved = self._save_at_the_end(step)
            if done:
                self.checkpointer.tidy_up()
                self.boundary.tidy_up()
            self._event("finished" if done else "preempted", step=step, **saved)
        if self.ranks.rank == 0 and (goodput := run_goodput(self.run)) is not None:
            say("goodput", **goodput.to_json())
        return ExitCode.DONE if done else ExitCode.PREEMPTED

    def _save_at_the_end(self, step: int) -> dict[str, Any]:
        """Save and wait, unless the grace period is too short for that; what there is to tell of it."""
        self.heartbeat.beat(step, "save")
        grace = self.record.spec.cluster.grace_seconds
        left, needed = self.boundary.seconds_to_save(step, grace)
        if left >= needed or self.checkpointer.committed_step == step:
            self._save(step, wait=True)
            return {}
        self.checkpointer.finish()
        return {
            "saved_step": self.checkpointer.committed_step,
            "why": f"{left:.1f} s of cluster.grace_seconds = {grace:g} are left and a save takes {needed:.1f} s",
        }

    def step(self, step: int) -> None:
        """Optimizer step ``step`` (1-based). What it measured comes out of ``late`` when it is there."""
        self.heartbeat.beat(step, "step")
        self.stragglers.begin(step)
        self.faults.before_step(step)
        rate = learning_rate(step, self.record.spec.total_steps, self.record.spec.training)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.late.begin()
        scale = self.stepper.loss_scale
        with self.plan_check.around(step):
            number = self.judge.batch_number(step)
            with self.ledger.during("data"):
                batches = self.feed.take(number)
            poisoned, factor = self.faults.poisons_gradient(step), self.faults.loss_factor(number)
            stepped = self.stepper.train(batches, poisoned=poisoned, factor=factor)
        if self.average is not None:
            self.average.update(step)
        measured: dict[str, Tensor | float] = {
            "loss": stepped.loss,
            "grad_norm": stepped.grad_norm,
            "learning_rate": rate,
        }
        if self.record.spec.training.precision == "fp16":
            measured |= {"loss_scale": scale, "skipped": float(stepped.skipped)}
        routing = routing_measures(self.model) if self.model.spec.num_experts else None
        if routing is not None:  # last, because a pipeline stage without experts has none
            measured |= {f"router_{name}": value for name, value in routing._asdict().items()}
        self.late.end(step, measured)

    def _rest(self) -> list[StepMeasures]:
        """What is measured and not agreed on yet. On a CPU nothing is; on a GPU the newest step."""
        agreed = self.boundary.agreement.on_values
        return [measured._replace(values=agreed(measured.values)) for measured in self.late.rest()]

    def _judge(self, measures: list[StepMeasures], step: int, metrics: MetricsLog) -> int:
        """Where the run stands once these are judged: at ``step``, or where it was rolled back to."""
        for measured in measures:
            self.boundary.cadence.step_took(measured.seconds)
        stands = self.judge.judge(measures, step, metrics)
        if stands < step:
            self.boundary.cadence.begin_at(stands)
            self.late.rest()  # of steps that are forgotten
            del self._validation_losses[self._evaluations_by(stands) :]
        return stands

    def _evaluations_by(self, step: int) -> int:
        """How many there were, with the one after that step."""
        return step // self.record.spec.evaluation.every if self.record.spec.evaluation.every else 0

    def _should_stop(self) -> bool:
        """Whether the validation losses so far say that it is no use to go on."""
        return should_stop(self._validation_losses, self.record.spec.training.early_stopping)

    def _evaluation_is_due(self, step: int) -> bool:
        every = self.record.spec.evaluation.every
        return every > 0 and step > 0 and (step % every == 0 or step == self.record.spec.total_steps)

    @torch.no_grad()
    def evaluate(self, step: int, metrics: MetricsLog) -> bool:
        """Log the mean validation loss in nats over the first ``evaluation.batches`` global batches, or what there is.

        The same sequences each time. False when a signal asked to leave on the way; whoever resumes evaluates then.
        """
        layout = self.record.plan.layout
        width = layout.micro_batch_size * layout.data_parallel
        wanted = self.record.spec.evaluation.batches * layout.global_batch_size
        rounds = min(wanted, len(self.validation.sequences)) // width
        losses = {"validation_loss": self._mean_loss(step, rounds)}
        if self.average is not None and self.average.taken:  # before the first weights are in it, there is none
            with self.average.in_use():
                losses["averaged_validation_loss"] = self._mean_loss(step, rounds)
        measured = {name: loss for name, loss in losses.items() if loss is not None}
        if len(measured) < len(losses):
            return False
        self._validation_losses.append(measured["validation_loss"])
        metrics.log_validation(step, rounds * width, **measured)
        return True

    def _mean_loss(self, step: int, rounds: int) -> float | None:
        """In nats; None when a signal asked to leave on the way."""
        total = torch.zeros((), device=self.device)
        waiting = self.validation.in_order(rounds)
        # As many at a time as a step takes, so that a pipeline is as full.
        while batches := list(itertools.islice(waiting, self.record.plan.layout.gradient_accumulation_steps)):
            if self.boundary.meet(step)[0] is StepDecision.PREEMPT:
                return None
            self.heartbeat.beat(step, "evaluation")
            total += len(batches) * self.stepper.validation_loss([batch.to(self.device) for batch in batches])
        return (total / rounds).item()

    def _save(self, step: int, *, wait: bool) -> None:
        self.boundary.saving(step)
        with self.ledger.during("save"):
            self.save(step, wait=wait)
        self.ledger.write()

    def save(self, step: int, *, wait: bool) -> None:
        """Begin a checkpoint of the state after ``step`` steps; the data position is that one number."""
        self.heartbeat.beat(step, "save")
        data = {"dataset": self.dataset.fingerprint, "dataset_seal": self.dataset.seal}
        state = {"step": step, **data, "guard": self.judge.guard.state_dict()}
        self.checkpointer.save(step, state, wait=wait)

    def resume(self) -> ResumePoint:
        """Restore the checkpoint that the attempt begins with, if any. Raises UsageError where it is of other data."""
        begin = self.begin
        self.heartbeat.beat(begin.step, "restore")
        if begin.checkpoint is not None:
            state, name = self.checkpointer.restore(begin.checkpoint), begin.checkpoint.path.name
            if state["dataset"] != self.dataset.fingerprint:
                raise UsageError(
                    f"{name} was trained on dataset {state['dataset'][:12]} and this one is "
                    f"{self.dataset.fingerprint[:12]}: resuming would train on other data. "
                    "Restore the data, or start anew."
                )
            if (state.get("dataset_seal") or self.dataset.seal) != self.dataset.seal:
                raise UsageError(
                    f"{name} was trained on data with other hashes than those of this dataset, which states the same "
                    "fingerprint: one of them was edited. Restore the dataset's folder from a copy, or start anew."
                )
            self.judge.guard.load_state_dict(state["guard"])
        self._event(
            "started" if begin.checkpoint is None else "resumed",
            step=begin.step,
            attempt=self.attempt,
            lost_steps=begin.lost_steps,
            passed_over=begin.passed_over,
            attention=attention_kernel_of(self.record.spec, self.record.plan.layout, self.device),
        )
        if not self.dataset.is_verified:
            self._event("unverified-data", schema=self.dataset.schema)
        return begin

    def _event(self, name: str, **details: Any) -> None:
        tell(self.run, self.ranks.rank, name, **details)
