"""Load a tokenizer.json, and derive the settings on which the tokens of a dataset depend."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.corpus_files import ENDS_OF_TEXT


@dataclass(frozen=True)
class TokenizerSettings:
    """``digest``: SHA-256 of tokenizer.json. ``end_of_text``: the token that ends documents.

    ``vocab_size``: the largest id and 1, as ids may have gaps. ``dtype``: of the files with tokens. ``unknown``: the
    token for text that the tokenizer has no tokens for; None if there is none.
    """

    digest: str
    end_of_text: int
    vocab_size: int
    dtype: str
    unknown: int | None

    @classmethod
    def of(cls, content: str) -> TokenizerSettings:
        """Return the settings of a tokenizer.json. Raises UsageError if no token ends documents."""
        return loaded_tokenizer(content)[0]


@lru_cache(maxsize=2)
def loaded_tokenizer(content: str) -> tuple[TokenizerSettings, Any]:
    """Return a tokenizer.json as a Tokenizer without truncation and padding, once per process. Raises UsageError."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = (tokenizer.token_to_id(name) for name in ENDS_OF_TEXT)
    if (end := next((token for token in known if token is not None), None)) is None:
        raise UsageError(Reason("engine.tokenizer-without-end-of-text", {"path": "", "tokens": list(ENDS_OF_TEXT)}))
    size = max(tokenizer.get_vocab().values()) + 1
    digest = hashlib.sha256(content.encode()).hexdigest()
    model = json.loads(content)["model"]
    name, unknown = model.get("unk_token"), model.get("unk_id")  # Unigram has the id
    unknown = tokenizer.token_to_id(name) if unknown is None and name is not None else unknown
    return TokenizerSettings(digest, end, size, "uint16" if size <= 1 << 16 else "uint32", unknown), tokenizer
