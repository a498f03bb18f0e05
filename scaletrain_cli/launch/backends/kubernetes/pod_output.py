"""What the ranks of this pod write to their log files, said again on the pod's own output, for `kubectl logs`.

The files on the volume stay the record. A thread of its own, which never holds a rank up: it reads what is there.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

# What a training pod prints, and what can be read from it again: whose line it is, which attempt, how far it is.


_BEGINS = re.compile(r"attempt (\d+) begins in (?:(the submitter's)|a) run directory\b")
_RANK_LINE = re.compile(r"rank (\d+): (.*)", re.DOTALL)
_STEP = re.compile(r"step +(\d+)/\d+  loss ([-+.\deE]+|nan|inf)\b")
_SPEED = re.compile(r"  ([\d,]+) tokens/s\b")


@dataclass(frozen=True)
class AttemptStart:
    """A pod's word that an attempt begins. ``shared`` when the submitter sees the same run directory."""

    attempt: int
    shared: bool


def beginning_line(attempt: int, *, shared: bool) -> str:
    """What every pod prints once it knows its attempt, before any rank starts."""
    directory = "the submitter's run directory" if shared else "a run directory of the pods' own"
    return f"attempt {attempt} begins in {directory}"


def read_beginning(line: str) -> AttemptStart | None:
    """The beginning that a line tells of."""
    match = _BEGINS.match(line)
    return AttemptStart(int(match[1]), match[2] is not None) if match else None


def rank_of(line: str) -> tuple[int | None, str]:
    """The rank whose line it is, None for the agent's own; and the line without that mark."""
    match = _RANK_LINE.match(line)
    return (int(match[1]), match[2]) if match else (None, line)


def progress_in(lines: Iterable[str]) -> dict[str, float]:
    """The newest step that rank 0 told of: its number, loss and speed."""
    newest: dict[str, float] = {}
    for line in lines:
        rank, text = rank_of(line)
        match = _STEP.match(text) if rank == 0 else None
        if match is None:
            continue
        newest = {"step": int(match[1]), "loss": float(match[2])}
        if (speed := _SPEED.search(text)) is not None:
            newest["tokens_per_second"] = float(speed[1].replace(",", ""))
    return newest


_POLL_SECONDS = 1.0
_PIECE_BYTES = 1 << 20
_RANK = re.compile(r"-(\d+)\.log$")


class PodOutput:
    """Follows the logs of this pod's ranks while it is entered; says the rest on leaving."""

    def __init__(self, paths: Sequence[Path], stream: int | None = None) -> None:
        """``stream`` is a file descriptor; else that of the standard output. A path need not be there yet."""
        self._paths = paths
        self._stream = sys.stdout.fileno() if stream is None else stream
        self._read: dict[Path, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="pod-output", daemon=True)

    def __enter__(self) -> PodOutput:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            self._say_news(whole_lines=True)
        self._say_news(whole_lines=False)

    def _say_news(self, *, whole_lines: bool) -> None:
        with contextlib.suppress(OSError):  # the volume is away for a moment, or nobody reads: the files have it all
            for path in filter(Path.exists, self._paths):
                while piece := self._piece(path, whole_lines):
                    self._say(path, piece)

    def _piece(self, path: Path, whole_lines: bool) -> bytes:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read(_PIECE_BYTES)
        if whole_lines and len(data) < _PIECE_BYTES:
            data = data[: data.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(data)
        return data

    def _say(self, path: Path, piece: bytes) -> None:
        match = _RANK.search(path.name)
        name = f"rank {int(match[1])}: " if match else ""
        text = b"".join(name.encode() + line + b"\n" for line in piece.splitlines())
        while text:
            text = text[os.write(self._stream, text) :]
