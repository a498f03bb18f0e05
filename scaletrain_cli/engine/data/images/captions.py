"""Captions as the tokens of CLIP's text tower."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.tokenizers.files import load_tokenizer, special_tokens
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.vision_model import OLD_EOS

# Of CLIP's own tokenizer, where the files beside a tokenizer.json name no other tokens.
_START, _END = "<|startoftext|>", "<|endoftext|>"


@dataclass(frozen=True)
class CaptionTokenizer:
    """Encodes captions as the start token, the tokens of the text, the end token, and padding up to ``positions``.

    A longer text is cut, so that the end token is the last one: the text tower takes its output as that of the caption.
    ``start``, ``end``, ``padding``: ids. Pickled, it carries the path of tokenizer.json.
    """

    path: Path
    positions: int
    start: int
    end: int
    padding: int
    tokenizer_class: str | None = None

    def length(self, caption: str) -> int:
        """Return the tokens of a caption with its start and end, before it is cut."""
        return len(_opened(self.path, self.tokenizer_class).encode(caption, add_special_tokens=False).ids) + 2

    def encode(self, captions: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the ids of captions, [captions, positions]."""
        rows = np.full((len(captions), self.positions), self.padding, np.int64)
        # In Python's loop and not as a batch, which would start threads in every reader process.
        for row, caption in zip(rows, captions, strict=True):
            ids = _opened(self.path, self.tokenizer_class).encode(caption, add_special_tokens=False).ids
            ids = [self.start, *ids[: self.positions - 2], self.end]
            row[: len(ids)] = ids
        return rows


def caption_tokenizer(
    path: Path, positions: int, vocab_size: int, eos_token_id: int | None = None, tokenizer_class: str | None = None
) -> CaptionTokenizer:
    """Return the tokenizer of captions in a tokenizer.json, with the special tokens that the files beside it name.

    Padding is the tokenizer's own, else its end token as in CLIP. ``positions``, ``vocab_size`` and ``eos_token_id``
    are those of the text tower; without the last one the end is not compared. Raises UsageError if the tokenizer cannot
    be read, lacks one of the tokens, has more tokens than the model, or has another end: the tower would take the
    output of another token as that of the caption.
    """
    try:
        tokenizer = _opened(path, tokenizer_class)
    except Exception as error:  # the package raises its base class alone
        raise UsageError(
            Reason("data.caption-tokenizer-unreadable", {"path": str(path), "error": str(error)})
        ) from error
    tokens = caption_tokens(path.parent)
    end = tokens["eos_token"]
    ids = []
    for name in tokens.values():
        if (number := tokenizer.token_to_id(name)) is None:
            raise UsageError(Reason("data.caption-token-absent", {"path": str(path), "token": name}))
        ids.append(number)
    if (token_count := tokenizer.get_vocab_size()) > vocab_size:
        params = {"path": str(path), "found": token_count, "vocab_size": vocab_size}
        raise UsageError(Reason("data.caption-vocabulary-too-large", params))
    expected = token_count - 1 if eos_token_id == OLD_EOS else eos_token_id  # the largest token marks the end then
    if expected not in (None, ids[1]):
        params = {"path": str(path), "token": end, "id": ids[1], "expected": expected}
        if eos_token_id == OLD_EOS:
            raise UsageError(Reason("data.caption-end-not-largest", params))
        raise UsageError(Reason("data.caption-end-differs", params | {"eos_token_id": eos_token_id}))
    return CaptionTokenizer(path, positions, ids[0], ids[1], ids[2], tokenizer_class)


def caption_tokens(folder: Path) -> dict[str, str]:
    """Return ``bos_token``, ``eos_token`` and ``pad_token`` of the tokenizer in a folder, in this order.

    Those that the files beside it do not name are CLIP's; padding is the end token then. Raises UsageError for a file
    that cannot be read.
    """
    names = special_tokens(folder)
    end = names.get("eos_token", _END)
    return {"bos_token": names.get("bos_token", _START), "eos_token": end, "pad_token": names.get("pad_token", end)}


@lru_cache(maxsize=4)
def _opened(path: Path, tokenizer_class: str | None) -> Any:
    return load_tokenizer(str(path), tokenizer_class)
