"""events.jsonl and metrics.jsonl: append-only JSON lines, and the rollbacks and findings that events record.

Several processes append to one file, so a line is one ``write`` on an O_APPEND descriptor; readers skip an
incomplete line, and the next writer starts a new one. Over NFS, where O_APPEND alone does not keep the lines of
several hosts apart, a lock does. The lock is on another file, which only the user of the run can open: a reader could
hold a lock on the journal itself, and so stop the training. Rollbacks are read from events rather than from
checkpoints: the checkpoint that a run rolls back to is older than the decision.
"""

import contextlib
import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.rundir.documents import is_time, parse_json, reporting_damage, undamaged_document, write_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import closing_descriptor, locked, open_to_append, open_to_change, open_to_read
from scaletrain_cli.sent_run import sent_run

_BLOCK_BYTES = 1 << 16
_LOCK_SECONDS = 1.0  # a line takes microseconds
LONGEST_LINE = 4 << 20  # bytes: ten times the longest that a run of a thousand nodes writes
_PLACED = ("from-scratch", "started", "resumed", "rolled-back")
_METRICS_BYTES = "metrics_bytes"


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON object as one line, on a new line even after an incomplete one."""
    append_lines(path, [record])


def append_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Append JSON objects, a line each, in one write. Raises OSError, and ValueError before anything is written."""
    append_whole_lines(
        path, "".join(json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n" for record in records).encode()
    )


def append_whole_lines(path: Path, lines: bytes) -> None:
    """Append lines in one write. Raises OSError."""
    with _writing(path), closing_descriptor(open_to_append(path)) as descriptor:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = b"\n" + lines if torn else lines
        written = os.write(descriptor, data)
        if written != len(data):
            raise OSError(f"{path}: only {written} of {len(data)} bytes of a line were written; is the disk full?")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Hold the lock of this user's writers in a folder, unless a stopped process has it: no step waits for that."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # such as a full disk; O_APPEND must suffice
            held.enter_context(locked(path.with_name(f".append-{os.geteuid()}.lock"), wait_seconds=_LOCK_SECONDS))
        yield


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every complete JSON object in the file, oldest first; none if the file is missing."""
    return (record for _, _, record in placed_lines(path))


def placed_lines(path: Path, start: int = 0) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the offsets of the begin and the end of each complete JSON object from ``start`` on, and the object.

    None if the file is missing. Raises DamagedError if it cannot be read, or has a line that no writer makes: a sparse
    file has one without end.
    """
    with reporting_damage(path), contextlib.suppress(FileNotFoundError), open_to_read(path) as file:
        place = file.seek(min(start, file.seek(0, os.SEEK_END)))
        while line := file.readline(LONGEST_LINE + 1):
            require_line(line)
            for record in _objects([line]):
                yield place, place + len(line), record
            place += len(line)


def require_line(line: bytes) -> None:
    """Raise ValueError for a longer line than any writer makes."""
    if len(line) > LONGEST_LINE:
        raise ValueError(f"it has a line of more than {LONGEST_LINE:,} bytes")


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def read_lines_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every complete JSON object, newest first, reading the file only as far as needed. Raises DamagedError."""
    for _, line in lines_backwards(path):
        with reporting_damage(path):
            require_line(line)
        yield from _objects([line])


def lines_backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, the last first, each with the offset of its first byte; none if it is missing.

    Of a line that is longer than LONGEST_LINE, parts are yielded: a sparse file has one without end.
    """
    with reporting_damage(path), contextlib.suppress(FileNotFoundError), open_to_read(path) as file:
        position, rest = file.seek(0, os.SEEK_END), b""
        while position > 0:
            start = max(0, position - _BLOCK_BYTES)
            file.seek(start)
            rest = file.read(position - start) + rest
            position = start
            while (end := rest.rfind(b"\n")) >= 0:
                yield position + end + 1, rest[end + 1 :]
                rest = rest[:end]
            if len(rest) > LONGEST_LINE:
                yield position, rest
                rest = b""
        yield 0, rest


def record_event(run: RunDir, event: str, **details: Any) -> None:
    """Append an event with the wall-clock time (Unix seconds).

    An event that invalidates earlier metrics also records the length of metrics.jsonl in bytes.
    """
    place = {_METRICS_BYTES: file_size(run.metrics)} if event in _PLACED else {}
    append_line(run.events, {"time": round(time.time(), 3), "event": event, **details, **place})


def size_here(path: Path) -> int:
    """Return the bytes of a file that this host writes; 0 where it cannot be read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def file_size(path: Path) -> int:
    """Return the bytes of a file that another host may write; 0 if it does not exist."""
    try:
        with path.open("rb") as file:  # opened, since a network file system answers a mere stat from its cache
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return 0


def withdraw_event(run: RunDir, event: str) -> None:
    """Remove the latest event if it has this name: that of a job that was not submitted, before others can write."""
    with _writing(run.events), closing_descriptor(open_to_change(run.events)) as descriptor:
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        start = data.rstrip(b"\n").rfind(b"\n") + 1
        if any(last.get("event") == event for last in _objects([data[start:]])):
            os.ftruncate(descriptor, start)


# The file of events that was parsed last, with its identity, size and time: a verb reads the same events several times.
_parsed: tuple[Path, tuple[int, int, int, int], list[dict[str, Any]]] | None = None


def read_events(run: RunDir) -> list[dict[str, Any]]:
    """Return all events, oldest first; each has its name in ``event``. Damaged lines are left out.

    The file is parsed again only if it has changed; do not modify the events. In a view for another machine, the events
    that it has recorded itself are among them.
    """
    own, elsewhere = _own_events(run), sent_run(run.path)
    if elsewhere is None or not elsewhere.events:
        return own
    return sorted([*filter(_is_event, elsewhere.events), *own], key=lambda event: event.get("time") or 0.0)


def events_to_send(run: RunDir) -> list[dict[str, Any]]:
    """Return the events of this machine's run directory for a view where the other files are.

    Without those that refer to a place in metrics.jsonl, which is another file there.
    """
    return [event for event in _own_events(run) if event["event"] not in _PLACED]


def _own_events(run: RunDir) -> list[dict[str, Any]]:
    global _parsed
    known = _parsed
    with reporting_damage(run.events):
        try:
            status = os.stat(run.events)
        except FileNotFoundError:
            return []
        state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if known is None or known[:2] != (run.events, state):
            known = (run.events, state, [event for event in read_lines(run.events) if _is_event(event)])
            _parsed = known
        return list(known[2])


# Types of the fields that readers rely on. An event with another type in one of them is a damaged line.
_INTEGERS = ("attempt", "first_attempt", "from_step", "lost_steps", _METRICS_BYTES, "saved_step", "step", "to_step")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "event": (str,),
    "skip": (list, NoneType),
    **dict.fromkeys(("time", "seconds", "blocked_seconds", "bytes"), (int, float, NoneType)),
    **dict.fromkeys(_INTEGERS, (int, NoneType)),
}


def _with(events: Iterable[Mapping[str, Any]], names: Collection[str], *fields: str) -> list[Mapping[str, Any]]:
    """Return the events with one of the names that have a value in each of the fields."""
    return [event for event in events if event["event"] in names and all(event.get(key) is not None for key in fields)]


def _is_event(record: Mapping[str, Any]) -> bool:
    for key, value in record.items():
        if key in _TYPES and type(value) not in _TYPES[key]:
            return False
    skip = record.get("skip") or [0, 0]
    return "event" in record and is_time(record.get("time")) and [type(batch) for batch in skip] == [int, int]


def read_metrics(run: RunDir) -> list[dict[str, Any]]:
    """Return the metrics by step since the run last started from scratch, without rolled-back steps.

    A step has more than one line when it was evaluated, and when a later attempt trained it again. Later lines
    override earlier ones, key by key. Lines and events are compared by position: clocks are set back, and differ.
    """
    events = read_events(run)
    scratch = _with(events, ("from-scratch",), _METRICS_BYTES)[-1:]
    back = _with(events, (ROLLBACK_EVENT,), "to_step", _METRICS_BYTES)
    by_step: dict[int, dict[str, Any]] = {}
    for place, _, record in placed_lines(run.metrics):
        step = record.get("step")
        if type(step) is not int or any(place < event[_METRICS_BYTES] for event in scratch):
            continue
        if any(step > event["to_step"] and place < event[_METRICS_BYTES] for event in back):
            continue
        by_step[step] = {**by_step.get(step, {}), **record}
    return [by_step[step] for step in sorted(by_step)]


def steps_logged_since_begun(run: RunDir) -> list[int]:
    """Return the steps logged since an attempt last began to train or was rolled back, in file order."""
    begun = _with(read_events(run), _PLACED[1:], _METRICS_BYTES)[-1:]
    lines = [(place, line) for place, _, line in placed_lines(run.metrics) if type(line.get("step")) is int]
    return [line["step"] for place, line in lines if not any(place < event[_METRICS_BYTES] for event in begun)]


def has_committed(run: RunDir) -> bool:
    """Return True if a checkpoint was committed since the run last started from scratch, or the run began with one."""
    names = [event.get("event") for event in read_events(run)]
    restarts = [index for index, name in enumerate(names) if name == "from-scratch"]
    return not {"checkpoint", BRANCH_EVENT}.isdisjoint(names[max(restarts, default=0) :])


def last_logged_step(run: RunDir) -> int | None:
    """Return the step of the newest line in metrics.jsonl; after a resume it may be below earlier ones."""
    return next((line["step"] for line in read_lines_backwards(run.metrics) if type(line.get("step")) is int), None)


BRANCH_EVENT = "branched"
ROLLBACK_EVENT, CORRUPTION_EVENT = "rolled-back", "corruption"


@dataclass(frozen=True)
class Rollback:
    """Steps after ``to_step`` up to ``from_step`` are discarded; batches ``skip``, both ends included, are skipped."""

    from_step: int
    to_step: int
    skip: tuple[int, int]


def invalidated_steps(events: Iterable[Mapping[str, Any]], steps: Collection[int]) -> set[int]:
    """Return those of ``steps`` whose mirrored checkpoints were discarded: rolled back, corrupt, or before a new start.

    A step is valid again after its next event ``mirrored``. One without such an event is older than all ``events``.
    """
    invalid: set[int] = set()
    for event in events:
        if event["event"] in ("mirrored", "moved"):  # a history that was moved may lack the first one
            invalid.discard(event.get("step") or 0)
        elif event["event"] == "from-scratch":
            invalid.update(steps)
        elif event["event"] in (ROLLBACK_EVENT, CORRUPTION_EVENT):
            last = event["to_step" if event["event"] == ROLLBACK_EVENT else "clean_step"]
            invalid.update(step for step in steps if step > last)
    return invalid


def record_rollback(run: RunDir, rollback: Rollback, **evidence: Any) -> None:
    """Append the event. Training continues only after it."""
    record_event(run, ROLLBACK_EVENT, **vars(rollback), lost_steps=rollback.from_step - rollback.to_step, **evidence)


def read_rollbacks(run: RunDir) -> list[Rollback]:
    """Return the rollbacks since the run last started from scratch, oldest first."""
    events = read_events(run)
    scratch = max((place for place, event in enumerate(events) if event["event"] == "from-scratch"), default=0)
    kept = _with(events[scratch:], (ROLLBACK_EVENT,), "from_step", "to_step", "skip")
    return [Rollback(event["from_step"], event["to_step"], tuple(event["skip"])) for event in kept]


RAISED_EVENT, CLEARED_EVENT = "finding", "finding-cleared"
SEVERITIES = ("note", "warning", "error")


@dataclass(frozen=True)
class RaisedFinding:
    """A finding that was raised and has not been cleared.

    ``subject``: the source, rank or device that it is about; empty for the run. ``severity``: the highest since it was
    raised. ``time``: Unix seconds at which it was raised. ``attempt``, ``step``: where the evidence is from.
    """

    reason: Reason
    subject: str
    severity: str
    time: float
    attempt: int
    step: int

    @property
    def key(self) -> str:
        """The code with the subject: at most one finding with a key is raised at a time."""
        return finding_key(self.reason.code, self.subject)


def finding_key(code: str, subject: str) -> str:
    """Return the key by which findings of all attempts are compared."""
    return f"{code} {subject}".rstrip()


def raised_findings(events: Iterable[Mapping[str, Any]]) -> dict[str, RaisedFinding]:
    """Return the raised findings by key, in the order in which they were raised. ``events``: oldest first.

    A run that starts again from scratch has none. Events of another form are skipped.
    """
    raised: dict[str, RaisedFinding] = {}
    for event in events:
        name = event.get("event")
        if name == "from-scratch":
            raised = {}
        elif name in (RAISED_EVENT, CLEARED_EVENT):
            reason, subject = reason_from(event), str(event.get("subject") or "")
            key, severity = finding_key(reason.code, subject), str(event.get("severity"))
            if name == CLEARED_EVENT:
                raised.pop(key, None)
            elif severity in SEVERITIES:
                since = raised[key].time if key in raised else event.get("time") or 0.0
                attempt, step = event.get("attempt") or 0, event.get("step") or 0
                raised[key] = RaisedFinding(reason, subject, severity, since, attempt, step)
    return raised


def mark_diagnosis(run: RunDir, attempt: int, *, is_over: bool) -> None:
    """Record that a process diagnoses the attempt, or has done so for the last time. Raises OSError."""
    write_document(_mark(run, attempt), {"is_over": is_over})


def is_diagnosed(run: RunDir, attempt: int) -> bool:
    """Return False while a process diagnoses the attempt, and True once no findings will follow."""
    mark = undamaged_document(_mark(run, attempt))
    return mark is None or mark.get("is_over") is not False


def _mark(run: RunDir, attempt: int) -> Path:
    return run.attempt(attempt) / "diagnosis.json"
