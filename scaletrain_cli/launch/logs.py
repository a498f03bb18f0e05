"""The logs of ranks in the run directory: find, read and follow them, and fetch them from pods."""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.errors import SchedulerError, UsageError
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.log_setup import is_library_noise
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import entries
from scaletrain_cli.rundir.journal import LONGEST_LINE, file_size, lines_backwards
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.safe_files import open_to_read
from scaletrain_cli.worker.progress import read_progress

_END_BYTES = 1 << 16


@dataclass(frozen=True)
class LogFile:
    """The log file of one rank in one attempt."""

    attempt: int
    node: str
    rank: int
    path: Path


@dataclass(frozen=True)
class LogLine:
    """One line of one rank, without its newline."""

    source: LogFile
    text: str


def log_files(run: RunDir, attempt: int | None = None, rank: int | None = None) -> list[LogFile]:
    """Return the logs of an attempt (default: the last) by rank. Raises UsageError for an unknown attempt or rank."""
    numbers = run.attempts()
    if attempt is not None and attempt not in numbers:
        params = {"run": run.run_id, "attempt": attempt, "last": max(numbers, default=0)}
        raise UsageError(Reason("runs.no-such-attempt" if numbers else "runs.no-attempts", params))
    if not numbers:
        return []
    logs = _files_of(run, attempt if attempt is not None else numbers[-1])
    if rank is None:
        return logs
    chosen = [file for file in logs if file.rank == rank]
    if logs and not chosen:
        params = {"run": run.run_id, "attempt": logs[0].attempt, "rank": rank, "last": logs[-1].rank}
        raise UsageError(Reason("runs.no-such-rank", params))
    return chosen


def is_for_people(line: str) -> bool:
    """Return False for a library's log line below level ERROR, and for a machine-readable progress line."""
    return not is_library_noise(line) and read_progress(line) is None


def read_logs(
    run: RunDir,
    attempt: int | None = None,
    rank: int | None = None,
    last_lines: int | None = None,
    *,
    everything: bool = True,
) -> Iterator[LogLine]:
    """Yield the lines of each rank in turn; with ``last_lines`` only that many of each.

    Without ``everything`` only lines for which ``is_for_people`` is true.
    """
    for file in log_files(run, attempt, rank):
        start = 0 if last_lines is None else _start_of_last(file.path, last_lines, everything=everything)
        with open_to_read(file.path) as lines:
            lines.seek(start)
            while line := lines.readline(LONGEST_LINE).decode(errors="replace"):
                if everything or is_for_people(line):
                    yield LogLine(file, line.rstrip("\r\n"))


def _start_of_last(path: Path, lines: int, *, everything: bool) -> int:
    """Return where the last lines of a log begin; no more of it is read. Lines are counted as read_logs() does."""
    start = file_size(path)
    for place, line in lines_backwards(path):
        if lines <= 0:
            break
        if line or place < start:  # not what follows the last line end
            start = place
            lines -= everything or is_for_people(line.decode(errors="replace"))
    return start


def end_of(path: Path) -> str:
    """Return the last 64 KiB of a log, where a failed process reports its error; empty without a log."""
    if not path.is_file():
        return ""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


class LogFollower:
    """Returns the lines that are new since the last call, in every attempt from the current one on."""

    def __init__(
        self,
        run: RunDir,
        rank: int | None = None,
        from_attempt: int | None = None,
        last_lines: int | None = None,
        *,
        everything: bool = True,
    ) -> None:
        """Begin with the ``last_lines`` of each log, None for all of it; counted as read_logs() does."""
        self._run, self._rank = run, rank
        self._first = from_attempt if from_attempt is not None else max(run.attempts(), default=1)
        self._positions: dict[Path, int] = {}
        for file in _files_of(run, self._first) if last_lines is not None else ():
            self._positions[file.path] = _start_of_last(file.path, last_lines or 0, everything=everything)

    def new_lines(self, *, to_the_end: bool = False) -> list[LogLine]:
        """Return complete lines; with ``to_the_end`` also the last incomplete one."""
        log_lines = []
        for number in self._run.attempts():
            if number >= self._first:
                for file in _files_of(self._run, number):
                    if self._rank in (None, file.rank):
                        lines = _new_text(file.path, self._positions, to_the_end=to_the_end).split("\n")
                        lines = lines[:-1] if lines[-1] == "" else lines
                        log_lines += [LogLine(file, line.rstrip("\r")) for line in lines]
        return log_lines


def _new_text(path: Path, positions: dict[Path, int], *, to_the_end: bool = False) -> str:
    """Return the complete lines behind a file's position, which is moved; ``to_the_end``: an incomplete one, too."""
    with path.open("rb") as file:
        position = file.seek(positions.get(path, 0))
        data = file.read()
    if not to_the_end:
        data = data[: data.rfind(b"\n") + 1]
    positions[path] = position + len(data)
    return data.decode(errors="replace")


def _files_of(run: RunDir, attempt: int) -> list[LogFile]:
    files = []
    for path in entries(run.attempt(attempt) / "logs"):
        node, _, rank = path.stem.rpartition("-")
        if path.suffix == ".log" and rank.isdigit() and path.is_file():  # reading a FIFO or a device would never end
            files.append(LogFile(attempt, node, int(rank), path))
    return sorted(files, key=lambda file: file.rank)


@contextlib.contextmanager
def fetched_logs(run: RunDir, *, follow: bool = False) -> Iterator[str]:
    """Fetch the logs into the run directory on entry; with ``follow``, keep fetching until exit.

    Yields the error if they could not be fetched, else an empty text: logs that were fetched before can still be read.
    """
    record = read_record(run)
    why, following = "", contextlib.ExitStack()
    try:
        logs = backend_for(record.spec.cluster.scheduler).logs(run, record)
        if logs is not None:
            logs.fetch()
            if follow:
                following.enter_context(logs.following())
    except (SchedulerError, UsageError) as error:
        why = str(error)
    with following:
        yield why


class EarlyOutput:
    """Returns new lines that pods printed before their attempt began; some pods end before that."""

    def __init__(self, run: RunDir, since: Sequence[LogFile]) -> None:
        """Skip output older than the logs of an attempt, ``since``."""
        self._folder = run.path / "pods"
        news = early_output(run, since)
        self._read = {path: path.stat().st_size for path in self._folder.glob("*.log") if path not in news}

    def new_lines(self) -> list[tuple[str, str]]:
        """Return the pod and the text of each new line."""
        lines = []
        for path in sorted(self._folder.glob("*.log")):
            lines += [(path.stem, line) for line in _new_text(path, self._read).splitlines()]
        return lines


def early_output(run: RunDir, since: Sequence[LogFile]) -> list[Path]:
    """Return the files with the output of pods before their attempt began, if newer than the logs ``since``."""
    newest = max((file.path.stat().st_mtime for file in since), default=0.0)
    return [path for path in sorted((run.path / "pods").glob("*.log")) if path.stat().st_mtime > newest]


# The part of a log that shows why its rank ended.
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s*File "(?P<path>[^"]+)", line \d+, in ')
_SIGN = re.compile(r"error|exception|fatal|killed|abort|out of memory|refused|cannot|no such", re.I)
_MOST_LINES = 6


def last_error(path: Path) -> str:
    """Return the exception of the last traceback with the innermost frame outside libraries; else the last lines that
    contain an error; else the last lines of the log. Empty for an empty or missing file.
    """
    lines = end_of(path).splitlines()
    lines = [line.rstrip() for line in lines if line.strip()]
    starts = [index for index, line in enumerate(lines) if line.strip().endswith(_TRACEBACK)]
    if starts:
        return "\n".join(_of_traceback(lines[starts[-1] + 1 :]))
    return "\n".join(([line for line in lines if _SIGN.search(line)] or lines)[-_MOST_LINES // 2 :])


def _of_traceback(lines: list[str]) -> list[str]:
    frames = [index for index, line in enumerate(lines) if _FRAME.match(line)]
    ends = [index for index, line in enumerate(lines) if not line.startswith((" ", "\t")) and line]
    message = lines[ends[0] : ends[0] + _MOST_LINES] if ends else []
    before = [index for index in frames if not ends or index < ends[0]]
    own = [index for index in before if "site-packages" not in lines[index] and "/lib/python" not in lines[index]]
    shown = (own or before)[-1:]
    return [line.strip() for index in shown for line in lines[index : index + 2] if line not in message] + message
