"""Prepared text: opened as sequences of tokens, whichever version has prepared it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.block_cache import BlockCache
from scaletrain_cli.data.chunk_hashes import CheckedFile, CorruptDataError
from scaletrain_cli.data.token_files import open_source
from scaletrain_cli.engine.data.sources import SourceSequences, TextSequences
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason

_SCHEMA = "scaletrain.dataset/v3"  # as rows: one file for each split
_WITHOUT_HASHES = "scaletrain.dataset/v2"  # written by earlier versions; opened without verification
SPLITS = ("train", "validation")
DTYPES = ("uint16", "uint32")


@dataclass(frozen=True)
class DatasetInfo:
    """The contents of dataset.json. ``fingerprint`` is the SHA-256 of all tokens.

    Beside ``train.bin`` and ``validation.bin`` are ``train.ends.bin`` and ``validation.ends.bin`` with the positions of
    document ends, as int64. Each of the four has the hashes of its chunks in a ``.blake2b`` file; ``seal`` is the
    SHA-256 of these files and of the other fields.
    """

    schema: str
    fingerprint: str
    dtype: str
    vocab_size: int
    documents: int
    train_tokens: int
    validation_tokens: int
    train_documents: int
    validation_documents: int
    replaced: int = 0  # bytes of the text that are not UTF-8, each replaced by U+FFFD
    seal: str = ""

    @property
    def is_verified(self) -> bool:
        """True if the dataset has hashes; datasets of earlier versions have none."""
        return self.schema != _WITHOUT_HASHES


@dataclass(frozen=True)
class TokenSequences(TextSequences):
    """Non-overlapping sequences of ``seq_len`` tokens and their successors, from one token file.

    ``document_ends``: ascending indices into ``tokens`` of the last token of each document. ``file``, ``ends_file``:
    compare the two files with their hashes.
    """

    tokens: npt.NDArray[np.unsignedinteger]
    seq_len: int
    document_ends: npt.NDArray[np.int64]
    file: CheckedFile | None = None
    ends_file: CheckedFile | None = None
    first: int = 0
    count: int | None = None  # number of sequences from ``first`` on; None for all

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len - self.first) if self.count is None else self.count

    def part(self, first: int, count: int) -> TokenSequences:
        return replace(self, first=self.first + first, count=count)

    def rows(self, indices: list[int]) -> npt.NDArray[np.int64]:
        starts = [(self.first + index) * self.seq_len for index in indices]
        if self.file is not None:
            width = self.tokens.itemsize
            for start in starts:
                self.file.check(start * width, (start + self.seq_len + 1) * width)
        return np.stack([self.tokens[start : start + self.seq_len + 1] for start in starts]).astype(np.int64)

    def document_ends_within(self, first: int, last: int) -> npt.NDArray[np.int64]:
        start, stop = ((self.first + index) * self.seq_len for index in (first, last))
        low, high = np.searchsorted(self.document_ends, (start, stop))
        return self.document_ends[low:high] - start


def open_source_dataset(
    folder: Path, seq_len: int, rank: int = 0, ranks: int = 1, cache: BlockCache | None = None
) -> tuple[DatasetInfo, SourceSequences, SourceSequences]:
    """Return info, training sequences and validation sequences of a source that was prepared in shards.

    Compares this rank's share of the shards with dataset.json; tokens and document ends are compared with their hashes
    when they are first read. Those of a remote dataset are read through ``cache``; None: one of the default size.

    Raises UsageError, and CorruptDataError if a file has changed since it was written.
    """
    document, splits = open_source(folder, rank, ranks, cache)
    try:
        info = DatasetInfo(
            schema=document["schema"],
            fingerprint=document["fingerprint"],
            dtype=document["tokenizer"]["dtype"],
            vocab_size=document["tokenizer"]["vocab_size"],
            documents=document["train_documents"] + document["validation_documents"],
            train_tokens=document["train_tokens"],
            validation_tokens=document["validation_tokens"],
            train_documents=document["train_documents"],
            validation_documents=document["validation_documents"],
            seal=document.get("seal", ""),
        )
    except (KeyError, TypeError) as error:
        raise CorruptDataError(folder / "dataset.json", f"it lacks a value: {error}") from error
    train, validation = (SourceSequences(splits[split], seq_len) for split in SPLITS)
    _require_a_sequence(folder, info, train)
    return info, train, validation


def open_dataset(
    folder: Path, seq_len: int, rank: int = 0, ranks: int = 1
) -> tuple[DatasetInfo, TokenSequences, TokenSequences]:
    """Return info, training sequences and validation sequences of a dataset in one file for each split.

    Compares this rank's share of the document ends with their hashes; tokens are compared when they are first read.
    Raises UsageError, and CorruptDataError if a file has changed since it was written.
    """
    try:
        info = DatasetInfo(**json.loads((folder / "dataset.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(Reason("engine.not-a-dataset", {"folder": str(folder), "error": str(error)})) from error
    if info.schema not in (_SCHEMA, _WITHOUT_HASHES):
        params = {"folder": str(folder), "schema": info.schema, "expected": _SCHEMA}
        raise UsageError(Reason("engine.dataset-schema-unknown", params))
    known = {"str": str, "int": int}
    wrong = [field.name for field in fields(info) if type(getattr(info, field.name)) is not known[str(field.type)]]
    if wrong or info.dtype not in DTYPES:
        raise CorruptDataError(
            folder / "dataset.json", f"{', '.join(wrong) or 'dtype'} has a value that is not allowed"
        )
    train, validation = (_sequences(folder, split, info, seq_len) for split in SPLITS)
    if info.is_verified:
        checked = [part for each in (train, validation) for part in (each.file, each.ends_file) if part is not None]
        if info.seal != seal_of(info, [part.hashes for part in checked]):
            raise CorruptDataError(folder / "dataset.json", "it does not match the hashes beside it")
        for each in (train, validation):
            if each.ends_file is not None:
                each.ends_file.check_share(rank, ranks)
    _require_a_sequence(folder, info, train)
    return info, train, validation


def _require_a_sequence(folder: Path, info: DatasetInfo, train: TextSequences) -> None:
    if not len(train):
        sizes = {"tokens": info.train_tokens, "length": train.seq_len}
        raise UsageError(Reason("engine.dataset-too-small", {"folder": str(folder), **sizes}))


def _sequences(folder: Path, split: str, info: DatasetInfo, seq_len: int) -> TokenSequences:
    tokens, documents = (getattr(info, f"{split}_{name}") for name in ("tokens", "documents"))
    paths = folder / f"{split}.bin", folder / f"{split}.ends.bin"
    mapped = map_numbers(paths[0], info.dtype, tokens), map_numbers(paths[1], "int64", documents)
    if not info.is_verified:
        return TokenSequences(mapped[0], seq_len, mapped[1])
    files = [CheckedFile(path, content.view(np.uint8)) for path, content in zip(paths, mapped, strict=True)]
    return TokenSequences(mapped[0], seq_len, mapped[1], files[0], files[1])


_LATER_FIELDS = {"loss_on", "truncation", "chat_template", "fields", "image_token", "tokens_per_image"} | {
    *("image_folder", "rows_with_bad_images", "bad_images"),
    *(f"{split}_{name}" for split in SPLITS for name in ("images", "image_bytes", "image_place_bytes", "image_uses")),
}


def seal_of(info: DatasetInfo, hashes: list[bytes]) -> str:
    """Return the SHA-256 of the other fields and of the ``hashes`` of the four data files, those of train.bin first.

    Fields that earlier versions did not write, and that are empty for them, do not count.
    """
    stated = {
        name: value for name, value in asdict(info).items() if name != "seal" and (value or name not in _LATER_FIELDS)
    }
    digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode())
    for each in hashes:
        digest.update(hashlib.sha256(each).digest())
    return digest.hexdigest()


def map_numbers(path: Path, dtype: str, count: int) -> npt.NDArray[Any]:
    """Return the numbers in a file, memory-mapped unless it is empty. Raises CorruptDataError."""
    expected = count * np.dtype(dtype).itemsize
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CorruptDataError(path, str(error.strerror)) from error
    if size != expected:
        raise CorruptDataError(path, f"{size} bytes instead of the {expected} that dataset.json states")
    return np.memmap(path, dtype=dtype, mode="r") if count else np.empty(0, dtype=dtype)


def draw(text: str) -> float:
    """Return a number in [0, 1) that depends on the document alone, so that its split never changes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
