"""Errors of regression: mean absolute error and root of the mean squared error."""

from __future__ import annotations

import torch
from torch import Tensor

from scaletrain_cli.engine.evaluation.measures import Figures, Measures, rounded, sum_over
from scaletrain_cli.engine.parallel.mesh import Axis


class Errors(Measures):
    """``mae`` and ``rmse`` over all samples and outputs; by output in the details if there are several."""

    def __init__(self, outputs: int) -> None:
        self._sums = torch.zeros(3, outputs, dtype=torch.float64)  # samples, absolute errors, squared errors

    def add(self, outputs: Tensor, targets: Tensor, counted: Tensor | None = None) -> None:
        """Add samples: outputs and targets [samples, outputs]."""
        errors = outputs.detach().double() - targets.double().view(len(outputs), -1)
        if counted is not None:
            errors = errors[counted]
        self._sums = self._sums.to(errors.device)
        self._sums += torch.stack([torch.ones_like(errors).sum(0), errors.abs().sum(0), errors.square().sum(0)])

    def result(self, axis: Axis) -> Figures | None:
        counts, absolute, squared = sum_over(self._sums, axis)
        if counts[0] == 0:
            return None
        total = counts.sum()
        metrics = {"mae": _value(absolute.sum() / total), "rmse": _value((squared.sum() / total).sqrt())}
        details: dict[str, object] = {"samples": int(counts[0])}
        if len(counts) > 1:
            each = zip(absolute / counts, (squared / counts).sqrt(), strict=True)
            details["outputs"] = [{"mae": _value(mae), "rmse": _value(rmse)} for mae, rmse in each]
        return Figures(metrics, details)


def _value(figure: Tensor) -> float:
    return rounded(float(figure))
