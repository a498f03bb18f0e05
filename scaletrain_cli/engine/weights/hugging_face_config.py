"""What the config.json beside Hugging Face weights says that their names and shapes do not. Knows no tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.architecture_source import SourceError, from_hugging_face

# Another value would load without a complaint and compute something else.
_HIDDEN_FROM_SHAPES = (
    "family",
    "num_attention_heads",
    "num_key_value_heads",
    "rope_theta",
    "norm_eps",
    "num_experts_per_tok",
    "norm_topk_prob",
)


def config_mismatches(folder: Path, spec: ModelSpec) -> Iterator[Problem]:
    """Differences between the model that the weights were trained as and ours; none without a config.json.

    Raises UsageError when it cannot be read, or is that of an architecture which the engine does not have.
    """
    path = folder / "config.json"
    if not path.exists():
        return
    try:
        trained = from_hugging_face(path)
    except SourceError as error:
        raise UsageError(f"model.weights: {path} {error}.") from error
    for key in _HIDDEN_FROM_SHAPES:
        ours = getattr(spec, key)
        if trained.get(key, ours) != ours:
            hint = f"Set model.{key}: {trained[key]}."
            yield Problem(str(path), key, f"the spec has {ours}.", str(trained[key]), hint)
    yield from _attention_mismatches(path, json.loads(path.read_bytes()), spec)


def _attention_mismatches(path: Path, config: dict[str, Any], spec: ModelSpec) -> Iterator[Problem]:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        message = "the engine turns positions without scaling, and the weights would not fit that."
        yield Problem(str(path), "rope_scaling", message, str(kind))
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True) and window < spec.seq_len:
        hint = f"Set model.seq_len to at most {window}."
        yield Problem(str(path), "sliding_window", "the engine attends to all of seq_len.", str(window), hint)
