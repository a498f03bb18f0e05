"""Losses of images and pairs by their name in ``training.loss``: classification, regression and contrastive.

Every loss returns a scalar of this rank with one convention: the mean over ranks is the textbook loss of the global
batch, and the mean over ranks of the gradients of the parameters, which DeepSpeed and DDP compute, is exactly its
gradient. All ranks must have batches of the same size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from scaletrain_cli.engine.losses.classification import (
    binary_cross_entropy,
    cross_entropy,
    huber,
    mean_absolute_error,
    mean_squared_error,
)
from scaletrain_cli.engine.losses.contrastive import info_nce, nt_xent, sigmoid_loss
from scaletrain_cli.engine.losses.uninformed import uninformed_loss
from scaletrain_cli.engine.parallel.mesh import Axis
from scaletrain_cli.spec.losses import LossSpec


@dataclass(frozen=True)
class LossSettings:
    """The settings of a loss from ``training``. A loss ignores the settings of other losses."""

    spec: LossSpec = field(default_factory=LossSpec)
    label_smoothing: float = 0.0
    several_labels: bool = False  # an image may have none or several of the classes, and not exactly one


# outputs of the model, targets (None for contrastive losses), settings, data-parallel ranks -> scalar, fp32
Loss = Callable[[Any, Any, LossSettings, Axis], Tensor]


def _bce(logits: Tensor, targets: Tensor, settings: LossSettings, axis: Axis) -> Tensor:
    spec = settings.spec
    return binary_cross_entropy(
        logits,
        targets,
        settings.label_smoothing,
        spec.pos_weight,
        spec.target_threshold,
        several_labels=settings.several_labels,
    )


def _sigmoid(pairs: Any, targets: None, settings: LossSettings, axis: Axis) -> Tensor:
    if pairs.logit_bias is None:
        raise ValueError("sigmoid: the model has no logit_bias")
    return sigmoid_loss(pairs.image, pairs.text, pairs.logit_scale, pairs.logit_bias, axis, settings.spec.chunk_size)


# Outputs are scores or predictions [batch, classes or values]. Those of info_nce and sigmoid are an object with the
# features image and text and the scalars logit_scale, a logarithm, and logit_bias. Those of nt_xent are the features of
# two views, [2 * batch, size].
LOSSES: dict[str, Loss] = {
    "cross_entropy": lambda logits, targets, settings, axis: cross_entropy(logits, targets, settings.label_smoothing),
    "bce": _bce,
    "mse": lambda predictions, targets, settings, axis: mean_squared_error(predictions, targets),
    "mae": lambda predictions, targets, settings, axis: mean_absolute_error(predictions, targets),
    "huber": lambda predictions, targets, settings, axis: huber(predictions, targets, settings.spec.delta),
    "info_nce": lambda pairs, targets, settings, axis: info_nce(
        pairs.image, pairs.text, pairs.logit_scale, axis, settings.spec.chunk_size
    ),
    "sigmoid": _sigmoid,
    "nt_xent": lambda features, targets, settings, axis: nt_xent(
        features, settings.spec.temperature, axis, settings.spec.chunk_size
    ),
}

__all__ = [
    "LOSSES",
    "LossSettings",
    "binary_cross_entropy",
    "cross_entropy",
    "info_nce",
    "nt_xent",
    "sigmoid_loss",
    "uninformed_loss",
]
