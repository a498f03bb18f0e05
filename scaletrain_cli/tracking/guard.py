"""Run trackers beside training: each in a thread of its own, from a queue, so that none can fail, stop or slow a run.

The metrics of a run are those of metrics.jsonl. A tracker that missed some, because it failed or the process was
killed, is given them when it starts again. ``tracking/<name>.json`` in the run directory holds how far it got.
"""

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import make_folder, open_to_read, replace_file
from scaletrain_cli.tracking.base import Outcome, TrackedRun, Tracker

# Maximum wait for all trackers at the end of training; after a preemption only a grace period is left.
FINISH_SECONDS: Mapping[Outcome, float] = {"finished": 60.0, "preempted": 20.0, "failed": 20.0}
_QUEUED = 10_000  # steps queued for a tracker that is down or slow
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 30.0, 900.0
_IDLE_SECONDS = 2.0  # between two reads of events.jsonl
_SAVE_SECONDS = 1.0  # between two writes of the state file
_FINDINGS_SECONDS, _FINDINGS_POLL_SECONDS = 3.0, 0.05  # for the last diagnosis of a run that has finished


# Records an event about a tracker: the name of the event, that of the tracker, and the reason with its parts.
Report = Callable[[str, str, Reason], None]


@dataclass(frozen=True)
class RunFiles:
    """The files that trackers read: ``metrics()`` yields the valid lines of metrics.jsonl in the order of steps.

    ``is_diagnosed()``: no more events of the diagnosis will follow.
    """

    metrics: Callable[[], Iterable[Mapping[str, Any]]]
    events: Path
    artifacts: Sequence[Path]
    is_diagnosed: Callable[[], bool] = lambda: True


@dataclass(frozen=True)
class _Finish:
    outcome: Outcome


@dataclass
class _Position:
    """The progress of a tracker: the last step of each metric, bytes of events.jsonl, and names of stored files."""

    steps: dict[str, int] = field(default_factory=dict)
    events_bytes: int = 0
    artifacts: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return max(self.steps.values(), default=0)

    def cap(self, step: int) -> None:
        self.steps = {name: min(last, step) for name, last in self.steps.items()}


class GuardedTracker:
    """One tracker in its thread. No method raises, and only finish() and join() wait."""

    def __init__(
        self, name: str, make: Callable[[], Tracker[Any]], run: TrackedRun, files: RunFiles, report: Report
    ) -> None:
        self.name = name
        self._make, self._run, self._files, self._report = make, run, files, report
        self._queue: queue.Queue[Mapping[str, Any] | _Finish] = queue.Queue(_QUEUED)
        self._off = threading.Event()
        self._wake = threading.Event()  # training has ended: retry without waiting
        self._state = run.folder / "tracking" / f"{name}.json"
        self._saved = 0.0
        self._down, self._delay = False, _FIRST_RETRY_SECONDS
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, line: Mapping[str, Any]) -> None:
        """Queue a line of metrics.jsonl, which has ``step`` and ``time``."""
        if self._off.is_set():
            return
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._turn_off(Reason("tracking.queue-full", {"tracker": self.name, "lines": _QUEUED}))

    def finish(self, outcome: Outcome) -> None:
        """Request the end, without waiting."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(_Finish(outcome))
        self._wake.set()

    def join(self, seconds: float) -> None:
        """Wait for the end; report and abandon a tracker that takes longer."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive() and not self._off.is_set():
            self._turn_off(Reason("tracking.finish-timeout", {"tracker": self.name}))

    def _turn_off(self, reason: Reason) -> None:
        if not self._off.is_set():
            self._off.set()
            self._report_event("tracker-off", reason)

    def _report_event(self, event: str, reason: Reason) -> None:
        with contextlib.suppress(Exception):  # as on a full disk
            self._report(event, self.name, reason)

    # From here on, everything runs in the thread.

    def _work(self) -> None:
        position = self._read_position()
        doing, pending = "start", list[Mapping[str, Any] | _Finish]()
        first = True
        while not self._off.is_set():
            last_try = self._wake.is_set()
            try:
                doing = "log"
                missed = self._files.metrics() if first else ()  # an error of the file system starts no tracker
                doing = "start"
                tracker = self._started(position)
                doing = "log"
                for line in missed:  # without what the tracker holds: nothing was trained again yet
                    new = {key: value for key, value in line.items() if line["step"] > position.steps.get(key, -1)}
                    self._send(tracker, new, position)
                first = False
                for path in self._files.artifacts:
                    if path.name not in position.artifacts and path.is_file():
                        tracker.artifact(path)
                        position.artifacts.append(path.name)
                self._serve(tracker, position, pending)
                return
            except Exception as error:
                params = {"tracker": self.name, "message": f"{type(error).__name__}: {error}"[:500]}
                if isinstance(error, ImportError | LookupError) and doing == "start":
                    self._turn_off(Reason("tracking.not-installed", params))
                elif not self._down:
                    self._down = True
                    self._report_event("tracker-off", Reason(f"tracking.{doing}-failed", params))
                self._save_position(position)
            if last_try or self._off.is_set():
                return
            self._wake.wait(self._delay)
            self._delay = min(2 * self._delay, _LAST_RETRY_SECONDS)

    def _started(self, position: _Position) -> Tracker[Any]:
        tracker = self._make()
        if (held := tracker.start(replace(self._run, last_step=position.last_step))) is not None:
            position.steps = dict(held)
        if tracker.rewinds:
            tracker.rewind(position.last_step)
        return tracker

    def _serve(self, tracker: Tracker[Any], position: _Position, pending: list[Mapping[str, Any] | _Finish]) -> None:
        """Send what is queued until the end; ``pending`` holds the item that an exception interrupted."""
        while not self._off.is_set():
            if not pending:
                with contextlib.suppress(queue.Empty):
                    pending.append(self._queue.get(timeout=_IDLE_SECONDS))
            if pending and isinstance(pending[0], _Finish) and pending[0].outcome == "finished":
                # The last diagnosis is awaited: no attempt follows that would pass its findings on.
                until = time.monotonic() + _FINDINGS_SECONDS
                while not self._files.is_diagnosed() and time.monotonic() < until:
                    time.sleep(_FINDINGS_POLL_SECONDS)
            if not pending or isinstance(pending[0], _Finish):
                self._send_events(tracker, position)
                self._save_position(position)
            if pending and isinstance(pending[0], _Finish):
                tracker.finish(pending[0].outcome)
                self._save_position(position)
                return
            if pending and isinstance(pending[0], Mapping):
                self._send(tracker, pending[0], position)
                if time.monotonic() - self._saved > _SAVE_SECONDS:
                    self._send_events(tracker, position)
                    self._save_position(position)
            if pending and self._down:
                self._down, self._delay = False, _FIRST_RETRY_SECONDS
                self._report_event("tracker-on", Reason("tracking.on", {"tracker": self.name}))
            pending.clear()

    def _send(self, tracker: Tracker[Any], line: Mapping[str, Any], position: _Position) -> None:
        """Log the values of a line; of a step that was trained again, those that the tracker does not hold."""
        step, seconds = int(line["step"]), float(line.get("time", 0.0))
        values = {
            name: value
            for name, value in line.items()
            if name not in ("step", "time") and isinstance(value, int | float) and not isinstance(value, bool)
        }
        if "attempt" in line:  # not so that of an evaluation, which may end after that of a later step
            # The line of a validation repeats the attempt of its step.
            again = any(step <= position.steps.get(name, 0) for name in values if name != "attempt")
            if tracker.rewinds and again:
                tracker.rewind(step - 1)
                position.cap(step - 1)
            values = {name: value for name, value in values.items() if step > position.steps.get(name, 0)}
        if values:
            tracker.log(step, values, seconds)
            position.steps |= {name: max(step, position.steps.get(name, 0)) for name in values}

    def _send_events(self, tracker: Tracker[Any], position: _Position) -> None:
        """Log the events recorded since the last call; an incomplete line is left for the next call."""
        lines: list[bytes] = []
        with contextlib.suppress(OSError), open_to_read(self._files.events) as file:  # else they are read next time
            file.seek(position.events_bytes)
            lines = [line for line in file if line.endswith(b"\n")]
        for line in lines:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                details = {key: value for key, value in event.items() if key not in ("event", "time")}
                tracker.event(str(event["event"]), details, float(event.get("time") or 0.0))
            position.events_bytes += len(line)

    def _read_position(self) -> _Position:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            with open_to_read(self._state) as file:
                data = json.loads(file.read())
            steps = {str(name): int(step) for name, step in data["steps"].items()}
            return _Position(steps, int(data["events_bytes"]), [str(name) for name in data["artifacts"]])
        return _Position()

    def _save_position(self, position: _Position) -> None:
        self._saved = time.monotonic()
        with contextlib.suppress(OSError):
            make_folder(self._state.parent)
            replace_file(self._state, json.dumps(vars(position)))


class Trackers:
    """All trackers of a run beside metrics.jsonl."""

    def __init__(self, tracked: Sequence[GuardedTracker] = ()) -> None:
        self._all = tracked

    def log(self, line: Mapping[str, Any]) -> None:
        """Log a line of metrics.jsonl."""
        for one in self._all:
            one.log(line)

    def finish(self, outcome: Outcome) -> None:
        """End all trackers, and wait at most FINISH_SECONDS for all of them together."""
        until = time.monotonic() + FINISH_SECONDS[outcome]
        for one in self._all:
            one.finish(outcome)
        for one in self._all:
            one.join(until - time.monotonic())
