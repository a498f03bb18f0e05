"""Where a vision network's dimensions come from: a preset, or a Hugging Face config.json. Validates nothing."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from scaletrain_cli.spec.vision import VISION

# A config.json leaves out what equals the default of its class in transformers, which is one of these.
_DEFAULTS = {
    "resnet": "resnet-50",
    "convnext": "convnext-tiny",
    "vit": "vit-base-patch16",
    "clip": "clip-vit-base-patch32",
}
_TOWERS = ("vision_config", "text_config")


@cache
def vision_presets() -> dict[str, dict[str, Any]]:
    """Dimensions by preset name, as published by each network's authors."""
    text = files("scaletrain_cli.spec").joinpath("vision_presets.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def vision_from_config(config: dict[str, Any]) -> dict[str, Any]:
    """Model keys of the spec from a config.json whose ``model_type`` is one of VISION."""
    family = config["model_type"]
    fields = VISION[family].model_fields
    found = {key: value for key, value in config.items() if key in fields and value is not None}
    if isinstance(config.get("id2label"), dict) and "num_labels" in fields:
        found["num_labels"] = len(config["id2label"])
    for tower in _TOWERS:
        if tower in fields:
            known: Any = fields[tower].annotation
            given = config.get(tower) or {}
            found[tower] = {key: value for key, value in given.items() if key in known.model_fields}
    return merged(vision_presets()[_DEFAULTS[family]], {**found, "family": family})


def merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` wins key by key, inside the towers of CLIP too."""
    both = {**under, **over}
    for tower in _TOWERS:
        if isinstance(under.get(tower), dict) and isinstance(over.get(tower), dict):
            both[tower] = {**under[tower], **over[tower]}
    return both
