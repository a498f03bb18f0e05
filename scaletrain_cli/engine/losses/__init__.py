"""Losses of images and pairs by their name in ``training.loss``: classification, regression and contrastive.

Every loss returns a scalar of this rank with one convention: the mean over ranks is the textbook loss of the global
batch, and the mean over ranks of the gradients of the parameters, which DeepSpeed and DDP compute, is exactly its
gradient. All ranks must have batches of the same size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scaletrain_cli.engine.losses.classification import (
    binary_cross_entropy,
    cross_entropy,
    huber,
    mean_absolute_error,
    mean_squared_error,
)
from scaletrain_cli.engine.losses.contrastive import info_nce, nt_xent, sigmoid_loss
from scaletrain_cli.engine.parallel.mesh import Axis
from scaletrain_cli.spec.losses import LossSpec


def uninformed_loss(
    name: str, spec: LossSpec, samples: int, outputs: int | None = None, *, one_class: bool, targets: Tensor | None
) -> float:
    """Return the loss of the best outputs that are equal for all samples, in the units of the loss.

    ``name``: in LOSSES. ``samples``: those that a contrastive loss compares with each other. ``outputs``: number of
    classes or values. ``one_class``: each sample has one of the classes, all equally often; False: each class is that
    of half the samples. ``targets``: [samples, values] of a regression, for which 0 is returned without them.
    """
    if name == "cross_entropy":
        return math.log(outputs or 1)
    if name == "bce":
        assert outputs is not None
        weights = spec.pos_weight if isinstance(spec.pos_weight, Sequence) else (spec.pos_weight or 1.0,)
        rate = 1 / outputs if one_class and outputs > 1 else 0.5
        return sum(_of_rate(rate, weight) for weight in weights) / len(weights)
    if name == "info_nce":
        return math.log(samples)
    if name == "nt_xent":
        return math.log(max(1, 2 * samples - 1))
    if name == "sigmoid":  # one of ``samples`` questions about an image is answered with yes
        return samples * _of_rate(1 / samples, 1.0)
    return 0.0 if targets is None or not len(targets) else _of_numbers(name, spec, targets)


def _of_rate(rate: float, weight: float) -> float:
    """Return the least of -[weight rate ln q + (1 - rate) ln(1 - q)] over q, in nats."""
    yes, no = weight * rate, 1 - rate
    return sum(share * math.log((yes + no) / share) for share in (yes, no) if share > 0)


def _of_numbers(name: str, spec: LossSpec, targets: Tensor) -> float:
    """Return the loss if the mean of the targets, for ``mae`` and ``huber`` their median, is always predicted."""
    center = targets.mean(0) if name == "mse" else torch.quantile(targets, 0.5, dim=0)
    predicted = center.expand_as(targets)
    if name == "huber":
        return huber(predicted, targets, spec.delta).item()
    return (mean_squared_error if name == "mse" else mean_absolute_error)(predicted, targets).item()


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
