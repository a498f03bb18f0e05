"""The output of a training pod: JSON lines that the launcher reads, and the log lines of its ranks.

The files on the volume remain the authoritative logs; a thread copies them to the pod's output without blocking a rank.

How it ended is in its termination message, one JSON object of at most 4096 bytes. The kubelet copies the message into
the status of the pod. A reader who sees neither the volume of the run nor the log of the pod finds it there as long as
the pod object exists. A pod that was killed writes no message; the kubelet then copies the last lines of its log
(``terminationMessagePolicy: FallbackToLogsOnError``).
"""

import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.reasons import Reason, reason_from, recorded
from scaletrain_cli.secret_text import hide_values_in
from scaletrain_cli.worker.progress import read_object, read_progress

PATH = "/dev/termination-log"  # the default of Kubernetes
_MARK = "pod-end"
_MOST_BYTES = 4096  # the kubelet cuts longer messages off
_MOST_TEXT_CHARACTERS = 1000  # of a reason that does not fit with its parameters; 3 bytes each at most


@dataclass(frozen=True)
class PodEnd:
    """The end of one pod. ``step``: the last one logged, ``checkpoint_step``: that of the latest valid checkpoint.

    ``requeue``: pod 0 decided that the next gang goes on; None if it made no decision that this pod knows.
    """

    exit_code: int
    reason: Reason
    attempt: int | None = None
    step: int | None = None
    checkpoint_step: int | None = None
    requeue: bool | None = None


@dataclass(frozen=True)
class TerminationMessage:
    """A termination message that was read. ``code`` is that of ``end.reason``, also where only its text fitted."""

    end: PodEnd
    code: str
    node: str


def termination_text(end: PodEnd, node: str, secrets: Collection[str] | None = ()) -> str:
    """Return the message. ``secrets``: values that must not be in it; None if they are not known.

    Without them only the code of the reason is written, as its text and parameters may contain one.
    """
    numbers = {"attempt": end.attempt, "step": end.step, "checkpoint_step": end.checkpoint_step, "requeue": end.requeue}
    whole = {"scaletrain": _MARK, "exit_code": end.exit_code, "node": node, **numbers}
    text = str(end.reason)
    reason = end.reason.to_document()
    cut = text[:_MOST_TEXT_CHARACTERS]
    code = {"code": end.reason.code}
    choices = ({**reason, "text": text}, reason, {**code, "text": cut}, code) if secrets is not None else (code,)
    for more in choices:
        message = json.dumps(hide_values_in(whole | more, secrets or ()), ensure_ascii=False, default=str)
        if len(message.encode("utf-8", "replace")) <= _MOST_BYTES:
            return message
    return json.dumps({**whole, "node": ""})


def write_termination_message(path: Path, end: PodEnd, node: str, secrets: Collection[str] | None = ()) -> None:
    """Write the message into the file that the kubelet mounts; does nothing outside a pod, where there is none."""
    with contextlib.suppress(OSError), os.fdopen(os.open(path, os.O_WRONLY | os.O_TRUNC), "wb") as stream:
        stream.write(termination_text(end, node, secrets).encode("utf-8", "replace"))


def read_termination_message(text: str) -> TerminationMessage | None:
    """Return the message of a pod; None for any other text, such as the last lines of a log."""
    if not text.startswith("{"):
        return None
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if message.get("scaletrain") != _MARK or not isinstance(message.get("exit_code"), int):
        return None
    code = str(message.get("code", ""))
    reason = reason_from(message) if "params" in message else recorded(str(message.get("text") or code))
    keys = ("attempt", "step", "checkpoint_step")
    numbers = {key: value if type(value := message.get(key)) is int else None for key in keys}
    requeue = message["requeue"] if isinstance(message.get("requeue"), bool) else None
    return TerminationMessage(
        PodEnd(message["exit_code"], reason, **numbers, requeue=requeue), code, str(message.get("node", ""))
    )


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
    document = read_object(line, "attempt-start", "attempt-end")
    return document if document is not None and isinstance(document.get("attempt"), int) else None


def preparation_end_line(error: ScaletrainError, why: object) -> str:
    """Return the line that a pod prints if its data cannot be prepared; ``why``: the document of a recorded reason."""
    end = {"exit_code": int(error.exit_code), "reason": why, "error": error.to_json()}
    return json.dumps({"scaletrain": "preparation-end", **end})


def preparation_sizes_line(sizes: Mapping[str, Sequence[object]]) -> str:
    """Return the line that a pod prints once the data are prepared: the numbers of a DataSize by the source's name."""
    return json.dumps({"scaletrain": "preparation-end", "exit_code": 0, "sizes": sizes})


def preparation_end(lines: Iterable[str]) -> dict[str, Any] | None:
    """Return the object of the last preparation-end line; None if there is none."""
    ends = [said for line in lines if (said := read_object(line, "preparation-end")) is not None]
    return next((said for said in reversed(ends) if isinstance(said.get("exit_code"), int)), None)


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

    def __enter__(self) -> "PodOutput":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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
                    match = _RANK.search(path.name)
                    name = f"rank {int(match[1])}: " if match else ""
                    text = b"".join(name.encode() + line + b"\n" for line in part.splitlines())
                    while text:
                        text = text[os.write(self._stream, text) :]

    def _next_part(self, path: Path, whole_lines: bool) -> bytes:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read(_PART_BYTES)
        if whole_lines and len(data) < _PART_BYTES:
            data = data[: data.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(data)
        return data
