"""Rotary positions (arXiv:2104.09864), and their frequencies for contexts longer than a model was first trained on."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.rope import RopeScalingSpec

Tables = tuple[Tensor, Tensor]  # cosines, and sines with those of the first half of the channels negated


def tables_of_layers(spec: ModelSpec, positions: Tensor, longest: Tensor | None) -> tuple[Tables, Tables]:
    """Return the tables of layers with full attention, and of layers with a window.

    They differ only with ``rope_local_base_freq`` (Gemma 3).

    ``longest``: see ``rotary_tables``.
    """
    context = spec.max_position_embeddings
    tables = rotary_tables(positions, spec.rotary_dim, spec.rope_theta, spec.rope_scaling, context, longest)
    if spec.rope_local_base_freq is None:
        return tables, tables
    return tables, rotary_tables(positions, spec.rotary_dim, spec.rope_local_base_freq)


def depends_on_longest(spec: ModelSpec) -> bool:
    """Return True if the frequencies of a row depend on its length."""
    return spec.rope_scaling is not None and spec.rope_scaling.rope_type in ("dynamic", "longrope")


def rotary_tables(
    positions: Tensor,
    channels: int,
    theta: float,
    scaling: RopeScalingSpec | None = None,
    context: int = 0,
    longest: Tensor | None = None,
) -> Tables:
    """Return the tables for positions [length], each [length, channels], in fp32.

    For positions [batch, length], or ``longest`` [batch], each [batch, 1, length, channels]. Not buffers, which would
    be cast to bf16. ``context``: max_position_embeddings. ``longest``: the highest position of each whole row plus 1,
    [batch], or a scalar for all rows; for scalings that depend on it.
    """
    frequencies = theta ** -(torch.arange(0, channels, 2, device=positions.device, dtype=torch.float32) / channels)
    factor = 1.0
    if scaling is not None:
        frequencies, factor = scaled(frequencies, channels, theta, scaling, context, longest)
    angles = positions.float().unsqueeze(-1) * (frequencies.unsqueeze(-2) if frequencies.ndim == 2 else frequencies)
    if angles.ndim == 3:
        angles = angles.unsqueeze(1)  # the same for all heads
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """Return each head, [batch, heads, length, head_dim], rotated, with Hugging Face's pairing of channels.

    Tables for fewer channels rotate the first ones.
    """
    cos, sin = tables
    turning = cos.shape[-1]
    part = x if turning == x.shape[-1] else x[..., :turning]
    if torch.compiler.is_compiling():
        turned = _turned(part, cos, sin, 1)
    else:
        turned = _Rotation.apply(part, cos, sin)  # type: ignore[no-untyped-call]
    if part is x:
        return turned
    # Joined in the order of memory, [batch, length, heads, head_dim]: attention's output then needs no copy.
    return torch.cat((turned.transpose(1, 2), x[..., turning:].transpose(1, 2)), dim=-1).transpose(1, 2)


class _Rotation(Function):
    """Its gradient is the rotation back; autograd's own formula takes twice as many kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradient, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Return [batch, heads, length, channels] rotated by the angles of the tables (1), or back (-1); sums in fp32."""
    rows = x.transpose(1, 2)  # in the order of memory, in which roll copies nothing
    cos, sin = (table.unsqueeze(1) if table.ndim == 2 else table.transpose(1, 2) for table in (cos, sin))
    other = rows.roll(rows.shape[-1] // 2, -1)
    return torch.addcmul(rows * cos, other, sin, value=direction).to(x.dtype).transpose(1, 2)


def scaled(
    frequencies: Tensor,
    channels: int,
    theta: float,
    scaling: RopeScalingSpec,
    context: int,
    longest: Tensor | None = None,
) -> tuple[Tensor, float]:
    """Return the scaled frequencies and a factor of cosines and sines.

    Frequencies [channels / 2], or of each row, [batch, channels / 2], with ``longest`` [batch].
    ``context``: the original context if ``scaling`` does not state it; ``longest``: as for ``rotary_tables``.
    """
    original = scaling.original_max_position_embeddings or context
    if scaling.rope_type == "longrope":
        return _longrope(frequencies, scaling, original, longest), _longrope_attention_factor(scaling, context)
    factor = scaling.factor
    assert factor is not None, "the spec requires it"
    if scaling.rope_type == "linear":
        return frequencies / factor, 1.0
    if scaling.rope_type == "dynamic":
        return _dynamic(channels, theta, factor, context, longest, frequencies), 1.0
    if scaling.rope_type == "llama3":
        # Slow channels are divided by the factor, and those between interpolated (arXiv:2407.21783).
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        assert low is not None, "the spec requires it"
        assert high is not None, "the spec requires it"
        turns = original * frequencies / (2 * math.pi)  # within the original context
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / factor), 1.0
    return _yarn(frequencies, channels, theta, scaling, original), _yarn_attention_factor(scaling)


def _longrope(frequencies: Tensor, scaling: RopeScalingSpec, original: int, longest: Tensor | None) -> Tensor:
    """Return frequencies over the short factors, or the long ones if a position exceeds the original context.

    They apply to all positions of a row (arXiv:2402.13753), as in transformers with a batch of one row.
    """
    device = frequencies.device
    short = on_device(scaling.short_factor, device)
    if longest is None:
        return frequencies / short
    return frequencies / torch.where(longest.unsqueeze(-1) > original, on_device(scaling.long_factor, device), short)


def on_device(numbers: Sequence[float] | None, device: torch.device) -> Tensor:
    """Return the numbers on a device, without waiting for it."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _longrope_attention_factor(scaling: RopeScalingSpec, context: int) -> float:
    """Return the attention temperature, as a factor of queries and keys."""
    original = scaling.original_max_position_embeddings or context
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    growth = scaling.factor or context / original
    return 1.0 if growth <= 1 else math.sqrt(1 + math.log(growth) / math.log(original))


def _dynamic(
    channels: int, theta: float, factor: float, context: int, longest: Tensor | None, frequencies: Tensor
) -> Tensor:
    """Return frequencies with a base that grows with the length of the row beyond the context (NTK-aware scaling)."""
    if longest is None:
        return frequencies
    length = longest.unsqueeze(-1).clamp(min=context).float()
    base = theta * (factor * length / context - (factor - 1)) ** (channels / (channels - 2))
    exponents = torch.arange(0, channels, 2, device=frequencies.device, dtype=torch.float32) / channels
    return base**-exponents


def _yarn(frequencies: Tensor, channels: int, theta: float, scaling: RopeScalingSpec, original: int) -> Tensor:
    """Return NTK-by-parts frequencies: a ramp over channels between two rotation counts (arXiv:2309.00071, 3.2)."""

    def channel(turns: float) -> float:
        """Return the channel that rotates this many times within the original context."""
        return channels * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = channel(scaling.beta_fast or 32.0), channel(scaling.beta_slow or 1.0)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)
    if first == last:
        last += 0.001
    ramp = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    stretched = ((ramp - first) / (last - first)).clamp(0, 1)
    return frequencies * ((1 - stretched) + stretched / (scaling.factor or 1.0))


def _yarn_attention_factor(scaling: RopeScalingSpec) -> float:
    """Return the attention temperature, as a factor of queries and keys (section 3.4)."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return scaling.attention_growth(scaling.mscale) / scaling.attention_growth(scaling.mscale_all_dim)
    return scaling.attention_growth(1.0)
