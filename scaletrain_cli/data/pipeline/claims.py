"""Claims: which of the processes that prepare data in one folder, perhaps on several machines, does which unit of work.

Results are atomic and any process may write any of them, so a claim only avoids double work; nothing breaks when two
processes do the same unit. Below ``folder``:

- ``workers/ID``: a living process; it changes the time of the file every few seconds. A process whose file is gone, or
  does not change while another one watches it, counts as dead. Times are those of the file system, and are compared
  with one another only.
- ``claims/STAGE/UNIT.N``: the process that does a unit. The file is created exclusively; ``UNIT.N+1`` may be created by
  any process once the owner of ``UNIT.N`` is dead, so that exactly one process takes it over.

Processes of one job name a file for the reason of a failure: they all stop when it is there.
"""

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.data.drafts import new_owner, remove_drafts
from scaletrain_cli.errors import ExitCode, ScaletrainError, UsageError
from scaletrain_cli.own_processes import boot_id, process_stat
from scaletrain_cli.reasons import Reason, reason_from, recorded
from scaletrain_cli.rundir.documents import parse_object, read_document, write_document
from scaletrain_cli.safe_files import create_file, make_folder, open_to_read
from scaletrain_cli.secret_text import hide_values_in, secret_values
from scaletrain_cli.unexpected import error_of_system

_LONG_STALE = 30  # times stale_seconds: dead without watching, whatever the clocks of file servers


@dataclass(frozen=True)
class Timing:
    """Intervals of claims. ``stale_seconds``: a process whose file is unchanged for longer is dead.

    NFS clients may see times that are a minute old, and a process that computes may be late by seconds.
    """

    heartbeat_seconds: float = 10.0
    stale_seconds: float = 150.0
    poll_seconds: float = 1.0


class Claims:
    """This process among those that work in a folder. ``failure``: the file that the processes of a job share."""

    def __init__(self, folder: Path, failure: Path | None = None, timing: Timing | None = None) -> None:
        self._workers, self._claims = folder / "workers", folder / "claims"
        self._failure = failure
        self.timing = timing or Timing()
        self.owner = new_owner()
        self.losses = 0  # how often others took this process for dead, as when it was suspended
        self._generations: dict[str, dict[str, int]] = {}
        self._owners: dict[Path, str] = {}
        self._seen: dict[Path, tuple[int, float]] = {}
        self._judged: dict[str, tuple[float, bool]] = {}
        self._remove: list[Callable[[], None]] = []
        self._folders: list[Path] = []  # of drafts
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="claims", daemon=True)

    def __enter__(self) -> "Claims":
        try:
            for folder in (self._workers, self._claims):
                make_folder(folder, parents=True)
            self._register()
            self._beating.start()
        except BaseException:  # as of a signal, before a with statement would call __exit__
            self.__exit__()
            raise
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        if kind is not None:
            for folder in self._folders:  # also what this process was writing: its worker processes have ended
                remove_drafts(folder, lambda owner: owner == self.owner or self.is_dead(owner))
        self._ended.set()
        if self._beating.ident is not None:  # it was started
            self._beating.join()
        with contextlib.suppress(OSError):
            self._remove_dead()
            self._own.unlink(missing_ok=True)
            if not os.listdir(self._workers):  # so it is for the last of several that end at the same time
                for folder in self._folders:
                    remove_drafts(folder, self.is_dead)
                for remove in self._remove:
                    remove()
                shutil.rmtree(self._claims, ignore_errors=True)

    def at_last_end(self, remove: Callable[[], None]) -> None:
        """Call ``remove`` when this process ends its work, if no other one works then."""
        self._remove.append(remove)

    @property
    def _own(self) -> Path:
        return self._workers / self.owner

    def _register(self) -> None:
        about = {
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
        }
        with contextlib.suppress(FileExistsError):
            create_file(self._own, json.dumps(about))

    def _beat(self) -> None:
        while not self._ended.wait(self.timing.heartbeat_seconds):
            with contextlib.suppress(OSError):  # the folder may come back; until then others take over
                self.beat()

    def beat(self) -> None:
        """Show that this process lives; note if others took it for dead. Raises OSError."""
        try:
            os.utime(self._own)
        except FileNotFoundError:
            self.losses += 1
            make_folder(self._workers, parents=True)
            self._register()

    # ---- other processes ----------------------------------------------------------------------------------------

    def _remove_dead(self) -> None:
        """Remove the files of dead processes. Raises OSError."""
        for name in os.listdir(self._workers):
            self.is_dead(name)

    def is_dead(self, owner: str) -> bool:
        """Return whether a process is dead; never true for this one."""
        if owner == self.owner:
            return False
        now = time.monotonic()
        checked, dead = self._judged.get(owner, (-1e9, False))
        if now - checked >= self.timing.poll_seconds:
            dead = self._judge(owner)
            self._judged[owner] = now, dead
        return dead

    def _judge(self, owner: str) -> bool:
        path = self._workers / owner
        try:
            with open_to_read(path) as file:  # opened, since an NFS client may show old times otherwise
                changed = os.fstat(file.fileno()).st_mtime_ns
                about = parse_object(file.read())  # empty if just created
        except FileNotFoundError:
            return True
        gone = about.get("machine") == _machine() != "" and about.get("started") != _started(about.get("pid"))
        if gone or self._is_stale(path, changed):
            path.unlink(missing_ok=True)
            return True
        return False

    def _is_stale(self, path: Path, changed: int) -> bool:
        """Return whether a file has not changed while it was watched, or for very long by the file system's clock."""
        now = time.monotonic()
        before, since = self._seen.get(path, (None, now))
        if before != changed:
            self._seen[path] = changed, now
            since = now
        with contextlib.suppress(OSError):
            age = (self._own.stat().st_mtime_ns - changed) / 1e9
            return now - since > self.timing.stale_seconds or age > _LONG_STALE * self.timing.stale_seconds
        return False

    def remove_drafts(self, folder: Path) -> None:
        """Remove what dead processes were writing below a folder, now and at the end.

        At an end by an exception also what this process was writing: its worker processes must have ended then.
        """
        self._folders.append(folder)
        remove_drafts(folder, self.is_dead)

    # ---- claims -------------------------------------------------------------------------------------------------

    def refresh(self, stage: str) -> None:
        """Read which claims of a stage there are."""
        generations: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._claims / stage):
                unit, _, number = name.rpartition(".")
                if unit and number.isdecimal():
                    generations[unit] = max(generations.get(unit, 0), int(number))
        self._generations[stage] = generations

    def claim(self, stage: str, unit: str) -> bool:
        """Return whether this process has the unit now: nobody had it, or only processes that are dead."""
        known = self._generations.setdefault(stage, {})
        if (latest := known.get(unit)) is not None:
            owner = self._owner_of(self._claims / stage / f"{unit}.{latest}")
            if owner == self.owner:
                return True
            if owner is None or (owner and not self.is_dead(owner)):
                return False
        number = 0 if latest is None else latest + 1
        path = self._claims / stage / f"{unit}.{number}"
        known[unit] = number
        try:
            make_folder(path.parent, parents=True)
            create_file(path, self.owner)
        except (FileExistsError, FileNotFoundError):  # another was faster, or has just removed all claims
            return False
        self._owners[path] = self.owner
        return True

    def _owner_of(self, path: Path) -> str | None:
        """Return the owner of a claim; "" for one who died while creating it, None if that is not known yet."""
        if path not in self._owners:
            try:
                with open_to_read(path) as file:
                    changed = os.fstat(file.fileno()).st_mtime_ns
                    owner = file.read().decode("ascii", "replace")
            except FileNotFoundError:  # all claims were removed
                return ""
            if len(owner) != len(self.owner):
                return "" if self._is_stale(path, changed) else None
            self._owners[path] = owner
        return self._owners[path]

    # ---- failures -----------------------------------------------------------------------------------------------

    def fail(self, error: Exception, unit: str) -> ScaletrainError:
        """Record why the job has failed, unless it is recorded, and return the error to raise."""
        failure = error if isinstance(error, ScaletrainError) else _unexpected(error, unit)
        if self._failure is not None:
            record_failure(self._failure, failure, unit)
        return failure

    def raise_failure(self) -> None:
        """Raise the error of another process of the same job, if one has failed."""
        if self._failure is not None and (error := read_failure(self._failure)) is not None:
            raise error


def record_failure(path: Path, error: ScaletrainError, unit: str) -> None:
    """Record why a job has failed, without secrets, unless the file is there. ``unit``: what failed. Raises OSError."""
    if read_failure(path) is None:
        reason = error.reason if error.reason is not None and not error.problems else recorded(str(error).rstrip("."))
        hidden = hide_values_in(reason.to_document(), secret_values(os.environ))
        about = {"reason": hidden, "exit_code": int(error.exit_code), "unit": unit}
        write_document(path, about | {"host": socket.gethostname(), "time": time.time()})


def read_failure(path: Path) -> ScaletrainError | None:
    """Return the error with which a job has failed; None if none is recorded."""
    if (document := read_document(path)) is None:
        return None
    kind = UsageError if document.get("exit_code") == ExitCode.USAGE else ScaletrainError
    return kind(reason_from(document.get("reason")))


def _unexpected(error: Exception, unit: str) -> ScaletrainError:
    if isinstance(error, OSError):
        failure = error_of_system(error, unit)
    else:
        failure = ScaletrainError(
            Reason("data.task-failed", {"task": unit, "error": f"{type(error).__name__}: {error}"})
        )
    failure.__cause__ = error
    return failure


def _machine() -> str:
    """Return an id of the process table that this process is in; "" if there is none."""
    with contextlib.suppress(OSError):
        if boot := boot_id():
            return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _started(pid: object) -> str:
    """Return when a process of this machine started, in ticks; "" if there is no such process."""
    with contextlib.suppress(OSError):
        stat = process_stat(pid)
        return "" if stat[0] in b"ZX" else stat[19].decode()
    return ""
