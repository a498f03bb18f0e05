"""The far end of a view: a verb that only reads a run, in a pod that mounts the volume of the runs.

``python -m scaletrain_cli.launch.node.view RUNS_ROOT RUN_ID``, started by the back end, with pipes as standard input
and output; streams.py is the protocol on them. The first frame has the words of the verb and what the other machine
knows of the run, which frames of kind RUN replace; the verb finds it in the file that SCALETRAIN_SENT_RUN names
(sent_run.py).

``--hold`` keeps a pod that was started for views, until none has been open for two minutes.
"""

import argparse
import contextlib
import fcntl
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import ExitCode, ScaletrainError
from scaletrain_cli.launch.node.command import Command, RefusedError, accept_request
from scaletrain_cli.launch.node.streams import Frame, Kind, Link, Outgoing, read_from
from scaletrain_cli.own_processes import leave_current_folder, python_command
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_record
from scaletrain_cli.safe_files import closing_descriptor, open_to_append, replace_file
from scaletrain_cli.sent_run import SENT_RUN

PAGE = 3  # the channel of the file that the verb writes, beside those of its streams
PAGE_WORD = "\0page"  # among the words of the verb, for the path of that file
IDLE_SECONDS = 120.0
_LOOK_EVERY_SECONDS = 2.0


@dataclass(frozen=True)
class Identity:
    """The fields by which both machines check that they mean the same run in the same revision."""

    created: float
    wandb_run_id: str
    revision: int

    @classmethod
    def of(cls, record: RunRecord) -> "Identity":
        return cls(record.created, record.wandb_run_id, record.revision)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one view, or hold the pod; return the exit code of the process, which says nothing about the verb."""
    leave_current_folder()
    parser = argparse.ArgumentParser(prog="view", description="Run a verb that reads a run, for another machine.")
    parser.add_argument("runs_root", type=Path, nargs="?")
    parser.add_argument("run_id", nargs="?")
    parser.add_argument("--hold", action="store_true")
    options = parser.parse_args(arguments)
    if options.hold:
        return hold()
    link, frames, first = accept_request()
    if first is None:
        return ExitCode.USAGE
    try:
        run = RunDir(options.runs_root.absolute() / options.run_id)
        require_same(run, Identity(**first.document["identity"]))
        with _open_view(), tempfile.TemporaryDirectory(prefix="scaletrain-view-") as folder:
            _serve(link, frames, first.document, run, Path(folder))
    except RefusedError as error:
        link.send_document(Kind.REFUSED, error.reason.to_document())
    except (ScaletrainError, OSError) as error:
        why = (error.reason if isinstance(error, ScaletrainError) else None) or Reason(
            "node.view-failed", {"error": str(error)}
        )
        link.send_document(Kind.REFUSED, why.to_document())
    return ExitCode.DONE


def require_same(run: RunDir, wanted: Identity) -> None:
    """Raise RefusedError unless the run directory here is that of the same run, in the same revision."""
    if not run.record.is_file():
        raise RefusedError(Reason("node.view-no-directory", {"folder": str(run.path)}))
    identity = Identity.of(read_record(run))
    if (identity.created, identity.wandb_run_id) != (wanted.created, wanted.wandb_run_id):
        raise RefusedError(Reason("node.view-other-run", {"folder": str(run.path)}))
    if identity.revision != wanted.revision:
        params = {"folder": str(run.path), "found": identity.revision, "wanted": wanted.revision}
        raise RefusedError(Reason("node.view-other-revision", params))


def _serve(link: Link, frames: Iterator[Frame], request: Mapping[str, Any], run: RunDir, folder: Path) -> None:
    """Run the verb, and send its exit code after its output and its file."""
    page, known = folder / "page", KnownRun(folder / "run.json", run)
    known.write(request["run"])
    words = [str(page) if word == PAGE_WORD else str(word) for word in request["words"]]
    environment = {**os.environ, "PYTHONUTF8": "1", "SCALETRAIN_RUNS": str(run.path.parent), SENT_RUN: str(known.path)}
    environment |= {str(name): str(value) for name, value in request["environment"].items()}
    view = View(link, python_command("scaletrain_cli", *words), environment, Path("/"), request["terminal"], known)
    view.start()
    link.send(Kind.READY)
    view.copy_output()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda number, _: view.signal(number))
    sending = view.outgoing(PAGE)
    threading.Thread(target=view.follow, args=(frames,), name="frames", daemon=True).start()
    code = view.wait()
    with contextlib.suppress(FileNotFoundError), page.open("rb") as file:
        sending.copy(read_from(file.fileno()))
    link.send_number(Kind.EXITED, 0, code)


@dataclass(frozen=True)
class KnownRun:
    """The file with what the other machine knows of the run, see sent_run.SentRun."""

    path: Path
    run: RunDir

    def write(self, document: Mapping[str, Any]) -> None:
        """Replace the file. Raises OSError."""
        replace_file(self.path, json.dumps({**document, "run_dir": str(self.run.path)}))


@dataclass
class View(Command):
    """A verb that reads a run."""

    known: KnownRun

    def outgoing(self, channel: int) -> Outgoing:
        """Return the sender of one more channel."""
        return self._outputs.setdefault(channel, Outgoing(self.link, channel))

    def _act(self, frame: Frame) -> None:
        if frame.kind == Kind.RUN:
            with contextlib.suppress(OSError):  # a full disk; the job is then too old to be shown
                self.known.write(frame.document)
            self.link.send(Kind.HEARD)  # the other machine ends a view whose connection stays silent
        else:
            super()._act(frame)


# ---- a pod that was started for views --------------------------------------------------------------------------------


@contextlib.contextmanager
def _open_view() -> Iterator[None]:
    """Hold the lock that says that a view is open. A pod of the run needs none, and may have no place for it."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            fcntl.flock(held.enter_context(closing_descriptor(open_to_append(_lock_file()))), fcntl.LOCK_SH)
        yield


def hold(idle_seconds: float = IDLE_SECONDS, look_every_seconds: float = _LOOK_EVERY_SECONDS) -> int:
    """Wait until no view has been open for a time, or for SIGTERM. Returns exit code 0."""
    ended = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):  # PID 1 of a container ignores both by default
        signal.signal(signum, lambda number, frame: ended.set())
    used = time.monotonic()
    while time.monotonic() - used < idle_seconds and not ended.wait(look_every_seconds):
        with closing_descriptor(open_to_append(_lock_file())) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                used = time.monotonic()
    return ExitCode.DONE


def _lock_file() -> Path:
    return Path(tempfile.gettempdir(), f"scaletrain-views-{os.geteuid()}.lock")


if __name__ == "__main__":
    sys.exit(main())
