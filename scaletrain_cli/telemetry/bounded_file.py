"""A file of segments that never exceeds its largest size: the oldest rows that coarser rows stand for are removed."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.safe_files import closing_descriptor, make_folder, open_to_append, open_to_read, replace_file
from scaletrain_cli.telemetry.segments import FACTOR, TIERS, Row, find_segments, read_segment, write_segment

Rows = Mapping[str, Sequence[Row]]  # of one tier, by subject
_KEPT_SHARE = 0.75  # of the largest size, when the oldest rows are removed
# Shares of the tiers in the file: the first three eighths are rows as they were added.
_WEIGHTS = (6.0, 4.0, 2.5, 1.5, 1.0, 0.5, 0.5)


@dataclass(frozen=True)
class _Stored:
    """A segment of the file. ``ends``: for each subject the number after its last added row."""

    start: int
    end: int
    tier: int
    ends: Mapping[str, int]


class BoundedFile:
    """A file of at most ``largest`` bytes, which only this process writes. An existing file is continued."""

    def __init__(self, path: Path, largest: int) -> None:
        self._path, self._largest = path, largest
        self._stored: list[_Stored] = []
        self._covered: list[dict[str, int]] = [{} for _ in range(TIERS)]  # for which rows a tier has rows
        self._size = 0
        with contextlib.suppress(OSError):
            self._find_end()

    @property
    def last(self) -> int:
        """Return the number after the last added row of any subject; 0 for an empty file."""
        return max((end for stored in self._stored for end in stored.ends.values()), default=0)

    def append(self, tier: int, rows: Rows, waiting: Callable[[], Sequence[tuple[int, Rows]]]) -> None:
        """Append a segment, or lose it where there is no room for it. Raises OSError.

        ``waiting`` is called before rows are removed: it returns the rows of coarser tiers that are not written yet.
        """
        self._find_end()
        data = write_segment(tier, rows)
        if self._size + len(data) > self._largest:
            self._make_room(len(data), waiting())
        if self._size + len(data) > self._largest:
            return
        if self._size == 0:
            make_folder(self._path.parent, parents=False)  # not where the run was removed
        # Opened for each segment: on NFS other hosts see what was written once the file is closed.
        with closing_descriptor(open_to_append(self._path)) as file:
            try:
                if os.write(file, data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            except OSError:
                os.ftruncate(file, self._size)
                raise
        self._note(tier, len(data), _ends(tier, rows))

    def _note(self, tier: int, length: int, ends: Mapping[str, int]) -> None:
        self._stored.append(_Stored(self._size, self._size + length, tier, ends))
        self._covered[tier].update(ends)
        self._size += length

    def _make_room(self, needed: int, waiting: Sequence[tuple[int, Rows]]) -> None:
        """Replace the file by one without the rows that are oldest in their tier. Raises OSError."""
        new = [(_ends(tier, rows), tier, write_segment(tier, rows)) for tier, rows in waiting]
        for ends, tier, _ in new:
            self._covered[tier].update(ends)
        kept: list[deque[_Stored]] = [deque() for _ in range(TIERS)]
        for stored in self._stored:
            kept[stored.tier].append(stored)
        sizes = [sum(stored.end - stored.start for stored in tier) for tier in kept]
        room = _KEPT_SHARE * self._largest - needed - sum(len(data) for _, _, data in new)
        while sum(sizes) > max(room, 0):
            # Of the rows that coarser ones stand for, those of the tier that exceeds its share of the file most.
            oldest = [tier for tier in range(TIERS) if kept[tier]]
            covered = [tier for tier in oldest if self._is_covered(kept[tier][0])]
            tier = max(covered or oldest, key=lambda tier: sizes[tier] / _WEIGHTS[tier])
            removed = kept[tier].popleft()
            sizes[tier] -= removed.end - removed.start
        with open_to_read(self._path) as file:
            data = file.read()
        rest = sorted((stored for tier in kept for stored in tier), key=lambda stored: stored.start)
        pieces = [(stored.ends, stored.tier, data[stored.start : stored.end]) for stored in rest] + new
        replace_file(self._path, b"".join(piece for _, _, piece in pieces))
        self._stored, self._size = [], 0
        for stands_for, tier, piece in pieces:
            self._note(tier, len(piece), stands_for)

    def _is_covered(self, stored: _Stored) -> bool:
        """Return whether rows of the next tier stand for all rows of the segment."""
        if stored.tier == TIERS - 1:
            return True
        covered = self._covered[stored.tier + 1]
        return all(end <= covered.get(subject, 0) for subject, end in stored.ends.items())

    def _find_end(self) -> None:
        """Find the segments of the file unless they are known, as for a file that this object wrote. Raises OSError."""
        size = os.stat(self._path).st_size if self._path.exists() else 0
        if size == self._size:
            return
        self._stored, self._covered, self._size = [], [{} for _ in range(TIERS)], 0
        with open_to_read(self._path) as file:
            data = file.read()
        for segment in find_segments(data):
            with contextlib.suppress(ValueError):
                parts = read_segment(data, segment)
                self._size = segment.start
                ends = {subject: part.firsts()[-1] + FACTOR**segment.tier for subject, part in parts.items()}
                self._note(segment.tier, segment.end - segment.start, ends)
        self._size = len(data)


def _ends(tier: int, rows: Rows) -> dict[str, int]:
    """Return for each subject the number after the last added row that its rows stand for."""
    return {subject: own[-1].first + FACTOR**tier for subject, own in rows.items()}
