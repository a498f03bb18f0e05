"""The JSON Schema of a run spec *file*, for editors; the loader checks more than a schema can express."""

from typing import Any

from scaletrain_cli.plugins import MODEL_FAMILIES, OPTIMIZERS, PluginError, plugins
from scaletrain_cli.spec.backend_traits import backend_names
from scaletrain_cli.spec.cluster import ClusterSpec
from scaletrain_cli.spec.extensions import BUILT_IN_OPTIMIZERS, base_family
from scaletrain_cli.spec.model import ModelSpec
from scaletrain_cli.spec.presets import hub_presets, presets, vision_presets
from scaletrain_cli.spec.run import FAMILIES, MODELS, SCHEMA, RunSpec, model_kind
from scaletrain_cli.spec.section import OpenSection
from scaletrain_cli.spec.training import OptimizerSpec
from scaletrain_cli.spec.vision_model import ClipSpec, LlavaSpec

# Keys that a file must have if neither a preset nor a config.json gives them; others are derived or have a default.
_DIMENSIONS = {
    "llama": ["family", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"],
    "gpt": ["family", "hidden_size", "num_hidden_layers", "num_attention_heads"],
    "resnet": ["family", "hidden_sizes", "depths"],
    "convnext": ["family", "hidden_sizes", "depths"],
    "vit": ["family", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"],
    "clip": ["family", "vision_config", "text_config"],
    "llava": ["family", "vision_config", "text_config"],
}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the files that load_spec accepts, except for yes and no as booleans."""
    schema = RunSpec.model_json_schema(by_alias=True, mode="validation")
    sections = schema["$defs"]
    for field in RunSpec.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, OpenSection):
            _add_plugins(sections[field.annotation.__name__], field.annotation)
    sections[ClusterSpec.__name__]["properties"]["scheduler"]["enum"] = backend_names()
    sections[OptimizerSpec.__name__]["properties"]["name"]["enum"] += plugins(OPTIMIZERS, BUILT_IN_OPTIMIZERS)
    sections[ModelSpec.__name__]["properties"]["family"]["enum"] += plugins(MODEL_FAMILIES, FAMILIES)
    for section in (schema, *sections.values()):
        for name, field in section["properties"].items():
            field.pop("title", None)  # pydantic's title repeats the name
            if name not in section.get("required", ()) and ("$ref" in field or section is schema):
                # An empty section (null) has its defaults.
                field.pop("default", None)
                whole = dict(field)
                field.clear()
                field["anyOf"] = [whole, {"type": "null"}]
    # Trackers may also be a list: of names, of mappings from one name to its options, or of mappings with ``kind``.
    item = {"anyOf": [{"type": "string"}, {"type": "object", "minProperties": 1}]}
    schema["properties"]["tracking"]["anyOf"].append({"type": "array", "items": item})
    for kind, model in MODELS.items():
        _loosen_model(kind, sections[model.__name__])
    for model in (ClipSpec, LlavaSpec):
        _loosen_parts(sections[model.__name__]["properties"], sections)
    schema["properties"]["model"] = {"anyOf": [{"$ref": f"#/$defs/{model.__name__}"} for model in MODELS.values()]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": f"ScaleTrain run spec {SCHEMA}",
    }


def _add_plugins(properties_of: dict[str, Any], section: type[OpenSection]) -> None:
    """Replace the field that holds the sections of plug-ins by one property per plug-in."""
    del properties_of["properties"]["plugins"]
    for name in section.plugin_names():
        try:
            model = section.plugin_model(name)
        except PluginError:  # a spec that names it is rejected with the reason
            model = None
        if model is not None:
            properties_of["properties"][name] = _with_definitions_inside(model.model_json_schema(by_alias=True))


def _with_definitions_inside(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that can be nested in another one, with its definitions inlined."""
    definitions = schema.pop("$defs", {})

    def inside(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return inside(definitions[node["$ref"].rpartition("/")[2]])
            return {key: inside(value) for key, value in node.items() if key != "title"}
        return [inside(value) for value in node] if isinstance(node, list) else node

    whole: dict[str, Any] = inside(schema)
    return {"anyOf": [whole, {"type": "null"}]}


def _loosen_parts(properties: dict[str, Any], sections: dict[str, Any]) -> None:
    """Require no key of the towers of a model, which a preset of the whole model may give."""
    for tower in ("vision_config", "text_config"):
        name = properties[tower]["$ref"].rpartition("/")[2]
        whole = sections[name]
        sections[f"{name}Part"] = {key: value for key, value in whole.items() if key not in ("required", "anyOf")}
        properties[tower] = {**properties[tower], "$ref": f"#/$defs/{name}Part"}


def _loosen_model(kind: str, model: dict[str, Any]) -> None:
    """Require dimensions only if nothing else gives them; ``kind`` is a key of MODELS."""
    properties = model["properties"]
    known = [name for name, given in (presets() | vision_presets()).items() if model_kind(given) == kind]
    on_hub = [name for name, preset in hub_presets().items() if preset in known]
    properties["preset"] = {
        "enum": [*known, *on_hub, None],
        "description": "published dimensions; other keys of this section take precedence",
    }
    properties["hf_config"] = {
        "type": "string",
        "description": "Hugging Face config.json, or hf://org/name@revision; other keys of this "
        "section take precedence",
    }
    del model["required"]
    added = {family: base_family(family) for family in plugins(MODEL_FAMILIES, FAMILIES)}
    dimensions = _DIMENSIONS | {family: _DIMENSIONS[base] for family, base in added.items() if base in _DIMENSIONS}
    model["anyOf"] = [
        {"required": ["preset"]},
        {"required": ["hf_config"]},
        *(
            {
                "required": [*names, "vocab_size"] if kind == "transformer" else names,
                "properties": {"family": {"const": family}},
            }
            for family, names in dimensions.items()
            if model_kind({"family": family}) == kind
        ),
    ]
