"""Views of a run whose files this machine does not see: the verb runs where they are, and its streams are passed on.

The back end brings a process there (Backend.view_command); launch/node/view.py is its end. The verb there asks no
scheduler: this machine does, and sends the answers while the view lasts.
"""

import contextlib
import dataclasses
import io
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from scaletrain_cli.errors import ScaletrainError, SchedulerError, UsageError
from scaletrain_cli.launch.backends.base import Backend, ViewWaitsError
from scaletrain_cli.launch.backends.registry import backend_for, failures_of_plugin
from scaletrain_cli.launch.node.command import STDERR, STDOUT
from scaletrain_cli.launch.node.streams import Frame, Kind, write_to
from scaletrain_cli.launch.node.view import PAGE, Identity
from scaletrain_cli.launch.node_session import (
    NodeSession,
    Signals,
    Streams,
    open_session,
    raw_terminal,
    resizing,
    terminal_size,
)
from scaletrain_cli.launch.run_status import RunStatus
from scaletrain_cli.launch.status import run_status
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.journal import events_to_send
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord

# The documents of the submitter's run directory that the pods do not have, by their path in it.
_DOCUMENTS = ("submission.json", "sweep.json", "spec-lines.json", "preparation/job.json", "preparation/failure.json")
_PASSED_ON = ("NO_COLOR", "FORCE_COLOR", "COLORTERM")
_SEND_EVERY_SECONDS = 5.0
_SEND_END_SECONDS = 1.0
_SILENT_SECONDS = 60.0  # without an answer: the connection is lost, as after this machine has slept
_ANSWER_SECONDS = 60.0  # until the far end has answered: Python starts there, maybe from a cold disk
_MOST_SAID = 300  # characters of what the command prints
_LOCAL_TIME = Path("/etc/localtime")


class NotReachableError(ScaletrainError):
    """The files of the run cannot be read now, and nothing was shown. ``waits``: they can be once its pods run."""

    def __init__(self, why: Reason, *, waits: bool = False) -> None:
        super().__init__(why)
        self.waits = waits


def has_views(record: RunRecord) -> bool:
    """Return whether the back end of a run can bring a view to its files."""
    try:
        with failures_of_plugin(record.spec.cluster.scheduler):
            backend = backend_for(record.spec.cluster.scheduler)
    except SchedulerError:  # not installed here
        return False
    return type(backend).view_command is not Backend.view_command


def show_view(
    run: RunDir,
    record: RunRecord,
    words: Sequence[str],
    say: Callable[[str], None],
    *,
    outputs: Mapping[int, Callable[[bytes], None]] | None = None,
) -> "ViewEnd":
    """Run a verb where the files of the run are, with the streams of this process, and return its end.

    It gets a terminal there if all three streams are one here, and ``outputs`` is not given: the writers of its
    standard output (1) and errors (2). ``words``: with PAGE_WORD for the path of a file that it writes. ``say``
    gets lines of progress. Raises NotReachableError, and SchedulerError if the connection was lost later.
    """
    terminal = outputs is None and all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    known = KnownRun(run, events_to_send(run))
    size = list(terminal_size()) if terminal else None
    # For the verb there: colors, the type of the terminal, and the local time of this machine.
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    if terminal and "TERM" in os.environ:
        environment["TERM"] = os.environ["TERM"]
    request = {
        "words": list(words),
        "terminal": size,
        "environment": environment | {"TZ": local_time_rule(os.environ.get("TZ"), _LOCAL_TIME)},
        "identity": vars(Identity.of(record)),
        "run": known.document(run_status(run)),
    }
    page = io.BytesIO()
    with contextlib.ExitStack() as open_things:
        signals = open_things.enter_context(Signals())
        errors = open_things.enter_context(tempfile.TemporaryFile())
        session = _opened(open_things, run, record, request, errors, say)
        signals.pass_on(session)
        frames = open_things.enter_context(known.sent_to(session))
        writers: dict[int, Callable[[bytes], object]] = dict(
            outputs or ({STDOUT: write_to(1)} if terminal else {STDOUT: write_to(1), STDERR: write_to(2)})
        )
        if terminal:
            open_things.enter_context(raw_terminal())
            open_things.enter_context(resizing(session))
        # A verb that only reads a run leaves the input of a script or loop around it alone, as it does here.
        answering = dataclasses.replace(session, frames=frames)
        code = Streams(answering, writers | {PAGE: page.write}, reads=terminal).run()
    return ViewEnd(code, page.getvalue())


@dataclass(frozen=True)
class ViewEnd:
    """The exit code of a verb, and the contents of the file that it wrote, if it was asked for one."""

    exit_code: int
    page: bytes


def _opened(
    open_things: contextlib.ExitStack,
    run: RunDir,
    record: RunRecord,
    request: Mapping[str, Any],
    errors: IO[bytes],
    say: Callable[[str], None],
) -> NodeSession:
    """Return an open session where the files are. Raises NotReachableError."""
    scheduler = record.spec.cluster.scheduler
    try:
        with failures_of_plugin(scheduler):
            command = open_things.enter_context(backend_for(scheduler).view_command(run, record, say))
        where = Reason("launch.view-place", {"run": run.run_id})
        return open_things.enter_context(open_session(command, str(where), request, errors, _ANSWER_SECONDS))
    except (SchedulerError, UsageError) as error:
        why = error.reason or Reason("launch.view-failed", {"error": error.message})
        errors.seek(0)
        if said := " ".join(errors.read().decode(errors="replace").split())[-_MOST_SAID:]:
            why = Reason("launch.view-said", {"why": why, "said": said})
        raise NotReachableError(why, waits=isinstance(error, ViewWaitsError)) from error


@dataclass(frozen=True)
class KnownRun:
    """The state of a run on this machine, which is sent to the far end (sent_run.SentRun).

    ``events``: as they were when the view began.
    """

    run: RunDir
    events: Sequence[dict[str, Any]]

    def document(self, status: RunStatus) -> dict[str, Any]:
        """Return the JSON object for the far end."""
        read = {name: read_document(self.run.path / name) for name in _DOCUMENTS}
        return {
            "job": status.job.to_document(),
            "is_cancelled": self.run.is_cancelled,
            "events": list(self.events),
            "documents": {name: document for name, document in read.items() if document is not None},
        }

    @contextlib.contextmanager
    def sent_to(self, session: NodeSession) -> Iterator[Iterator[Frame]]:
        """Return a context in which the far end gets the state of the job every few seconds; yield its frames.

        They end, as those of a lost connection do, once it has answered nothing for a minute.
        """
        ended, sending = threading.Event(), threading.Lock()
        asked: float | None = None  # when the first state was sent after the last frame arrived

        def arriving() -> Iterator[Frame]:
            nonlocal asked
            for frame in session.frames:
                asked = None
                yield frame

        def send() -> None:
            nonlocal asked
            while not ended.wait(_SEND_EVERY_SECONDS):
                since = asked  # the other thread may forget it at any time
                if since is not None and time.monotonic() - since > _SILENT_SECONDS:
                    session.process.terminate()
                    return
                with contextlib.suppress(UsageError):  # a record that is damaged meanwhile
                    document = self.document(run_status(self.run))  # may take as long as the scheduler
                    with sending:  # the descriptor of a link that is closed may be that of another file
                        asked = asked or time.monotonic()
                        if ended.is_set() or not session.link.send_document(Kind.RUN, document):
                            return

        threading.Thread(target=send, name="job", daemon=True).start()
        try:
            yield arriving()
        finally:
            ended.set()
            if sending.acquire(timeout=_SEND_END_SECONDS):  # one that goes on in a pipe that nobody reads fails later
                sending.release()


class LinesOnce:
    """A writer of complete lines that leaves out those written before.

    ``shown``: the number of lines that another writer has shown, which are the first ones of the first connection.
    Those of this writer are known by what they say: a new line may come between them at the next connection.
    """

    def __init__(self, write: Callable[[bytes], None], shown: int = 0) -> None:
        self._write, self._shown = write, shown
        self._rest = b""
        self._known: Counter[bytes] = Counter()  # lines that were shown
        self._left: Counter[bytes] = Counter()  # of them, those that come again
        self.written = shown

    def begin(self) -> None:
        """Note that all lines will come again."""
        self._rest, self._left = b"", self._known.copy()

    def write(self, data: bytes) -> None:
        """Write the lines that are complete and new."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        new = []
        for line in lines:
            if self._left[line] > 0:
                self._left[line] -= 1
                continue
            self._known[line] += 1
            if self._shown > 0:
                self._shown -= 1
                continue
            new.append(line)
        self.written += len(new)
        if new:
            self._write(b"".join(line + b"\n" for line in new))


def local_time_rule(given: str | None, file: Path) -> str:
    """Return the local time as a rule of POSIX for TZ, such as ``CET-1CEST,M3.5.0,M10.5.0/3``; an image has no zones.

    ``given``: the value of TZ here. The rule is the last line of a file of time zones; without one, it is the offset of
    now.
    """
    zones = Path("/usr/share/zoneinfo")
    path = file if given is None else zones / given.lstrip(":")
    with contextlib.suppress(OSError, ValueError):
        *_, rule, after = path.read_bytes().rsplit(b"\n", 2)
        if path.is_file() and after == b"" and rule.isascii() and rule:
            return rule.decode()
    if given:
        return given
    seconds = -time.localtime().tm_gmtoff
    hours, rest = divmod(abs(seconds), 3600)
    return f"<local>{'-' if seconds < 0 else ''}{hours}:{rest // 60:02d}"
