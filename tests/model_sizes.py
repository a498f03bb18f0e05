"""The dimensions of small transformers in a line."""

from typing import Any

SIZES = {
    **{"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"},
    **{"kv_heads": "num_key_value_heads", "head_dim": "head_dim", "intermediate": "intermediate_size"},
    **{"vocab": "vocab_size", "seq_len": "seq_len", "positions": "max_position_embeddings"},
}


def model_sizes(**sizes: Any) -> dict[str, Any]:
    """Return sizes, such as ``hidden=16``, under their names in the section ``model`` and in config.json."""
    return {SIZES[name]: size for name, size in sizes.items()}
