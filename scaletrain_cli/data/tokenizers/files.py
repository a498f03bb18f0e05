"""Read a tokenizer of Hugging Face with its special tokens, or train one on texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home

# More text does not improve a tokenizer, and takes memory in proportion.
_MOST_CHARACTERS_TO_LEARN_FROM = 500_000_000
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(path: str) -> Any:
    """Return the tokenizer of a tokenizer.json, without truncation and padding. Raises UsageError."""
    return parsed_tokenizer(tokenizer_file(path), path)


def parsed_tokenizer(content: bytes, path: str) -> Any:
    """Return the tokenizer with the content of a tokenizer.json, as ``load_tokenizer`` does. Raises UsageError."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises nothing narrower
        params = {"path": path, "error": str(error)}
        raise UsageError(Reason("engine.tokenizer-invalid", params)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def train_tokenizer(texts: Iterator[str], vocab_size: int, special_tokens: list[str]) -> Any:
    """Return a byte-level BPE tokenizer (GPT-2 report, section 2.2) that was trained on texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_beginning(texts), trainer)
    return tokenizer


def _beginning(texts: Iterator[str]) -> Iterator[str]:
    total = 0
    for text in texts:
        yield text
        total += len(text)
        if total > _MOST_CHARACTERS_TO_LEARN_FROM:
            return


def tokenizer_file(path: str) -> bytes:
    """Return the content of a tokenizer.json. Raises UsageError."""
    try:
        return expand_home(path).read_bytes()
    except OSError as error:
        params = {"path": path, "error": error.strerror or str(error)}
        raise UsageError(Reason("engine.tokenizer-unreadable", params)) from error


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens by name, such as eos_token, that the files beside a tokenizer state.

    Raises UsageError for a file that cannot be read.
    """
    config = json_object(folder / "tokenizer_config.json")
    named = json_object(folder / "special_tokens_map.json") | {k: v for k, v in config.items() if v is not None}
    return {name: text for name in _SPECIAL if (text := _token(named.get(name))) is not None}


def json_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; empty if there is no file. Raises UsageError for one that cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise UsageError(Reason("data.template-unreadable", {"path": str(path), "error": str(error)})) from error
    return found if isinstance(found, dict) else {}


def _token(given: Any) -> str | None:
    text = given.get("content") if isinstance(given, dict) else given
    return text if isinstance(text, str) else None
