"""The output of a training pod: JSON lines that the launcher reads, and the log lines of its ranks.

The files on the volume remain the authoritative logs; a thread copies them to the pod's output without blocking a rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.worker.progress import read_progress

_RANK_LINE = re.compile(r"rank (\d+): (.*)", re.DOTALL)  # as PodOutput writes it


def attempt_start_line(attempt: int, *, shared: bool) -> str:
    """Return the line that every pod prints before any rank starts.

    ``shared``: the submitting machine sees the same run directory, and needs nothing from the pod's output.
    """
    return json.dumps({"scaletrain": "attempt-start", "attempt": attempt, "shared": shared})


def attempt_end_line(attempt: int, exit_code: int, *, requeue: bool, reason: Reason) -> str:
    """Return the line that pod 0 prints after its decision; ``exit_code`` is the pod's, ``reason`` the decision's."""
    end = {"attempt": attempt, "exit_code": exit_code, "requeue": requeue, **reason.to_document(), "text": str(reason)}
    return json.dumps({"scaletrain": "attempt-end", **end})


def read_pod_line(line: str) -> dict[str, Any] | None:
    """Return the JSON object of an attempt-start or attempt-end line; None for any other line."""
    if not line.startswith('{"scaletrain"'):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_about_attempt = found.get("scaletrain") in ("attempt-start", "attempt-end")
    return found if is_about_attempt and isinstance(found.get("attempt"), int) else None


def preparation_end_line(error: ScaletrainError, why: object) -> str:
    """Return the line that a pod prints if its data cannot be prepared; ``why``: the document of a recorded reason."""
    end = {"exit_code": int(error.exit_code), "reason": why, "error": error.to_json()}
    return json.dumps({"scaletrain": "preparation-end", **end})


def preparation_sizes_line(sizes: Mapping[str, Sequence[object]]) -> str:
    """Return the line that a pod prints once the data are prepared: the numbers of a DataSize by the source's name."""
    return json.dumps({"scaletrain": "preparation-end", "exit_code": 0, "sizes": sizes})


def preparation_end(lines: Iterable[str]) -> dict[str, Any] | None:
    """Return the object of the last preparation-end line; None if there is none."""
    found: dict[str, Any] | None = None
    for line in lines:
        if line.startswith('{"scaletrain"'):
            with contextlib.suppress(ValueError, RecursionError):
                said = json.loads(line)
                if said.get("scaletrain") == "preparation-end" and isinstance(said.get("exit_code"), int):
                    found = said
    return found


def rank_of(line: str) -> tuple[int | None, str]:
    """Return the rank of a line (None for the agent) and the line without the prefix of the rank."""
    match = _RANK_LINE.match(line)
    return (int(match[1]), match[2]) if match else (None, line)


def progress_in(lines: Iterable[str]) -> dict[str, float]:
    """Return the newest progress line of rank 0: its step, loss and tokens per second; empty if there is none."""
    newest: dict[str, float] = {}
    for line in lines:
        rank, text = rank_of(line)
        newest = (read_progress(text) if rank == 0 else None) or newest
    return newest


_POLL_SECONDS = 1.0
_PART_BYTES = 1 << 20
_RANK = re.compile(r"-(\d+)\.log$")


class PodOutput:
    """A context that prints the logs of this pod's ranks as they grow, and the remaining lines on exit."""

    def __init__(self, paths: Sequence[Path], stream: int | None = None) -> None:
        """Print to the file descriptor ``stream``, by default the standard output. A path need not exist yet."""
        self._paths = paths
        self._stream = sys.stdout.fileno() if stream is None else stream
        self._read: dict[Path, int] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="pod-output", daemon=True)

    def __enter__(self) -> PodOutput:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            self._print_new(whole_lines=True)
        self._print_new(whole_lines=False)

    def _print_new(self, *, whole_lines: bool) -> None:
        # The volume may be unavailable for a moment, or the output closed: the files are complete.
        with contextlib.suppress(OSError):
            for path in filter(Path.exists, self._paths):
                while part := self._next_part(path, whole_lines):
                    self._print(path, part)

    def _next_part(self, path: Path, whole_lines: bool) -> bytes:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read(_PART_BYTES)
        if whole_lines and len(data) < _PART_BYTES:
            data = data[: data.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(data)
        return data

    def _print(self, path: Path, part: bytes) -> None:
        match = _RANK.search(path.name)
        name = f"rank {int(match[1])}: " if match else ""
        text = b"".join(name.encode() + line + b"\n" for line in part.splitlines())
        while text:
            text = text[os.write(self._stream, text) :]
