"""The config.json of Hugging Face weights: compared with the spec on import, written on export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.spec.hugging_face import from_config, read_config, sliding_window
from scaletrain_cli.spec.model import ModelSpec
from scaletrain_cli.spec.presets import SourceError

# With another value the weights would load without an error and compute something else.
_HIDDEN_FROM_SHAPES = (
    "family",
    "num_attention_heads",
    "num_key_value_heads",
    "rope_theta",
    "norm_eps",
    "num_experts_per_tok",
    "first_k_dense_replace",
    "norm_topk_prob",
)


def config_mismatches(folder: Path, spec: ModelSpec) -> Iterator[Problem]:
    """Return the differences between the weights' config.json and the spec; empty without a config.json.

    Raises UsageError when it cannot be read, or is that of an architecture which the engine does not have.
    """
    path = folder / "config.json"
    if not path.exists():
        return
    try:
        config = read_config(path)
        trained = from_config(config)
    except SourceError as error:
        raise UsageError(f"{path} {error}.") from error
    for key in _HIDDEN_FROM_SHAPES:
        ours = getattr(spec, key)
        if trained.get(key, ours) != ours:
            hint = f"Set model.{key}: {trained[key]}."
            yield Problem(str(path), key, f"the spec has {ours}.", str(trained[key]), hint)
    ours, theirs = _scaling(spec), trained.get("rope_scaling")
    if ours != theirs:
        hint = f"Set model.rope_scaling: {_flow(theirs)}."
        yield Problem(str(path), "rope_scaling", f"the spec has {_flow(ours)}.", _flow(theirs), hint)
    window = sliding_window(config)
    if window and window < spec.seq_len:
        hint = f"Set model.seq_len to at most {window}."
        yield Problem(str(path), "sliding_window", "the engine uses full attention over seq_len.", str(window), hint)


def _scaling(spec: ModelSpec) -> dict[str, object] | None:
    """Return the scaling as it would be read from a config.json."""
    if spec.rope_scaling is None:
        return None
    found = spec.rope_scaling.to_hugging_face()
    if spec.rope_scaling.rope_type == "yarn":
        found.setdefault("original_max_position_embeddings", spec.max_position_embeddings)
    return found


def _flow(section: dict[str, object] | None) -> str:
    """Return the value as one line of YAML."""
    if section is None:
        return "null"
    return f"{{{', '.join(f'{key}: {str(value).lower()}' for key, value in section.items())}}}"


def to_hugging_face(model: ModelSpec) -> dict[str, Any]:
    """Return the config.json of the architecture that matches ``model``. Raises UsageError if there is none."""
    problems = _unknown_to_all(model)
    if problems:
        raise UsageError("no Hugging Face architecture matches this model", tuple(problems))
    return {**(_gpt2(model) if model.base_family == "gpt" else _llama(model)), "use_cache": True}


def _llama(model: ModelSpec) -> dict[str, Any]:
    config: dict[str, Any] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": model.attention_dropout,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": _rope_scaling(model),
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tie_word_embeddings,
    }
    if model.num_experts:
        return config | (_qwen3_moe(model) if model.qk_norm else _mixtral(model))
    if model.qk_norm:
        return config | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False}
    if model.qkv_bias:
        return config | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
    return config | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": False}


def _rope_scaling(model: ModelSpec) -> dict[str, object] | None:
    if model.rope_scaling is None:
        return None
    # transformers 4 reads the type and the original context here; transformers 5 reads both only from here.
    found = {"original_max_position_embeddings": model.max_position_embeddings} | model.rope_scaling.to_hugging_face()
    if model.rope_scaling.rope_type == "linear":
        del found["original_max_position_embeddings"]
    return {**found, "rope_theta": model.rope_theta}


def _qwen3_moe(model: ModelSpec) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "use_sliding_window": False,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.num_experts_per_tok,
        "moe_intermediate_size": model.expert_size,
        "norm_topk_prob": model.norm_topk_prob,
        "router_aux_loss_coef": model.router_aux_loss_coef,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(model.first_k_dense_replace)),
    }


def _mixtral(model: ModelSpec) -> dict[str, Any]:
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "sliding_window": None,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.num_experts_per_tok,
        "intermediate_size": model.expert_size,
        "router_aux_loss_coef": model.router_aux_loss_coef,
    }


def _gpt2(model: ModelSpec) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "n_embd": model.hidden_size,
        "n_layer": model.num_hidden_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.intermediate_size,
        "n_positions": model.max_position_embeddings,
        "vocab_size": model.vocab_size,
        "layer_norm_epsilon": model.norm_eps,
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tie_word_embeddings,
        "embd_pdrop": model.hidden_dropout,
        "resid_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
    }


def _unknown_to_all(model: ModelSpec) -> list[Problem]:
    """Return a problem for each setting that no supported architecture has, alone or in this combination."""
    usual = model.model_copy(update=dict.fromkeys(("gated_mlp", "norm", "norm_bias", "bias", "position_embedding")))
    mixtral = model.num_experts > 0 and not model.qk_norm
    gpt = model.base_family == "gpt"
    wrong = (
        ("family", model.family != model.base_family, "is defined by a plug-in and cannot be exported."),
        ("gated_mlp", model.has_gated_mlp != usual.has_gated_mlp, f"must be {str(usual.has_gated_mlp).lower()}."),
        ("norm", model.norm_kind != usual.norm_kind, f"must be {usual.norm_kind}."),
        ("norm_bias", model.has_norm_bias != usual.has_norm_bias, f"must be {str(usual.has_norm_bias).lower()}."),
        ("bias", model.has_bias != usual.has_bias, f"must be {str(usual.has_bias).lower()}."),
        ("position_embedding", model.positions != usual.positions, f"must be {usual.positions}."),
        ("embedding_norm", model.embedding_norm, "must be false."),
        ("kv_lora_rank", model.kv_lora_rank > 0, "must be 0: latent attention cannot be exported."),
        ("qkv_bias", model.qkv_bias and (model.qk_norm or mixtral), "must be false with qk_norm or experts."),
        (
            "shared_expert_intermediate_size",
            model.shared_expert_intermediate_size > 0,
            "must be 0: Hugging Face models have gated shared experts only.",
        ),
        (
            "norm_topk_prob",
            mixtral and not model.norm_topk_prob,
            "must be true with experts and without qk_norm, as in Mixtral.",
        ),
        (
            "first_k_dense_replace",
            mixtral and model.first_k_dense_replace > 0,
            "must be 0 with experts and without qk_norm, as in Mixtral.",
        ),
        ("num_experts", gpt and model.num_experts > 0, "must be 0, as in GPT-2."),
        (
            "num_key_value_heads",
            gpt and model.num_key_value_heads != model.num_attention_heads,
            "must equal num_attention_heads, as in GPT-2.",
        ),
        (
            "head_dim",
            gpt and model.head_dim * model.num_attention_heads != model.hidden_size,
            "must be hidden_size / num_attention_heads, as in GPT-2.",
        ),
    )
    return [Problem("model", f"model.{key}", why, str(getattr(model, key))) for key, applies, why in wrong if applies]
