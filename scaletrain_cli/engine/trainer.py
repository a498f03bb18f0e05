"""The training loop: at each step boundary agree with all ranks what to do, do it, and train the next step."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scaletrain_cli.engine.checkpoint.checkpointing import Checkpointer
from scaletrain_cli.engine.checkpoint.resume_point import ResumePoint
from scaletrain_cli.engine.compose import Composed
from scaletrain_cli.engine.data.batches import BatchReader
from scaletrain_cli.engine.data.loader import BatchesAndRounds, Loader, Round, rounds_reader
from scaletrain_cli.engine.data.splits import Reader, RunData, sequences_validated
from scaletrain_cli.engine.evaluation.measures import Figures
from scaletrain_cli.engine.faults import Faults
from scaletrain_cli.engine.health.rollback import GuardActions
from scaletrain_cli.engine.health.stragglers import Stragglers
from scaletrain_cli.engine.metrics.data_waits import DataWaits
from scaletrain_cli.engine.metrics.goodput_ledger import LedgerClock
from scaletrain_cli.engine.metrics.out_of_memory import reporting_out_of_memory
from scaletrain_cli.engine.metrics.plan_check import PlanCheck
from scaletrain_cli.engine.metrics.reporting import MetricsLog, log_event, report_event
from scaletrain_cli.engine.metrics.step_measures import DeferredMetrics, StepMeasures
from scaletrain_cli.engine.model.attention import attention_kernel_of
from scaletrain_cli.engine.model.moe import routing_measures
from scaletrain_cli.engine.objectives.reference import ReferencePass
from scaletrain_cli.engine.optim.averaging import WeightAverage
from scaletrain_cli.engine.optim.schedules import learning_rate, should_stop
from scaletrain_cli.engine.parallel.batch_norm import images_of_statistics
from scaletrain_cli.engine.process_group import Ranks, StepDecision
from scaletrain_cli.engine.stages import StageSwitch
from scaletrain_cli.engine.step import Stepper
from scaletrain_cli.engine.step_sync import StepSync
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.evaluations import is_lower_better
from scaletrain_cli.rundir.goodput import run_goodput
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.worker.heartbeat import Heartbeat

_STEPS_BETWEEN_COLLECTIONS = 50


class GarbageCollection:
    """A context that disables Python's garbage collector, except for a collection on all ranks every 50 steps.

    A rank that collects makes all others wait in the next collective, so all collect after the same step.
    """

    def __enter__(self) -> GarbageCollection:
        gc.disable()
        gc.collect()
        gc.freeze()  # excludes everything that exists now from later collections
        return self

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        gc.enable()

    def after_step(self, step: int) -> None:
        """Collect objects created since the context was entered, after every 50th step."""
        if step % _STEPS_BETWEEN_COLLECTIONS == 0:
            gc.collect()


@dataclass
class LoopState:
    """The state of the loop between two steps; the same on every rank."""

    step: int  # optimizer steps trained
    last_step: int  # the step after which training ends; early stopping lowers it
    evaluation_due: bool  # the validation loss after ``step`` is still to be measured
    validations: list[dict[str, float]]  # of the whole run, in order: measures by their names in metrics.jsonl

    @property
    def at_last_step(self) -> bool:
        """True after the last step of training."""
        return self.step == self.last_step

    @property
    def is_complete(self) -> bool:
        """True if nothing is left to train or to evaluate."""
        return self.at_last_step and not self.evaluation_due


@dataclass
class Trainer:
    """The parts of one rank, built by ``assembly.assemble``, and the loop over them. Methods are collective."""

    run: RunDir
    record: RunRecord
    ranks: Ranks
    attempt: int
    resume_point: ResumePoint
    device: torch.device
    composed: Composed
    stages: StageSwitch
    stepper: Stepper
    average: WeightAverage | None
    checkpointer: Checkpointer
    data: RunData
    training: Reader
    validation: dict[str, Reader]  # by source
    validation_shares: dict[str, float]  # of the sources in the validation loss; the sum is 1
    faults: Faults
    guard: GuardActions
    deferred_metrics: DeferredMetrics
    data_waits: DataWaits
    ledger: LedgerClock
    plan_check: PlanCheck
    step_sync: StepSync
    heartbeat: Heartbeat
    stragglers: Stragglers
    reference: ReferencePass | None  # None: the objective has no reference
    loader: Loader[Any] = field(init=False)
    metrics: MetricsLog = field(init=False)
    garbage_collection: GarbageCollection = field(default_factory=GarbageCollection)

    def fit(self) -> ExitCode:
        """Train from the resume point until the last step or a preemption signal; return the rank's exit code."""
        reporting = partial(
            reporting_out_of_memory, self.run, self.record.plan, self.attempt, self.ranks.rank, self.composed
        )
        with reporting():
            state = self.resume()
            prepared = self.prepare_batches(state.step)
        with (
            contextlib.closing(self.ledger),
            MetricsLog(self.run, self.record, self.ranks.rank, self.attempt, self.device) as self.metrics,
            self.garbage_collection,
            contextlib.closing(self.loader),
            reporting(),
        ):
            if prepared:
                self._train_until_end(state)
            self._finish(state)
        if self.ranks.rank == 0 and (goodput := run_goodput(self.run)) is not None:
            log_event("goodput", **goodput.to_json())
        return ExitCode.DONE if state.is_complete else ExitCode.PREEMPTED

    def _train_until_end(self, state: LoopState) -> None:
        """Train until the last step, or until a rank receives a preemption signal. All ranks decide alike."""
        while True:
            decision, measures = self.step_sync.agree(state.step, self.deferred_metrics.due(state.step))
            save_due = decision is StepDecision.SAVE or state.at_last_step
            if save_due or state.evaluation_due or decision is StepDecision.PREEMPT:
                measures += self._remaining_measures()
            rolled_back = self._check(state, measures)
            if decision is StepDecision.PREEMPT:
                return
            if rolled_back:
                continue
            if save_due:
                self.metrics.flush()  # an attempt that resumes here does not log these steps again
                self.save(state.step, wait=not self.record.spec.checkpoint.asynchronous)
            if state.evaluation_due:
                if not self._evaluate(state):
                    continue  # preempted
                if self._is_best(state):
                    self.metrics.flush()  # retention reads the loss there
                    self.save(state.step, wait=not self.record.spec.checkpoint.asynchronous)
            if state.at_last_step:
                return
            self._train_step(state)

    def _check(self, state: LoopState, measures: list[StepMeasures]) -> bool:
        """Pass measures to the guard; return True, with ``state`` moved back, if it rolled the run back."""
        for measured in measures:
            self.step_sync.schedule.step_took(measured.seconds)
        step = self.guard.check(measures, state.step, self.metrics)
        if step == state.step:
            return False
        self.step_sync.schedule.begin_at(step)
        self.deferred_metrics.remaining()  # discards the measures of undone steps
        state.step, state.last_step, state.evaluation_due = step, self.record.spec.total_steps, False
        every = self.record.spec.evaluation.every
        del state.validations[step // every if every else 0 :]
        return True

    def _evaluate(self, state: LoopState) -> bool:
        """Evaluate after ``state.step`` steps, and stop early if due; return False if a preemption signal arrived."""
        with self.ledger.during("evaluation"):
            measured = self.evaluate(state.step, self.metrics)
        if measured is None:
            return False
        if not state.validations:
            check_metrics(self.record.spec, measured)
        state.validations.append(measured)
        state.evaluation_due = False
        if self._should_stop_early(state):
            state.last_step = state.step
            metric = self.record.spec.training.early_stopping.metric
            latest = _values(state.validations[-5:], metric)
            self._report("stopped-early", step=state.step, metric=metric, values=latest)
        return True

    def _train_step(self, state: LoopState) -> None:
        """Train one optimizer step and advance ``state`` to it."""
        state.step += 1
        state.evaluation_due = self._evaluation_follows(state.step)
        with self.ledger.during("step"):
            self.optimizer_step(state.step)
        self.ledger.step_trained()
        self.checkpointer.allocate()
        self.garbage_collection.after_step(state.step)

    def _finish(self, state: LoopState) -> None:
        """Save if there is time, and report how the attempt ended."""
        self.metrics.flush()
        self.metrics.finished = state.is_complete
        unsaved = self._save_before_exit(state.step)
        if state.is_complete:
            self.checkpointer.clean_up()
            self.step_sync.clear_save_request()
        self._report("finished" if state.is_complete else "preempted", step=state.step, **unsaved)

    def optimizer_step(self, step: int) -> None:
        """Run optimizer step ``step`` (1-based); its measures become available from ``deferred_metrics``."""
        rate = learning_rate(step, self.record.spec.total_steps, self.record.spec.training)
        self._enter_stage(step, rate)
        self.stragglers.begin(step)
        self.faults.before_step(step)
        self.deferred_metrics.begin()
        scale = self.stepper.loss_scale
        with self.plan_check.around(step):
            number = self.guard.batch_number(step)
            with self.ledger.during("data"):
                began = time.perf_counter()
                batches = self.loader.take(number, self._following(step)).micro_batches()
                waited = time.perf_counter() - began
            nan_gradient, factor = self.faults.injects_nan(step), self.faults.loss_factor(number)
            result = self.stepper.train(batches, nan_gradient=nan_gradient, factor=factor)
        settings = self.record.spec.data.loader
        self.data_waits.add(step, waited, workers=settings.workers, prefetch=settings.prefetch)
        if self.average is not None:
            self.average.update(step)
        measured: dict[str, Tensor | float] = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": rate,
            "data_wait": waited,
        }
        if self.record.spec.training.precision == "fp16":
            measured |= {"loss_scale": scale, "skipped": float(result.skipped)}
        measured |= result.measures
        if (tokens := getattr(batches[0], "step_tokens", None)) is not None:
            measured["tokens"] = float(tokens)
        model = self.composed.model
        routing = routing_measures(model) if getattr(model.spec, "num_experts", 0) else None
        if routing is not None:  # last, because a pipeline stage without experts has none
            measured |= {f"router_{name}": value for name, value in routing._asdict().items()}
        self.deferred_metrics.end(step, measured)

    def _following(self, step: int) -> list[int]:
        """Return the batches of the steps after ``step`` that are read ahead."""
        last = min(step + self.record.spec.data.loader.read_ahead, self.record.spec.total_steps)
        return [self.guard.batch_number(later) for later in range(step + 1, last + 1)]

    def _enter_stage(self, step: int, rate: float) -> None:
        """Begin the step, with another engine if a training stage begins: that takes as long as the set-up of a run."""
        if not self.stages.is_due(step):
            self.heartbeat.beat(step, "step")
            self.stages.enter(step, rate)
            return
        self.heartbeat.beat(step, "set-up")
        self.stages.enter(step, rate)
        self._report("stage", step=step, **self.stages.summary())
        self.heartbeat.beat(step, "step", self.heartbeat.first_step_seconds)

    def resume(self) -> LoopState:
        """Restore the checkpoint of the resume point, if any, and return where the loop starts."""
        begin, name, before = self.resume_point, "started", None
        self.heartbeat.beat(begin.step, "restore")
        if begin.checkpoint is not None:
            name = "resumed"
            restored = self.checkpointer.restore(begin.checkpoint)
            self.guard.load_state_dict(restored["guard"])
            before = restored.get("batch_norm_images")  # earlier versions do not write it
        kernel = {}
        if isinstance(self.record.spec.model, ModelSpec):
            kernel["attention"] = attention_kernel_of(self.record.spec, self.record.plan.layout, self.device)
        self._report(
            name,
            step=begin.step,
            attempt=self.attempt,
            lost_steps=begin.lost_steps,
            passed_over=begin.passed_over,
            **kernel,
        )
        if before is not None and before != (now := self._images_of_statistics()):
            self._report("batch-norm-images", step=begin.step, before=before, now=now)
        for info in self.data.infos.values():
            if not info.is_verified:
                self._report("unverified-data", schema=info.schema)
        self.step_sync.schedule.begin_at(begin.step)
        self.ledger.set_up_is_done()
        due = self._evaluation_follows(begin.step) and not begin.evaluated
        state = LoopState(begin.step, self.record.spec.total_steps, due, list(begin.validations))
        if begin.evaluated and self._should_stop_early(state):
            state.last_step = state.step
        return state

    def prepare_batches(self, step: int) -> bool:
        """Make the batches ready to train after ``step`` steps, with reference log-probabilities if needed.

        Returns False after a preemption signal. Raises ReferenceDataError, see ``ReferencePass``.
        """
        ready = True
        if self.reference is not None:
            assert isinstance(self.training, BatchReader)
            with self.ledger.during("restore"):
                own = self.reference.with_reference(self.training, "train", step)
                others = None if own is None else self._validation_with_reference(step)
            ready = own is not None and others is not None
            self.training, self.validation = own or self.training, others or self.validation
        settings = self.record.spec.data.loader
        by_round = {name: rounds_reader(reader.without_groups()) for name, reader in self.validation.items()}
        validation = {name: found for name, found in by_round.items() if found is not None}
        training = self.training.without_groups().batch
        self.loader = Loader(
            BatchesAndRounds(training, validation) if validation else training,
            self.device,
            workers=settings.workers,
            pin_memory=settings.pin_memory,
        )
        if ready and self.reference is not None and step == 0:
            batches = self.training.batch(self.guard.batch_number(1)).micro_batches()
            self.reference.check([batch.to(self.device) for batch in batches])
        return ready

    def _validation_with_reference(self, step: int) -> dict[str, Reader] | None:
        if not self.record.spec.evaluation.every:
            return self.validation
        ((name, reader),) = self.validation.items()  # pairs have one source
        assert self.reference is not None
        assert isinstance(reader, BatchReader)
        found = self.reference.with_reference(reader, "validation", step)
        return None if found is None else {name: found}

    def _images_of_statistics(self) -> int | None:
        if isinstance(self.record.spec.model, ModelSpec):
            return None
        return images_of_statistics(self.composed.model, self.record.spec, self.record.plan.layout)

    def save(self, step: int, *, wait: bool) -> None:
        """Start a checkpoint of the state after ``step`` steps; with ``wait``, return when it is committed."""
        self.step_sync.save_begins(step)
        with self.ledger.during("save"):
            self.heartbeat.beat(step, "save")
            state = {"step": step, **self.data.to_checkpoint(), "guard": self.guard.state_dict()}
            if (images := self._images_of_statistics()) is not None:
                state["batch_norm_images"] = images
            self.checkpointer.save(step, state, wait=wait)
        self.ledger.write()

    @torch.no_grad()
    def evaluate(self, step: int, metrics: MetricsLog) -> dict[str, float] | None:
        """Log and return the mean validation loss over the first ``evaluation.batches`` global batches, and measures.

        The same sequences each time, or as many as the validation splits have. Several sources have a loss each, and
        the whole is their mean by ``validation_shares``. None if a preemption signal arrived during the evaluation:
        nothing is logged, and the next attempt evaluates again.
        """
        shares = self.validation_shares if len(self.validation) > 1 else {}
        whole = not self.composed.objective.masks_samples
        counts = {
            name: sequences_validated(self.record, len(reader), shares.get(name), whole_rounds=whole)
            for name, reader in self.validation.items()
        }
        found = self._validate(step, counts, "validation_")
        if found is not None and self.average is not None and self.average.taken:  # not before the first average
            with self.average.in_use():
                averaged = self._validate(step, counts, "averaged_validation_")
            found = None if averaged is None else found._replace(metrics=found.metrics | averaged.metrics)
        if found is None:
            return None
        metrics.log_validation(step, sum(counts.values()), found.details, **found.metrics)
        return found.metrics

    def _validate(self, step: int, counts: dict[str, int], prefix: str) -> Figures | None:
        """Return losses and other measures, by their names with the prefix, and details; None after a signal."""
        objective = self.composed.objective
        objective.begin_validation()
        losses = self._validation_losses(step, counts, f"{prefix}loss")
        if losses is None:
            return None
        figures = objective.end_validation()
        taken = {name: value.item() for name, value in self.stepper.take_measures().items()}
        measures = figures.metrics if prefix != "validation_" else taken | figures.metrics
        finite = {f"{prefix}{name}": value for name, value in measures.items() if math.isfinite(value)}
        return Figures(losses | finite, figures.details)

    def _validation_losses(self, step: int, counts: dict[str, int], name: str) -> dict[str, float] | None:
        """Return the validation loss and, of several sources, the loss of each; None after a preemption signal."""
        found = {}
        for source, reader in self.validation.items():
            loss = self._mean_loss(step, self._evaluated(step, source, reader, counts[source]))
            if loss is None:
                return None
            found[source] = loss
        if len(found) == 1:
            return {name: next(iter(found.values()))}
        # a source without a share has no part in the whole, also if its loss is not finite
        whole = sum(share * found[source] for source, share in self.validation_shares.items() if share)
        return {name: whole, **{f"{name}/{source}": loss for source, loss in found.items()}}

    def _evaluated(self, step: int, source: str, reader: Reader, count: int) -> Iterator[Any]:
        """Yield this rank's micro-batches of an evaluation of the first ``count`` samples of a source.

        Images are read and decoded ahead by the loader of the training batches, as many micro-batches as it reads for
        training; the last rounds are followed by the batches of the next steps.
        """
        by_round = rounds_reader(reader)
        if by_round is None:
            yield from reader.in_order(count)
            return
        ahead, size = self.record.spec.data.loader.read_ahead, self.record.plan.layout.gradient_accumulation_steps
        rounds = [Round(source, number, count) for number in range(1, by_round.rounds(count) + 1)]
        for place, request in enumerate(rounds, 1):
            later = rounds[place : place + ahead * size]
            then = self._following(step)[: ahead - -(-len(later) // size)]
            yield from self.loader.take(request, [*later, *then]).micro_batches()

    def _mean_loss(self, step: int, waiting: Iterator[Any]) -> float | None:
        """Return the mean loss over micro-batches, in nats; None after a preemption signal."""
        total = torch.zeros((), device=self.device)
        rounds = 0
        # As many micro-batches at a time as a training step has, so that a pipeline is filled as well.
        while batches := list(itertools.islice(waiting, self.record.plan.layout.gradient_accumulation_steps)):
            if self.step_sync.agree(step)[0] is StepDecision.PREEMPT:
                return None
            self.heartbeat.beat(step, "evaluation")
            rounds += len(batches)
            total += len(batches) * self.stepper.validation_loss([batch.to(self.device) for batch in batches])
        exact = self.composed.objective.take_validation_loss()
        return (total / rounds).item() if exact is None else exact

    def _evaluation_follows(self, step: int) -> bool:
        every = self.record.spec.evaluation.every
        return every > 0 and step > 0 and (step % every == 0 or step == self.record.spec.total_steps)

    def _should_stop_early(self, state: LoopState) -> bool:
        settings = self.record.spec.training.early_stopping
        return settings.patience > 0 and should_stop(self._lowered(state, settings.metric), settings)

    def _is_best(self, state: LoopState) -> bool:
        """Return True if the newest validation has the best value of ``checkpoint.keep_best``."""
        metric = self.record.spec.checkpoint.keep_best
        if metric is None or metric not in state.validations[-1]:
            return False
        *earlier, newest = self._lowered(state, metric)
        return newest < min(earlier, default=math.inf)

    def _lowered(self, state: LoopState, metric: str) -> list[float]:
        """Return the values of a metric of all validations that have it, negated if the greatest is the best."""
        sign = 1.0 if is_lower_better(self.run, metric) else -1.0
        return [sign * value for value in _values(state.validations, metric)]

    def _remaining_measures(self) -> list[StepMeasures]:
        """Return the measures that are not agreed on yet: none on a CPU, those of the newest step on a GPU."""
        agreed = self.step_sync.consensus.on_values
        return [measured._replace(values=agreed(measured.values)) for measured in self.deferred_metrics.remaining()]

    def _save_before_exit(self, step: int) -> dict[str, Any]:
        """Save and wait, unless the grace period is too short; return the details of a save that was left out."""
        self.heartbeat.beat(step, "save")
        grace = self.record.spec.cluster.grace_seconds
        left, needed = self.step_sync.seconds_to_save(step, grace)
        if left >= needed or self.checkpointer.committed_step == step:
            self.save(step, wait=True)
            return {}
        self.checkpointer.finish()
        return {
            "saved_step": self.checkpointer.committed_step,
            "why": f"{left:.1f} s of cluster.grace_seconds = {grace:g} are left and a save takes {needed:.1f} s",
        }

    def _report(self, name: str, **details: Any) -> None:
        report_event(self.run, self.ranks.rank, name, **details)


def check_metrics(spec: RunSpec, measured: Mapping[str, float]) -> None:
    """Raise UsageError if the validation has not measured the metric of early stopping or of ``keep_best``.

    A loss that is not finite is not an error: then the other measures are left out.
    """
    stopping = spec.training.early_stopping
    metrics = {"checkpoint.keep_best": spec.checkpoint.keep_best or ""}
    if stopping.patience:
        metrics["training.early_stopping.metric"] = stopping.metric
    for key, metric in metrics.items():
        missing = metric.startswith("validation_") and metric not in measured  # others are of evaluation.tasks
        if missing and math.isfinite(measured["validation_loss"]):
            names = sorted(name for name in measured if name.startswith("validation_"))
            raise UsageError(Reason("engine.metric-not-measured", {"key": key, "metric": metric, "names": names}))


def _values(validations: Iterable[Mapping[str, float]], metric: str) -> list[float]:
    """Return the values of a metric in the validations that have it."""
    return [measured[metric] for measured in validations if metric in measured]
