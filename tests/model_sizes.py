"""The dimensions of small transformers in a line."""

from typing import Any

SIZES = {
    **{"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"},
    **{"keys": "num_key_value_heads", "head": "head_dim", "inner": "intermediate_size"},
    **{"words": "vocab_size", "length": "seq_len", "positions": "max_position_embeddings"},
}


def model_sizes(**sizes: Any) -> dict[str, Any]:
    """Return sizes, such as ``hidden=16``, under their names in the section ``model`` and in config.json."""
    return {SIZES[name]: size for name, size in sizes.items()}
