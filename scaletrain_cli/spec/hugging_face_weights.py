"""The config.json of Hugging Face weights: compared with the spec on import, written on export."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.spec.hugging_face import from_config, known_keys, read_config, same_settings
from scaletrain_cli.spec.hugging_face_architectures import ARCHITECTURES, LATENT_KEYS, OF_EXPERTS, TRAITS
from scaletrain_cli.spec.hugging_face_vision import (
    AnyVision,
    listed,
    read_tower,
    section_differences,
    vision_differences,
    vision_to_config,
)
from scaletrain_cli.spec.model import ModelSpec
from scaletrain_cli.spec.presets import SourceError
from scaletrain_cli.spec.vision_model import ClipVisionSpec, LlavaSpec

# With another value the weights would load without an error and compute something else. A key that is missing in
# config.json is compared only if its absence has a meaning.
_HIDDEN_FROM_SHAPES = (
    "family num_hidden_layers num_attention_heads num_key_value_heads rope_theta norm_eps num_experts_per_tok "
    "norm_topk_prob"
).split()
_DENSE_BLOCKS = ("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers")
_ABSENCE_IS_A_VALUE = (
    "qk_norm_scope attn_logit_softcapping final_logit_softcapping partial_rotary_factor scale_embedding swiglu_limit "
    "norm_position zero_centered_norm scoring_func topk_method n_group topk_group routed_scaling_factor rope_interleave"
).split()
_MOST_LAYERS = 10_000  # compared for their windows and experts


def config_mismatches(folder: Path, spec: ModelSpec | AnyVision | ClipVisionSpec, path: str = "") -> Iterator[Problem]:
    """Return the differences between the weights' config.json and the spec; empty without a config.json.

    ``path``: of ``spec`` within the model section, such as ``text_config.``. Raises UsageError when it cannot be read,
    or is that of an architecture which the engine does not have.
    """
    file = folder / "config.json"
    if not file.exists():
        return
    try:
        config = read_config(file)
        trained = read_tower(config, from_config) if isinstance(spec, ClipVisionSpec) else from_config(config)
    except SourceError as error:
        raise UsageError(f"{file} {error}.") from error

    for key, ours, theirs in _all_differences(spec, trained):
        hint = f"Set model.{path}{key}: {_flow(theirs)}."
        yield Problem(str(file), key, f"the spec has {_flow(ours)}.", _flow(theirs), hint)


def _all_differences(
    spec: ModelSpec | AnyVision | ClipVisionSpec, trained: dict[str, Any]
) -> Iterator[tuple[str, object, object]]:
    """Yield (key, ours, theirs) for each setting that differs from that of the weights."""
    if isinstance(spec, ModelSpec):
        yield from _text_differences(spec, trained)
        return
    if isinstance(spec, ClipVisionSpec):
        yield from section_differences(spec, trained, "")
        return
    yield from vision_differences(spec, trained)
    if isinstance(spec, LlavaSpec) and trained["family"] == spec.family:
        for key, ours, theirs in _text_differences(spec.text_config, trained["text_config"]):
            yield f"text_config.{key}", ours, theirs


def _text_differences(spec: ModelSpec, trained: dict[str, Any]) -> Iterator[tuple[str, object, object]]:
    for key in _HIDDEN_FROM_SHAPES:
        ours = getattr(spec, key)
        if trained.get(key, ours) != ours:
            yield key, ours, trained[key]
    for key in _ABSENCE_IS_A_VALUE:
        if key in OF_EXPERTS and not spec.moe_layers:
            continue
        ours, theirs = getattr(spec, key), trained.get(key, ModelSpec.model_fields[key].default)
        if ours != theirs:
            yield key, ours, theirs
    activation = trained.get("hidden_activation", "silu")
    if trained["family"] == "llama" and spec.activation != activation:
        yield "hidden_activation", spec.activation, activation
    scalar = trained.get("query_pre_attn_scalar", spec.head_dim)
    if (spec.query_pre_attn_scalar or spec.head_dim) != scalar:
        yield "query_pre_attn_scalar", spec.query_pre_attn_scalar, scalar
    scaling, their_scaling = _scaling(spec), trained.get("rope_scaling")
    if scaling != their_scaling:
        yield "rope_scaling", scaling, their_scaling
    theirs = trained.get("max_position_embeddings", spec.max_position_embeddings)
    if theirs != spec.max_position_embeddings and _scales_by_longest(spec):
        yield "max_position_embeddings", spec.max_position_embeddings, theirs
    yield from _window_differences(spec, trained)
    yield from _dense_differences(spec, trained)


def _scales_by_longest(spec: ModelSpec) -> bool:
    """Return True if the rotary frequencies follow from ``max_position_embeddings``."""
    scaling = spec.rope_scaling
    if scaling is None:
        return False
    given = scaling.factor or scaling.attention_factor
    return scaling.rope_type == "dynamic" or (scaling.rope_type == "longrope" and not given)


def _dense_differences(spec: ModelSpec, trained: dict[str, Any]) -> Iterator[tuple[str, object, object]]:
    """Yield the settings that differ, if other blocks then have experts."""
    theirs = {key: trained.get(key, ModelSpec.model_fields[key].default) for key in _DENSE_BLOCKS}
    theirs["mlp_only_layers"] = tuple(theirs["mlp_only_layers"])
    other = spec.model_copy(update={**theirs, "num_experts": trained.get("num_experts", 0)})
    if any(spec.has_experts(block) != other.has_experts(block) for block in range(_compared_layers(spec))):
        changed = (key for key in _DENSE_BLOCKS if getattr(spec, key) != theirs[key])
        yield from ((key, listed(getattr(spec, key)), listed(theirs[key])) for key in changed)


def _compared_layers(spec: ModelSpec) -> int:
    return min(spec.num_hidden_layers, _MOST_LAYERS)


def _window_differences(spec: ModelSpec, trained: dict[str, Any]) -> Iterator[tuple[str, object, object]]:
    """Yield the window settings that differ, if any layer then attends to other tokens of a sequence of seq_len."""
    keys = ("sliding_window", "layer_types", "rope_local_base_freq")
    theirs = {key: trained.get(key) for key in keys}
    theirs["layer_types"] = tuple(theirs["layer_types"] or ())
    other = spec.model_copy(update=theirs)
    layers = range(_compared_layers(spec))
    local = [model.rope_local_base_freq or model.rope_theta for model in (spec, other)]
    kinds = [[model.slides(layer) for layer in layers] for model in (spec, other)]
    windows = [model.sliding_window if model.windowed_layers else None for model in (spec, other)]
    if windows[0] != windows[1]:
        yield "sliding_window", spec.sliding_window, other.sliding_window
    elif kinds[0] != kinds[1] and (any(windows) or local[0] != spec.rope_theta or local[1] != spec.rope_theta):
        yield "layer_types", list(spec.layer_types), list(other.layer_types)
    if local[0] != local[1]:
        yield "rope_local_base_freq", spec.rope_local_base_freq, other.rope_local_base_freq


def _scaling(spec: ModelSpec) -> dict[str, object] | None:
    """Return the scaling as it would be read from a config.json."""
    if spec.rope_scaling is None:
        return None
    scaling = spec.rope_scaling.to_hugging_face()
    if spec.rope_scaling.rope_type == "yarn":
        scaling.setdefault("original_max_position_embeddings", spec.max_position_embeddings)
    return scaling


def _flow(value: object) -> str:
    """Return the value as one line of YAML."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def to_hugging_face(model: ModelSpec | AnyVision) -> dict[str, Any]:
    """Return the config.json of the architecture that matches ``model``. Raises UsageError if there is none."""
    if not isinstance(model, ModelSpec):
        return vision_to_config(model, to_hugging_face)
    if not model.moe_layers:  # the settings of experts have no effect
        model = model.model_copy(update={key: ModelSpec.model_fields[key].default for key in OF_EXPERTS})
    problems = _unknown_to_all(model)
    if problems:
        raise UsageError("no Hugging Face architecture matches this model", tuple(problems))
    kind = _closest(model)
    config = {"model_type": kind, "architectures": [ARCHITECTURES[kind].model_class], "use_cache": True}
    # Values of settings that are written otherwise in a config.json, by their keys in the spec.
    scalar = model.query_pre_attn_scalar or model.head_dim
    values = {
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "rope_local_base_freq": model.rope_local_base_freq or model.rope_theta,
        "moe_intermediate_size": model.expert_size,
        "intermediate_size": model.expert_size if kind in ("mixtral", "gpt_oss") else model.intermediate_size,
        "q_lora_rank": model.q_lora_rank or None,
        "v_head_dim": model.value_head_dim,
        "first_k_dense_replace": model.num_hidden_layers - model.moe_layers,
    }
    for ours, theirs in same_settings(kind).items():
        if model.moe_layers or ours not in OF_EXPERTS or ours in LATENT_KEYS:
            config[theirs] = values[ours] if ours in values else getattr(model, ours)
    if kind == "gpt2":
        config |= {"embd_pdrop": model.hidden_dropout, "resid_pdrop": model.hidden_dropout}
        config |= {"activation_function": "gelu_new", "attn_pdrop": model.attention_dropout}
    else:
        config |= _of_llama(model, kind)
    keys = known_keys(kind)
    return {key: value for key, value in config.items() if key in keys}


def _candidates(model: ModelSpec) -> list[str]:
    """Return the architectures of the same family, with experts or without."""
    if model.base_family == "gpt":
        return ["gpt2"]
    if model.kv_lora_rank:
        return ["deepseek_v3", "deepseek_v2"]
    sparse = model.num_experts > 0
    others = {kind: known for kind, known in ARCHITECTURES.items() if "kv_lora_rank" not in known.varies}
    return [kind for kind, known in others.items() if known.family == "llama" and known.experts == sparse]


def _closest(model: ModelSpec) -> str:
    """Return the architecture from which the fewest settings differ; the first of several."""
    return min(_candidates(model), key=lambda kind: len(_differences(model, kind)))


def _differences(model: ModelSpec, kind: str) -> list[tuple[str, str]]:
    """Return the traits of the model that an architecture does not have, as (key, what it must be)."""
    known = ARCHITECTURES[kind]
    if known.family == "gpt":
        return []
    differences = []
    for key in TRAITS:
        if key in known.varies:
            continue
        usual = known.fixed.get(key, ModelSpec.model_fields[key].default)
        if _effective(model, key) != _effective(model.model_copy(update={key: usual}), key):
            shown = "removed" if usual is None or usual == () else _flow(usual)
            differences.append((key, f"must be {shown}, as in {kind}."))
    if "layer_types" not in known.varies and "sliding_window" in known.varies and model.layer_types:
        differences = [(key, why) for key, why in differences if key != "layer_types"]
        if {"full_attention"} & set(model.layer_types):
            differences.append(("layer_types", f"must be removed: every layer of {kind} has a sliding window."))
    scaling = model.rope_scaling
    if scaling is not None and scaling.rope_type not in known.ropes:
        differences.append(("rope_scaling.rope_type", f"must be {' or '.join(known.ropes)}, as in {kind}."))
    if kind == "gpt_oss" and model.swiglu_limit is None:
        differences.append(("swiglu_limit", "must be a number, as in gpt_oss."))
    unscaled = kind in ("gemma3_text", "olmo3") and model.sliding_window and scaling is not None
    if unscaled and not model.rope_local_base_freq:
        differences.append(("rope_local_base_freq", f"must be set: layers with a window are not scaled in {kind}."))
    return differences


def _effective(model: ModelSpec, key: str) -> object:
    """Return the value of a setting with which models that compute the same are equal."""
    if key == "hidden_activation":
        return model.activation
    if key == "query_pre_attn_scalar":
        return model.query_pre_attn_scalar or model.head_dim
    if key == "bias":
        return model.has_bias
    if key == "qkv_bias":
        return model.qkv_bias and not model.attention_bias
    if key == "rope_interleave":
        return model.rope_interleave or not model.kv_lora_rank
    if key in OF_EXPERTS and not model.moe_layers:
        return None
    if key == "qk_norm_scope":
        return model.qk_norm_scope if model.qk_norm else "head"
    return getattr(model, key)


def _of_llama(model: ModelSpec, kind: str) -> dict[str, Any]:
    """Return the keys of config.json that are derived from several settings, of a model with the modules of Llama."""
    known, scaling = ARCHITECTURES[kind], model.rope_scaling
    config: dict[str, Any] = {"hidden_act": model.activation, "attention_bias": model.has_output_bias}
    config["rope_scaling"] = _rope_scaling(model)
    if kind == "llama":
        config["mlp_bias"] = model.has_bias
    if "hidden_activation" in known.used:
        config["hidden_activation"] = model.activation
    if "sliding_window" in known.varies:
        config |= _windows(model, kind)
    if "partial_rotary_factor" in known.varies:
        config["partial_rotary_factor"] = model.partial_rotary_factor
    if kind == "phi3" and scaling is not None:
        config["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    if kind == "olmo3":  # transformers 5 reads this, and transformers 4 the keys beside it
        whole = config["rope_scaling"] or {"rope_type": "default", "rope_theta": model.rope_theta}
        local = {"rope_type": "default", "rope_theta": model.rope_local_base_freq or model.rope_theta}
        config["rope_parameters"] = {"full_attention": whole, "sliding_attention": local}
    if known.default_rope and scaling is None:
        config["rope_scaling"] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if kind == "deepseek_v3":
        config["num_nextn_predict_layers"] = 0
    if kind == "gpt_oss":
        config["attention_bias"] = True
    if kind.startswith("deepseek") and model.moe_layers:
        config |= {"moe_layer_freq": 1, "scoring_func": model.scoring_func, "topk_method": model.topk_method}
        config["n_shared_experts"] = _shared_experts(model)
    elif "decoder_sparse_step" in known.used:
        dense = {*range(model.first_k_dense_replace), *model.mlp_only_layers}
        config |= {"decoder_sparse_step": model.decoder_sparse_step, "mlp_only_layers": sorted(dense)}
    return config


def _shared_experts(model: ModelSpec) -> int:
    """Return how many experts are as wide as the shared ones together; 0 if that is not a whole number."""
    shared, rest = divmod(model.shared_expert_intermediate_size, model.expert_size)
    return 0 if rest else shared


def _windows(model: ModelSpec, kind: str) -> dict[str, Any]:
    """Return the window of a model, and the kind of each layer where the architecture has several."""
    known = ARCHITECTURES[kind]
    settings: dict[str, Any] = {"sliding_window": model.sliding_window}
    if "use_sliding_window" in known.used:
        settings["use_sliding_window"] = model.sliding_window is not None
    if "layer_types" in known.varies:
        layers = range(model.num_hidden_layers)
        settings["layer_types"] = ["sliding_attention" if model.slides(layer) else "full_attention" for layer in layers]
        if kind.startswith(("gemma", "gpt_oss", "olmo3")) and model.sliding_window is None:
            settings["sliding_window"] = known.defaults["sliding_window"]  # transformers wants one; no layer uses it
    return settings


def _rope_scaling(model: ModelSpec) -> dict[str, object] | None:
    if model.rope_scaling is None:
        return None
    # transformers 4 reads the type and the original context here; transformers 5 reads both only from here.
    rope = {"original_max_position_embeddings": model.max_position_embeddings} | model.rope_scaling.to_hugging_face()
    if model.rope_scaling.rope_type in ("linear", "dynamic"):
        del rope["original_max_position_embeddings"]
    return {**rope, "rope_theta": model.rope_theta}


def _unknown_to_all(model: ModelSpec) -> list[Problem]:
    """Return a problem for each setting that no supported architecture has, alone or in this combination."""
    usual = model.model_copy(update=dict.fromkeys(("gated_mlp", "norm", "norm_bias", "position_embedding")))
    gpt = model.base_family == "gpt"
    wrong = (
        ("family", model.family != model.base_family, "is defined by a plug-in and cannot be exported."),
        ("gated_mlp", model.has_gated_mlp != usual.has_gated_mlp, f"must be {_flow(usual.has_gated_mlp)}."),
        ("norm", model.norm_kind != usual.norm_kind, f"must be {usual.norm_kind}."),
        ("norm_bias", model.has_norm_bias != usual.has_norm_bias, f"must be {_flow(usual.has_norm_bias)}."),
        ("bias", gpt and not model.has_bias, "must be true."),
        ("position_embedding", model.positions != usual.positions, f"must be {usual.positions}."),
        ("embedding_norm", model.embedding_norm, "must be false."),
        (
            "shared_expert_intermediate_size",
            model.kv_lora_rank > 0 and model.moe_layers > 0 and not _shared_experts(model),
            "must be a multiple of moe_intermediate_size above 0, as in DeepSeek.",
        ),
        (
            "num_key_value_heads",
            model.kv_lora_rank > 0 and model.num_key_value_heads != model.num_attention_heads,
            "must equal num_attention_heads, as in DeepSeek.",
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
    problems = [(key, why) for key, applies, why in wrong if applies]
    problems += _differences(model, _closest(model))
    return [Problem("model", f"model.{key}", why, str(_shown(model, key))) for key, why in problems]


def _shown(model: ModelSpec, key: str) -> object:
    value: object = model
    for part in key.split("."):
        value = getattr(value, part)
    return value
