"""The section model.rope_scaling: rotary positions for contexts longer than the model was first trained on."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from scaletrain_cli.spec.quantities import Positive, Whole
from scaletrain_cli.spec.section import Section

# Keys of each kind; the first ones are required.
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
# As transformers reads them.
KEYS_OF_ROPE: dict[str, tuple[str, ...]] = {
    **_NEEDED,
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale"),
        *("mscale_all_dim", "truncate"),
    ),
    "longrope": (*_NEEDED["longrope"], "factor", "attention_factor"),
}
Factors = Annotated[tuple[Positive, ...], Field(min_length=1, max_length=1024)]


class RopeScalingSpec(Section):
    """RoPE scaling, with Hugging Face's keys.

    ``linear`` (arXiv:2306.15595), ``dynamic`` (NTK-aware, by the length of a row), ``llama3`` (Llama
    3.1 to 3.3), ``yarn`` (arXiv:2309.00071), ``longrope`` (arXiv:2402.13753, Phi-3 and later).
    """

    rope_type: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: Annotated[float, Field(ge=1, le=1e6)] | None = Field(
        default=None, description="required, except with longrope: max_position_embeddings / original"
    )
    original_max_position_embeddings: Whole | None = Field(
        default=None, description="context length before scaling; null: model.max_position_embeddings"
    )
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    attention_factor: Positive | None = Field(default=None, description="yarn and longrope; null: derived")
    beta_fast: Positive | None = Field(default=None, description="yarn; null: 32")
    beta_slow: Positive | None = Field(default=None, description="yarn; null: 1")
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: bool | None = Field(
        default=None, description="yarn; round the ends of the ramp to whole channels; null: true"
    )
    short_factor: Factors | None = Field(
        default=None, description="longrope; divisor of each frequency if no position exceeds the original context"
    )
    long_factor: Factors | None = Field(default=None, description="longrope; divisors otherwise, for all positions")

    def problems_with(self, channels: int, theta: float, context: int) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for keys that the kind requires, does not use, or cannot compute with.

        ``channels``: frequencies; ``theta``: their base; ``context``: model.max_position_embeddings.
        """
        for key in _NEEDED[self.rope_type]:
            if getattr(self, key) is None:
                yield key, f"is required with rope_type: {self.rope_type}."
        for key in sorted(type(self).model_fields.keys() - {"rope_type"} - set(KEYS_OF_ROPE[self.rope_type])):
            if getattr(self, key) is not None:
                yield key, f"has no effect with rope_type: {self.rope_type}. Remove it."
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.rope_type == "llama3" and low is not None and high is not None and low >= high:
            yield "low_freq_factor", f"must be below high_freq_factor = {high:g}."
        if self.rope_type == "yarn" and theta <= 1:
            yield "rope_type", f"yarn requires model.rope_theta above 1; it is {theta:g}."
        if self.rope_type == "dynamic" and channels == 1:
            yield "rope_type", "dynamic requires more than 2 rotated channels per head."
        original = self.original_max_position_embeddings or context
        if self.rope_type == "longrope" and original == 1 and self.attention_factor is None:
            yield "original_max_position_embeddings", "must be above 1 without attention_factor."
        for key in ("short_factor", "long_factor") if self.rope_type == "longrope" else ():
            factors = getattr(self, key)
            if factors is not None and len(factors) != channels:
                yield key, f"must have {channels} items, one per rotated pair of channels; it has {len(factors)}."

    def attention_growth(self, scale: float) -> float:
        """Return 0.1 ``scale`` ln(factor) + 1, by which YaRN increases attention scores (arXiv:2309.00071, 3.4)."""
        factor = self.factor or 1.0
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    def to_hugging_face(self) -> dict[str, object]:
        """Return the section as in config.json."""
        settings = self.model_dump(exclude_none=True)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
