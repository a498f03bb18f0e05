"""Batches that a run leaves out: those of ``data.skip`` and of its rollbacks."""

from collections.abc import Iterable

SkipRange = tuple[int, int]


def merged_skip_ranges(skip_ranges: Iterable[SkipRange]) -> tuple[SkipRange, ...]:
    """Return the same batches as disjoint ranges in ascending order, with adjacent ranges merged."""
    found: list[SkipRange] = []
    for first, last in sorted(skip_ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return tuple(found)


def batch_number(step: int, skip_ranges: Iterable[SkipRange]) -> int:
    """Return the ``step``-th batch (1-based) outside ``skip_ranges``, merged by ``merged_skip_ranges``."""
    number = step
    for first, last in skip_ranges:
        if first > number:
            break
        number += last - first + 1
    return number


def skipped_until(batch: int, skip_ranges: Iterable[SkipRange]) -> tuple[SkipRange, ...]:
    """Return the part of skip ranges up to a batch, as disjoint ranges in ascending order."""
    return tuple((first, min(last, batch)) for first, last in merged_skip_ranges(skip_ranges) if first <= batch)


def keeps_batches(step: int, before: Iterable[SkipRange], after: Iterable[SkipRange]) -> bool:
    """Return True if the first ``step`` steps have the same batches with the ranges ``after`` as with ``before``."""
    given = tuple(before)  # which may be an iterator, and is used twice
    trained = batch_number(step, merged_skip_ranges(given)) if step else 0
    return skipped_until(trained, given) == skipped_until(trained, after)
