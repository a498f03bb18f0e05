"""Model presets, and the dimensions that follow from other dimensions."""

from typing import Any

from scaletrain_cli.project_files import packaged_data
from scaletrain_cli.spec.extensions import base_family

TOWERS = ("vision_config", "text_config")


def vision_presets() -> dict[str, dict[str, Any]]:
    """Return the published dimensions of vision networks by preset name."""
    return packaged_data("spec/vision_presets.json")


def merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return the union of two model sections; keys of ``over`` take precedence, also inside the parts of CLIP or LLaVA.

    A part with a preset or a config.json of its own replaces the one below.
    """
    both = {**under, **over}
    for tower in TOWERS:
        part = over.get(tower)
        if isinstance(under.get(tower), dict) and isinstance(part, dict) and not {"preset", "hf_config"} & part.keys():
            both[tower] = {**under[tower], **part}
    return both


# Default training length of presets whose published maximum is a long-context extension.
LONGEST_DEFAULT_SEQ_LEN = 8192


# Keys that a dimension is derived from if it is not given; problems with them are reported once.
DERIVED_FROM = {
    "num_key_value_heads": ("num_attention_heads",),
    "head_dim": ("hidden_size", "num_attention_heads"),
    "intermediate_size": ("hidden_size", "family"),
    "max_position_embeddings": ("seq_len",),
}


class SourceError(ValueError):
    """A preset or config.json that cannot be used; ``hint``: what to do; ``key``: the spec key at fault."""

    def __init__(self, message: str, hint: str | None = None, key: str = "hf_config") -> None:
        super().__init__(message)
        self.key, self.hint = key, hint


def presets() -> dict[str, dict[str, Any]]:
    """Return the published dimensions of transformers by preset name."""
    return packaged_data("spec/presets.json")


def hub_presets() -> dict[str, str]:
    """Return the names of presets by the names of models on the Hugging Face Hub that have these dimensions."""
    return packaged_data("spec/hub_presets.json")


def derived_dimensions(given: dict[str, Any]) -> dict[str, Any]:
    """Return ``given`` with dimensions that follow from others, as the architectures define them."""

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
    if hidden and base_family(str(given.get("family"))) == "gpt":
        derived["intermediate_size"] = 4 * hidden
    if longest:
        derived["seq_len"] = min(longest, LONGEST_DEFAULT_SEQ_LEN)
    if seq_len:
        derived["max_position_embeddings"] = seq_len
    return derived | given
