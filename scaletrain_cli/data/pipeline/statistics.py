"""Statistics of the documents of a shard: lengths in tokens, kinds of characters, unknown tokens."""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

_NO_WORD = re.compile(r"[^\w\s\x00-\x7f]")  # marks and symbols beyond ASCII
_KINDS = {
    "digits": range(ord("0"), ord("9") + 1),
    "whitespace": (*b" \t\n\r\x0b\x0c", 0x1C, 0x1D, 0x1E, 0x1F),
    "marks": [code for code in range(0x21, 0x7F) if not chr(code).isalnum()],
    "control": [code for code in (*range(0x20), 0x7F) if not chr(code).isspace()],
    "non_ascii": [*range(0xC2, 0xF5)],  # the first bytes of characters of several bytes
}


@dataclass
class Statistics:
    """Counts of the documents of a shard.

    ``lengths``: by the least length of a range, [documents, tokens]; ranges begin at 1, 2, 3, 4, 6, 8, 12, 16, ...
    tokens, without the token that ends documents. ``unknown``: the id that stands for text that the tokenizer has no
    tokens for; None if it has one for each byte.
    """

    unknown: int | None = None
    lengths: dict[int, list[int]] = field(default_factory=dict)
    shortest: int | None = None
    longest: int = 0
    unknown_tokens: int = 0
    characters: int = 0
    marks_beyond_ascii: int = 0
    replacement_characters: int = 0
    _bytes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(256, np.int64))

    def add(self, text: str, content: bytes, ids: npt.NDArray[Any]) -> None:
        """Count a document: its text, the same in UTF-8, and its tokens with the one that ends it."""
        count = len(ids) - 1
        found = self.lengths.setdefault(length_range(count), [0, 0])
        found[0] += 1
        found[1] += count
        self.shortest = count if self.shortest is None else min(self.shortest, count)
        self.longest = max(self.longest, count)
        if self.unknown is not None:
            self.unknown_tokens += int(np.count_nonzero(ids == self.unknown))
        self.characters += len(text)
        self._bytes += np.bincount(np.frombuffer(content, np.uint8), minlength=256)
        if not text.isascii():
            replaced = text.count("\ufffd")
            self.replacement_characters += replaced
            self.marks_beyond_ascii += len(_NO_WORD.findall(text)) - replaced

    def to_json(self) -> dict[str, Any]:
        """Return the counts; ``marks`` are punctuation and symbols."""
        kinds = {name: int(self._bytes[list(codes)].sum()) for name, codes in _KINDS.items()}
        kinds["marks"] += self.marks_beyond_ascii
        return {
            "lengths": {str(least): self.lengths[least] for least in sorted(self.lengths)},
            "shortest": self.shortest,
            "longest": self.longest,
            "unknown_tokens": None if self.unknown is None else self.unknown_tokens,
            "characters": {"all": self.characters, **kinds, "replacement": self.replacement_characters},
        }


def length_range(tokens: int) -> int:
    """Return the least length of the range that a length is in: 0, or 1 or 1.5 times a power of two."""
    if tokens < 2:
        return tokens
    power = 1 << (tokens.bit_length() - 1)
    return power * 3 // 2 if tokens >= power * 3 // 2 else power


def length_range_end(least: int) -> int:
    """Return the largest length in a range, given its least one."""
    if least < 2:
        return least
    power = 1 << (least.bit_length() - 1)
    return (2 * power if least > power else power * 3 // 2) - 1
