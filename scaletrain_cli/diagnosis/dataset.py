"""Figures of the prepared text that bear on the loss: length of an epoch, entropy of its tokens, repeated passages.

Read from the dataset in the runs root, as far as it is a local file: at most 2 MB of it, once per process.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from scaletrain_cli.rundir.datasets import datasets_file, read_entries, recorded_folders
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import open_to_read
from scaletrain_cli.spec import ModelSpec, RunSpec

_BLOCKS, _BLOCK_BYTES = 8, 1 << 18
_CODES = {"uint16": "H", "uint32": "I"}
_PASSAGES = 200
_PASSAGE_TOKENS = 32


@dataclass(frozen=True)
class Dataset:
    """The text of a run with one source. ``train_tokens``: of one epoch; ``dtype``: of a token in ``files``."""

    train_tokens: int
    dtype: str
    files: tuple[Path, ...]
    seal: str

    @cached_property
    def token_entropy(self) -> float | None:
        """The entropy of the token frequencies in nats: the least loss of a model that ignores the context.

        Of a sample of up to a million tokens, with the correction of Miller (1955) for its size; None for fewer than
        4,096 tokens, or without a readable file.
        """
        return _sampled(self.files, self.dtype, self.seal).entropy

    @cached_property
    def repeated_share(self) -> float | None:
        """The share of 200 passages of 32 tokens that occur again in the sample; None as above."""
        return _sampled(self.files, self.dtype, self.seal).repeated


@dataclass(frozen=True)
class _Sampled:
    entropy: float | None = None
    repeated: float | None = None


def read_dataset(run: RunDir, spec: RunSpec) -> Dataset | None:
    """Return the prepared text of a run; None for rows, images, several sources, and data that are not here."""
    if not isinstance(spec.model, ModelSpec) or spec.training.objective != "causal_lm" or spec.code.own_program:
        return None
    folders, _ = recorded_folders(spec, run.path.parent, read_entries(datasets_file(run)))
    if len(folders) != 1:
        return None
    (folder,) = folders.values()
    found = read_document(folder / "dataset.json") or {}
    tokens, tokenizer = found.get("train_tokens"), found.get("tokenizer")
    dtype = tokenizer.get("dtype") if isinstance(tokenizer, dict) else None
    if not isinstance(tokens, int) or dtype not in _CODES:
        return None
    return Dataset(tokens, dtype, tuple(sorted(folder.glob("[0-9]*/train.bin"))), str(found.get("seal")))


@lru_cache(maxsize=16)
def _sampled(files: tuple[Path, ...], dtype: str, seal: str) -> _Sampled:
    """Return the figures of a sample. ``seal`` tells the contents of the files apart."""
    try:
        blocks = _read_blocks(files)
    except OSError:
        return _Sampled()
    width = array(_CODES[dtype]).itemsize
    data = b"".join(block[: len(block) // width * width] for block in blocks)
    tokens = array(_CODES[dtype], data)
    if len(tokens) < 4096:
        return _Sampled()
    counts = Counter(tokens)
    plain = math.log(len(tokens)) - math.fsum(n * math.log(n) for n in counts.values()) / len(tokens)
    chance, length = random.Random(0), _PASSAGE_TOKENS * width
    places = [chance.randrange(len(tokens) - _PASSAGE_TOKENS) * width for _ in range(_PASSAGES)]
    repeated = sum(_occurs_twice(data, data[at : at + length], width) for at in places)
    return _Sampled(plain + (len(counts) - 1) / (2 * len(tokens)), repeated / _PASSAGES)


def _occurs_twice(data: bytes, passage: bytes, width: int) -> bool:
    found, times = data.find(passage), 0
    while found >= 0:
        times += found % width == 0
        if times > 1:
            return True
        found = data.find(passage, found + 1)
    return False


def _read_blocks(files: tuple[Path, ...]) -> list[bytes]:
    """Return up to 8 blocks of 256 kB, at equal distances over all files. Raises OSError."""
    sizes = [path.stat().st_size for path in files]
    total = sum(sizes)
    if total <= _BLOCKS * _BLOCK_BYTES:
        places = [(path, 0, size) for path, size in zip(files, sizes, strict=True)]
    else:
        places = [_place_at(total * number // _BLOCKS // 8 * 8, files, sizes) for number in range(_BLOCKS)]
    blocks = []
    for path, start, count in places:
        with open_to_read(path) as file:
            file.seek(start)
            blocks.append(file.read(count))
    return blocks


def _place_at(at: int, files: tuple[Path, ...], sizes: list[int]) -> tuple[Path, int, int]:
    """Return the file of a byte, the offset there, and the size of a block."""
    for path, size in zip(files, sizes, strict=True):
        if at < size:
            return path, at // 8 * 8, _BLOCK_BYTES
        at -= size
    return files[-1], 0, _BLOCK_BYTES
