"""Rotary frequencies stretched to contexts longer than a model was first trained on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scaletrain_cli.spec.rope import RopeScalingSpec


def scaled(
    frequencies: Tensor, head_dim: int, theta: float, scaling: RopeScalingSpec, longest: int
) -> tuple[Tensor, float]:
    """Return the stretched frequencies [head_dim / 2] and what cosines and sines are multiplied by.

    ``longest`` is the context before stretching where ``scaling`` does not say.
    """
    original = scaling.original_max_position_embeddings or longest
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(frequencies, scaling, original), 1.0
    return _yarn(frequencies, head_dim, theta, scaling, original), _yarn_attention_factor(scaling)


def _llama3(frequencies: Tensor, scaling: RopeScalingSpec, original: int) -> Tensor:
    """Slow channels are divided by the factor, fast ones kept, those between interpolated (arXiv:2407.21783)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None, "the spec requires it"
    assert high is not None, "the spec requires it"
    turns = original * frequencies / (2 * math.pi)  # within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: Tensor, head_dim: int, theta: float, scaling: RopeScalingSpec, original: int) -> Tensor:
    """NTK-by-parts (arXiv:2309.00071, section 3.2): a ramp over channels between two numbers of turns."""

    def channel(turns: float) -> float:
        """The channel that turns so often within the original context."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = channel(scaling.beta_fast or 32.0), channel(scaling.beta_slow or 1.0)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    ramp = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    stretched = ((ramp - first) / (last - first)).clamp(0, 1)
    return frequencies * ((1 - stretched) + stretched / scaling.factor)


def _yarn_attention_factor(scaling: RopeScalingSpec) -> float:
    """The temperature of attention, as a factor of queries and keys alike (section 3.4)."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def growth(scale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * scale * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return growth(scaling.mscale) / growth(scaling.mscale_all_dim)
    return growth(1.0)
