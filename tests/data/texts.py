"""Rows of texts, and tokenizers for them. No tests here."""

import json
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, models, pre_tokenizers, trainers


def ignore(*_: object) -> None:
    """Take progress."""


def jsonl(texts: Iterable[str]) -> bytes:
    return b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)


def tokenizer_of_words(words: Sequence[str], end: str = "<|endoftext|>") -> Tokenizer:
    """Return a tokenizer of these words, which white space divides; ``end`` is 0, and every other word 1."""
    vocabulary = {end: 0, "[UNK]": 1} | {word: number for number, word in enumerate(words, start=2)}
    found = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found.add_special_tokens([end])
    return found


def trained_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE; the end of text is 0."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    settings = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    found.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **settings))
    return found
