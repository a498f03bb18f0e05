"""Prepared text, opened as sequences of tokens, and what it has in common with prepared rows."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.block_cache import BlockCache
from scaletrain_cli.data.chunk_hashes import CorruptDataError
from scaletrain_cli.data.token_files import open_source
from scaletrain_cli.engine.data.sources import SourceSequences
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class DatasetInfo:
    """The contents of dataset.json of text and of rows.

    ``fingerprint``: SHA-256 of all tokens; ``seal``: of the hashes of all files and of the other fields.
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
    if not len(train):
        sizes = {"tokens": info.train_tokens, "length": train.seq_len}
        raise UsageError(Reason("engine.dataset-too-small", {"folder": str(folder), **sizes}))
    return info, train, validation


def seal_of(info: DatasetInfo, hashes: list[bytes]) -> str:
    """Return the SHA-256 of the other fields and of the ``hashes`` of the data files, those of train.bin first."""
    stated = {name: value for name, value in asdict(info).items() if name != "seal"}
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
