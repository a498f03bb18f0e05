"""The validation during training: loss and measures over the validation splits, and what follows from them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from scaletrain_cli.engine.compose import Composed
from scaletrain_cli.engine.context import RankContext
from scaletrain_cli.engine.data.loader import Loader, Round
from scaletrain_cli.engine.data.splits import Reader, sequences_validated
from scaletrain_cli.engine.evaluation.inference import SampleAnswers
from scaletrain_cli.engine.evaluation.measures import Figures
from scaletrain_cli.engine.metrics.reporting import MetricsLog
from scaletrain_cli.engine.optim.averaging import WeightAverage
from scaletrain_cli.engine.step import ModelStepper, Stepper
from scaletrain_cli.engine.step_sync import StepSync
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.evaluations import is_lower_better
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.evaluation import ZERO_SHOT
from scaletrain_cli.spec.training import should_stop

if TYPE_CHECKING:  # which need Pillow
    from scaletrain_cli.engine.data.images.batches import ImageMicroBatch
    from scaletrain_cli.engine.evaluation.zero_shot import ZeroShot


class ReadAhead(NamedTuple):
    """The loader that reads images before they are needed.

    ``following``: training batches of the next steps, read after the last images of a validation. ``batches``: number
    of training batches that are read ahead, in whose place as many images of the validation are.
    """

    loader: Loader[Any]
    following: list[int]
    batches: int


@dataclass
class Validation:
    """The validation splits of one rank, and what measures the model on them. Only ``measure`` is collective."""

    context: RankContext
    composed: Composed
    stepper: Stepper
    average: WeightAverage | None
    readers: dict[str, Reader]  # by source
    shares: dict[str, float]  # of the sources in the validation loss; the sum is 1
    step_sync: StepSync
    answers: SampleAnswers | None = None  # None: no validation writes answers
    zero_shot: ZeroShot | None = None  # None: no images are classified by the texts of their classes

    @property
    def zero_shot_readers(self) -> dict[str, Reader]:
        """The reader of the images of ``evaluation.zero_shot`` by its name; empty without any."""
        return {} if self.zero_shot is None else {ZERO_SHOT: self.zero_shot.reader}

    @torch.no_grad()
    def measure(self, step: int, ahead: ReadAhead, metrics: MetricsLog) -> dict[str, float] | None:
        """Log and return the mean validation loss over the first ``evaluation.batches`` global batches, and measures.

        The same sequences each time, or as many as the validation splits have. Several sources have a loss each, and
        the whole is their mean by ``shares``. None if a preemption signal arrived during the evaluation: nothing is
        logged, and the next attempt evaluates again.
        """
        shares = self.shares if len(self.readers) > 1 else {}
        whole = not self.composed.objective.masks_samples
        counts = {
            name: sequences_validated(self.context.record, len(reader), shares.get(name), whole_rounds=whole)
            for name, reader in self.readers.items()
        }
        figures = self._measured(step, counts, "validation_", ahead)
        if figures is not None and self.average is not None and self.average.taken:  # not before the first average
            with self.average.in_use():
                averaged = self._measured(step, counts, "averaged_validation_", ahead)
            figures = None if averaged is None else figures._replace(metrics=figures.metrics | averaged.metrics)
        if figures is None:
            return None
        if self.answers is not None:
            if (answers := self._sample_answers(step, self.answers)) is None:
                return None
            figures = figures._replace(details=figures.details | {"answers": answers})
        metrics.log_validation(step, sum(counts.values()), figures.details, **figures.metrics)
        return figures.metrics

    def _sample_answers(self, step: int, answers: SampleAnswers) -> list[dict[str, str]] | None:
        """Return the answers to the first rows; None after a preemption signal."""
        samples: list[dict[str, str]] = []
        self.composed.engine.eval()
        for row in range(min(self.context.spec.evaluation.sample_answers, len(answers))):
            if not self.step_sync.goes_on(step):
                self.composed.engine.train()
                return None
            answer = answers.answer(self.composed.engine, self.composed.objective, row)
            samples += [] if answer is None else [answer]
        self.composed.engine.train()
        return samples

    def _measured(self, step: int, counts: dict[str, int], prefix: str, ahead: ReadAhead) -> Figures | None:
        """Return losses and other measures, by their names with the prefix, and details; None after a signal."""
        objective = self.composed.objective
        objective.begin_validation()
        if (losses := self._losses(step, counts, f"{prefix}loss", ahead)) is None:
            return None
        figures = objective.end_validation()
        if self.zero_shot is not None:
            zero_shot = self._zero_shot_figures(step, self.zero_shot, ahead)
            if zero_shot is None:
                return None
            figures = Figures(figures.metrics | zero_shot.metrics, figures.details | zero_shot.details)
        taken = {name: value.item() for name, value in self.stepper.take_measures().items()}
        measures = figures.metrics if prefix != "validation_" else taken | figures.metrics
        finite = {f"{prefix}{name}": value for name, value in measures.items() if math.isfinite(value)}
        return Figures(losses | finite, figures.details)

    def _zero_shot_figures(self, step: int, zero_shot: ZeroShot, ahead: ReadAhead) -> Figures | None:
        """Return the accuracy of zero-shot classification; None after a preemption signal."""

        def pixels(batch: ImageMicroBatch) -> Tensor:
            prepared: Any = self.composed.objective.prepared(batch)
            return prepared.pixels  # type: ignore[no-any-return]

        assert isinstance(self.stepper, ModelStepper)
        batches = self._batches(ZERO_SHOT, zero_shot.reader, len(zero_shot.reader), ahead)
        return zero_shot.measure(self.stepper.outputs, pixels, batches, partial(self.step_sync.goes_on, step))

    def _losses(self, step: int, counts: dict[str, int], name: str, ahead: ReadAhead) -> dict[str, float] | None:
        """Return the validation loss and, of several sources, the loss of each; None after a preemption signal."""
        losses = {}
        for source, reader in self.readers.items():
            loss = self._mean_loss(step, self._batches(source, reader, counts[source], ahead))
            if loss is None:
                return None
            losses[source] = loss
        if len(losses) == 1:
            return {name: next(iter(losses.values()))}
        # a source without a share has no part in the whole, also if its loss is not finite
        whole = sum(share * losses[source] for source, share in self.shares.items() if share)
        return {name: whole, **{f"{name}/{source}": loss for source, loss in losses.items()}}

    def _batches(self, source: str, reader: Reader, count: int, ahead: ReadAhead) -> Iterator[Any]:
        """Yield this rank's micro-batches of an evaluation of the first ``count`` samples of a source.

        Images are read and decoded ahead by the loader of the training batches, as many micro-batches as it reads for
        training; the last rounds are followed by the batches of the next steps.
        """
        if not hasattr(reader, "rounds"):
            yield from reader.in_order(count)
            return
        most, size = ahead.batches, self.context.layout.gradient_accumulation_steps
        rounds = [Round(source, number, count) for number in range(1, reader.rounds(count) + 1)]
        for place, request in enumerate(rounds, 1):
            later = rounds[place : place + most * size]
            then = ahead.following[: most - -(-len(later) // size)]
            yield from ahead.loader.take(request, [*later, *then]).micro_batches()

    def _mean_loss(self, step: int, waiting: Iterator[Any]) -> float | None:
        """Return the mean loss over micro-batches, in nats; None after a preemption signal."""
        total = torch.zeros((), device=self.context.device)
        rounds = 0
        # As many micro-batches at a time as a training step has, so that a pipeline is filled as well.
        while batches := list(itertools.islice(waiting, self.context.layout.gradient_accumulation_steps)):
            if not self.step_sync.goes_on(step):
                return None
            rounds += len(batches)
            total += len(batches) * self.stepper.validation_loss([batch.to(self.context.device) for batch in batches])
        exact = self.composed.objective.take_validation_loss()
        return (total / rounds).item() if exact is None else exact

    def stops_early(self, validations: Sequence[Mapping[str, float]]) -> bool:
        """Return True if ``training.early_stopping`` ends the training after these validations of the run."""
        settings = self.context.spec.training.early_stopping
        return settings.patience > 0 and should_stop(self._lowered(validations, settings.metric), settings)

    def is_best(self, validations: Sequence[Mapping[str, float]]) -> bool:
        """Return True if the newest validation has the best value of ``checkpoint.keep_best``."""
        metric = self.context.spec.checkpoint.keep_best
        if metric is None or metric not in validations[-1]:
            return False
        *earlier, newest = self._lowered(validations, metric)
        return newest < min((value for value in earlier if not math.isnan(value)), default=math.inf)

    def _lowered(self, validations: Sequence[Mapping[str, float]], metric: str) -> list[float]:
        """Return the values of a metric of all validations that have it, negated if the greatest is the best."""
        sign = 1.0 if is_lower_better(self.context.run, metric) else -1.0
        return [sign * value for value in values_of(metric, validations)]


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


def values_of(metric: str, validations: Iterable[Mapping[str, float]]) -> list[float]:
    return [measured[metric] for measured in validations if metric in measured]
