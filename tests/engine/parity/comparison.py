"""The differences of a layout from the reference, and their limits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.engine.parity.reference import Trained


@dataclass(frozen=True)
class Difference:
    """The largest differences: of the loss in nats, of the gradient norm (relative), and of any final weight."""

    loss: float
    norm: float
    weight: float

    def within(self, limit: Difference) -> bool:
        """Return True if no difference exceeds its limit, and none is NaN."""
        return self.loss <= limit.loss and self.norm <= limit.norm and self.weight <= limit.weight


FP32 = Difference(loss=1e-5, norm=1e-4, weight=1e-5)
BF16 = Difference(loss=2e-2, norm=float("inf"), weight=float("inf"))


def assert_same(resumed: Trained, whole: Trained) -> None:
    assert (resumed.losses, resumed.norms) == (whole.losses, whole.norms)
    assert all(torch.equal(resumed.weights[name], values) for name, values in whole.weights.items())


def difference(layout: Trained, reference: Trained) -> Difference:
    """Return the differences. Raises AssertionError if the two have weights of different names."""
    assert layout.weights.keys() == reference.weights.keys()
    return Difference(
        loss=max(abs(a - b) for a, b in zip(layout.losses, reference.losses, strict=True)),
        norm=max(abs(a - b) / b for a, b in zip(layout.norms, reference.norms, strict=True)),
        weight=max((layout.weights[name] - whole).abs().max().item() for name, whole in reference.weights.items()),
    )
