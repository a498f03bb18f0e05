"""The layout of experts in the files of GPT-OSS, where all experts of a layer are one tensor.

Matrices are [experts, in, out] and biases [experts, out]. Gates and ups are one tensor, whose even columns are gates
and odd ones ups; here they are separate matrices [out, in]. OpenAI's files have the matrices in MXFP4 (Open Compute
Project, Microscaling Formats 1.0, sections 5.3.3 and 6.3): ``*_blocks`` [experts, out, in / 32, 16] holds two 4-bit
values per byte, the lower half first, and ``*_scales`` [experts, out, in / 32] the exponents of 2 of their blocks.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaletrain_cli.engine.parallel.mesh import ShardSpec
from scaletrain_cli.spec.weight_files import ExpertPlace, Shape, expert_place, router_name

_EXPONENT_BIAS = 127  # of a scale, which has 8 bits of exponent alone (E8M0)
# E2M1: sign, two bits of exponent with a bias of 1, one bit of mantissa; exponent 0 is subnormal.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def read_expert(
    place: ExpertPlace, shape: Shape, spec: ShardSpec | None, slice_of: Callable[[str], Any], *, packed: bool
) -> Tensor:
    """Return this rank's shard of an expert's parameter of a whole shape [out, in] or [out].

    ``slice_of``: returns the slice of a stored tensor, so that no more is read than needed. ``packed``: a matrix in
    MXFP4, returned in bf16.
    """
    first, length = spec.spans(shape[0])[0] if spec is not None and spec.dim == 0 else (0, shape[0])
    columns = slice(first * place.step, (first + length) * place.step)
    number, own = place.number, slice(place.first, None, place.step)
    if place.is_bias:
        bias: Tensor = slice_of(place.stack)[number, columns]
        return bias[own]
    if packed:
        blocks, scales = (slice_of(name)[number, columns][own] for name in (place.blocks, place.scales))
        values = dequantized(blocks, scales)[:, : shape[1]]
    else:
        values = slice_of(place.stack)[number, :, columns][:, own].t()
    return spec.take(values) if spec is not None and spec.dim == 1 else values


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the bf16 values [rows, blocks x 32] of MXFP4 ``blocks`` [rows, blocks, 16] and ``scales`` [rows, blocks].

    Exact, because a value has two significant bits.
    """
    table = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.bfloat16)
    halves = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(table[halves.int()], scales.int().unsqueeze(-1) - _EXPONENT_BIAS).flatten(-2)


class Stored(NamedTuple):
    """A tensor to write: its shape, and the parameters in it with their places; no places for a parameter itself."""

    shape: Shape
    parts: tuple[tuple[str, ExpertPlace | None], ...]

    def joined(self, read: Callable[[str], Tensor], dtype: torch.dtype) -> Tensor:
        """Return the tensor; ``read`` returns the parameter of a name."""
        (name, place), *_ = self.parts
        if place is None:
            return read(name)
        whole = torch.empty(self.shape, dtype=dtype)
        for name, place in self.parts:
            assert place is not None
            values = read(name)
            whole[place.number][..., place.first :: place.step] = values if place.is_bias else values.t()
        return whole


def stored_tensors(shapes: Mapping[str, Shape], experts: int) -> dict[str, Stored]:
    """Return the tensors of GPT-OSS's files in 16 or 32 bits, by name, for parameters of these names and shapes."""
    tensors: dict[str, Stored] = {}
    for name, shape in shapes.items():
        place = expert_place(name, shape, experts)
        if place is None:
            tensors[router_name(name)] = Stored(shape, ((name, None),))
        else:
            known = tensors.get(place.stack, Stored(place.shape, ()))
            tensors[place.stack] = known._replace(parts=(*known.parts, (name, place)))
    return tensors
