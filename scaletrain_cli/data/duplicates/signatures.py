"""Signatures of the documents of one task: hashes of the whole text, band keys and a sketch of the MinHash signature.

A document takes 44 + 8 x bands + bands x rows bytes: 364 with 20 bands of 8 rows.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.duplicates.corpus import Corpus, SectionWriter, Settings, Texts
from scaletrain_cli.data.duplicates.shingles import exact_hash, shingles_of, words_hash, words_of

U64 = npt.NDArray[np.uint64]

_SEED = 1
_SHINGLES_AT_ONCE = 1 << 20  # that MinHash is computed of at a time
_DOCUMENTS_AT_ONCE = 1024


def write_signatures(corpus: Corpus, task: int, texts: Texts) -> None:
    settings = corpus.settings
    columns = _columns(settings, texts(task))
    with SectionWriter(corpus.signatures(task)) as file:
        file.add("index", "<i8", columns["index"])
        file.add("exact", "<u8", columns["exact"])
        if settings.near:
            file.add("words", "<u8", columns["words"])
            file.add("shingles", "<u4", columns["shingles"])
            for band in range(settings.bands):
                file.add(band_section(band), "<u8", columns["keys"][:, band])
            file.add("sketch", "u1", columns["sketch"])


def band_section(band: int) -> str:
    return f"band {band}"


def minhash(shingles: list[U64], settings: Settings) -> npt.NDArray[np.uint32]:
    """Return the MinHash signatures of sets of shingles, shape (sets, bands x rows)."""
    from rensa import RMinHash

    offsets = np.cumsum([0, *map(len, shingles)], dtype=np.uint64)
    values = np.concatenate([*shingles, np.empty(0, np.uint64)])
    hashes = settings.bands * settings.rows
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(values, offsets, num_perm=hashes, seed=_SEED)
    return np.array(matrix.to_rows(), np.uint32).reshape(-1, hashes)


def band_keys(signatures: npt.NDArray[np.uint32], settings: Settings) -> U64:
    """Return a key of 64 bits for each band of each signature, shape (signatures, bands)."""
    rows = signatures.reshape(-1, settings.bands, settings.rows).astype(np.uint64)
    keys = np.full(rows.shape[:2], _SEED, np.uint64)
    for row in range(settings.rows):
        keys = (keys ^ rows[:, :, row]) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    return keys


def sketch_similarity(first: npt.NDArray[np.uint8], second: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Return the estimated Jaccard similarity of sketches; two different hashes agree in their low byte in 1 of 256."""
    agreeing = (first == second).mean(axis=-1)
    estimate: npt.NDArray[np.float64] = (agreeing - 1 / 256) / (1 - 1 / 256)
    return estimate


def _columns(settings: Settings, texts: Iterable[tuple[int, str]]) -> dict[str, npt.NDArray[Any]]:
    indices: list[int] = []
    exact, words_hashes = bytearray(), bytearray()
    counts: list[int] = []
    waiting: list[U64] = []
    waiting_shingles = 0
    keys: list[U64] = []
    sketches: list[npt.NDArray[np.uint8]] = []

    def compute() -> None:
        signatures = minhash(waiting, settings)
        keys.append(band_keys(signatures, settings))
        sketches.append(signatures.astype(np.uint8))
        waiting.clear()

    for index, text in texts:
        indices.append(index)
        exact += exact_hash(text)
        if not settings.near:
            continue
        words = words_of(text)
        shingles = shingles_of(words, settings.ngram)
        words_hashes += words_hash(words)
        counts.append(len(shingles))
        waiting.append(shingles)
        waiting_shingles += len(shingles)
        if waiting_shingles >= _SHINGLES_AT_ONCE or len(waiting) == _DOCUMENTS_AT_ONCE:
            compute()
            waiting_shingles = 0
    if settings.near:
        compute()
    hashes = settings.bands * settings.rows
    return {
        "index": np.array(indices, np.int64),
        "exact": np.frombuffer(bytes(exact), "<u8").reshape(-1, 2),
        "words": np.frombuffer(bytes(words_hashes), "<u8").reshape(-1, 2),
        "shingles": np.array(counts, np.uint32),
        "keys": np.concatenate([*keys, np.empty((0, settings.bands), np.uint64)]),
        "sketch": np.concatenate([*sketches, np.empty((0, hashes), np.uint8)]),
    }
