"""Dimensions of published models, for rows that name a model without all of its dimensions.

They are from published_models.json, where each model has its source (config.json, the paper, the recipe), and from
model_arch.csv of the directory of measurements. Columns of a row take precedence. A test compares the parameters of
each model with the published count.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from planner_truth.mapping import Unmapped, padded_vocab, transformer
from planner_truth.table import whole
from scaletrain_cli.spec.hugging_face import from_config
from scaletrain_cli.spec.presets import derived_dimensions, presets

_FILE = Path(__file__).with_name("published_models.json")
_TABLE = "model_arch.csv"
# Column of a row, and of model_arch.csv, by key of the spec.
_COLUMNS = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn",
}
# Families with LayerNorm, biases and a plain MLP; all others have RMSNorm and a gated one.
_PLAIN = r"gpt|bert|opt|bloom|falcon|pythia|neox|megatron|turing|mpt|nemotron"
_tabled: dict[str, dict[str, Any]] = {}


@cache
def published_models() -> tuple[tuple[re.Pattern[str], str, Mapping[str, Any]], ...]:
    """Return the models of published_models.json: pattern of names, source, and model section without seq_len."""
    return tuple(
        (_pattern(entry["names"]), entry["source"], _section(entry)) for entry in json.loads(_FILE.read_text())
    )


def _pattern(names: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![a-z0-9])(?:{names})(?![a-z0-9])")


def _section(entry: Mapping[str, Any]) -> dict[str, Any]:
    if "preset" in entry:
        found = derived_dimensions(presets()[entry["preset"]])
    else:
        found = dict(entry.get("model") or from_config(entry["config"]))
    found.pop("rope_scaling", None)  # for longer sequences than the model's own; it changes neither time nor memory
    found.setdefault("head_dim", found["hidden_size"] // found["num_attention_heads"])
    return found


def read_dimensions(directory: Path) -> None:
    """Read the dense models of model_arch.csv whose dimensions are complete; without the file there are none."""
    _tabled.clear()
    path = directory / _TABLE
    if not path.is_file():
        return
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            cells = [row.get(key) or "" for key in (*_COLUMNS.values(), "vocab")]
            if not all(cell.isdigit() for cell in cells) or row.get("experts"):
                continue
            *sizes, vocab = map(int, cells)
            plain = re.search(_PLAIN, row["model"].lower()) is not None
            keys = dict(zip(_COLUMNS, sizes, strict=True))
            head = {"head_dim": keys["hidden_size"] // keys["num_attention_heads"]}
            more = {"vocab_size": vocab, "tie_word_embeddings": plain, "family": "gpt" if plain else "llama"}
            _tabled.setdefault(_letters(row["model"]), {**keys, **head, **more})


def known_model(row: Mapping[str, str], tensor: int = 1) -> dict[str, Any]:
    """Return the model section of the model that a row names, with the row's own dimensions where it has them.

    Raises Unmapped.
    """
    found = _named(row["model"])
    if found is None:
        raise Unmapped(f"dimensions of {row['model']} are not known")
    given = {key: whole(row, column, found[key]) for key, column in _COLUMNS.items()}
    seq_len = whole(row, "seq_len", 2048 if "internlm" in row["model"].lower() else None)
    changed = (
        given["hidden_size"] != found["hidden_size"] or given["num_attention_heads"] != found["num_attention_heads"]
    )
    head = {"head_dim": given["hidden_size"] // given["num_attention_heads"]} if changed else {}
    vocab = padded_vocab(found["vocab_size"], tensor)
    return {**found, **given, **head, "vocab_size": vocab, "seq_len": seq_len, "max_position_embeddings": seq_len}


def model_of(row: Mapping[str, str], tensor: int = 1) -> dict[str, Any]:
    """Return the model section of a row: of the model that it names, or else from its columns. Raises Unmapped."""
    if _named(row["model"]) is not None:
        return known_model(row, tensor)
    if any(not row[key] for key in ("layers", "hidden", "heads", "vocab")):
        raise Unmapped(f"dimensions of {row['model']} are not known")
    plain = re.search(_PLAIN, row["model"].lower()) is not None
    return model_of_columns(row, plain=plain, vocab=padded_vocab(whole(row, "vocab"), tensor), tied=plain)


def model_of_columns(row: Mapping[str, str], *, plain: bool, vocab: int, tied: bool) -> dict[str, Any]:
    """Return the model section of a row whose columns have its dimensions. Raises Unmapped.

    ``plain``: LayerNorm, biases and an MLP that is not gated. Without a column ``ffn`` its width is 4 times the hidden
    size, of a gated MLP 8/3 times in multiples of 256.
    """
    hidden, heads = whole(row, "hidden"), whole(row, "heads")
    return transformer(
        "gpt" if plain else "llama",
        layers=whole(row, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=whole(row, "kv_heads", heads),
        ffn=whole(row, "ffn", 4 * hidden if plain else -(-8 * hidden // 3 // 256) * 256),
        vocab=vocab,
        seq_len=whole(row, "seq_len"),
        tied=tied,
    )


def _named(name: str) -> Mapping[str, Any] | None:
    words = re.sub(r"[^a-z0-9.]+", " ", name.lower())
    found = next((section for pattern, _, section in published_models() if pattern.search(words)), None)
    return found or _tabled.get(_letters(name))


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())
