"""The interface of measures over a validation split, and rows of all ranks."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from scaletrain_cli.engine.parallel.mesh import Axis

_BYTES_PER_GATHER = 1 << 24  # of one rank


class Figures(NamedTuple):
    """Results of an evaluation, the same on every rank.

    ``metrics``: for metrics.jsonl, by name. ``details``: JSON for the file of the evaluation, such as a list of
    classes.
    """

    metrics: dict[str, float]
    details: dict[str, Any]


class Measures(ABC):
    """Accumulates what the micro-batches of one rank contribute. Only ``result`` is collective."""

    @abstractmethod
    def result(self, axis: Axis) -> Figures | None:
        """Return the figures over all samples of all ranks of the axis; None without any. Collective.

        They depend neither on the number of ranks nor on the division of samples among them.
        """


class MeanLoss:
    """The mean of the losses of micro-batches, each by its number of samples."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None  # losses times samples, samples

    def add(self, loss: Tensor, samples: Tensor | int) -> None:
        """Add the mean loss of a micro-batch; without samples it is not counted, whatever it is."""
        count = torch.as_tensor(samples, dtype=torch.float64, device=loss.device)
        weighted = torch.where(count > 0, loss.detach().double() * count, torch.zeros_like(count))
        found = torch.stack([weighted, count])
        self._sums = found if self._sums is None else self._sums + found

    def take(self, axis: Axis) -> float | None:
        """Return the mean over all ranks, and begin again; None if no rank has counted a sample. Collective."""
        total, samples = sum_over(torch.zeros(2, dtype=torch.float64) if self._sums is None else self._sums, axis)
        self._sums = None
        return rounded(float(total / samples)) if samples > 0 else None


def sum_over(values: Tensor, axis: Axis) -> Tensor:
    """Return the sum over the ranks of an axis, on the CPU. Collective."""
    if axis.group is None:
        return values.cpu()
    values = values.to(axis.device)
    dist.all_reduce(values, group=axis.group)
    return values.cpu()


def rows_of_all(rows: Tensor, axis: Axis) -> Tensor:
    """Return the rows of all ranks in the order of the ranks, on the CPU: [sum of local rows, ...]. Collective.

    Ranks may have different numbers of rows, also none. They are sent in parts, so that a device holds few of them.
    """
    rows = rows.detach()
    if axis.group is None:
        return rows.cpu()
    device = axis.device
    own = torch.tensor([len(rows)], device=device)
    counts = [torch.zeros_like(own) for _ in range(axis.size)]
    dist.all_gather(counts, own, group=axis.group)
    sizes = [int(count) for count in counts]
    found: list[list[Tensor]] = [[] for _ in sizes]
    part = max(1, _BYTES_PER_GATHER // (math.prod(rows.shape[1:]) * rows.element_size()))
    for first in range(0, max(sizes), part):
        count = min(part, max(sizes) - first)
        sent = torch.zeros(count, *rows.shape[1:], dtype=rows.dtype, device=device)
        there = rows[first : first + count]
        sent[: len(there)] = there.to(device)
        received = [torch.empty_like(sent) for _ in sizes]
        dist.all_gather(received, sent, group=axis.group)
        for rank, (size, values) in enumerate(zip(sizes, received, strict=True)):
            found[rank].append(values[: max(0, size - first)].cpu())
    return torch.cat([values for of_rank in found for values in of_rank])


def in_sample_order(samples: Tensor) -> Tensor:
    """Return the indices of rows in the order of their sample numbers, the first row alone of equal numbers."""
    order = torch.argsort(samples, stable=True)
    ordered = samples[order]
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return order[first]


def slices_of(count: int, size: int) -> Iterator[slice]:
    """Yield slices of ``size`` indices, the last one shorter, that cover 0 to ``count`` - 1."""
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))


def rounded(value: float) -> float:
    """Return the value with nine digits: the order in which ranks are added up has no effect on them."""
    return float(f"{value:.9g}")
