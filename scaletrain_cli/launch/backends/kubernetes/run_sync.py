"""The records of a run in a pod without a shared volume, kept equal with those of pod 0 while the pod runs.

What this pod writes goes to pod 0: its records and failures, marks, and the events that it appends. What pod 0 has of
the attempt and of the other pods comes here; of events, those before the attempt. Each file has one writer, except
marks, whose content does not matter.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.launch.backends.kubernetes.run_server import CONTROL
from scaletrain_cli.rundir.journal import size_here
from scaletrain_cli.safe_files import make_folder, open_to_read, replace_file
from scaletrain_cli.worker.checkpoint_commit import open_attempt
from scaletrain_cli.worker.remote_run import RemoteRun

_SECONDS = 1.0  # between two exchanges
_ANSWER_SECONDS, _LAST_SECONDS = 5.0, 10.0
_SENT = ("*", "failures/*", "hub/*", "idle/*", "preflight/*", "stacks/*", "memory/*.json")
_SERIES = "telemetry/*.jsonl.gz"
_LARGEST_PART = 16 << 20
logger = logging.getLogger(__name__)


class RunSync:
    """A thread that exchanges the records of an attempt and later ones. ``remote``: the directory of pod 0."""

    def __init__(self, remote: RemoteRun, attempt: int) -> None:
        # Without further tries of its own: a pod that ends must not wait for one that is gone.
        self._patient, self._remote = remote, replace(remote, pauses=(), seconds=_ANSWER_SECONDS)
        self._run, self._attempt = remote.run, attempt
        self._same: dict[str, tuple[int, int]] = {}  # time of change and size of files here that pod 0 has
        self._received: dict[str, list[int]] = {}  # the same of files of pod 0 that are here
        self._sent: dict[Path, int] = {}  # how much of a file that grows pod 0 has
        self._over, self._failing = threading.Event(), False
        self._thread = threading.Thread(target=self._repeat, name="run-sync", daemon=True)

    def __enter__(self) -> "RunSync":
        """Bring what pod 0 has of the attempt, and start the thread. Raises OSError."""
        self._patient.again(self._receive)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Send what is left, unless pod 0 is gone, and end the thread."""
        self._over.set()
        self._thread.join(_LAST_SECONDS)
        if not self._failing and not self._thread.is_alive():
            self._exchange()

    def _repeat(self) -> None:
        while not self._over.wait(_SECONDS):
            self._exchange()

    def _exchange(self) -> None:
        try:
            self._send()
            self._receive()
            self._failing = False
        except (OSError, ScaletrainError, ValueError) as error:  # pod 0 may be gone; the agent finds out what it means
            if not self._failing:
                logger.warning("the records of this pod and of pod 0 are not exchanged: %s", error)
            self._failing = True

    def _send(self) -> None:
        # The record of a node is read before the rest is sent, and sent last: once pod 0 sees its end, it decides by
        # the failures and events that came before it.
        of_nodes = [self._changed(path) for path in self._paths("nodes/*")]
        for path in (self._run.events, *self._paths(_SERIES)):
            self._send_growth(path)
        for changed in (*map(self._changed, self._paths(*_SENT)), *of_nodes):
            if changed is not None:
                path, state, content = changed
                try:
                    self._remote.replace(path, content)
                except PermissionError as error:  # a name that pod 0 does not take; others, as of a full disk, may pass
                    logger.warning("%s is not sent to pod 0: %s", path.name, error)
                self._same[self._name(path)] = state

    def _send_growth(self, path: Path) -> None:
        while (sent := self._sent.get(path, 0)) < size_here(path):
            with open_to_read(path) as file:
                file.seek(sent)
                content = file.read(_LARGEST_PART)
            if path == self._run.events:
                content = content[: content.rfind(b"\n") + 1]  # whole lines
            if not content:
                return
            self._remote.append(path, sent, content)
            self._sent[path] = sent + len(content)

    def _changed(self, path: Path) -> tuple[Path, tuple[int, int], bytes] | None:
        """Return a file with its state and content; None if pod 0 has it as it is."""
        try:
            status = path.stat()
            state = status.st_mtime_ns, status.st_size
            return None if self._same.get(self._name(path)) == state else (path, state, path.read_bytes())
        except FileNotFoundError:
            return None

    def _receive(self) -> None:
        for name, stated in self._remote.listing(self._attempt).items():
            path = self._run.path / name
            # A file of this pod: pod 0 has it from here.
            if self._received.get(name) == stated or (name in self._same and name not in self._received):
                continue
            number = path.relative_to(self._run.path / "attempts").parts[0] if name not in CONTROL else None
            if number is not None and not self._run.attempt(int(number)).is_dir():
                self._open(int(number))
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                replace_file(path, self._remote.read(path))
                status = path.stat()
                self._same[name], self._received[name] = (status.st_mtime_ns, status.st_size), stated

    def _open(self, number: int) -> None:
        """Make the folders of an attempt that pod 0 has begun, and bring the events before it."""
        self._send_growth(self._run.events)
        with contextlib.suppress(FileNotFoundError):
            replace_file(self._run.events, self._remote.read(self._run.events))
        self._sent[self._run.events] = size_here(self._run.events)
        for folder in ("logs", "nodes", "failures"):
            make_folder(self._run.attempt(number) / folder)
        open_attempt(self._run.checkpoints, number)

    def _paths(self, *patterns: str) -> Iterator[Path]:
        for number in self._run.attempts():
            for pattern in patterns if number >= self._attempt else ():
                for path in sorted(self._run.attempt(number).glob(pattern)):
                    if path.is_file() and not path.name.startswith("."):
                        yield path

    def _name(self, path: Path) -> str:
        return path.relative_to(self._run.path).as_posix()
