"""Tokens of one task on disk, in a folder that appears whole."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.chunk_hashes import CorruptDataError, HashedFile
from scaletrain_cli.data.drafts import draft_of
from scaletrain_cli.data.pipeline.statistics import Statistics
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.safe_files import create_file, make_folder

SCHEMA = "scaletrain.dataset/v4"
SPLITS = ("train", "validation")
# Large enough for the tokenizer's own loop, small enough that a batch of long documents stays in memory.
_DOCUMENTS_PER_ENCODE = 256
_CHARACTERS_PER_ENCODE = 1 << 22
_INFO = "shard.json"
_STATISTICS = "statistics.json"


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
    """Yield the tokens of texts. Holds few documents at a time."""
    # without the offsets of tokens in the text, which are not used
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
    for batch in _batches(iter(texts)):
        for text, found in zip(batch, encode(batch), strict=True):
            yield Encoded(text.encode(), np.array([*found.ids, end_of_text], dtype), text)


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
    draft = draft_of(folder)
    make_folder(draft, exist_ok=False)
    try:
        statistics = Statistics(unknown)
        info = _write(draft, documents, validation_share, statistics)
        create_file(draft / _STATISTICS, json.dumps(statistics.to_json()))
        create_file(draft / _INFO, json.dumps(asdict(info), sort_keys=True))
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same bytes
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(folder: Path, documents: Iterable[Encoded], validation_share: float, statistics: Statistics) -> ShardInfo:
    tokens, count, size = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0), 0
    with ExitStack() as opened:
        files = {split: opened.enter_context(HashedFile(folder / f"{split}.bin")) for split in SPLITS}
        ends = {split: opened.enter_context(HashedFile(folder / f"{split}.ends.bin")) for split in SPLITS}
        for each in documents:
            split = split_of(each.content, validation_share)
            text_bytes = b"" if each.text is None else each.content
            statistics.add(each.text or "", text_bytes, each.tokens)
            files[split].write(each.tokens.tobytes())
            tokens[split] += len(each.tokens)
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
    """Return the folder with the tokens of a task, by the number of the task."""
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
    try:
        return ShardInfo(**json.loads((folder / _INFO).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


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


def read_statistics(folder: Path) -> dict[str, Any] | None:
    """Return the statistics of the documents of a shard; None if there are none."""
    try:
        found = json.loads((folder / _STATISTICS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
