"""Recorded spot markets from files. Knows no runs.

Formats: that of skypilot-org/spot-traces, JSON ``{"metadata": {"gap_seconds": 600}, "data": [4, 3]}`` with the nodes
that were up at each point (or 0 and 1); or CSV lines ``seconds,nodes``. Both plain or gzipped.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import Problem, UsageError

_LONGEST_SECONDS = 1e10  # keeps a slip of the pen finite, and takes the seconds of Unix time


@dataclass(frozen=True)
class SpotTrace:
    """Nodes that were up, as (seconds, nodes) stretches of time, one after another."""

    name: str
    stretches: tuple[tuple[float, int], ...]

    @property
    def seconds(self) -> float:
        return math.fsum(seconds for seconds, _ in self.stretches)


def read_trace(path: Path) -> SpotTrace:
    """A trace from a file. Raises UsageError where it cannot be read or is not a trace."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise _odd(path, f"cannot be read: {error}.", "Give a JSON or CSV file, plain or gzipped.") from error
    stretches = _from_json(path, text) if text.lstrip()[:1] in ("{", "[") else _from_csv(path, text)
    if not any(nodes for _, nodes in stretches):
        raise _odd(path, "has no point with a node up, so nothing can run on it.", "Record a time with capacity.")
    return SpotTrace(path.name, tuple(stretches))


def _from_json(path: Path, text: str) -> list[tuple[float, int]]:
    try:
        document: Any = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _odd(path, f"is not JSON: {error}.", "Check that the file is whole.") from error
    if isinstance(document, dict) and isinstance(document.get("files"), dict):
        some = ", ".join(list(document["files"])[:2])
        raise _odd(path, f"holds {len(document['files'])} traces.", f"Write one of them to a file, such as {some}.")
    metadata = document.get("metadata") if isinstance(document, dict) else None
    gap: Any = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    data = document.get("data") if isinstance(document, dict) else None
    if not _is_number(gap) or not 0 < gap <= _LONGEST_SECONDS:
        raise _odd(path, "lacks metadata.gap_seconds, the seconds between two points.", 'Add {"gap_seconds": 600}.')
    if not isinstance(data, list) or not data:
        raise _odd(path, "lacks data, the list of nodes up at each point.", "Add it, or give CSV lines seconds,nodes.")
    stretches: list[tuple[float, int]] = []
    for index, point in enumerate(data):
        nodes = _nodes(path, f"data[{index}]", point)
        if stretches and stretches[-1][1] == nodes:
            stretches[-1] = (stretches[-1][0] + gap, nodes)
        else:
            stretches.append((float(gap), nodes))
    return stretches


def _from_csv(path: Path, text: str) -> list[tuple[float, int]]:
    """Lines ``seconds,nodes``: nodes up from then on; the last of them for as long as the one before."""
    points: list[tuple[float, int]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [cell.strip() for cell in line.split(",")]
        if not line.strip() or (not points and cells[0].lower() in ("seconds", "time", "t")):
            continue
        try:
            seconds, nodes = (float(cell) for cell in cells)
        except ValueError:
            raise _odd(path, f"line {number} is not seconds,nodes.", "Write two numbers, as 600,4.", line) from None
        if not abs(seconds) <= _LONGEST_SECONDS or (points and seconds <= points[-1][0]):
            raise _odd(path, f"line {number} does not come after the one before it.", "Sort the lines by time.", line)
        points.append((seconds, _nodes(path, f"line {number}", nodes)))
    if len(points) < 2:
        raise _odd(path, "has fewer than two points.", "Write at least two lines seconds,nodes.")
    ends = [seconds for seconds, _ in points[1:]]
    ends.append(2 * points[-1][0] - points[-2][0])
    return [(end - seconds, nodes) for (seconds, nodes), end in zip(points, ends, strict=True)]


def _nodes(path: Path, where: str, value: Any) -> int:
    if isinstance(value, bool):
        return int(value)
    if not _is_number(value) or not 0 <= value <= 1e6 or value != int(value):
        raise _odd(path, f"{where} is not a number of nodes.", "Give whole numbers from 0 on.", str(value))
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _odd(path: Path, message: str, hint: str, given: str | None = None) -> UsageError:
    shown = None if given is None else given.encode("unicode_escape").decode("ascii")[:80]
    return UsageError(f"the spot trace {path} cannot be used", (Problem(str(path), "", message, shown, hint),))
