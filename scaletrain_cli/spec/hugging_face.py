"""Read a model's dimensions from a Hugging Face config.json.

Each key that transformers reads is used, or has no effect on the model, or is refused by name if its value is not
supported. All others are ignored: they cannot change what transformers computes. Works on the raw mapping, before
validation, so that keys of the spec take precedence.
"""

import json
from pathlib import Path
from typing import Any

from scaletrain_cli.safe_files import open_to_read
from scaletrain_cli.spec.corpus_files import LFS_POINTER
from scaletrain_cli.spec.hugging_face_architectures import (
    ARCHITECTURES,
    OF_EXPERTS,
    Architecture,
    KnownKeys,
    check_keys,
)
from scaletrain_cli.spec.hugging_face_read_only import ABOUT_IMAGES, READ_ONLY, TEXT_PARTS, shortest
from scaletrain_cli.spec.hugging_face_vision import vision_from_config
from scaletrain_cli.spec.presets import SourceError
from scaletrain_cli.spec.rope import KEYS_OF_ROPE
from scaletrain_cli.spec.vision_model import VISION
from scaletrain_cli.text import either

_READ = ARCHITECTURES | READ_ONLY
_ROPE = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"})
_OF_EVERY_MODEL = frozenset(
    "hidden_size num_hidden_layers num_attention_heads vocab_size max_position_embeddings tie_word_embeddings "
    "initializer_range".split()
)
_OF_LLAMA = frozenset({"num_key_value_heads", "head_dim", "intermediate_size", "attention_dropout"})
_OF_ROUTER = frozenset({"num_experts", "num_experts_per_tok", "router_aux_loss_coef"})
_OF_EACH_ROPE = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor"})


def known_keys(kind: str) -> KnownKeys:
    """Return the keys of a transformer's ``model_type``."""
    known = _READ[kind]
    used = _OF_EVERY_MODEL | known.used | set(known.aliases)
    used |= {theirs for ours, theirs in known.renamed.items() if known.experts or ours not in _OF_ROUTER}
    if known.family == "gpt":
        return KnownKeys(used, known.irrelevant, known.only)
    used |= _OF_LLAMA
    if known.experts:
        used |= _OF_ROUTER - ({"num_experts"} & known.renamed.keys() - known.aliases.keys())
    if known.fixed.get("position_embedding") != "none":
        used |= _ROPE | {"partial_rotary_factor"}
    if known.activations and "hidden_activation" not in known.used:
        used |= {"hidden_act"}
    # transformers' cache reads layer_types for each architecture; see _windows.
    irrelevant = known.irrelevant | {"layer_types"} | ({"head_dim"} if "kv_lora_rank" in known.used else set())
    return KnownKeys(used - irrelevant - set(known.only), irrelevant, known.only)


def same_settings(kind: str) -> dict[str, str]:
    """Return the keys of config.json by those of the spec, for settings that have the same values in both."""
    known, used = _READ[kind], known_keys(kind).used
    apart = {*_DERIVED, *known.aliases, *known.renamed.values()}
    return {key: key for key in sorted(used - apart)} | {
        ours: theirs for ours, theirs in known.renamed.items() if theirs in used
    }


_LARGEST_CONFIG_BYTES = 1_000_000

# Keys of config.json from which settings of another name or form are derived.
_DERIVED = frozenset(
    "attention_bias mlp_bias sliding_window layer_types use_sliding_window max_window_layers "
    "sliding_window_pattern hidden_activation partial_rotary_factor original_max_position_embeddings "
    "n_shared_experts decoder_sparse_step mlp_only_layers resid_pdrop embd_pdrop attn_pdrop rope_scaling "
    "rope_parameters hidden_act".split()
)
# Keys whose null differs from a missing key, which has a default.
_NULL_IS_A_VALUE = frozenset(
    "sliding_window layer_types rope_local_base_freq attn_logit_softcapping final_logit_softcapping q_lora_rank".split()
)


def from_config(config: dict[str, Any], ignored: list[str] | None = None) -> dict[str, Any]:
    """Return the model keys of a parsed config.json. Raises SourceError.

    ``ignored``: gets the keys that transformers does not read for this model, with those of their sections.
    """
    ignored = [] if ignored is None else ignored
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in VISION:
        return vision_from_config(config, from_config, ignored)
    if isinstance(kind, str) and kind in TEXT_PARTS:
        return _text_part(config, kind, ignored)
    if not isinstance(kind, str) or kind not in _READ:
        names = ", ".join(sorted([*_READ, *TEXT_PARTS, *VISION]))
        stated = "no model_type" if kind is None else f"model_type {str(kind)[:80]!r}"
        raise SourceError(f"has {stated}; known: {names}")
    known, keys = _READ[kind], known_keys(kind)
    check_keys(config, keys, ignored)
    aliases = known.aliases
    config = {aliases.get(key, key): config[key] for key in config if key in keys and aliases.get(key) not in config}
    settings = {ours: config[theirs] for ours, theirs in same_settings(kind).items() if theirs in config}
    settings |= _dropouts(config, known.family)
    if known.family == "llama":
        rope = _rope(config, kind, ignored) if keys.used >= _ROPE else {}
        attention, mlp = config.get("attention_bias"), config.get("mlp_bias")
        if mlp and not attention:
            raise SourceError("has mlp_bias = true, but only false is supported without attention_bias")
        settings |= {"bias": True, "attention_bias": None} if mlp else {"attention_bias": attention or None}
        settings |= {**rope, **_activation(config, kind)}
        settings |= {} if known.derive else _windows(config, kind)
    if known.experts and "kv_lora_rank" not in known.varies and not _has_experts(config, known):
        key = known.renamed.get("num_experts", "num_experts")
        raise SourceError(f"has {key} = null, but models of type {kind} have experts")
    if "decoder_sparse_step" in known.used:
        step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(isinstance(block, int) and block >= 0 for block in dense):
            raise SourceError(f"has mlp_only_layers = {str(dense)[:80]}, which are no numbers of layers")
        leading = sorted(dense) == list(range(len(dense)))
        settings |= {
            "decoder_sparse_step": step,
            "first_k_dense_replace": len(dense) if leading else None,
            "mlp_only_layers": None if leading else sorted(set(dense)),
        }
    if kind == "deepseek_v2":
        settings |= _groups(config)
    if "kv_lora_rank" in known.varies:
        shared = config.get("n_shared_experts", known.shared_experts)
        width = config.get("moe_intermediate_size", known.defaults["moe_intermediate_size"])
        if _are_whole(shared, width):  # the shared experts are as wide as the others
            settings["shared_expert_intermediate_size"] = shared * width
    if known.derive is not None:
        derived = known.derive(config)
        without = known.used | (frozenset() if known.experts or "num_experts" in derived else OF_EXPERTS)
        settings = {key: value for key, value in settings.items() if key not in without} | derived
    given = {key: value for key, value in settings.items() if value is not None or key in _NULL_IS_A_VALUE}
    whole = {"family": known.family, **known.defaults, **given, **known.fixed}
    dense, layers = whole.get("first_k_dense_replace", 0), whole.get("num_hidden_layers", 0)
    is_dense = _are_whole(dense, layers) and dense >= layers > 0  # so that the model has no experts
    if "kv_lora_rank" in known.varies and (is_dense or not _has_experts(config, known)):
        whole = {key: value for key, value in whole.items() if key not in OF_EXPERTS}
    return {key: value for key, value in whole.items() if value is not None}


def _text_part(config: dict[str, Any], kind: str, ignored: list[str]) -> dict[str, Any]:
    """Return the model keys of the language model in a multimodal config.json. Raises SourceError."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise SourceError(f"has model_type {kind} and no text_config, which has the language model")
    model_type, tied = TEXT_PARTS[kind]
    keys = KnownKeys(frozenset({"text_config"}), ABOUT_IMAGES, {"tie_word_embeddings": (tied,)})
    check_keys(config, keys, ignored)
    if text.get("model_type", model_type) != model_type:
        raise SourceError(f"has text_config.model_type other than {model_type}")
    inner: list[str] = []
    settings = from_config({"model_type": model_type, **text}, inner)
    ignored += [f"text_config.{key}" for key in inner]
    return {**settings, "text_of": kind}


def _rope(config: dict[str, Any], kind: str, ignored: list[str]) -> dict[str, Any]:
    """Return the settings of rotary positions. Raises SourceError for unsupported ones."""
    # transformers 5 keeps all rotary settings here; before, rope_scaling was next to rope_theta.
    section = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(section) or _READ[kind].default_rope
    if not isinstance(rope, dict):
        raise SourceError("has rope_scaling or rope_parameters that is not a mapping")
    settings: dict[str, Any] = {}
    if kind in ("gemma3_text", "olmo3") and isinstance(rope.get("full_attention"), dict):
        local = rope.get("sliding_attention") or {}
        if not isinstance(local, dict) or local.get("rope_type", "default") != "default":
            raise SourceError(f"has rope_parameters.sliding_attention = {str(local)[:80]}, which scales")
        settings["rope_local_base_freq"] = local.get("rope_theta", config.get("rope_local_base_freq"))
        section, rope = f"{section}.full_attention", rope["full_attention"]
    if nested := sorted(key for key, value in rope.items() if isinstance(value, dict)):
        raise SourceError(f"has {section}.{nested[0][:80]}, but {kind} has the same positions in all layers")
    if "rope_theta" in rope:
        settings["rope_theta"] = rope["rope_theta"]
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rotated not in (None, 1, 1.0) and "partial_rotary_factor" not in _READ[kind].varies:
        raise SourceError(f"has partial_rotary_factor = {str(rotated)[:80]}, but only 1 is supported")
    scaling = _rope_scaling(config, rope, kind)
    if kind == "olmo3" and scaling is not None:  # its layers with a window are never scaled
        theta = settings.get("rope_theta", config.get("rope_theta", _READ[kind].defaults["rope_theta"]))
        settings.setdefault("rope_local_base_freq", theta)
    of_kind = () if scaling is None else KEYS_OF_ROPE[scaling["rope_type"]]
    ignored += [f"{section}.{key}" for key in rope if key not in _OF_EACH_ROPE and key not in of_kind]
    return {**settings, "partial_rotary_factor": rotated, "rope_scaling": scaling}


def _rope_scaling(config: dict[str, Any], rope: dict[str, Any], architecture: str) -> dict[str, Any] | None:
    """Return the rope_scaling section of the spec. Raises SourceError for an unsupported kind."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", None):
        return None
    if kind == "su" or (architecture == "phi3" and kind == "yarn"):  # earlier names, as in transformers
        kind = "longrope"
    known = _READ[architecture].ropes
    if kind not in known:
        raise SourceError(f"has rope_scaling of type {str(kind)[:80]}, but {architecture} has {either(known)} only")
    scaling = {key: rope[key] for key in KEYS_OF_ROPE[kind] if rope.get(key) is not None}
    if kind in ("yarn", "llama3", "longrope"):
        original = config.get("original_max_position_embeddings") or (4096 if architecture == "phi3" else None)
        if original is not None:  # which transformers prefers
            scaling["original_max_position_embeddings"] = original
        elif kind != "llama3":
            scaling.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return {"rope_type": kind, **scaling}


def _windows(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the settings of sliding windows. Raises SourceError for unsupported kinds of layers."""
    known = _READ[kind]
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or set(map(str, kinds)) - {"full_attention", "sliding_attention"}:
        shown = str(kinds)[:80]
        raise SourceError(f"has layer_types = {shown}, but only full and sliding attention are supported")
    window = config.get("sliding_window", known.defaults.get("sliding_window"))
    off = "use_sliding_window" in known.used and not config.get("use_sliding_window")
    if off or "sliding_window" not in known.varies:
        window = None
    if "layer_types" not in known.varies:
        if kinds and set(kinds) != {"full_attention" if window is None else "sliding_attention"}:
            raise SourceError(f"has layer_types, which models of type {kind} do not have")
        return {"sliding_window": window, "layer_types": None}
    layers = config.get("num_hidden_layers")
    if not kinds and "max_window_layers" in known.used:  # Qwen
        if window is None:
            return {"sliding_window": None, "layer_types": None, "rope_local_base_freq": None}
        if not isinstance(layers, int):
            raise SourceError("has use_sliding_window, and no whole num_hidden_layers, which it depends on")
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int) or first < 0:
            raise SourceError(f"has max_window_layers = {str(first)[:80]}, which is not a whole number")
        full = min(first, layers)
        if kind == "qwen2_moe":  # every second one of the first layers slides
            kinds = ["full_attention" if index % 2 else "sliding_attention" for index in range(full)]
            kinds += ["full_attention"] * (layers - full)
        else:
            kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    elif not kinds:
        kinds = list(known.layer_types)
        every = config.get("sliding_window_pattern")
        if isinstance(every, int) and not isinstance(every, bool) and every > 0:  # Gemma 3
            kinds = ["sliding_attention"] * (every - 1) + ["full_attention"]
    if window is None or set(kinds) == {"full_attention"}:
        return {"sliding_window": None, "layer_types": None, "rope_local_base_freq": None}
    slides_everywhere = set(kinds) == {"sliding_attention"}
    return {"sliding_window": window, "layer_types": None if slides_everywhere else shortest(kinds)}


def _activation(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the activation of the MLP. Raises SourceError for an unsupported one."""
    known = _READ[kind]
    key = "hidden_activation" if "hidden_activation" in known.used else "hidden_act"
    given = config.get(key)
    if given is None or not known.activations:
        return {"hidden_activation": None}
    if not isinstance(given, str) or given not in known.activations:
        allowed = " or ".join(known.activations)
        raise SourceError(f"has {key} = {str(given)[:80]}, but only {allowed} is supported")
    named = known.activations[given]
    return {"hidden_activation": None if named == "silu" else named}


def _dropouts(config: dict[str, Any], family: str) -> dict[str, Any]:
    if family == "llama":
        return {"attention_dropout": config.get("attention_dropout")}
    # A key that is left out has the default of transformers.
    missing = _READ["gpt2"].defaults["hidden_dropout"]
    embedding, residual = (missing if config.get(key) is None else config[key] for key in ("embd_pdrop", "resid_pdrop"))
    if embedding != residual:
        shown = f"embd_pdrop = {str(embedding)[:80]} and resid_pdrop = {str(residual)[:80]}"
        raise SourceError(f"has {shown}, where a missing key is {missing:g}; they must be equal")
    return {"hidden_dropout": residual, "attention_dropout": config.get("attn_pdrop")}


def _groups(config: dict[str, Any]) -> dict[str, Any]:
    """Return the groups of experts of a DeepSeek-V2, which one of its two methods has. Raises SourceError."""
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        shown = str(method)[:80]
        raise SourceError(f"has topk_method = {shown}, but only greedy or group_limited_greedy is supported")
    return {"n_group": None, "topk_group": None} if method == "greedy" else {}


def _has_experts(config: dict[str, Any], known: Architecture) -> bool:
    """Return False if the number of experts is null, with which DeepSeek's own code has none; a missing one is not."""
    names = {"num_experts", known.renamed.get("num_experts", "num_experts")} & config.keys()
    return not names or any(config[name] is not None for name in names)


def _are_whole(*values: Any) -> bool:
    return all(isinstance(value, int) for value in values)


def read_config(path: Path) -> dict[str, Any]:
    """Return the parsed config.json at ``path``, a file or a folder. Raises SourceError."""
    data = b""
    try:
        if path.is_dir():
            path = path / "config.json"
        with open_to_read(path) as file:
            data = file.read(_LARGEST_CONFIG_BYTES + 1)
        config = json.loads(data) if len(data) <= _LARGEST_CONFIG_BYTES else None
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        if data.startswith(LFS_POINTER.encode()):
            raise SourceError("is a pointer of Git LFS, and not the file", "Run git lfs pull.") from error
        raise SourceError("is not JSON") from error
    if not isinstance(config, dict):
        raise SourceError("is not a Hugging Face config.json, which holds one JSON object")
    return config
