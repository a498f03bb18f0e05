"""The loss of a model whose outputs say nothing about its input, which a healthy loss falls from."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from scaletrain_cli.engine.losses.classification import huber, mean_absolute_error, mean_squared_error
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
