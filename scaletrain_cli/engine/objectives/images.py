"""Objectives over images and pairs: classification, regression, and contrastive losses with negatives of all ranks."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaletrain_cli.engine.data.images.batches import ImageMicroBatch
from scaletrain_cli.engine.data.images.mixing import finish
from scaletrain_cli.engine.deepspeed_engine import forward_dtype
from scaletrain_cli.engine.evaluation.measures import (
    Accuracy,
    Errors,
    Figures,
    LabelMeasures,
    MeanLoss,
    Measures,
    Retrieval,
    in_sample_order,
    rows_of_all,
    sum_over,
)
from scaletrain_cli.engine.losses import LOSSES, LossSettings, uninformed_loss
from scaletrain_cli.engine.losses.grad_cache import Outputs, joined
from scaletrain_cli.engine.objectives.base import Joined, Objective, RowLosses
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.vision_model import image_channels


class PreparedImages(NamedTuple):
    """A micro-batch as the model takes it.

    pixels: [images, channels, height, width], normalized, in the dtype of the weights; all first views, then all second
    ones. samples: [images] int64, numbers that key stochastic depth. targets: [batch] int64 classes, or [batch, values]
    fp32; None for pairs and views. tokens: [batch, length] int64 captions, or None. real: [batch] bool, False for
    samples that are not counted in a validation; None: all are. content: images as they were read, in a validation.
    sources: [batch] int64, number of the source of each sample; None: there is only one.
    """

    pixels: Tensor
    samples: Tensor
    targets: Tensor | None
    tokens: Tensor | None
    real: Tensor | None = None
    content: Tensor | None = None
    sources: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        """The arguments of the forward pass: pixels and samples, or of pairs pixels and captions."""
        return self.pixels, self.samples if self.tokens is None else self.tokens


class ImageObjective(Objective):
    """A loss of ``training.loss`` over the outputs of a network for images.

    ``class_names``: in the order of the labels; None: classes are shown by their numbers.
    """

    masks_samples = True
    class_names: Sequence[str] | None = None
    _validation_loss: MeanLoss | None = None  # None: no validation is in progress
    _measures: Measures | None = None

    def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
        super().__init__(spec, mesh)
        self._spec = spec
        self._settings = LossSettings(spec.training.loss, spec.training.label_smoothing)
        self._loss = LOSSES[spec.training.loss.of(spec.training.objective)]
        assert not isinstance(spec.model, ModelSpec)
        self._classes: int | None = getattr(spec.model, "num_labels", None)
        self._mean, self._std = spec.data.images.normalization(spec.model.family, image_channels(spec.model))
        channels_last = getattr(spec.model, "memory_format", "contiguous_format") == "channels_last"
        self._memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def describe_classes(self, names: Sequence[str] | None, *, several_labels: bool) -> None:
        """Set the names of the classes; ``several_labels``: an image may have none or several, and not exactly one."""
        self.class_names, self._settings = names, replace(self._settings, several_labels=several_labels)

    def continue_from(self, other: Objective) -> None:
        if isinstance(other, ImageObjective):
            self.describe_classes(other.class_names, several_labels=other._settings.several_labels)

    def prepared(self, batch: ImageMicroBatch) -> PreparedImages:
        """Return the normalized, erased and mixed images in the dtype of the weights, and their targets."""
        finished = finish(
            batch,
            mean=self._mean,
            std=self._std,
            dtype=forward_dtype(self.training.precision),
            memory_format=self._memory_format,
            classes=self._classes,
        )
        views = len(batch.images) // len(batch.samples)
        samples = batch.samples
        if views > 1:
            samples = torch.cat([views * samples + view for view in range(views)])
        content = None if self._validation_loss is None else batch.images
        return PreparedImages(
            finished.images, samples, finished.targets, batch.tokens, batch.real, content, batch.sources
        )

    def loss(self, model: Any, outputs: Any, batch: PreparedImages) -> Tensor:
        """Return the loss of a micro-batch; the mean over the data-parallel ranks is that of all of them together."""
        if self._validation_loss is None:
            return self._loss(outputs, batch.targets, self._settings, self.mesh.data)
        return self._observed(self._validation_loss, outputs, batch)

    def uninformed_loss(self, samples: int, targets: Tensor | None) -> float:
        """Return the loss of a model that knows nothing about its images, of steps with that many samples.

        ``targets``: of some samples, [samples, values], for a regression.
        """
        name, one_class = self.training.loss.of(self.training.objective), not self._settings.several_labels
        return uninformed_loss(name, self.training.loss, samples, self._classes, one_class=one_class, targets=targets)

    def begin_validation(self) -> None:
        self._validation_loss, self._measures = MeanLoss(), None

    def take_validation_loss(self) -> float | None:
        assert self._validation_loss is not None
        return self._validation_loss.take(self.mesh.data)

    def end_validation(self) -> Figures:
        measures, self._validation_loss, self._measures = self._measures, None, None
        figures = None if measures is None else measures.result(self.mesh.data)
        return figures or Figures({}, {})

    @abstractmethod
    def _observed(self, mean: MeanLoss, outputs: Any, batch: PreparedImages) -> Tensor:
        """Return the loss of a micro-batch of a validation, after adding it and what else is measured."""


class _WithTargets(ImageObjective):
    """A loss of each sample by itself, so that a step with several sources has a loss of each.

    With mixup or CutMix the loss of a sample counts for the source of its own image.
    """

    def loss(self, model: Any, outputs: Tensor, batch: PreparedImages) -> Tensor:
        loss = super().loss(model, outputs, batch)
        if self.row_losses is not None and batch.sources is not None and batch.targets is not None:
            losses = self._of_rows(outputs.detach(), batch.targets)
            self.row_losses.append(RowLosses(batch.sources, losses, torch.ones_like(losses)))
        return loss

    def _of_rows(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, [batch] fp32."""

        def alone(row: Tensor, target: Tensor) -> Tensor:
            return self._loss(row.unsqueeze(0), target.unsqueeze(0), self._settings, self.mesh.data)

        return torch.vmap(alone)(outputs, targets).float()

    def _observed(self, mean: MeanLoss, outputs: Tensor, batch: PreparedImages) -> Tensor:
        targets = batch.targets
        assert targets is not None
        if batch.real is not None:
            outputs, targets = outputs[batch.real], targets[batch.real]
        some = len(outputs) > 0
        loss = self._loss(outputs, targets, self._settings, self.mesh.data) if some else outputs.sum().float()
        mean.add(loss, len(outputs))
        self._measure(outputs, targets)
        return loss

    @abstractmethod
    def _measure(self, outputs: Tensor, targets: Tensor) -> None:
        """Add the outputs of samples to the measures of the validation."""


class Classification(_WithTargets):
    """Cross-entropy, or binary cross-entropy of each class by itself."""

    def _measure(self, outputs: Tensor, targets: Tensor) -> None:
        kind = LabelMeasures if targets.is_floating_point() else Accuracy
        self._measures = self._measures or kind(outputs.shape[1], self.class_names)
        assert isinstance(self._measures, kind)
        self._measures.add(outputs, targets)


class Regression(_WithTargets):
    """The squared, absolute or Huber error of predicted numbers."""

    def _measure(self, outputs: Tensor, targets: Tensor) -> None:
        self._measures = self._measures or Errors(outputs.shape[1])
        assert isinstance(self._measures, Errors)
        self._measures.add(outputs, targets)


class Contrastive(ImageObjective, Joined):
    """A loss that compares all samples of a step, of all ranks and all micro-batches."""

    def prepared(self, batch: ImageMicroBatch) -> PreparedImages:
        images = super().prepared(batch)
        self._views = len(images.pixels) // len(batch.samples)
        return images

    def features(self, model: Any, outputs: Any, batch: PreparedImages) -> Outputs:
        if isinstance(outputs, Tensor):
            return (outputs,)
        self._pairs = type(outputs)
        # the copy of a scalar, a parameter, remains when ZeRO-3 has released it
        return tuple(feature.clone() if feature is not None and feature.dim() == 0 else feature for feature in outputs)

    def begin_validation(self) -> None:
        super().begin_validation()
        self._waiting: list[_Pairs] = []

    def take_validation_loss(self) -> float | None:
        self._add_global_batch()
        if isinstance(self._measures, Retrieval):
            self._measures.next_source()
        return super().take_validation_loss()

    def _observed(self, mean: MeanLoss, outputs: Any, batch: PreparedImages) -> Tensor:
        # the micro-batches of a global batch follow each other, in every layout
        self._waiting.append(_Pairs(self.features(None, outputs, batch), batch.samples, batch.real))
        if sum(len(pairs.samples) for pairs in self._waiting) * self.mesh.data.size >= self.training.global_batch_size:
            self._add_global_batch()
        limit = self._spec.evaluation.retrieval_pairs
        if batch.tokens is not None and limit > 0:
            self._measures = self._measures or Retrieval(limit)
            assert isinstance(self._measures, Retrieval)
            assert batch.content is not None
            self._measures.add((outputs.image, outputs.text), (batch.content, batch.tokens), batch.samples, batch.real)
        return torch.zeros((), device=batch.samples.device)  # take_validation_loss has the loss

    def _add_global_batch(self) -> None:
        """Add the loss over the samples that wait, of all micro-batches and ranks, to that of the validation.

        Samples that stand in for missing ones are left out: they would be wrong negatives. Collective.
        """
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        assert self._validation_loss is not None
        axis = self.mesh.data
        samples = torch.cat([pairs.samples for pairs in waiting])
        real = torch.cat(
            [torch.ones_like(pairs.samples).bool() if pairs.real is None else pairs.real for pairs in waiting]
        )
        if int(sum_over((~real).sum().view(1), axis)) == 0:
            self._validation_loss.add(self.joined_loss([pairs.features for pairs in waiting]), len(samples))
            return
        # ranks have different numbers of samples: the first rank computes the loss of all of them
        order = in_sample_order(rows_of_all(samples[real], axis))
        parts: list[Tensor | None] = []
        for part in joined([pairs.features for pairs in waiting]):
            if part is not None and part.dim() > 0:
                part = rows_of_all(part[real].float(), axis)[order].to(part.device)
            parts.append(part)
        if axis.rank == 0:
            loss = self._loss(self._outputs(tuple(parts)), None, self._settings, Axis())
            self._validation_loss.add(loss, len(order))

    def joined_loss(self, features: Sequence[Outputs]) -> Tensor:
        return self._loss(self._outputs(joined(features, self._views)), None, self._settings, self.mesh.data)

    def _outputs(self, parts: Outputs) -> Any:
        return parts[0] if len(parts) == 1 else self._pairs(*parts)


class _Pairs(NamedTuple):
    """Features of a micro-batch of a validation, and the numbers of its samples. ``real``: None: all are counted."""

    features: Outputs
    samples: Tensor
    real: Tensor | None
