"""Which batch a step trains on where windows of the data are left out: pure arithmetic. Knows no data and no file.

Batches are numbered from 1, without end. A window is an inclusive range of those numbers that is never trained on; the
steps take the other batches in order, so that without windows step n trains on batch n.
"""

from __future__ import annotations

from collections.abc import Iterable

Window = tuple[int, int]


def merged(windows: Iterable[Window]) -> tuple[Window, ...]:
    """The same batches as few windows in ascending order, none of which touch."""
    found: list[Window] = []
    for first, last in sorted(windows):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return tuple(found)


def batch_number(step: int, windows: Iterable[Window]) -> int:
    """The ``step``-th batch (1-based) that is in no window; ``windows`` as merged() leaves them."""
    number = step
    for first, last in windows:
        if first > number:
            break
        number += last - first + 1
    return number
