"""The training loop: at each step boundary agree with all ranks what to do, do it, and train the next step."""

import contextlib
import ctypes
import gc
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from scaletrain_cli.engine.checkpoint.checkpointing import Checkpointer
from scaletrain_cli.engine.checkpoint.resume_point import ResumePoint
from scaletrain_cli.engine.compose import Composed
from scaletrain_cli.engine.context import RankContext
from scaletrain_cli.engine.data.batches import BatchReader
from scaletrain_cli.engine.data.loader import BatchesAndRounds, Loader
from scaletrain_cli.engine.data.splits import Reader, RunData
from scaletrain_cli.engine.faults import STATE_PARTS, Faults
from scaletrain_cli.engine.health.rollback import GuardActions
from scaletrain_cli.engine.health.state_check import flip_bit, held_tensors
from scaletrain_cli.engine.health.stragglers import Stragglers
from scaletrain_cli.engine.metrics.data_waits import DataWaits
from scaletrain_cli.engine.metrics.goodput_ledger import LedgerClock
from scaletrain_cli.engine.metrics.out_of_memory import reporting_out_of_memory
from scaletrain_cli.engine.metrics.plan_check import PlanCheck
from scaletrain_cli.engine.metrics.profiler import StepProfiler, profiled
from scaletrain_cli.engine.metrics.rank_measures import RankMeasures
from scaletrain_cli.engine.metrics.reporting import MetricsLog, log_event
from scaletrain_cli.engine.metrics.step_measures import DeferredMetrics, StepMeasures
from scaletrain_cli.engine.metrics.trace import DATA, STEP
from scaletrain_cli.engine.model.attention import attention_kernel_of
from scaletrain_cli.engine.model.moe import routing_measures
from scaletrain_cli.engine.model.vision.batch_norm import images_of_statistics
from scaletrain_cli.engine.objectives.reference import ReferencePass
from scaletrain_cli.engine.optim.averaging import WeightAverage
from scaletrain_cli.engine.optim.local_sgd import LocalSGD
from scaletrain_cli.engine.stages import StageSwitch
from scaletrain_cli.engine.step import Stepper
from scaletrain_cli.engine.step_sync import StepSync
from scaletrain_cli.engine.validation import ReadAhead, Validation, check_metrics, values_of
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.rundir.goodput import run_goodput
from scaletrain_cli.spec.training import learning_rate
from scaletrain_cli.worker.loop_adapter import StepDecision
from scaletrain_cli.worker.telemetry import resident_bytes

_STEPS_BETWEEN_COLLECTIONS = 50
# Growth of the resident memory after which free blocks are returned to the system.
_GROWTH_SHARE, _GROWTH_BYTES = 0.25, 128 << 20


class GarbageCollection:
    """A context that disables Python's garbage collector, except for a collection on all ranks every 50 steps.

    A rank that collects makes all others wait in the next collective, so all collect after the same step. After it,
    memory that the C library keeps in free blocks is returned, if the process has grown much: allocations by several
    threads leave more and more of them, also in a plain loop of torch.
    """

    def __init__(self) -> None:
        self._resident = 0  # bytes after free blocks were last returned

    def __enter__(self) -> "GarbageCollection":
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
            if resident_bytes() - self._resident > max(_GROWTH_BYTES, _GROWTH_SHARE * self._resident):
                trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
                if trim is not None:
                    trim(0)
                self._resident = resident_bytes()


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

    context: RankContext
    resume_point: ResumePoint
    readers: int  # processes that read batches; 0: a thread
    composed: Composed
    stages: StageSwitch
    stepper: Stepper
    average: WeightAverage | None
    local_sgd: LocalSGD | None
    checkpointer: Checkpointer
    data: RunData
    training: Reader
    validation: Validation
    faults: Faults
    guard: GuardActions
    deferred_metrics: DeferredMetrics
    data_waits: DataWaits
    ledger: LedgerClock
    plan_check: PlanCheck
    profiler: StepProfiler
    step_sync: StepSync
    stragglers: Stragglers
    measures: RankMeasures
    reference: ReferencePass | None  # None: the objective has no reference
    most_steps: int | None = None  # number of steps after which training ends; None: those of the spec
    loader: Loader[Any] = field(init=False)
    metrics: MetricsLog = field(init=False)
    garbage_collection: GarbageCollection = field(default_factory=GarbageCollection)

    def fit(self) -> ExitCode:
        """Train from the resume point until the last step or a preemption signal; return the rank's exit code."""
        run, record, rank, attempt = self.context.run, self.context.record, self.context.rank, self.context.attempt
        reporting = partial(reporting_out_of_memory, run, record.plan, attempt, rank, self.composed)
        with reporting():
            state = self.resume()
            prepared = self.prepare_batches(state.step)
        with (
            contextlib.closing(self.ledger),
            MetricsLog(run, record, rank, attempt, self.context.device) as self.metrics,
            self.garbage_collection,
            self.measures,
            contextlib.closing(self.loader),
            contextlib.closing(self.profiler),
            reporting(),
        ):
            if prepared:
                self._train_until_end(state)
            self._finish(state)
        if self.context.rank == 0 and (goodput := run_goodput(self.context.run)) is not None:
            log_event("goodput", **goodput.to_json())
        return ExitCode.DONE if state.is_complete else ExitCode.PREEMPTED

    def _train_until_end(self, state: LoopState) -> None:
        """Train until the last step, or until a rank receives a preemption signal. All ranks decide alike."""
        copies = self.checkpointer.copies
        while True:
            decision, measures = self.step_sync.agree(state.step, self.deferred_metrics.due(state.step))
            save_due = decision is StepDecision.SAVE or state.at_last_step
            copy_due = copies is not None and copies.is_due(state.step) and not state.at_last_step
            if save_due or copy_due or state.evaluation_due or decision is StepDecision.PREEMPT:
                agreed = self.context.consensus.on_values
                # None on a CPU, those of the newest step on a GPU.
                measures += [late._replace(values=agreed(late.values)) for late in self.deferred_metrics.remaining()]
            rolled_back = self._check(state, measures)
            if decision is StepDecision.PREEMPT:
                return
            if rolled_back:
                continue
            if save_due:
                self.metrics.flush()  # an attempt that resumes here does not log these steps again
                self.save(state.step, wait=not self.context.spec.checkpoint.asynchronous)
            if copy_due:
                with self.ledger.during("save"):
                    self.context.heartbeat.beat(state.step, "save")
                    seconds = self.step_sync.schedule.step_seconds
                    # The metrics of these steps are not logged again by an attempt that resumes from the copy.
                    written = self._client_state(state.step)
                    self.checkpointer.copy_to_memory(state.step, written, seconds, self.metrics.flush)
            if state.evaluation_due:
                if not self._evaluate(state):
                    continue  # preempted
                if self.validation.is_best(state.validations):
                    self.metrics.flush()  # retention reads the loss there
                    self.save(state.step, wait=not self.context.spec.checkpoint.asynchronous)
            if state.at_last_step:
                return
            self._train_step(state)

    def _check(self, state: LoopState, measures: list[StepMeasures]) -> bool:
        """Pass measures to the guard; return True, with ``state`` moved back, if it rolled the run back."""
        for measured in measures:
            self.step_sync.schedule.step_took(measured.seconds)
            self.measures.step_took(measured.step, measured.seconds)
        step = self.guard.check(measures, state.step, self.metrics)
        self.measures.add_of_run(self.metrics.take_latest())
        if step == state.step:
            return False
        self.step_sync.schedule.begin_at(step)
        self.step_sync.state_check.forget(step)
        self.deferred_metrics.remaining()  # discards the measures of undone steps
        state.step, state.last_step, state.evaluation_due = step, self._last_step, False
        every = self.context.spec.evaluation.every
        del state.validations[step // every if every else 0 :]
        return True

    def _evaluate(self, state: LoopState) -> bool:
        """Evaluate after ``state.step`` steps, and stop early if due; return False if a preemption signal arrived."""
        with self.ledger.during("evaluation"):
            ahead = ReadAhead(self.loader, self._following(state.step), self._read_ahead)
            measured = self.validation.measure(state.step, ahead, self.metrics)
        if measured is None:
            return False
        if not state.validations:
            check_metrics(self.context.spec, measured)
        state.validations.append(measured)
        state.evaluation_due = False
        if self.validation.stops_early(state.validations):
            state.last_step = state.step
            metric = self.context.spec.training.early_stopping.metric
            latest = values_of(metric, state.validations[-5:])
            self.context.report("stopped-early", step=state.step, metric=metric, values=latest)
        return True

    def _train_step(self, state: LoopState) -> None:
        """Train one optimizer step and advance ``state`` to it."""
        state.step += 1
        state.evaluation_due = self.context.spec.evaluates_after(state.step)
        self.profiler.before_step(state.step)
        with self.ledger.during("step"), profiled(STEP):
            self.optimizer_step(state.step)
            self.measures.after_step(state.step)
        self.ledger.step_trained()
        self.profiler.after_step(state.step)
        self.checkpointer.allocate()
        self.garbage_collection.after_step(state.step)

    def _finish(self, state: LoopState) -> None:
        """Save if there is time, and report how the attempt ended."""
        self.metrics.flush()
        self.metrics.finished = state.is_complete
        unsaved = self._save_before_exit(state)
        if self.checkpointer.copies is not None:  # after the save: it waits for the last transfer to another node
            self.checkpointer.copies.close()
        self.context.report("finished" if state.is_complete else "preempted", step=state.step, **unsaved)
        if state.is_complete:  # reported before: the deletion of old checkpoints may take minutes
            self.checkpointer.clean_up()
            self.step_sync.clear_save_request()

    def optimizer_step(self, step: int) -> None:
        """Run optimizer step ``step`` (1-based); its measures become available from ``deferred_metrics``."""
        rate = learning_rate(step, self.context.spec.total_steps, self.context.spec.training)
        self._enter_stage(step, rate)
        self.stragglers.begin(step)
        self.faults.before_step(step)
        self.deferred_metrics.begin()
        self.measures.begin(step)
        scale = self.stepper.loss_scale
        with self.plan_check.around(step):
            number = self.guard.batch_number(step)
            with self.ledger.during("data"), profiled(DATA):
                began = time.perf_counter()
                batches = self.loader.take(number, self._following(step)).micro_batches()
                waited = time.perf_counter() - began
            self.context.heartbeat.has_batch()
            nan_gradient, factor = self.faults.injects_nan(step), self.faults.loss_factor(number)
            self.stepper.before_update = partial(self._before_update, step)
            result = self.stepper.train(batches, nan_gradient=nan_gradient, factor=factor)
        self.data_waits.add(step, waited, workers=self.readers, prefetch=self.context.spec.data.loader.prefetch)
        if self.local_sgd is not None:
            self.local_sgd.after_step(step)
        if self.average is not None:
            self.average.update(step)
        measured: dict[str, Tensor | float] = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": rate,
            "data_wait": waited,
        }
        if self.context.spec.training.precision == "fp16":
            measured |= {"loss_scale": scale, "skipped": float(result.skipped)}
        measured |= result.measures
        if (tokens := getattr(batches[0], "step_tokens", None)) is not None:
            measured["tokens"] = float(tokens)
        model = self.composed.model
        routing = routing_measures(model) if getattr(model.spec, "num_experts", 0) else None
        if routing is not None:  # last, because a pipeline stage without experts has none
            measured |= {f"router_{name}": value for name, value in routing._asdict().items()}
        self.step_sync.state_check.after_step(step)  # which may run the model again
        self.measures.end(step, waited, result.grad_norm)
        self.deferred_metrics.end(step, measured)

    def _before_update(self, step: int) -> None:
        for part, bit in self.faults.bit_flips(step):
            flip_bit(held_tensors(self.composed)[STATE_PARTS.index(part)], bit)
        self.step_sync.state_check.before_update()

    @property
    def _last_step(self) -> int:
        total = self.context.spec.total_steps
        return total if self.most_steps is None else min(total, self.most_steps)

    @property
    def _read_ahead(self) -> int:
        return self.context.spec.data.loader.read_ahead(self.readers)

    def _following(self, step: int) -> list[int]:
        """Return the batches of the steps after ``step`` that are read ahead."""
        last = min(step + self._read_ahead, self._last_step)
        return [self.guard.batch_number(later) for later in range(step + 1, last + 1)]

    def _enter_stage(self, step: int, rate: float) -> None:
        """Begin the step, with another engine if a training stage begins: that takes as long as the set-up of a run."""
        is_new = self.stages.is_due(step)
        allowed = None if is_new else self.profiler.allowed_seconds
        self.context.heartbeat.beat(step, "set-up" if is_new else "step", allowed)
        self.stages.enter(step, rate)
        if not is_new:
            return
        self.step_sync.state_check.forget(step - 1)
        self.context.report("stage", step=step, **self.stages.summary())
        self.context.heartbeat.beat(step, "step", self.context.heartbeat.first_step_seconds)

    def resume(self) -> LoopState:
        """Restore the checkpoint of the resume point, if any, and return where the loop starts."""
        begin, name, before = self.resume_point, "started", None
        source = {"saved_step": begin.saved_step} if begin.in_memory else {}
        self.context.heartbeat.beat(begin.step, "restore")
        if begin.checkpoint is not None:
            name = "resumed"
            restored = self.checkpointer.restore(begin.checkpoint, **source)
            self.guard.guard.load_state_dict(restored["guard"])
            before = restored.get("batch_norm_images")  # absent without batch normalization
        kernel = {}
        if self.composed.model.language is not None:
            kernel["attention"] = attention_kernel_of(self.context.spec, self.context.layout, self.context.device)
        self.context.report(
            name,
            step=begin.step,
            attempt=self.context.attempt,
            lost_steps=begin.lost_steps,
            passed_over=begin.passed_over,
            **source,
            **kernel,
        )
        if before is not None and before != (now := self._images_of_statistics()):
            self.context.report("batch-norm-images", step=begin.step, before=before, now=now)
        self.step_sync.schedule.begin_at(begin.saved_step)
        self.ledger.set_up_is_done()
        due = self.context.spec.evaluates_after(begin.step) and not begin.evaluated
        state = LoopState(begin.step, self._last_step, due, list(begin.validations))
        if begin.evaluated and self.validation.stops_early(state.validations):
            state.last_step = state.step
        return state

    def prepare_batches(self, step: int) -> bool:
        """Make the batches ready to train after ``step`` steps, with reference log-probabilities if needed.

        Returns False after a preemption signal. Raises ReferenceDataError, see ``ReferencePass``.
        """
        ready = True
        if self.reference is not None:
            with self.ledger.during("restore"):
                ready = self._compute_reference(self.reference, step)
        settings = self.context.spec.data.loader
        readers = {**self.validation.readers, **self.validation.zero_shot_readers}
        validation = {name: reader.without_groups() for name, reader in readers.items() if hasattr(reader, "rounds")}
        training = self.faults.reading(self.training.without_groups().batch)
        self.loader = Loader(
            BatchesAndRounds(training, validation) if validation else training,
            self.context.device,
            workers=self.readers,
            pin_memory=settings.pin_memory,
        )
        if ready and self.reference is not None and step == 0:
            batches = self.training.batch(self.guard.batch_number(1)).micro_batches()
            self.reference.check([batch.to(self.context.device) for batch in batches])
        return ready

    def _compute_reference(self, reference: ReferencePass, step: int) -> bool:
        """Give the readers of pairs their reference; return False after a preemption signal."""
        assert isinstance(self.training, BatchReader)
        training = reference.with_reference(self.training, "train", step)
        if training is None:
            return False
        self.training = training
        for name, reader in self.validation.readers.items() if self.context.spec.evaluation.every else ():
            assert isinstance(reader, BatchReader)
            validation = reference.with_reference(reader, "validation", step, name)
            if validation is None:
                return False
            self.validation.readers[name] = validation
        return True

    def _images_of_statistics(self) -> int | None:
        if self.composed.model.language is not None:
            return None
        return images_of_statistics(self.composed.model, self.context.spec, self.context.layout)

    def save(self, step: int, *, wait: bool) -> None:
        """Start a checkpoint of the state after ``step`` steps; with ``wait``, return when it is committed."""
        self.step_sync.save_begins(step)
        with self.ledger.during("save"):
            self.context.heartbeat.beat(step, "save")
            self.checkpointer.save(step, self._client_state(step), wait=wait)
        self.ledger.write()

    def _client_state(self, step: int) -> dict[str, Any]:
        state = {"step": step, **self.data.to_checkpoint(), "guard": self.guard.guard.state_dict()}
        state["skipped"] = [list(span) for span in self.guard.skipped]
        if (images := self._images_of_statistics()) is not None:
            state["batch_norm_images"] = images
        return state

    def _save_before_exit(self, state: LoopState) -> dict[str, Any]:
        """Save and wait, unless the grace period is too short; return the details of a save that was left out.

        A finished run has not ended before its state is saved: if the grace period does, the next attempt finishes it.
        """
        self.context.heartbeat.beat(state.step, "save")
        grace = self.context.spec.cluster.grace_seconds
        left, needed = self.step_sync.seconds_to_save(state.step, grace)
        if left >= needed or state.is_complete or self.checkpointer.committed_step == state.step:
            self.save(state.step, wait=True)
            return {}
        self.checkpointer.finish()
        return {
            "saved_step": self.checkpointer.committed_step,
            "why": f"{left:.1f} s of cluster.grace_seconds = {grace:g} are left and a save takes {needed:.1f} s",
        }
