"""Where a model's dimensions come from: a preset, a Hugging Face config.json, or other dimensions that imply them.

Works on the raw mapping, before validation, so that a user's own keys always win.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from scaletrain_cli.safe_files import open_to_read
from scaletrain_cli.spec.hugging_face_keys import CLIP_TOWER, VISION_KEYS, KnownKeys, known_keys, refusals
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


# What transformers takes where a config.json says nothing, if it is not what this package takes.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"norm_eps": 1e-6},
    "mistral": {"norm_eps": 1e-6, "num_key_value_heads": 8},
    "mixtral": {"rope_theta": 1e6, "num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen2": {"norm_eps": 1e-6},
    "qwen3": {"norm_eps": 1e-6, "head_dim": 128},
    "qwen3_moe": {"norm_eps": 1e-6},
    "deepseek_v2": {"norm_eps": 1e-6},
    "deepseek_v3": {"norm_eps": 1e-6},
    "gpt2": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
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

    Raises SourceError when the file is not readable, its architecture is not one we train, or a key of it asks for
    something that would not be trained.
    """
    return from_config(read_config(path))


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    """The same of a config that was read before. Raises SourceError."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in VISION:
        _require_known(config, _vision_keys(kind))
        for tower in ("vision_config", "text_config"):
            if isinstance(config.get(tower), dict):
                sizes: Any = VISION[kind].model_fields[tower].annotation
                _require_known(config[tower], KnownKeys(frozenset(sizes.model_fields), CLIP_TOWER.irrelevant), tower)
        return vision_from_config(config)
    if not isinstance(kind, str) or kind not in _FAMILIES:
        known = ", ".join(sorted([*_FAMILIES, *VISION]))
        raise SourceError("hf_config", f"has model_type {str(kind)[:80]!r}; known: {known}")
    family, renamed, fixed = _FAMILIES[kind]
    # Where transformers 5 keeps all of the rotary positions; before, rope_scaling stood beside rope_theta.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise SourceError("hf_config", "has rope_scaling or rope_parameters that is no mapping")
    if "rope_theta" in rope:
        config = {**config, "rope_theta": rope["rope_theta"]}
    _require_known(config, known_keys(kind, frozenset((*_SAME_NAME, *renamed.values()))))
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or set(map(str, kinds)) - {"full_attention", "sliding_attention"}:
        raise SourceError("hf_config", f"has layer_types = {str(kinds)[:80]}, and only full attention is trained here")
    found = {key: config[key] for key in _SAME_NAME if key in config}
    found |= {key: config[theirs] for key, theirs in renamed.items() if theirs in config}
    shared, width = config.get("n_shared_experts"), config.get("moe_intermediate_size")
    if isinstance(shared, int) and isinstance(width, int):
        found["shared_expert_intermediate_size"] = shared * width
    found |= {"rope_scaling": _rope_scaling(config, rope), **_dropouts(config, family)}
    if kind == "qwen3_moe":
        found |= _sparse_layers(config)
    return {"family": family, **_DEFAULTS[kind], **fixed, **{k: v for k, v in found.items() if v is not None}}


def _vision_keys(kind: str) -> KnownKeys:
    known = VISION_KEYS[kind]
    return KnownKeys(frozenset(VISION[kind].model_fields), known.irrelevant, known.only)


def _require_known(config: dict[str, Any], known: KnownKeys, where: str = "") -> None:
    if problems := list(refusals(config, known)):
        raise SourceError("hf_config", "; ".join(f"{where} {problem}".strip() for problem in problems[:5]))


def _rope_scaling(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any] | None:
    """Our section of the same name. Raises SourceError for a kind that the engine does not have."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", None):
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise SourceError(
            "hf_config", f"has rope_scaling of type {str(kind)[:80]}, and only linear, llama3 and yarn are trained"
        )
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise SourceError("hf_config", "has partial_rotary_factor, and all channels are rotated here")
    apart = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
    scaling = {key: value for key, value in rope.items() if key not in apart and value is not None}
    original = config.get("original_max_position_embeddings")
    if kind == "yarn":
        scaling.setdefault("original_max_position_embeddings", original or config.get("max_position_embeddings"))
    return {"rope_type": kind, **scaling}


def _dropouts(config: dict[str, Any], family: str) -> dict[str, Any]:
    if family == "llama":
        return {"attention_dropout": config.get("attention_dropout")}
    embedding, residual = config.get("embd_pdrop"), config.get("resid_pdrop")
    if embedding != residual:
        raise SourceError("hf_config", f"has embd_pdrop = {embedding} and resid_pdrop = {residual}; they must be equal")
    return {"hidden_dropout": residual, "attention_dropout": config.get("attn_pdrop")}


def _sparse_layers(config: dict[str, Any]) -> dict[str, Any]:
    """Which blocks of a Qwen3-MoE are dense: leading ones alone. Raises SourceError for any other choice."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if step not in (None, 1):
        raise SourceError("hf_config", f"has decoder_sparse_step = {str(step)[:80]}, and only 1 is trained here")
    if not isinstance(dense, list) or sorted(map(str, dense)) != sorted(map(str, range(len(dense)))):
        raise SourceError("hf_config", f"has mlp_only_layers = {str(dense)[:80]}, and only leading ones are dense here")
    return {"first_k_dense_replace": len(dense)} if dense else {}


def sliding_window(config: dict[str, Any]) -> int | None:
    """The tokens that some layer attends to, where that is less than all of them."""
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", not str(config.get("model_type")).startswith("qwen"))  # as transformers
    if config.get("layer_types"):
        used = "sliding_attention" in config["layer_types"]
    return window if used and isinstance(window, int) and not isinstance(window, bool) else None


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config.json, or of that in a folder. Raises SourceError."""
    try:
        if path.is_dir():
            path = path / "config.json"
        with open_to_read(path) as file:
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
        config = read_config(base_dir / model["hf_config"])
        given = merged(_within_window(config, from_config(config), given), given)
    preset = model.get("preset")
    if preset is not None:
        known = presets() | vision_presets()
        if not isinstance(preset, str) or preset not in known:
            raise SourceError("preset", "is not a known preset")
        given = merged(known[preset], given)
    family = given.get("family")
    return given if isinstance(family, str) and family in VISION else _derived(given)


def _within_window(config: dict[str, Any], found: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """With a ``seq_len`` at which a sliding window is full attention. Raises SourceError for a longer one."""
    window, length = sliding_window(config), given.get("seq_len")
    if window is None or found.get("family") in VISION:
        return found
    if isinstance(length, int) and length > window:
        raise SourceError(
            "hf_config",
            f"has sliding_window = {window}, and model.seq_len is {length}: each token attends to all of seq_len here. "
            f"Set model.seq_len to at most {window}",
        )
    longest = found.get("max_position_embeddings")
    if length is None and isinstance(longest, int):
        return {**found, "seq_len": min(longest, window, _LONGEST_DEFAULT_SEQ_LEN)}
    return found


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
