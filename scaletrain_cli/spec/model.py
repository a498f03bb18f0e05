"""The model section: a transformer's dimensions under their Hugging Face names. Arithmetic on them lives in plan/."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from scaletrain_cli.spec.quantities import Positive, Whole, WholeOrZero
from scaletrain_cli.spec.section import Section


class ModelSpec(Section):
    """Dimensions of a decoder-only transformer.

    ``llama``: RMSNorm, rotary positions, SwiGLU, no biases unless ``qkv_bias``. ``gpt``: LayerNorm, learned
    positions, GELU, biases everywhere. ``preset`` only records where the dimensions came from.
    """

    family: Literal["llama", "gpt"]
    preset: str | None = None
    hidden_size: Whole
    num_hidden_layers: Whole
    num_attention_heads: Whole
    num_key_value_heads: Whole
    head_dim: Whole
    intermediate_size: Whole
    vocab_size: Whole
    seq_len: Whole
    max_position_embeddings: Whole
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_theta: Positive = 10000.0
    norm_eps: Positive = 1.0e-5
    initializer_range: Positive = 0.02
    num_experts: WholeOrZero = 0
    num_experts_per_tok: WholeOrZero = 0
    moe_intermediate_size: WholeOrZero = Field(default=0, description="0: the same as intermediate_size")

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """(key, message) for each dimension that contradicts another one."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            yield "num_key_value_heads", f"must divide num_attention_heads = {heads}; use {divisors(heads)}."
        if self.family == "llama" and self.head_dim % 2:
            yield "head_dim", "must be even, because rotary positions turn pairs of channels."
        if self.family == "gpt" and self.seq_len > self.max_position_embeddings:
            yield "seq_len", f"must not exceed max_position_embeddings = {self.max_position_embeddings}."
        if self.family == "gpt" and (self.qk_norm or self.num_experts):
            yield "family", "gpt has neither qk_norm nor experts; use family: llama."
        if self.num_experts == 0 and (self.num_experts_per_tok or self.moe_intermediate_size):
            yield "num_experts", "must be at least 1 when num_experts_per_tok or moe_intermediate_size is set."
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            yield "num_experts_per_tok", f"must be between 1 and num_experts = {self.num_experts}."


def divisors(number: int) -> str:
    """The whole numbers that divide ``number``, as a phrase: ``1, 2, 4 or 8``."""
    found = [str(n) for n in range(1, min(number, 4096) + 1) if number % n == 0]
    return found[0] if len(found) == 1 else ", ".join(found[:-1]) + f" or {found[-1]}"
