"""The text side of an exported folder: the tokenizer, its special tokens, and where generation ends.

Without these transformers assumes token ids that mean something else, and generation never stops.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.engine.dataset import dataset_folder
from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.end_of_text import ENDS_OF_TEXT

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Beside a tokenizer.json of Hugging Face: what its tokens mean and how a chat is written with them.
_BESIDE_A_TOKENIZER = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("chat_template.json", "generation_config.json"),
)


@dataclass(frozen=True)
class TextFiles:
    """``files``: contents by name. ``ids``: bos, eos and pad ids as config.json holds them, None where not known."""

    files: dict[str, bytes]
    ids: dict[str, Any]

    @property
    def has_tokenizer(self) -> bool:
        return "tokenizer.json" in self.files


def text_files(spec: RunSpec, runs_root: Path) -> TextFiles:
    """Return the text side of an export of this run.

    It is that of the folder which the weights or the tokenizer came from, if that has the tokenizer which the data were
    made with; else it is derived from the tokenizer. Without a tokenizer at hand only ids of loaded weights are kept.
    """
    folders = _origins(spec)
    tokenizer = _read(_dataset_tokenizer(spec, runs_root))
    if tokenizer is None:
        known = next((config for folder in folders if (config := _object(folder / "config.json"))), {})
        return TextFiles({}, {name: known.get(name) for name in _IDS})
    vocabulary = _vocabulary(tokenizer)
    for folder in folders:
        theirs = _read(folder / "tokenizer.json")
        if theirs is not None and _vocabulary(theirs) == vocabulary:
            files = {name: found for name in _BESIDE_A_TOKENIZER if (found := _read(folder / name)) is not None}
            own = _derived(spec, vocabulary)
            ids = own.ids | {
                name: given
                for source in ("config.json", "generation_config.json")
                for name, given in _object(folder / source).items()
                if name in _IDS and given is not None
            }
            made = {name: content for name, content in own.files.items() if name != "generation_config.json"}
            made["generation_config.json"] = _json({name: given for name, given in ids.items() if given is not None})
            return TextFiles(made | files | {"tokenizer.json": theirs}, ids)
    derived = _derived(spec, vocabulary)
    return TextFiles({"tokenizer.json": tokenizer, **derived.files}, derived.ids)


def _derived(spec: RunSpec, vocabulary: dict[str, int]) -> TextFiles:
    """From the token that ends a document, which is also what each document is preceded by, as in GPT-2."""
    end = next((name for name in ENDS_OF_TEXT if name in vocabulary), None)
    if end is None:
        return TextFiles({}, dict.fromkeys(_IDS))
    ids = dict.fromkeys(_IDS, vocabulary[end])
    tokens = {"bos_token": end, "eos_token": end, "pad_token": end}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.transformer.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        **tokens,
    }
    files = {
        "tokenizer_config.json": _json(config),
        "special_tokens_map.json": _json(tokens),
        "generation_config.json": _json(ids),
    }
    return TextFiles(files, dict(ids))


def _origins(spec: RunSpec) -> list[Path]:
    """Folders that may hold what stands beside the tokenizer."""
    weights, path = spec.transformer.weights, spec.data.tokenizer.path
    found = [] if weights is None else [Path(os.path.expanduser(weights))]
    return found if path is None else [*found, Path(os.path.expanduser(path)).parent]


def _dataset_tokenizer(spec: RunSpec, runs_root: Path) -> Path | None:
    try:
        return dataset_folder(spec.data, runs_root) / "tokenizer.json"
    except (ScaletrainError, OSError):  # of data that this machine does not have
        path = spec.data.tokenizer.path
        return None if path is None else Path(os.path.expanduser(path))


def _vocabulary(tokenizer: bytes) -> dict[str, int]:
    """Ids by token, empty where they cannot be read."""
    try:
        content = json.loads(tokenizer)
        return dict(_pairs(content["model"]["vocab"])) | {t["content"]: t["id"] for t in content["added_tokens"]}
    except (ValueError, KeyError, TypeError, IndexError):
        return {}


def _pairs(vocabulary: Any) -> Iterator[tuple[str, int]]:
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    else:  # Unigram: [token, log probability] by id
        yield from ((entry[0], number) for number, entry in enumerate(vocabulary))


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError:
        return None


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read(path) or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _json(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()
