"""The documents of a source that is already tokenized: whole, with ids of the vocabulary, each with its end.

A Megatron-LM set says where documents end. In an array each document ends with the end-of-text token, and belongs to
the part that it begins in, although it may reach into the next ones.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.pipeline.shards import Encoded
from scaletrain_cli.data.sources.formats import reader_of
from scaletrain_cli.data.sources.records import BadRecord, Part, TokenRecord
from scaletrain_cli.data.tokenizers.settings import TokenizerSettings
from scaletrain_cli.reasons import Reason

# No document may be longer: one is held in memory. A longer one is a file whose end-of-text token is another one.
MAX_DOCUMENT_TOKENS = 1 << 24
_NO_END = 1 << 62


def token_documents(part: Part, tokenizer: TokenizerSettings) -> Iterator[TokenRecord | BadRecord]:
    """Yield the documents that begin in a part. A document without tokens is left out. Raises OSError."""
    with_ends = part.file.kind == "megatron"
    records = reader_of(part.file).records(part) if with_ends else _from_array(part, tokenizer.end_of_text)
    for record in records:
        if isinstance(record, TokenRecord):
            end = tokenizer.end_of_text
            content = record.tokens[:-1] if len(record.tokens) and record.tokens[-1] == end else record.tokens
            if len(content):
                yield _checked(record, tokenizer)
        elif isinstance(record, BadRecord):
            yield record


def _checked(record: TokenRecord, tokenizer: TokenizerSettings) -> TokenRecord | BadRecord:
    low, high = int(record.tokens.min()), int(record.tokens.max())
    if low < 0 or high >= tokenizer.vocab_size:
        params = {"id": high if low >= 0 else low, "size": tokenizer.vocab_size}
        return BadRecord(record.place, Reason("sources.id-outside-vocabulary", params))
    return record


def _from_array(part: Part, end_of_text: int) -> Iterator[TokenRecord | BadRecord]:
    """Yield the documents of an array that begin in a part: at its start, or after an end-of-text token."""
    # The token before the part says if a document begins with the part.
    wider = replace(part, start=max(0, part.start - 1), stop=_NO_END)
    held: list[npt.NDArray[Any]] | None = [] if part.start == 0 else None  # None: no document has begun
    begins, length = 0, 0
    for record in reader_of(part.file).records(wider):
        if not isinstance(record, TokenRecord):
            yield from (record,) if isinstance(record, BadRecord) else ()
            return
        start = 0
        for end in np.flatnonzero(record.tokens == end_of_text).tolist():
            if held is not None:
                yield TokenRecord(begins, np.concatenate([*held, record.tokens[start : end + 1]]), True)
            start, held, length = end + 1, [], 0
            begins = record.place + start
            if begins >= part.stop:
                return
        if held is None:
            if record.place + len(record.tokens) >= part.stop:
                return
            continue
        held.append(record.tokens[start:])
        length += len(record.tokens) - start
        if length > MAX_DOCUMENT_TOKENS:
            params = {"tokens": MAX_DOCUMENT_TOKENS, "end_of_text": end_of_text}
            yield BadRecord(begins, Reason("sources.no-end-of-text", params))
            held = None
    if held:
        yield TokenRecord(begins, np.concatenate(held), True)


def encoded_before(records: Iterable[TokenRecord], tokenizer: TokenizerSettings) -> Iterator[Encoded]:
    """Yield the documents with the end-of-text token as their last one. Their tokens decide on their split."""
    end = tokenizer.end_of_text
    for record in records:
        tokens = record.tokens if record.tokens[-1] == end else np.append(record.tokens, end)
        yield Encoded(tokens.astype("<u4").tobytes(), tokens.astype(tokenizer.dtype), None)
