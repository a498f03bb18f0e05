"""Signatures of the documents of one task: hashes of the whole text, band keys and a sketch of the MinHash signature.

Words are those of the text in NFKD and lower case: marks without a width of their own and format characters are left
out, each run of decimal digits becomes one 0, and punctuation, symbols and white space separate words. A character of
a script that writes no spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese) is a word of its own. A shingle is n words
in a row; it is kept as 64 bits.

A document takes 44 + 8 x bands + bands x rows bytes: 364 with 20 bands of 8 rows.
"""

import hashlib
import sys
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrain_cli.data.duplicates.corpus import Corpus, SectionWriter, Texts
from scaletrain_cli.data.steps.normalization import stream_safe
from scaletrain_cli.spec.preparation import DuplicatesSpec

U64 = npt.NDArray[np.uint64]

HASH_BYTES = 16
# A text is read in blocks, so that one of a gigabyte needs no temporary arrays of many gigabytes.
_BLOCK_CHARACTERS = 1 << 20

_SEPARATOR, _LETTER, _LEFT_OUT, _DIGIT, _OWN_WORD = range(5)
_ZERO = ord("0")
_WITHOUT_SPACES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),  # Chinese characters
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that powers of it never vanish modulo 2**64


def exact_hash(text: str) -> bytes:
    """Return 128 bits of a text (BLAKE2b): equal for texts that differ in white space and Unicode composition alone."""
    composed = text if text.isascii() else unicodedata.normalize("NFC", stream_safe(text))
    data = " ".join(composed.split()).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


def words_hash(words: U64) -> bytes:
    """Return 128 bits of the words of a text (BLAKE2b); equal words mean equal shingles."""
    return hashlib.blake2b(words.astype("<u8").tobytes(), digest_size=HASH_BYTES).digest()


def words_of(text: str) -> U64:
    """Return the words of a text in order, each as a hash of 64 bits."""
    if len(text) <= _BLOCK_CHARACTERS:
        return _block_words(text)
    parts, start = [], 0
    while start < len(text):
        end = start + _BLOCK_CHARACTERS
        while end < len(text) and end < start + 2 * _BLOCK_CHARACTERS and not text[end].isspace():
            end += 1
        parts.append(_block_words(text[start:end]))
        start = end
    return np.concatenate(parts)


def shingles_of(words: U64, ngram: int) -> U64:
    """Return the different shingles of ``ngram`` words, sorted; none if the text has fewer words."""
    count = len(words) - ngram + 1
    if count < 1:
        return np.empty(0, np.uint64)
    total = np.zeros(count, np.uint64)
    for offset, power in enumerate(_powers(ngram)[:ngram].tolist()):
        total += words[offset : offset + count] * np.uint64(power)
    shingles = np.sort(_mixed(total))
    different: U64 = shingles[np.append(True, shingles[1:] != shingles[:-1])]  # faster than np.unique()
    return different


def similarity_of(first: U64, second: U64) -> tuple[int, int]:
    """Return how many shingles two sorted sets have in common, and how many they have together."""
    if len(first) > len(second):
        first, second = second, first
    if not len(first):
        return 0, len(second)
    places = np.minimum(np.searchsorted(second, first), len(second) - 1)
    common = int(np.count_nonzero(second[places] == first))
    return common, len(first) + len(second) - common


def _block_words(text: str) -> U64:
    if text.isascii():
        codes = np.frombuffer(text.lower().encode("ascii"), np.uint8)
    else:
        codes = np.frombuffer(
            unicodedata.normalize("NFKD", stream_safe(text)).lower().encode("utf-32-le", "surrogatepass"),
            np.dtype("<u4"),
        )
    kinds = _kinds(text.isascii())[codes]
    present = kinds != _LEFT_OUT
    if not present.all():
        codes, kinds = codes[present], kinds[present]
    digits = kinds == _DIGIT
    if digits.any():
        first = digits.copy()
        first[1:] &= ~digits[:-1]
        codes = np.where(digits, _ZERO, codes)
        kept = first | ~digits
        codes, kinds = codes[kept], kinds[kept]
    letters = kinds != _SEPARATOR
    alone = kinds == _OWN_WORD
    starts = letters.copy()
    starts[1:] &= ~letters[:-1] | alone[1:] | alone[:-1]
    if not starts.any():
        return np.empty(0, np.uint64)
    codes, starts = codes[letters], starts[letters]
    first_letters = np.flatnonzero(starts)
    lengths = np.diff(first_letters, append=len(codes))
    within = np.arange(len(codes)) - np.repeat(first_letters, lengths)
    values = _mixed(codes.astype(np.uint64)) * _powers(int(lengths.max()))[within]
    return _mixed(np.add.reduceat(values, first_letters))


def _mixed(values: U64) -> U64:
    """Return values whose bits all depend on all bits of the given ones (the finalizer of SplitMix64)."""
    values = values + np.uint64(_FACTOR)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: U64 = values ^ (values >> np.uint64(31))
    return mixed


def _powers(count: int) -> U64:
    """Return at least ``count`` powers of the factor, from the first one on."""
    return _power_table(max(64, 1 << (count - 1).bit_length()))


@lru_cache(maxsize=4)
def _power_table(count: int) -> U64:
    powers: U64 = np.cumprod(np.full(count, _FACTOR, np.uint64), dtype=np.uint64)
    return powers


@lru_cache(maxsize=2)
def _kinds(ascii_alone: bool) -> npt.NDArray[np.uint8]:
    """Return the kind of each character by its number."""
    count = 128 if ascii_alone else sys.maxunicode + 1
    kinds = np.full(count, _LETTER, np.uint8)
    by_category = {"Mn": _LEFT_OUT, "Me": _LEFT_OUT, "Cf": _LEFT_OUT, "Nd": _DIGIT}
    for code in range(count):
        category = unicodedata.category(chr(code))
        if category in by_category:
            kinds[code] = by_category[category]
        elif category[0] in "PSZ" or category in ("Cc", "Cs"):
            kinds[code] = _SEPARATOR
    if not ascii_alone:
        for first, last in _WITHOUT_SPACES:
            block = kinds[first : last + 1]
            block[block == _LETTER] = _OWN_WORD
    return kinds


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


def minhash(shingles: list[U64], settings: DuplicatesSpec) -> npt.NDArray[np.uint32]:
    """Return the MinHash signatures of sets of shingles, shape (sets, bands x rows)."""
    from rensa import RMinHash

    offsets = np.cumsum([0, *map(len, shingles)], dtype=np.uint64)
    values = np.concatenate([*shingles, np.empty(0, np.uint64)])
    hashes = settings.bands * settings.rows
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(values, offsets, num_perm=hashes, seed=_SEED)
    return np.array(matrix.to_rows(), np.uint32).reshape(-1, hashes)


def band_keys(signatures: npt.NDArray[np.uint32], settings: DuplicatesSpec) -> U64:
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


def _columns(settings: DuplicatesSpec, texts: Iterable[tuple[int, str]]) -> dict[str, npt.NDArray[Any]]:
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
