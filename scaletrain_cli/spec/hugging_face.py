"""Read a model's dimensions from a Hugging Face config.json.

Each key is either used, or known not to change the model, or rejected by name. An unknown key is rejected too, because
it may change what the model computes. Works on the raw mapping, before validation, so that keys of the spec take
precedence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.safe_files import open_to_read
from scaletrain_cli.spec.presets import TOWERS, SourceError, merged, vision_presets
from scaletrain_cli.spec.vision_model import VISION

# Keys of every config: names, versions, token ids, outputs, and settings of generation and of other tasks.
_ABOUT_THE_FILE = frozenset(
    (
        "architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id "
        "chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype early_stopping "
        "encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task "
        "forced_bos_token_id forced_eos_token_id "
        "gradient_checkpointing id2label is_decoder label2id length_penalty max_length min_length "
        "model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions "
        "output_hidden_states output_router_logits output_scores pad_token_id prefix problem_type "
        "remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens "
        "task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript "
        "transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache"
    ).split()
)
# Same results in another order or precision; a context length that only custom code reads.
_SAME_RESULT = frozenset({"pretraining_tp", "reorder_and_upcast_attn", "quantization_config", "n_ctx"})
_NOT_BOTH_WAYS: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "partial_rotary_factor": (1, 1.0),
}
_LLAMA_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_mrope": (False,),
}
_WINDOW = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
_ROPE = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
# Keys of DeepSeek's router and latent attention. They do not change the model's size, which is what the planner needs;
# the engine rejects the whole architecture.
_DEEPSEEK_PLANNED = frozenset(
    (
        "aux_loss_alpha ep_size n_group num_mtp_layers num_nextn_predict_layers qk_head_dim rope_interleave "
        "routed_scaling_factor scoring_func seq_aux topk_group topk_method"
    ).split()
)


@dataclass(frozen=True)
class KnownKeys:
    """Keys of a config: ``used`` become spec keys, ``irrelevant`` have no effect, ``only`` may have these values or be
    null.
    """

    used: frozenset[str]
    irrelevant: frozenset[str] = frozenset()
    only: Mapping[str, tuple[Any, ...]] | None = None


def known_keys(kind: str, taken: frozenset[str]) -> KnownKeys:
    """Return the known keys of a ``model_type``; ``taken`` are the keys that its dimensions are read from."""
    if kind == "gpt2":
        heads = frozenset(f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels"))
        only: dict[str, tuple[Any, ...]] = {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        }
        dropouts = frozenset({"resid_pdrop", "embd_pdrop", "attn_pdrop"})
        return KnownKeys(taken | dropouts, heads | {"summary_first_dropout"}, only)
    llama_only = dict(_LLAMA_ONLY)
    used, irrelevant = taken | _WINDOW | _ROPE | {"attention_dropout"}, frozenset[str]()
    if kind == "mixtral":
        llama_only["router_jitter_noise"] = (0, 0.0)
    if kind == "qwen3_moe":
        used |= {"decoder_sparse_step", "mlp_only_layers"}
    if kind.startswith("deepseek"):
        used |= {"n_shared_experts"}
        irrelevant = _DEEPSEEK_PLANNED
        llama_only |= {"moe_layer_freq": (1,)}
    return KnownKeys(used, irrelevant, llama_only)


# Vision networks are planned, not trained by this project's engine, so only keys that change a size matter.
VISION_KEYS: dict[str, KnownKeys] = {
    "resnet": KnownKeys(
        frozenset(),
        frozenset({"hidden_act", "stage_names", "out_features", "out_indices"}),
        {"downsample_in_first_stage": (False,), "downsample_in_bottleneck": (False,)},
    ),
    "convnext": KnownKeys(
        frozenset(),
        frozenset(
            "hidden_act initializer_range layer_norm_eps drop_path_rate num_stages stage_names out_features "
            "out_indices".split()
        ),
    ),
    "vit": KnownKeys(
        frozenset(),
        frozenset(
            "hidden_act hidden_dropout_prob attention_probs_dropout_prob initializer_range layer_norm_eps "
            "encoder_stride pooler_output_size pooler_act".split()
        ),
    ),
    "clip": KnownKeys(
        frozenset(), frozenset("initializer_factor logit_scale_init_value text_config_dict vision_config_dict".split())
    ),
}
CLIP_TOWER = KnownKeys(
    frozenset(),
    frozenset("hidden_act layer_norm_eps attention_dropout dropout initializer_range initializer_factor".split())
    | {"projection_dim"},  # the whole model's key counts
)


def rejections(config: Mapping[str, Any], known: KnownKeys) -> Iterator[str]:
    """Yield the reasons why a config cannot be imported, one line for each key."""
    for key, value in config.items():
        if key.startswith("_") or key in known.used or key in known.irrelevant:
            continue
        if key in _ABOUT_THE_FILE or key in _SAME_RESULT:
            continue
        only = {**_NOT_BOTH_WAYS, **(known.only or {})}
        if key not in only:
            yield f"has the unsupported key {key[:80]}. Remove it if it does not change the model"
        elif value is not None and value not in only[key]:
            allowed = " or ".join(map(_shown, only[key])) or "null"
            yield f"has {key} = {_shown(value)}, but only {allowed} is supported"


def _shown(value: Any) -> str:
    return (str(value).lower() if isinstance(value, bool) else str(value))[:80]


_LARGEST_CONFIG_BYTES = 1_000_000

# The family of the spec, and the spec keys with another name in config.json.
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


# Defaults of transformers for keys missing in config.json, where they differ from those of this package.
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


def from_hugging_face(path: Path) -> dict[str, Any]:
    """Return the model keys of a Hugging Face ``config.json``, or of the folder that contains it.

    Raises SourceError if the file cannot be read, its architecture is not supported, or one of its keys has a value
    that is not supported.
    """
    return from_config(read_config(path))


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the model keys of a parsed config.json. Raises SourceError."""
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
    # transformers 5 keeps all rotary settings here; before, rope_scaling was next to rope_theta.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise SourceError("hf_config", "has rope_scaling or rope_parameters that is not a mapping")
    if "rope_theta" in rope:
        config = {**config, "rope_theta": rope["rope_theta"]}
    _require_known(config, known_keys(kind, frozenset((*_SAME_NAME, *renamed.values()))))
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or set(map(str, kinds)) - {"full_attention", "sliding_attention"}:
        raise SourceError("hf_config", f"has layer_types = {str(kinds)[:80]}, but only full attention is supported")
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
    if problems := list(rejections(config, known)):
        raise SourceError("hf_config", "; ".join(f"{where} {problem}".strip() for problem in problems[:5]))


def _rope_scaling(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any] | None:
    """Return the rope_scaling section of the spec. Raises SourceError for an unsupported kind."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", None):
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise SourceError(
            "hf_config", f"has rope_scaling of type {str(kind)[:80]}, but only linear, llama3 and yarn are supported"
        )
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise SourceError("hf_config", "has partial_rotary_factor, which is not supported")
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
    """Return the number of dense leading blocks of a Qwen3-MoE. Raises SourceError for other patterns."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if step not in (None, 1):
        raise SourceError("hf_config", f"has decoder_sparse_step = {str(step)[:80]}, but only 1 is supported")
    if not isinstance(dense, list) or sorted(map(str, dense)) != sorted(map(str, range(len(dense)))):
        raise SourceError(
            "hf_config", f"has mlp_only_layers = {str(dense)[:80]}, but only leading dense layers are supported"
        )
    return {"first_k_dense_replace": len(dense)} if dense else {}


def sliding_window(config: dict[str, Any]) -> int | None:
    """Return the sliding window in tokens, or None if every layer uses full attention."""
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", not str(config.get("model_type")).startswith("qwen"))  # as in transformers
    if config.get("layer_types"):
        used = "sliding_attention" in config["layer_types"]
    return window if used and isinstance(window, int) and not isinstance(window, bool) else None


def read_config(path: Path) -> dict[str, Any]:
    """Return the parsed config.json at ``path``, a file or a folder. Raises SourceError."""
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


# A config.json omits values equal to the default of its class in transformers, which is one of these.
_VISION_DEFAULTS = {
    "resnet": "resnet-50",
    "convnext": "convnext-tiny",
    "vit": "vit-base-patch16",
    "clip": "clip-vit-base-patch32",
}


def vision_from_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the model keys of a config.json whose ``model_type`` is one of VISION."""
    family = config["model_type"]
    fields = VISION[family].model_fields
    found = {key: value for key, value in config.items() if key in fields and value is not None}
    if isinstance(config.get("id2label"), dict) and "num_labels" in fields:
        found["num_labels"] = len(config["id2label"])
    for tower in TOWERS:
        if tower in fields:
            known: Any = fields[tower].annotation
            given = config.get(tower) or {}
            found[tower] = {key: value for key, value in given.items() if key in known.model_fields}
    return merged(vision_presets()[_VISION_DEFAULTS[family]], {**found, "family": family})
