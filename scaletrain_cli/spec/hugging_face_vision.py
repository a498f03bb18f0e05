"""The config.json of models of images: read as keys of the model section, and written for exported weights.

A key that is left out has the default of its class in transformers.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.spec.hugging_face_architectures import KnownKeys, check_keys
from scaletrain_cli.spec.presets import SourceError, merged, vision_presets
from scaletrain_cli.spec.section import Section
from scaletrain_cli.spec.vision_model import (
    VISION,
    ClipSpec,
    ClipTextSpec,
    ClipVisionSpec,
    ConvNextSpec,
    LlavaSpec,
    ResNetSpec,
    VitSpec,
)
from scaletrain_cli.text import either

AnyVision = ResNetSpec | ConvNextSpec | VitSpec | ClipSpec | LlavaSpec
_ZERO = (0, 0.0)
# Keys of this project only, which a config.json does not have.
_OWN = frozenset(
    "family preset weights vision_weights text_weights new_classifier memory_format max_logit_scale "
    "logit_bias_init_value norm zero_init_residual".split()
)
# Names of stages, and of those whose images a detector reads.
_STAGES = frozenset({"stage_names", "out_features", "out_indices"})
VISION_KEYS: dict[str, KnownKeys] = {
    "resnet": KnownKeys(
        frozenset(),
        _STAGES,
        {"hidden_act": ("relu",), "downsample_in_first_stage": (False,), "downsample_in_bottleneck": (False,)},
    ),
    "convnext": KnownKeys(
        frozenset({"num_stages", "num_hidden_layers"}), _STAGES, {"hidden_act": ("gelu", "gelu_python")}
    ),
    "vit": KnownKeys(
        frozenset(),
        frozenset({"encoder_stride", "pooler_output_size", "pooler_act"}),
        {"hidden_dropout_prob": _ZERO, "attention_probs_dropout_prob": _ZERO, "head_dim": ()},
    ),
    "clip": KnownKeys(
        frozenset({"text_config_dict", "vision_config_dict"}), frozenset(), {"initializer_factor": (1, 1.0)}
    ),
    "llava": KnownKeys(
        frozenset({"image_token_id", "tie_word_embeddings"}),
        frozenset({"image_seq_length", "ignore_index", "vocab_size"}),
        {"multimodal_projector_bias": (True,)},
    ),
}
# projection_dim counts in the whole model; the text tower's first weights do not follow from initializer_range.
TOWER_KEYS = KnownKeys(
    frozenset(),
    frozenset({"projection_dim", "initializer_range", "vocab_size"}),
    {"attention_dropout": _ZERO, "dropout": _ZERO, "initializer_factor": (1, 1.0)},
)
_TOWERS: dict[str, type[Section]] = {"vision_config": ClipVisionSpec, "text_config": ClipTextSpec}
_ACTIVATIONS = {
    **{"gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_pytorch_tanh"},
    **{"gelu_pytorch_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu"},
}
# Models of this package with the defaults of the classes of transformers.
_DEFAULTS = {
    "resnet": "resnet-50",
    "convnext": "convnext-tiny",
    "vit": "vit-base-patch16",
    "clip": "clip-vit-base-patch32",
}
# Of a LLaVA without vision_config, and of language models with a partial text_config.
_LLAVA_TOWER = {
    **{"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    **{"patch_size": 14, "image_size": 336},
}
_SEVEN_BILLION = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_TEXT_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": _SEVEN_BILLION | {"intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048},
    "mistral": _SEVEN_BILLION
    | {"intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 131072, "num_key_value_heads": 8},
    "qwen2": _SEVEN_BILLION
    | {"intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768, "num_key_value_heads": 32},
}
# Settings that may differ from those of the weights: shapes show them, or only training and first weights use them.
_MAY_DIFFER = _OWN | {
    *("image_size", "num_labels", "drop_path_rate", "initializer_range", "logit_scale_init_value"),
    *("layer_scale_init_value",),
}

ReadText = Callable[[dict[str, Any], list[str]], dict[str, Any]]


def vision_from_config(config: dict[str, Any], read_text: ReadText, ignored: list[str]) -> dict[str, Any]:
    """Return the model keys of a config.json whose ``model_type`` is one of VISION. Raises SourceError.

    ``read_text``: returns the keys of a language model from its config. ``ignored``: gets keys that are not read.
    """
    family = config["model_type"]
    fields = set(VISION[family].model_fields) - _OWN - _TOWERS.keys()
    known = VISION_KEYS[family]
    towers = _TOWERS.keys() & set(VISION[family].model_fields)
    check_keys(config, KnownKeys(known.used | fields | towers, known.irrelevant, known.only), ignored)
    values = _values(config, fields)
    if isinstance(config.get("id2label"), dict) and "num_labels" in fields:
        values["num_labels"] = len(config["id2label"])
    if family == "llava":
        return {"family": family, **_llava(config, values, read_text, ignored)}
    for tower in sorted(towers):
        # transformers prefers the older key, if it is there
        given = config.get(f"{tower}_dict") or config.get(tower) or {}
        values[tower] = _tower(given, tower, ignored)
    whole = merged(vision_presets()[_DEFAULTS[family]], {**values, "family": family})
    stages, depths = config.get("num_stages"), whole.get("depths")
    if stages is None and "num_hidden_layers" in known.used:  # its name in other models
        stages = config.get("num_hidden_layers")
    if stages is not None and isinstance(depths, list) and stages != len(depths):
        raise SourceError(f"has num_stages = {str(stages)[:80]}, but depths of {len(depths)} stages")
    return whole


def _llava(config: dict[str, Any], values: dict[str, Any], read_text: ReadText, ignored: list[str]) -> dict[str, Any]:
    given, text = config.get("vision_config"), config.get("text_config") or {}
    if not isinstance(text, dict):
        raise SourceError(f"has text_config = {str(text)[:80]}, which is not a mapping")
    kind = given.get("model_type", "clip_vision_model") if isinstance(given, dict) else "clip_vision_model"
    if kind != "clip_vision_model":
        raise SourceError(f"has vision_config.model_type = {str(kind)[:80]}, but only clip_vision_model is supported")
    layer = config.get("vision_feature_layer", -2)
    if not isinstance(layer, int):
        raise SourceError(f"has vision_feature_layer = {str(layer)[:80]}, but only one layer is supported")
    tower = _LLAVA_TOWER if given is None else _tower(given, "vision_config", ignored)
    base = vision_presets()[_DEFAULTS["clip"]]["vision_config"]
    text_kind = text.get("model_type", "llama")
    defaults = _TEXT_DEFAULTS.get(text_kind, {}) if isinstance(text_kind, str) else {}
    stated = {key: value for key, value in text.items() if value is not None or key not in defaults}
    inner: list[str] = []
    try:
        language = read_text({**defaults, **stated, "model_type": text_kind}, inner)
    except SourceError as error:
        raise SourceError(f"has a text_config that {error}", error.hint, error.key) from error
    ignored += [f"text_config.{key}" for key in inner]
    if config.get("tie_word_embeddings"):
        language["tie_word_embeddings"] = True
    language.pop("final_logit_softcapping", None)  # LLaVA has a head of its own in transformers, without a cap
    if "image_token_index" not in values and config.get("image_token_id") is not None:
        values["image_token_index"] = config["image_token_id"]
    return {**values, "vision_config": {**base, **tower}, "text_config": language}


def read_tower(config: dict[str, Any], read: ReadText) -> dict[str, Any]:
    """Return the keys of ``vision_config`` by the config.json of a CLIP, of its image tower, or of a LLaVA.

    ``read``: returns the model keys of a config.json. Raises SourceError.
    """
    kind = config.get("model_type")
    if kind == "clip_vision_model":
        return {**vision_presets()[_DEFAULTS["clip"]]["vision_config"], **_tower(config, "vision_config", [])}
    if kind not in ("clip", "llava"):
        raise SourceError(
            f"has model_type = {str(kind)[:80]}, but only clip_vision_model, clip and llava have an image tower"
        )
    tower: dict[str, Any] = read(config, [])["vision_config"]
    return tower


def _tower(given: Any, name: str, ignored: list[str]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise SourceError(f"has {name} = {str(given)[:80]}, which is not a mapping")
    fields = set(_TOWERS[name].model_fields)
    check_keys(given, KnownKeys(frozenset(fields), TOWER_KEYS.irrelevant, TOWER_KEYS.only), ignored, name)
    return _values(given, fields)


def _values(config: Mapping[str, Any], fields: set[str]) -> dict[str, Any]:
    """Return the values of these keys that are not null, as the spec has them. Raises SourceError."""
    values = {key: value for key, value in config.items() if key in fields and value is not None}
    for key in ("hidden_act", "projector_hidden_act"):
        if key in values and values[key] not in _ACTIVATIONS:
            allowed = either(tuple(_ACTIVATIONS))
            raise SourceError(f"has {key} = {str(values[key])[:80]}, but only {allowed} is supported")
        if key in values:
            values[key] = _ACTIVATIONS[values[key]]
    for key in ("image_size", "patch_size"):
        size = values.get(key)
        if isinstance(size, list):
            if len(size) != 2 or size[0] != size[1]:
                raise SourceError(f"has {key} = {str(size)[:80]}, but only squares are supported")
            values[key] = size[0]
    return values


def vision_differences(spec: AnyVision, trained: Mapping[str, Any]) -> Iterator[tuple[str, object, object]]:
    """Yield (key, ours, theirs) for each setting with which the weights of a config.json would compute something else.

    ``trained``: the model keys of that config.json. The language model of a LLaVA is not compared.
    """
    if trained.get("family") != spec.family:
        yield "family", spec.family, trained.get("family")
        return
    yield from section_differences(spec, trained, "")


def section_differences(spec: Section, trained: Mapping[str, Any], path: str) -> Iterator[tuple[str, object, object]]:
    for key, field in type(spec).model_fields.items():
        ours = getattr(spec, key)
        if isinstance(ours, ClipVisionSpec | ClipTextSpec):
            yield from section_differences(ours, trained.get(key) or {}, f"{path}{key}.")
        elif not isinstance(ours, Section) and key not in _MAY_DIFFER:
            theirs = trained.get(key, field.default)
            theirs = tuple(theirs) if isinstance(theirs, list) else theirs
            if ours != theirs:
                yield f"{path}{key}", listed(ours), listed(theirs)


def listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


_MODEL_CLASSES = {
    "resnet": "ResNetForImageClassification",
    "convnext": "ConvNextForImageClassification",
    "vit": "ViTForImageClassification",
    "clip": "CLIPModel",
    "llava": "LlavaForConditionalGeneration",
}


def vision_to_config(model: AnyVision, write_text: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Return the config.json of a model of images. ``write_text``: returns that of a language model.

    Raises UsageError if transformers has no such model.
    """
    if isinstance(model, ResNetSpec) and model.norm != "batch":
        problem = Problem("model", "model.norm", "must be batch, as in resnet.", model.norm)
        raise UsageError("no Hugging Face architecture matches this model", (problem,))
    config: dict[str, Any] = {"model_type": model.family, "architectures": [_MODEL_CLASSES[model.family]]}
    for key in type(model).model_fields:
        value = getattr(model, key)
        if key in _OWN or (key == "drop_path_rate" and model.family == "vit"):
            continue
        if key == "num_labels":
            names = {str(number): f"LABEL_{number}" for number in range(value)}
            config["id2label"], config["label2id"] = names, {name: int(number) for number, name in names.items()}
        elif isinstance(value, ClipVisionSpec | ClipTextSpec):
            kind = "clip_vision_model" if isinstance(value, ClipVisionSpec) else "clip_text_model"
            config[key] = {"model_type": kind, **value.model_dump(mode="json")}
            if isinstance(model, ClipSpec):
                config[key]["projection_dim"] = model.projection_dim
        else:
            config[key] = write_text(value) if isinstance(value, Section) else listed(value)
    if isinstance(model, ConvNextSpec):
        config |= {"num_stages": len(model.depths), "hidden_act": "gelu"}
    if isinstance(model, ResNetSpec):
        config["hidden_act"] = "relu"
    if isinstance(model, LlavaSpec):
        config["image_seq_length"] = model.tokens_per_image
        config["tie_word_embeddings"] = model.text_config.tie_word_embeddings
    return config
