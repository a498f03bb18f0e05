"""Dimensions of well-known models, for rows that name a model without all of its dimensions.

They are from the models' published config.json. Columns of a table take precedence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner_truth.mapping import Unmapped, padded_vocab, transformer
from planner_truth.table import whole


@dataclass(frozen=True)
class Architecture:
    """Dimensions of a model; ``more``: other keys of the spec's model section."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool = False
    more: tuple[tuple[str, Any], ...] = ()


_DEEPSEEK_V3 = (
    ("head_dim", 128),
    ("kv_lora_rank", 512),
    ("q_lora_rank", 1536),
    ("qk_rope_head_dim", 64),
    ("v_head_dim", 128),
    ("num_experts", 256),
    ("num_experts_per_tok", 8),
    ("moe_intermediate_size", 2048),
    ("shared_expert_intermediate_size", 2048),
    ("first_k_dense_replace", 3),
)
_QWEN3_30B = (
    ("head_dim", 128),
    ("qk_norm", True),
    ("num_experts", 128),
    ("num_experts_per_tok", 8),
    ("moe_intermediate_size", 768),
)
# NeMo's GPT and Nemotron recipes have no biases and learned or rotary positions; dropout as in the recipe.
_MODELS: tuple[tuple[str, Architecture], ...] = (
    (r"llama.?3.*70b", Architecture("llama", 80, 8192, 64, 8, 28672, 128256)),
    (r"llama.?3.*405b", Architecture("llama", 126, 16384, 128, 8, 53248, 128256)),
    (r"llama.?3.*8b", Architecture("llama", 32, 4096, 32, 8, 14336, 128256)),
    (r"llama.?3.*3b", Architecture("llama", 28, 3072, 24, 8, 8192, 128256, True, (("head_dim", 128),))),
    (r"llama.?2.*70b", Architecture("llama", 80, 8192, 64, 8, 28672, 32000)),
    (r"llama.?2.*13b", Architecture("llama", 40, 5120, 40, 40, 13824, 32000)),
    (r"llama.?2.*7 ?b", Architecture("llama", 32, 4096, 32, 32, 11008, 32000)),
    (r"deepseek.?v3", Architecture("llama", 61, 7168, 128, 128, 18432, 129280, False, _DEEPSEEK_V3)),
    (r"qwen3.?30b", Architecture("llama", 48, 2048, 32, 4, 6144, 151936, False, _QWEN3_30B)),
    (r"qwen3.*8b", Architecture("llama", 36, 4096, 32, 8, 12288, 151936, False, (("qk_norm", True),))),
    (r"nemotron.?8b", Architecture("gpt", 32, 4096, 32, 32, 16384, 256000, False, (("position_embedding", "rotary"),))),
    (r"gpt3.?5b", Architecture("gpt", 24, 4096, 32, 32, 16384, 50257, True)),
    (r"gpt3.?175b", Architecture("gpt", 96, 12288, 96, 96, 49152, 50257, True)),
    (r"internlm.?7b", Architecture("llama", 32, 4096, 32, 32, 11008, 103168, False, (("qkv_bias", True),))),
    (r"internlm.?20b", Architecture("llama", 60, 5120, 40, 40, 13824, 103168)),
)


def known_model(row: Mapping[str, str], tensor: int = 1) -> dict[str, Any]:
    """Return the model section: the row's columns, completed by the dimensions of the model that it names.

    Raises Unmapped.
    """
    name = row["model"].lower().replace("_", " ")
    found = next((model for pattern, model in _MODELS if re.search(pattern, name)), None)
    if found is None:
        raise Unmapped(f"dimensions of {row['model']} are not known")
    return transformer(
        found.family,
        layers=whole(row, "layers", found.layers),
        hidden=whole(row, "hidden", found.hidden),
        heads=whole(row, "heads", found.heads),
        kv_heads=whole(row, "kv_heads", found.kv_heads),
        ffn=whole(row, "ffn", found.ffn),
        vocab=padded_vocab(found.vocab, tensor),
        seq_len=whole(row, "seq_len", 2048 if "internlm" in name else None),
        tied=found.tied,
        **dict(found.more),
    )
