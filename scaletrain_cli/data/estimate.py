"""Estimates of data that are not prepared: tokens of each source by a sample of its files, epochs, preparation time.

Once the data are prepared, the counts of tokens and sequences are exact.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from scaletrain_cli.data.sources.formats import FILES_READ, Beginning, read_beginning
from scaletrain_cli.data.sources.listing import source_files
from scaletrain_cli.data.sources.records import Columns, Record, SourceFile, TokenRecord
from scaletrain_cli.data.sources.stores import is_remote
from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import DataSpec, RunSpec
from scaletrain_cli.spec.corpus_files import EMBEDDED
from scaletrain_cli.spec.sources import SourceSpec

_REMOTE_FILES_READ = 2  # of each format
_REMOTE_SECONDS = 5.0
_MOST_CHARACTERS = 1 << 20  # of a source that are tokenized
# Characters of text per token of byte-level BPE tokenizers by the size of their vocabulary: measured on held-out
# English and Python, for the largest the order of magnitude of Llama 3's on English.
_CHARACTERS_PER_TOKEN = {1024: 2.3, 4096: 2.9, 16384: 3.5, 32768: 3.8, 131072: 4.3}
_USUAL_VOCABULARY = {"sentencepiece": 32768, "tiktoken": 131072, "file": 131072}  # where the file is not read
# Bytes of text per second that one process takes through a step: measured on one core with documents of 4 KB.
_TOKENIZED_PER_SECOND = 1.6e6
_STEP_PER_SECOND = {
    "normalization": 12e6,
    "language": 7e6,
    "quality": 13e6,
    "score": 100e6,
    "duplicates": 10e6,  # reads the documents twice
    "contamination": 12e6,
    "identifiers": 20e6,
}
# Bytes of files per second that one process hashes: measured on one core with files in memory.
_HASHED_PER_SECOND = 1.0e9
# A tokenizer is trained in one process on this many characters at most.
_TRAINED_PER_SECOND, _MOST_TRAINED_ON = 3.5e6, 500e6


@dataclass(frozen=True)
class SourceSize:
    """The size of a source. ``tokens``: to train on, without those for validation. ``exact``: counted, not estimated.

    ``text_bytes``: of its documents, 0 if it is prepared; ``stored_bytes``, ``files``: as stored.
    """

    name: str
    tokens: int
    exact: bool
    files: int = 0
    stored_bytes: int = 0
    text_bytes: int = 0

    def sequences(self, seq_len: int) -> int:
        """Return the number of training sequences, each of ``seq_len`` tokens and the one after them."""
        return max(0, self.tokens - 1) // seq_len


def source_sizes(
    data: DataSpec, runs_root: Path, folder: Path = Path(), files: Mapping[str, Sequence[SourceFile]] | None = None
) -> dict[str, SourceSize]:
    """Return the size of each source of text by its name; sources that cannot be read here are left out.

    ``files``: those of sources that the caller has listed; others are then left out, unless they are prepared or part
    of this program. Reads at most the beginnings of a few files of each source.
    Steps of ``data.prepare`` that remove text are not taken into account. Raises nothing.
    """
    prepared = _prepared(data, runs_root, folder)
    tokenizer = _Tokenizer(data, folder)
    sizes = {}
    for section, (key, path) in zip(data.all_sources, data.paths(), strict=True):
        dataset = prepared.get(section.name) or folder / expand_home(path)
        try:
            if is_remote(path):
                from scaletrain_cli.data.remote_datasets import remote_description  # loads numpy

                document = remote_description(path, _REMOTE_SECONDS)
            else:
                document = read_document(dataset / "dataset.json")
            tokens = None if document is None else document.get("train_tokens")
            size = None
            if isinstance(tokens, int) and tokens >= 0:
                size = SourceSize(section.name, tokens, exact=True)
            if size is None and not is_reference(path):
                if files is None or path in EMBEDDED:
                    listed: Sequence[SourceFile] = source_files(section, folder, key, _REMOTE_SECONDS)
                else:
                    listed = files.get(section.name, ())
                size = _estimated_size(section, listed, tokenizer, data.validation_split)
        except (ScaletrainError, OSError, ValueError):
            continue  # the checks before a run state what is wrong
        if size is not None:
            sizes[section.name] = size
    return sizes


def preparation_seconds(spec: RunSpec, runs_root: Path, folder: Path = Path(), workers: int = 0) -> float | None:
    """Return about how long ``workers`` processes (0: one for each CPU core) take to prepare the text of a run.

    0 if it is prepared; None if a source cannot be read here.
    """
    sizes = source_sizes(spec.data, runs_root, folder)
    if len(sizes) < len(spec.data.all_sources):
        return None
    return seconds_to_prepare(spec.data, sizes, workers or len(os.sched_getaffinity(0)))


def seconds_to_prepare(data: DataSpec, sizes: Mapping[str, SourceSize], workers: int) -> float:
    """Return about how long ``workers`` processes take to prepare sources of these sizes."""
    total = 0.0
    not_hashed = {section.name for section in data.all_sources if is_remote(section.path)}
    for name, size in sizes.items():
        steps = (step.step for step in data.prepare if step.only is None or name in step.only)
        per_byte = 1 / _TOKENIZED_PER_SECOND + sum(1 / _STEP_PER_SECOND[step] for step in steps)
        hashed = 0 if name in not_hashed else size.stored_bytes
        total += size.text_bytes * per_byte + hashed / _HASHED_PER_SECOND
    text = sum(size.text_bytes for size in sizes.values())
    trains = data.tokenizer.path is None and text > 0
    return total / workers + (min(text, _MOST_TRAINED_ON) / _TRAINED_PER_SECOND if trains else 0.0)


def _prepared(data: DataSpec, runs_root: Path, folder: Path) -> Mapping[str, Path]:
    """Return the datasets that are there. Remote sources are not asked for: their listing may take long."""
    if any(is_remote(path) or is_reference(path) for _, path in data.paths()) or not (runs_root / "datasets").is_dir():
        return {}
    from scaletrain_cli.data.prepared import find_prepared  # loads all of the preparation

    try:
        return find_prepared(data, runs_root, folder) or {}
    except (ScaletrainError, OSError):
        return {}


def _estimated_size(
    section: SourceSpec, files: Sequence[SourceFile], tokenizer: "_Tokenizer", validation_share: float
) -> SourceSize | None:
    """Return the size of files, as if all of a format were like the beginnings of some. None if those show nothing."""
    tokens = text = 0.0
    groups: dict[tuple[str, str], list[SourceFile]] = {}
    for file in files:
        groups.setdefault((file.kind, file.compression), []).append(file)
    most = _REMOTE_FILES_READ if is_remote(section.path) else FILES_READ
    for group in groups.values():
        sample = _sample(group[:: math.ceil(len(group) / most)], Columns(section.field), tokenizer)
        if sample is None:
            return None
        tokens_read, text_read, stored = sample
        times = sum(file.size for file in group) / stored
        tokens += times * tokens_read
        text += times * text_read
    size = sum(file.size for file in files)
    if not files:
        return None
    return SourceSize(section.name, round(tokens * (1 - validation_share)), False, len(files), size, round(text))


def _sample(
    files: Sequence[SourceFile], columns: Columns, tokenizer: "_Tokenizer"
) -> tuple[float, float, float] | None:
    """Return tokens, bytes of text and stored bytes of the beginnings of files of one format; None if not known."""
    tokens = text = stored = 0.0
    for file in files:
        beginning = read_beginning(file, columns)
        if (used := _stored_bytes(file, beginning)) is None:
            continue
        documents = [record.text for record in beginning.documents if isinstance(record, Record)]
        ids = sum(len(record.tokens) for record in beginning.documents if isinstance(record, TokenRecord))
        tokens += ids or tokenizer.count(documents)
        text += sum(len(document.encode()) for document in documents)
        stored += used
    return (tokens, text, stored) if stored else None


def _stored_bytes(file: SourceFile, beginning: Beginning) -> float | None:
    """Return the bytes of a file that hold the documents of its beginning; None if that is not known."""
    if beginning.share:
        return beginning.share * file.size
    records = beginning.documents
    if not records:
        return None
    if isinstance(records[0], TokenRecord):
        return float(sum(record.tokens.nbytes for record in records if isinstance(record, TokenRecord)))
    if file.kind == "parquet" and not is_remote(file.path):
        from scaletrain_cli.extras import require

        if rows := int(require("pyarrow.parquet", "parquet").read_metadata(file.path).num_rows):
            return file.size * len(records) / rows
    return float(sum(len(record.text.encode()) for record in records if isinstance(record, Record)))


class _Tokenizer:
    """Counts tokens: with the tokenizer of the spec if it is a tokenizer.json, else by characters per token."""

    def __init__(self, data: DataSpec, folder: Path) -> None:
        self._settings, self._folder = data.tokenizer, folder
        self._loaded: Any = None

    def count(self, texts: Sequence[str]) -> float:
        """Return the number of tokens of texts, with one at the end of each."""
        characters = sum(map(len, texts))
        path = self._settings.path
        if self._settings.kind != "file" or path is None or is_reference(path):
            vocab_size = _USUAL_VOCABULARY.get(self._settings.kind, self._settings.vocab_size)
            return characters / characters_per_token(vocab_size) + len(texts)
        if self._loaded is None:
            from scaletrain_cli.data.tokenizers.files import load_tokenizer, tokens_before

            self._loaded = load_tokenizer(str(self._folder / expand_home(path)), self._settings.tokenizer_class)
            self._before = len(tokens_before(self._loaded))
        encoded = taken = 0
        for text in texts:
            part = text[: _MOST_CHARACTERS - taken]
            encoded += self._before + len(self._loaded.encode(part, add_special_tokens=False).ids)
            taken += len(part)
            if taken >= _MOST_CHARACTERS:
                break
        return encoded * characters / max(1, taken) + len(texts)


def characters_per_token(vocab_size: int) -> float:
    """Return the usual number of characters per token, between the measured sizes by their logarithms."""
    known = sorted(_CHARACTERS_PER_TOKEN.items())
    if vocab_size <= known[0][0]:
        return known[0][1]
    for (low, fewer), (high, more) in pairwise(known):
        if vocab_size <= high:
            return fewer + (more - fewer) * math.log(vocab_size / low) / math.log(high / low)
    return known[-1][1]
