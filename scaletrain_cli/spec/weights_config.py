"""Compare the config.json beside Hugging Face weights with the spec, in all that names and shapes do not show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.spec.architecture_source import SourceError, from_config, read_config, sliding_window
from scaletrain_cli.spec.model import ModelSpec

# Another value would load without a complaint and compute something else.
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
    """Differences between the model that the weights were trained as and ours; none without a config.json.

    Raises UsageError when it cannot be read, or is that of an architecture which the engine does not have.
    """
    path = folder / "config.json"
    if not path.exists():
        return
    try:
        config = read_config(path)
        trained = from_config(config)
    except SourceError as error:
        raise UsageError(f"model.weights: {path} {error}.") from error
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
        yield Problem(str(path), "sliding_window", "the engine attends to all of seq_len.", str(window), hint)


def _scaling(spec: ModelSpec) -> dict[str, object] | None:
    """As a config.json would be read."""
    if spec.rope_scaling is None:
        return None
    found = spec.rope_scaling.to_hugging_face()
    if spec.rope_scaling.rope_type == "yarn":
        found.setdefault("original_max_position_embeddings", spec.max_position_embeddings)
    return found


def _flow(section: dict[str, object] | None) -> str:
    """As YAML has it in one line."""
    if section is None:
        return "null"
    return f"{{{', '.join(f'{key}: {str(value).lower()}' for key, value in section.items())}}}"
