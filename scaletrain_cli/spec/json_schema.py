"""The JSON Schema of a run spec as a *file* may hold it, for editors; the loader checks more than a schema can say."""

from __future__ import annotations

from typing import Any

from scaletrain_cli.spec.presets import presets, vision_presets
from scaletrain_cli.spec.run import MODELS, SCHEMA, RunSpec, model_kind

# What a file must give where neither a preset nor a config.json does; the rest follows from these or has a default.
_DIMENSIONS = {
    "llama": ["family", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"],
    "gpt": ["family", "hidden_size", "num_hidden_layers", "num_attention_heads"],
    "resnet": ["family", "hidden_sizes", "depths"],
    "convnext": ["family", "hidden_sizes", "depths"],
    "vit": ["family", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"],
    "clip": ["family", "vision_config", "text_config"],
}


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the files that load_spec accepts; yes and no for true and false aside."""
    schema = RunSpec.model_json_schema(by_alias=True, mode="validation")
    sections = schema["$defs"]
    for section in (schema, *sections.values()):
        for name, field in section["properties"].items():
            field.pop("title", None)  # pydantic's is the name again, in capitals
            if name not in section.get("required", ()) and ("$ref" in field or section is schema):
                _allow_empty(field)
    for kind, model in MODELS.items():
        _loosen_model(kind, sections[model.__name__])
    schema["properties"]["model"] = {"anyOf": [{"$ref": f"#/$defs/{model.__name__}"} for model in MODELS.values()]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": f"ScaleTrain run spec {SCHEMA}",
    }


def _allow_empty(field: dict[str, Any]) -> None:
    """A section may be left empty (null); its defaults then apply, so they need no copy here."""
    field.pop("default", None)
    whole = dict(field)
    field.clear()
    field["anyOf"] = [whole, {"type": "null"}]


def _loosen_model(kind: str, model: dict[str, Any]) -> None:
    """Dimensions are needed only where nothing else gives them; ``kind`` is a key of MODELS."""
    properties = model["properties"]
    known = [name for name, given in (presets() | vision_presets()).items() if model_kind(given) == kind]
    properties["preset"] = {"enum": [*known, None], "description": "known dimensions; keys beside it win"}
    properties["hf_config"] = {
        "type": "string",
        "description": "path of a Hugging Face config.json, relative to this file; keys beside it win",
    }
    del model["required"]
    model["anyOf"] = [
        {"required": ["preset"]},
        {"required": ["hf_config"]},
        *(
            {
                "required": [*names, "vocab_size"] if kind == "transformer" else names,
                "properties": {"family": {"const": family}},
            }
            for family, names in _DIMENSIONS.items()
            if model_kind({"family": family}) == kind
        ),
    ]
