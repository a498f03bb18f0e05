"""Scaled random weights as a pure function of seed, name and whole shape. Of layouts it knows a rank's cut alone.

Every layout starts from the same weights: a rank draws the chunks of rows that its cut touches and keeps its slice,
so it never holds a whole parameter that others share with it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from scaletrain_cli.engine.parallel.shard_spec import ShardSpec

# Small enough that one CUDA launch fills it without its threads looping: how they would depends on the GPU's size, and
# so would the values. Small enough for a CPU's cache, too.
_CHUNK_NUMEL = 2**18


@dataclass(frozen=True)
class ScaledInitialisation:
    """Normal(0, ``initializer_range``) matrices, those into the residual stream divided by sqrt(2 ``layers``).

    That keeps the residual stream's variance independent of depth (GPT-2 report, section 2.3). Norms are 1, biases 0.
    ``device`` draws; a CPU and a GPU draw different values.
    """

    seed: int
    initializer_range: float
    layers: int
    residual_projections: tuple[str, ...]
    device: torch.device

    def read(self, name: str, whole_shape: tuple[int, ...], cut: ShardSpec | None) -> Tensor:
        """This rank's piece of the parameter, fp32."""
        if name.endswith("bias") or len(whole_shape) == 1:
            return torch.full(_local(whole_shape, cut), 0.0 if name.endswith("bias") else 1.0, device=self.device)
        std = self.initializer_range
        if name.endswith(self.residual_projections):
            std /= (2 * self.layers) ** 0.5
        return normal(self.seed, name, whole_shape, std, cut, self.device)


def normal(
    seed: int, name: str, whole_shape: tuple[int, ...], std: float, cut: ShardSpec | None, device: torch.device
) -> Tensor:
    """The cut's slice of a Normal(0, std) tensor of at least two dimensions, fp32, drawn by chunks of whole rows."""
    *leading, columns = whole_shape
    rows, kept_columns = torch.arange(torch.Size(leading).numel()), None
    whole_rows = len(rows)
    if cut is not None and cut.dim == len(leading):
        kept_columns = ShardSpec(0, cut.ranks, cut.rank, cut.parts).take(torch.arange(columns)).to(device)
    elif cut is not None:
        rows = cut.take(rows.view(leading)).flatten()  # ascending, as slices of a row-major order are
    kept = torch.empty(_local(whole_shape, cut), device=device)
    flat, generator = kept.view(len(rows), -1), torch.Generator(device)
    height = max(1, _CHUNK_NUMEL // columns)
    scratch, start = torch.empty(min(height, whole_rows), columns, device=device), 0
    while start < len(rows):
        chunk = int(rows[start]) // height
        first, last = chunk * height, min((chunk + 1) * height, whole_rows)
        end = start + int(torch.searchsorted(rows[start : start + height], last))
        generator.manual_seed(_chunk_seed(seed, name, chunk))
        drawn = scratch[: last - first].normal_(0.0, std, generator=generator)
        wanted = rows[start:end] - first
        drawn = drawn if end - start == last - first else drawn[wanted.to(device)]
        flat[start:end] = drawn if kept_columns is None else drawn[:, kept_columns]
        start = end
    return kept


def _chunk_seed(seed: int, name: str, chunk: int) -> int:
    """63 bits that have nothing to do with those of another chunk."""
    digest = hashlib.blake2b(f"{seed}/{name}/{chunk}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _local(whole_shape: tuple[int, ...], cut: ShardSpec | None) -> tuple[int, ...]:
    """The shape of the cut's slice."""
    return tuple(n // cut.ranks if cut and dim == cut.dim else n for dim, n in enumerate(whole_shape))
