"""Objectives over images and pairs: classification, regression, and contrastive losses with negatives of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaletrain_cli.engine.data.images.batches import ImageMicroBatch
from scaletrain_cli.engine.data.images.mixing import finish
from scaletrain_cli.engine.deepspeed_engine import forward_dtype
from scaletrain_cli.engine.losses import LOSSES, LossSettings
from scaletrain_cli.engine.losses.grad_cache import Outputs, joined
from scaletrain_cli.engine.objectives.base import Joined, Objective
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.vision_model import image_channels


class PreparedImages(NamedTuple):
    """A micro-batch as the model takes it.

    pixels: [images, channels, height, width], normalized, in the dtype of the weights; all first views, then all second
    ones. samples: [images] int64, numbers that key stochastic depth. targets: [batch] int64 classes, or [batch, values]
    fp32; None for pairs and views. tokens: [batch, length] int64 captions, or None.
    """

    pixels: Tensor
    samples: Tensor
    targets: Tensor | None
    tokens: Tensor | None

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        """The arguments of the forward pass: pixels and samples, or of pairs pixels and captions."""
        return self.pixels, self.samples if self.tokens is None else self.tokens


class ImageObjective(Objective):
    """A loss of ``training.loss`` over the outputs of a network for images."""

    def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
        super().__init__(spec.training, mesh)
        self._spec = spec
        self._settings = LossSettings(spec.training.loss, spec.training.label_smoothing)
        self._loss = LOSSES[spec.training.loss.of(spec.training.objective)]
        assert not isinstance(spec.model, ModelSpec)
        self._classes: int | None = getattr(spec.model, "num_labels", None)
        self._mean, self._std = spec.data.images.normalization(spec.model.family, image_channels(spec.model))
        channels_last = getattr(spec.model, "memory_format", "contiguous_format") == "channels_last"
        self._memory_format = torch.channels_last if channels_last else torch.contiguous_format

    @classmethod
    def of(cls, spec: RunSpec, mesh: Mesh) -> Objective:
        """Return the objective of a run."""
        return cls(spec, mesh)

    def prepared(self, batch: ImageMicroBatch) -> PreparedImages:
        """Return the normalized, erased and mixed images in the dtype of the weights, and their targets."""
        assert batch.real is None, "evaluations of images have whole rounds"
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
        return PreparedImages(finished.images, samples, finished.targets, batch.tokens)

    def loss(self, model: Any, outputs: Any, batch: PreparedImages) -> Tensor:
        """Return the loss of a micro-batch; the mean over the data-parallel ranks is that of all of them together."""
        return self._loss(outputs, batch.targets, self._settings, self.mesh.data)


class Classification(ImageObjective):
    """Cross-entropy, or binary cross-entropy of each class by itself."""


class Regression(ImageObjective):
    """The squared, absolute or Huber error of predicted numbers."""


class Contrastive(ImageObjective, Joined):
    """A loss that compares all samples of a step, of all ranks and all micro-batches."""

    def prepared(self, batch: ImageMicroBatch) -> PreparedImages:
        """Return the micro-batch as the model takes it."""
        found = super().prepared(batch)
        self._views = len(found.pixels) // len(batch.samples)
        return found

    def features(self, model: Any, outputs: Any, batch: PreparedImages) -> Outputs:
        """Return what the loss reads of the outputs of a micro-batch, as a tuple of tensors."""
        if isinstance(outputs, Tensor):
            return (outputs,)
        self._pairs = type(outputs)
        # the copy of a scalar, a parameter, remains when ZeRO-3 has released it
        return tuple(each.clone() if each is not None and each.dim() == 0 else each for each in outputs)

    def joined_loss(self, features: Sequence[Outputs]) -> Tensor:
        """Return the loss over the features of all micro-batches of a step. Collective."""
        parts = joined(features, self._views)
        outputs = parts[0] if len(parts) == 1 else self._pairs(*parts)
        return self._loss(outputs, None, self._settings, self.mesh.data)
