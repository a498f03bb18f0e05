"""Where a model's dimensions come from: a preset, a Hugging Face config.json, or other dimensions that imply them.

Works on the raw mapping, before validation, so that a user's own keys always win.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from scaletrain_cli.spec.vision import VISION
from scaletrain_cli.spec.vision_source import merged, vision_from_config, vision_presets

# Context length that a preset trains at, where the published maximum is a long-context extension.
_LONGEST_DEFAULT_SEQ_LEN = 8192

_LARGEST_CONFIG_BYTES = 1_000_000

# Our family, and the spec keys to take from config.json under another name than their own.
_LLAMA_KEYS = {"norm_eps": "rms_norm_eps", "num_experts": "num_local_experts"}
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "norm_eps": "layer_norm_epsilon",
}
_DEEPSEEK_KEYS = {"norm_eps": "rms_norm_eps", "num_experts": "n_routed_experts", "head_dim": "qk_nope_head_dim"}
_SAME_NAME = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "rope_theta",
    "initializer_range",
    "num_experts_per_tok",
    "norm_topk_prob",
    "router_aux_loss_coef",
    "num_experts",
    "moe_intermediate_size",
    "first_k_dense_replace",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_rope_head_dim",
    "v_head_dim",
)
_FAMILIES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "llama": ("llama", _LLAMA_KEYS, {}),
    "mistral": ("llama", _LLAMA_KEYS, {}),
    "mixtral": ("llama", _LLAMA_KEYS, {"norm_topk_prob": True}),
    "qwen2": ("llama", _LLAMA_KEYS, {"qkv_bias": True}),
    "qwen3": ("llama", _LLAMA_KEYS, {"qk_norm": True}),
    "qwen3_moe": ("llama", _LLAMA_KEYS, {"qk_norm": True}),  # num_experts, or from transformers 5 num_local_experts
    "deepseek_v2": ("llama", _DEEPSEEK_KEYS, {}),
    "deepseek_v3": ("llama", _DEEPSEEK_KEYS, {}),
    "gpt2": ("gpt", _GPT2_KEYS, {"tie_word_embeddings": True}),
}


# What a dimension follows from where it is not given; a problem with one of those is not told twice.
DERIVED_FROM = {
    "num_key_value_heads": ("num_attention_heads",),
    "head_dim": ("hidden_size", "num_attention_heads"),
    "intermediate_size": ("hidden_size", "family"),
    "max_position_embeddings": ("seq_len",),
}


class SourceError(ValueError):
    """A preset or config.json that cannot be used; ``key`` is the spec key to blame."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Dimensions of transformers by preset name, as published by each model's authors."""
    text = files("scaletrain_cli.spec").joinpath("presets.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def from_hugging_face(path: Path) -> dict[str, Any]:
    """Model keys of the spec from a Hugging Face ``config.json`` (or the folder that holds it).

    What only matters to a finished model is left out: rope_scaling stretches the context after training, and a sliding
    window is trained as full attention. Raises SourceError when the file is not readable or its architecture is not
    one we train.
    """
    config = _read_config(path)
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in VISION:
        return vision_from_config(config)
    if not isinstance(kind, str) or kind not in _FAMILIES:
        known = ", ".join(sorted([*_FAMILIES, *VISION]))
        raise SourceError("hf_config", f"has model_type {str(kind)[:80]!r}; known: {known}")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise SourceError("hf_config", "has attention_bias or mlp_bias, which no family here trains")
    family, renamed, fixed = _FAMILIES[kind]
    activation = config.get("hidden_act", "silu")
    if family == "llama" and activation not in ("silu", "swish"):
        raise SourceError("hf_config", f"has hidden_act {str(activation)[:80]!r}; {family} trains silu alone")
    rope = config.get("rope_parameters")  # where transformers 5 keeps rope_theta
    if isinstance(rope, dict) and "rope_theta" in rope:
        config = {"rope_theta": rope["rope_theta"], **config}
    found = {key: config[key] for key in _SAME_NAME if key in config}
    found |= {key: config[theirs] for key, theirs in renamed.items() if theirs in config}
    shared, width = config.get("n_shared_experts"), config.get("moe_intermediate_size")
    if isinstance(shared, int) and isinstance(width, int):
        found["shared_expert_intermediate_size"] = shared * width
    return {"family": family, **fixed, **{key: value for key, value in found.items() if value is not None}}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        if path.is_dir():
            path = path / "config.json"
        with path.open("rb") as file:
            data = file.read(_LARGEST_CONFIG_BYTES + 1)
        config = json.loads(data) if len(data) <= _LARGEST_CONFIG_BYTES else None
    except OSError as error:
        raise SourceError("hf_config", f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError("hf_config", "is not JSON") from error
    if not isinstance(config, dict):
        raise SourceError("hf_config", "is not a Hugging Face config.json, which holds one JSON object")
    return config


def complete(model: dict[str, Any], base_dir: Path) -> dict[str, Any]:
    """The mapping with preset or config.json under the user's keys, and derived dimensions filled in.

    Raises SourceError. Leaves anything that it does not understand for validation to report.
    """
    given = {key: value for key, value in model.items() if key != "hf_config"}
    if "hf_config" in model:
        if not isinstance(model["hf_config"], str) or "\0" in model["hf_config"]:
            raise SourceError("hf_config", "must be the path of a Hugging Face config.json")
        given = merged(from_hugging_face(base_dir / model["hf_config"]), given)
    preset = model.get("preset")
    if preset is not None:
        known = presets() | vision_presets()
        if not isinstance(preset, str) or preset not in known:
            raise SourceError("preset", "is not a known preset")
        given = merged(known[preset], given)
    family = given.get("family")
    return given if isinstance(family, str) and family in VISION else _derived(given)


def _derived(given: dict[str, Any]) -> dict[str, Any]:
    """Fill what follows from other dimensions, as the architectures define it."""

    def whole(key: str) -> int | None:
        value = given.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    heads, hidden, seq_len = whole("num_attention_heads"), whole("hidden_size"), whole("seq_len")
    longest = whole("max_position_embeddings")
    derived: dict[str, Any] = {}
    if heads:
        derived["num_key_value_heads"] = heads
    if heads and hidden and hidden % heads == 0:
        derived["head_dim"] = hidden // heads
    if hidden and given.get("family") == "gpt":
        derived["intermediate_size"] = 4 * hidden
    if longest:
        derived["seq_len"] = min(longest, _LONGEST_DEFAULT_SEQ_LEN)
    if seq_len:
        derived["max_position_embeddings"] = seq_len
    return derived | given
