"""Number of samples and tokens of the training data, from files that this machine can read; exact once prepared.

Uses the standard library only, and reads at most the beginning of a few files.
"""

import json
import math
import os
import stat
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.safe_files import expand_home, open_to_read
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.corpus_files import EMBEDDED, ROW_FORMATS, NoCorpusError, find_files, kind_of
from scaletrain_cli.spec.shared_paths import parent_of_glob

# Characters of English text per token of the tokenizers of Llama 3, Qwen and GPT-4, by order of magnitude.
_CHARACTERS_PER_TOKEN = 4
_FILES_READ = 8
_BYTES_READ = 1 << 18  # of each of these files
_FEWEST_ROWS = 8  # of an estimate
_LARGEST_COUNT = 1 << 62
ENOUGH_TO_VALIDATE = 16  # samples of one source of several, in every layout


class DataSize(NamedTuple):
    """``train`` and ``validation``: samples (sequences, or pairs of ``dpo``); ``tokens``: of the training samples.

    ``exact``: counted when the data were prepared; otherwise estimated from the size of the files and their first rows.
    ``rows``: of both splits, where sequences may hold several; else 0.
    """

    train: int
    validation: int
    tokens: int
    exact: bool
    rows: int = 0


def data_size(spec: RunSpec) -> DataSize | None:
    """Return the size of ``data.source``; None if it cannot be known here without preparing the data.

    That is so for text that is not prepared, embedded data, the hub, compressed or binary files of rows, rows of which
    the beginnings of the files show too few, and files that this machine has not or may have in other versions.
    """
    if spec.counted_data is not None:
        return DataSize(*spec.counted_data)
    source = spec.data.source
    if source is None or spec.code.own_program or spec.unit != "tokens" or source in EMBEDDED or is_reference(source):
        return None
    try:
        if not is_seen(spec, source):
            return None
        status = os.stat((spec.folder / expand_home(source)).absolute())
        stamp = (status.st_mtime_ns, status.st_size)
    except (OSError, ValueError):
        stamp = (0, 0)  # a glob, or nothing
    data, model = spec.data, spec.transformer
    folder = spec.folder.absolute()
    return _data_size(
        source, folder, spec.training.objective, model.seq_len, data.packing != "none", data.validation_split, stamp
    )


def pair_count(spec: RunSpec) -> tuple[int, bool] | None:
    """Return the preference pairs of all sources and both splits, and True if they were counted; None as data_size."""
    sizes = [data_size(alone) for alone in spec.of_sources().values()]
    counted = [size for size in sizes if size is not None]
    if len(counted) < len(sizes):
        return None
    return sum(size.train + size.validation for size in counted), all(size.exact for size in counted)


def is_seen(spec: RunSpec, source: str) -> bool:
    """Return whether the ranks are assumed to read the files that this machine has at the path."""
    traits = spec.cluster.traits
    if traits.runs_here:
        return True
    seen = parent_of_glob(source)
    return traits.shared_run_directory and not spec.cluster.section.unseen_place(spec.folder, seen)


def validation_from_training(train: int, validation: int, global_batch_size: int, width: int | None) -> int:
    """Return how many samples for training a new run validates on, because its validation split is too small.

    0 if that is large enough, -1 if both are too small. ``train``, ``validation``: samples of the splits. ``width``: in
    a micro-batch of all replicas, which a single source must fill; None for one of several sources, of which the number
    is the same in every layout.
    """
    # Enough for one round in every layout of this batch size, unless that is more than a tenth of the data.
    count = global_batch_size
    if train < 10 * global_batch_size:
        count = min(global_batch_size, max(width or 1, train // 20))
    if validation >= (min(count, ENOUGH_TO_VALIDATE) if width is None else width):
        return 0
    return -1 if count < (width or 1) or train < 2 * count else count


@lru_cache(maxsize=32)
def _data_size(
    source: str, folder: Path, objective: str, seq_len: int, packed: bool, split: float, stamp: tuple[int, int]
) -> DataSize | None:
    try:
        prepared = folder / expand_home(source) / "dataset.json"
        if prepared.is_file():
            with open_to_read(prepared) as file:
                return prepared_size(json.loads(file.read()), objective, seq_len)
        if objective == "causal_lm":
            return None
        return _of_rows(find_files(source, folder, ROW_FORMATS).files, objective, seq_len, packed, split)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, NoCorpusError):
        return None  # the checks of submit and validate state what is wrong


def prepared_size(info: Mapping[str, Any], objective: str, seq_len: int) -> DataSize:
    """Return the size of prepared data of text, rows or images from their dataset.json. Raises KeyError and ValueError.

    ``seq_len``: of the sequences of text.
    """
    if "train_samples" in info:  # images
        return DataSize(_count(info["train_samples"]), _count(info["validation_samples"]), 0, True)
    tokens, other = _count(info["train_tokens"]), _count(info["validation_tokens"])
    if objective == "causal_lm":
        return DataSize(max(0, tokens - 1) // seq_len, max(0, other - 1) // seq_len, tokens, True)
    width, rows = 2 if objective == "dpo" else 1, 0
    if info.get("packing", "none") != "none":
        left_out = ("rows_without_target", "rows_too_long", "rows_unusable", "rows_with_bad_images")
        rows = _count(info["rows_read"]) - sum(_count(info.get(name, 0)) for name in left_out)
    return DataSize(_count(info["train_rows"]) // width, _count(info["validation_rows"]) // width, tokens, True, rows)


def _count(value: Any) -> int:
    """Return the value if it is a count. Raises ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST_COUNT:
        raise ValueError(f"not a count: {value!r}")
    return value


def _of_rows(files: tuple[Path, ...], objective: str, seq_len: int, packed: bool, split: float) -> DataSize | None:
    """Return the size of rows that are not prepared, as if all rows were like the first ones of some files.

    None if the beginnings show too little: fewer than _FEWEST_ROWS whole rows, or a cut row in most of what was read.
    """
    if any(kind_of(path) != "jsonl" or path.suffix != ".jsonl" for path in files):
        return None
    size = sum(_size_of_regular(path) for path in files)
    sample = files[:: math.ceil(len(files) / _FILES_READ)]
    read = cut = rows = characters = 0
    for path in sample:
        with open_to_read(path) as file:
            beginning = file.read(_BYTES_READ)
            is_whole = len(beginning) == os.fstat(file.fileno()).st_size
        lines = beginning.splitlines(keepends=True)
        if not is_whole and lines:
            cut += len(lines.pop())
        read += sum(map(len, lines))
        rows += sum(bool(line.strip()) for line in lines)
        characters += sum(_characters(json.loads(line)) for line in lines if line.strip())
    if not rows or (read < size and (cut > read or rows < _FEWEST_ROWS)):
        return None
    total = size / read
    whole = round(rows * total)
    tokens = math.ceil(characters * total / _CHARACTERS_PER_TOKEN)
    if not packed:  # longer rows are truncated
        tokens = min(tokens, whole * seq_len * (2 if objective == "dpo" else 1))
    train = max(1, round(whole * (1 - split)))
    tokens = round(tokens * (1 - split))
    if packed:
        train = math.ceil(tokens / seq_len)
    return DataSize(train, round(train * split / (1 - split)) if split < 1 else 0, tokens, False)


def _size_of_regular(path: Path) -> int:
    """Return the size of a file. Raises ValueError for a FIFO or device, and OSError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"not a regular file: {path}")
    return status.st_size


def _characters(value: Any) -> int:
    """Return the number of characters of all texts in a row."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0
