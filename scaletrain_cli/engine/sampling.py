"""Which sequences make up which batch: a pure function of (seed, batch number), independent of how the job is cut.

Samples are drawn without replacement within an epoch. The epoch's order is a keyed permutation that is computed per
index (a Feistel network with cycle walking; Black and Rogaway, CT-RSA 2002), so no list of samples is ever held.
"""

from __future__ import annotations

_MASK64 = (1 << 64) - 1
_ROUNDS = 4


def batch_indices(
    *, seed: int, batch: int, global_batch_size: int, samples: int, rank: int, data_parallel: int, micro_batch_size: int
) -> list[list[int]]:
    """Sample indices of one data-parallel rank in batch ``batch`` (0-based): one list per micro-batch.

    The union over the ranks is the same set for every (data_parallel, micro_batch_size) that makes up
    ``global_batch_size``.
    """
    micro_steps = global_batch_size // (micro_batch_size * data_parallel)
    first = batch * global_batch_size
    return [
        [
            sample_at(first + (micro * data_parallel + rank) * micro_batch_size + offset, seed=seed, samples=samples)
            for offset in range(micro_batch_size)
        ]
        for micro in range(micro_steps)
    ]


def sample_at(position: int, *, seed: int, samples: int) -> int:
    """The sample at a position of the endless stream of epochs, each a fresh permutation of range(samples)."""
    epoch, index = divmod(position, samples)
    return permute(index, size=samples, key=_mix(_mix(seed) ^ epoch))


def permute(index: int, *, size: int, key: int) -> int:
    """The image of ``index`` under a pseudo-random permutation of range(size)."""
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:  # the network permutes a power of four >= size; walk until back inside (< 4 turns on average)
        left, right = index >> half_bits, index & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mix(right ^ _mix(key + turn)) & mask)
        index = left << half_bits | right
        if index < size:
            return index


def _mix(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014): 64 bits in, 64 well-mixed bits out."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
