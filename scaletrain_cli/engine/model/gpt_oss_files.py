"""The layout of experts in the files of GPT-OSS, where all experts of a layer are one tensor.

Matrices are [experts, in, out] and biases [experts, out]. Gates and ups are one tensor, whose even columns are gates
and odd ones ups; here they are separate matrices [out, in]. OpenAI's files have the matrices in MXFP4 (Open Compute
Project, Microscaling Formats 1.0, sections 5.3.3 and 6.3): ``*_blocks`` [experts, out, in / 32, 16] holds two 4-bit
values per byte, the lower half first, and ``*_scales`` [experts, out, in / 32] the exponents of 2 of their blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaletrain_cli.engine.parallel.mesh import ShardSpec

Shape = tuple[int, ...]

_EXPERT = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.(?P<kind>weight|bias)")
_ROUTER = re.compile(r"(?<=\.mlp\.)gate(?=\.(weight|bias)$)")
_GATES = {"gate_proj": 0, "up_proj": 1}  # their first column of two that alternate

_BLOCK = 32  # values with one scale
_EXPONENT_BIAS = 127  # of a scale, which has 8 bits of exponent alone (E8M0)
# E2M1: sign, two bits of exponent with a bias of 1, one bit of mantissa; exponent 0 is subnormal.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Place(NamedTuple):
    """The place of an expert's matrix or bias: in tensor ``stack``, the expert's ``number``.

    ``first``, ``step``: its columns among those of the expert. ``shape``: that of the whole stack.
    """

    stack: str
    number: int
    first: int
    step: int
    shape: Shape
    is_bias: bool

    @property
    def blocks(self) -> str:
        """Return the name of the 4-bit values."""
        return f"{self.stack}_blocks"

    @property
    def scales(self) -> str:
        """Return the name of the scales."""
        return f"{self.stack}_scales"

    def stored_shapes(self, *, packed: bool) -> dict[str, Shape]:
        """Return the shapes of the tensors in the files, by name; ``packed``: in MXFP4."""
        if not packed:
            return {self.stack: self.shape}
        experts, inputs, outputs = self.shape
        scales = (experts, outputs, -(-inputs // _BLOCK))
        return {self.blocks: (*scales, _BLOCK // 2), self.scales: scales}


def router_name(name: str) -> str:
    """Return the name of a parameter in GPT-OSS's files, if it is not one of an expert."""
    return _ROUTER.sub("router", name)


def place_of(name: str, shape: Shape, experts: int) -> Place | None:
    """Return the place of an expert's parameter with this name and whole shape; None for all other parameters."""
    found = _EXPERT.fullmatch(name)
    if found is None:
        return None
    joined, is_bias = found["matrix"] in _GATES, found["kind"] == "bias"
    first, step = (_GATES[found["matrix"]], 2) if joined else (0, 1)
    stack = f"{found['experts']}.{'gate_up_proj' if joined else found['matrix']}{'_bias' if is_bias else ''}"
    stored = (experts, *reversed(shape[1:]), shape[0] * step)
    return Place(stack, int(found["number"]), first, step, stored, is_bias)


def read_expert(
    place: Place, shape: Shape, spec: ShardSpec | None, slice_of: Callable[[str], Any], *, packed: bool
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
    values = torch.ldexp(table[halves.int()], scales.int().unsqueeze(-1) - _EXPONENT_BIAS)
    return values.flatten(-2)


class Stored(NamedTuple):
    """A tensor to write: its shape, and the parameters in it with their places; no places for a parameter itself."""

    shape: Shape
    parts: tuple[tuple[str, Place | None], ...]

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
    found: dict[str, Stored] = {}
    for name, shape in shapes.items():
        place = place_of(name, shape, experts)
        if place is None:
            found[router_name(name)] = Stored(shape, ((name, None),))
        else:
            known = found.get(place.stack, Stored(place.shape, ()))
            found[place.stack] = known._replace(parts=(*known.parts, (name, place)))
    return found
