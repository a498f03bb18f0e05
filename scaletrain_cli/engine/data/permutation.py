"""The order of the samples of one source: epochs of pseudo-random permutations, computed for any position.

The samples of a batch are a pure function of the seed and the batch number, the same in every layout.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

_MASK64 = (1 << 64) - 1
_ROUNDS = 4


def sample_at(position: int, *, seed: int, samples: int) -> int:
    """Return the sample at a position of an endless stream of epochs, each a new permutation of range(samples)."""
    epoch, index = divmod(position, samples)
    return permute(index, size=samples, key=_epoch_key(seed, epoch))


def permute(index: int, *, size: int, key: int) -> int:
    """Return the image of ``index`` under a pseudo-random permutation of range(size), by cycle walking."""
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask, keys = (1 << half_bits) - 1, _turn_keys(key)
    while True:  # the network permutes a power of four >= size; repeat until inside (< 4 rounds on average)
        left, right = index >> half_bits, index & mask
        for turn_key in keys:
            left, right = right, left ^ (_mix_bits(right ^ turn_key) & mask)
        index = left << half_bits | right
        if index < size:
            return index


def samples_at(first: int, count: int, *, seed: int, samples: int) -> npt.NDArray[np.int64]:
    """Return the samples at ``count`` positions from ``first`` on; see sample_at()."""
    found, position = [np.empty(0, np.int64)], first
    while position < first + count:
        epoch, index = divmod(position, samples)
        stop = min(index + first + count - position, samples)
        key = _epoch_key(seed, epoch)
        found.append(_permuted(np.arange(index, stop, dtype=np.uint64), size=samples, key=key))
        position += stop - index
    return np.concatenate(found)


def _permuted(indices: npt.NDArray[np.uint64], *, size: int, key: int) -> npt.NDArray[np.int64]:
    """Return the images of indices; see permute()."""
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    keys = [np.uint64(each) for each in _turn_keys(key)]
    found: npt.NDArray[np.uint64] = indices.copy()
    waiting = np.arange(len(found))
    while len(waiting):
        left, right = found[waiting] >> half, found[waiting] & mask
        for turn_key in keys:
            # The finalizer of each value, see _mix_bits(); products of arrays are modulo 2^64.
            mixed: npt.NDArray[np.uint64] = (right ^ turn_key) + np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed ^= mixed >> np.uint64(31)
            left, right = right, left ^ (mixed & mask)
        found[waiting] = (left << half) | right
        waiting = waiting[found[waiting] >= size]
    images: npt.NDArray[np.int64] = found.astype(np.int64)
    return images


@lru_cache(maxsize=1024)
def _epoch_key(seed: int, epoch: int) -> int:
    return _mix_bits(_mix_bits(seed) ^ epoch)


@lru_cache(maxsize=1024)
def _turn_keys(key: int) -> tuple[int, ...]:
    return tuple(_mix_bits(key + turn) for turn in range(_ROUNDS))


def _mix_bits(value: int) -> int:
    """Return SplitMix64's finalizer (Steele, Lea, Flood, OOPSLA 2014) of a 64-bit integer."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
