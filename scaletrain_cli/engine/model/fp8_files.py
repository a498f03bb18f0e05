"""Matrices in fp8 in Hugging Face files, with one scale for each block of rows and columns, as in DeepSeek-V3's.

A matrix ``*.weight`` in E4M3 has its scales beside it in ``*.weight_scale_inv`` [rows / 128, columns / 128]; a value
times the scale of its block is the weight. The size of the blocks is ``quantization_config.weight_block_size`` in
config.json (DeepSeek-V3, arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScaledMatrix:
    """A matrix in a file, read as fp32. Indexed by slices without a step, as those of safetensors are.

    ``values`` and ``scales``: safetensors' slices of both tensors.
    """

    values: Any
    scales: Any
    block: tuple[int, int]

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """Return a part; only its values and the scales of its blocks are read."""
        rows, columns = ((*index, slice(None)) if isinstance(index, tuple) else (index, slice(None)))[:2]
        spans = [part.indices(size)[:2] for part, size in zip((rows, columns), self.values.get_shape(), strict=True)]
        blocks = tuple(
            slice(first // each, -(-stop // each)) for (first, stop), each in zip(spans, self.block, strict=True)
        )
        scales: Tensor = self.scales[blocks].float()
        for dim, ((first, stop), each) in enumerate(zip(spans, self.block, strict=True)):
            scales = scales.repeat_interleave(each, dim).narrow(dim, first % each, stop - first)
        values: Tensor = self.values[rows, columns].to(torch.float32)
        return values * scales
