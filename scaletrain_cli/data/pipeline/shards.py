"""Tokens of one task on disk, in a folder that appears whole, and statistics of their documents."""

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.chunk_hashes import CorruptDataError, HashedFile
from scaletrain_cli.data.drafts import draft_of, folder_written_whole
from scaletrain_cli.data.tokenizers.files import tokens_before, with_start
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document, undamaged_as
from scaletrain_cli.safe_files import create_file, make_folder

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
        counts = self.lengths.setdefault(length_range(count), [0, 0])
        counts[0] += 1
        counts[1] += count
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
    return tokens - tokens % _range_width(tokens)


def length_range_end(least: int) -> int:
    """Return the largest length in a range, given its least one."""
    return least + _range_width(least) - 1


def _range_width(length: int) -> int:
    return max(1, (1 << length.bit_length()) // 4)  # half of the largest power of two up to it


SCHEMA = "scaletrain.dataset/v4"
SPLITS = ("train", "validation")
# Large enough for the tokenizer's own loop, small enough that a batch of long documents stays in memory.
_DOCUMENTS_PER_ENCODE = 256
_CHARACTERS_PER_ENCODE = 1 << 22
_INFO = "shard.json"
STATISTICS = "statistics.json"  # of the documents of a shard


@dataclass(frozen=True)
class ShardInfo:
    """The contents of shard.json: counts, and the SHA-256 of the hashes of the four files.

    ``bytes``: of the documents in UTF-8, without the tokens that end them; 0 for a source of tokens.
    """

    train_tokens: int
    train_documents: int
    validation_tokens: int
    validation_documents: int
    bytes: int
    digest: str


class Encoded(NamedTuple):
    """The tokens of a document with the one that ends it.

    ``content``: the bytes that decide on the split, those of the text. ``text``: None if only its tokens are known.
    """

    content: bytes
    tokens: npt.NDArray[Any]
    text: str | None


def split_of(content: bytes, validation_share: float) -> str:
    """Return the split of a document, which depends on its content alone, so that it never changes."""
    drawn = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64
    return SPLITS[drawn < validation_share]


def encoded(tokenizer: Any, texts: Iterable[str], end_of_text: int, dtype: str) -> Iterator[Encoded]:
    """Yield the tokens of texts, without what the tokenizer puts behind a text. Holds few documents at a time."""
    # without the offsets of tokens in the text, which are not used
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
    before = tokens_before(tokenizer)
    for batch in _batches(iter(texts)):
        for text, encoding in zip(batch, encode(batch, add_special_tokens=False), strict=True):
            ids = with_start(encoding.ids, before)
            ends = [] if ids[-1:] == [end_of_text] else [end_of_text]
            yield Encoded(text.encode(), np.array([*ids, *ends], dtype), text)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == _DOCUMENTS_PER_ENCODE or characters >= _CHARACTERS_PER_ENCODE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def write_shard(
    folder: Path, documents: Iterable[Encoded], validation_share: float, unknown: int | None = None
) -> None:
    """Write the tokens of documents as ``folder``, unless it is there. Raises OSError.

    Of each split there are two files with the hashes of their chunks: tokens, and the positions of the last token of
    each document (int64). ``unknown``: the token for text that the tokenizer has no tokens for, if there is one.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent, parents=True)
    with folder_written_whole(folder) as draft:
        statistics = Statistics(unknown)
        info = _write(draft, documents, validation_share, statistics)
        create_file(draft / STATISTICS, json.dumps(statistics.to_json()))
        create_file(draft / _INFO, json.dumps(asdict(info), sort_keys=True))


def _write(folder: Path, documents: Iterable[Encoded], validation_share: float, statistics: Statistics) -> ShardInfo:
    tokens, count, size = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0), 0
    with ExitStack() as opened:
        files = {split: opened.enter_context(HashedFile(folder / f"{split}.bin")) for split in SPLITS}
        ends = {split: opened.enter_context(HashedFile(folder / f"{split}.ends.bin")) for split in SPLITS}
        for document in documents:
            split = split_of(document.content, validation_share)
            text_bytes = b"" if document.text is None else document.content
            statistics.add(document.text or "", text_bytes, document.tokens)
            files[split].write(document.tokens.tobytes())
            tokens[split] += len(document.tokens)
            count[split] += 1
            size += len(text_bytes)
            ends[split].write(np.int64(tokens[split] - 1).tobytes())
        digest = hashlib.sha256()
        for split in SPLITS:
            for file in (files[split], ends[split]):
                digest.update(hashlib.sha256(file.finish()).digest())
    return ShardInfo(
        train_tokens=tokens["train"],
        train_documents=count["train"],
        validation_tokens=tokens["validation"],
        validation_documents=count["validation"],
        bytes=size,
        digest=digest.hexdigest(),
    )


def shard_folder(dataset: Path, number: int) -> Path:
    return dataset / f"{number:06d}"


def seal_of(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all values of a dataset.json but the seal itself."""
    stated = {name: value for name, value in document.items() if name != "seal"}
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


def read_description(dataset: Path, schema: str) -> dict[str, Any]:
    """Return dataset.json. Raises UsageError for one of another schema or none, CorruptDataError if it has changed."""
    document = read_document(dataset / "dataset.json")
    if document is None or document.get("schema") != schema:
        params = {"folder": str(dataset), "schema": str((document or {}).get("schema")), "expected": schema}
        raise UsageError(Reason("engine.dataset-schema-unknown", params))
    if document.get("seal") != seal_of(document):
        raise CorruptDataError(dataset / "dataset.json", "it has changed since it was written")
    return document


def read_shard_info(folder: Path) -> ShardInfo | None:
    """Return what a shard has; None if it was not written yet."""
    return undamaged_as(ShardInfo, folder / _INFO)


def remove_damaged_shard(folder: Path) -> bool:
    """Return whether a shard is missing, after removing what has no valid shard.json, as a crash of a machine leaves.

    Raises OSError.
    """
    if read_shard_info(folder) is not None:
        return False
    if folder.is_dir():
        draft = draft_of(folder)
        folder.rename(draft)  # at once, as other processes look for it
        shutil.rmtree(draft)
    return True
