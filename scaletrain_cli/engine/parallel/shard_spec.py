"""Which piece of a whole parameter a rank holds. Knows no communication."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ShardSpec:
    """One of ``ranks`` equal slices along ``dim``.

    ``parts``: a fused projection is that many matrices side by side, and each of them is cut (GPT-2's ``c_attn``: 3).
    """

    dim: int
    ranks: int
    rank: int
    parts: int = 1

    def take(self, whole: Tensor) -> Tensor:
        """This rank's slice, a copy."""
        pieces = [part.chunk(self.ranks, self.dim)[self.rank] for part in whole.chunk(self.parts, self.dim)]
        return torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].clone()

    def whole_shape(self, local: torch.Size) -> tuple[int, ...]:
        """The shape before it was cut."""
        return tuple(size * self.ranks if dim == self.dim else size for dim, size in enumerate(local))


def mark(parameter: nn.Parameter, cut: ShardSpec) -> None:
    """Remember the cut, and tell DeepSpeed that every rank of the model-parallel group counts in the gradient norm."""
    parameter.cut = cut  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.model_parallel = True  # type: ignore[attr-defined]


def cut_of(parameter: nn.Parameter) -> ShardSpec | None:
    """The cut of a parameter, or None where every rank holds the whole."""
    return getattr(parameter, "cut", None)
