"""Read a tokenizer of Hugging Face, or train one on texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home

# More text does not improve a tokenizer, and takes memory in proportion.
_MOST_CHARACTERS_TO_LEARN_FROM = 500_000_000


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
