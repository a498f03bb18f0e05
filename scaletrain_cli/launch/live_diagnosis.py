"""The process that diagnoses a run while it trains, and notifies: a child of the first node's agent (node/observer.py).

``python -m scaletrain_cli.launch.live_diagnosis RUN_DIR --attempt N --parent-pid PID``. It reads the run directory and
appends the events ``finding`` and ``finding-cleared``; a thread sends notifications of all events to the receivers in
``notify``. The end of its standard input asks for a last diagnosis; it then ends. It has the lowest priority, is the
first process that the kernel kills for lack of memory, dies with the agent, and no rank waits for it.
"""

import argparse
import contextlib
import itertools
import logging
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scaletrain_cli.diagnosis.case import read_case
from scaletrain_cli.diagnosis.checks import diagnose
from scaletrain_cli.diagnosis.findings import Hysteresis, Transition
from scaletrain_cli.errors import ExitCode, ScaletrainError
from scaletrain_cli.launch.node.processes import die_with_parent, yield_to_training
from scaletrain_cli.log_setup import set_up_logging
from scaletrain_cli.notify.notifier import Notifier, receivers_environment
from scaletrain_cli.rundir.documents import json_value
from scaletrain_cli.rundir.journal import (
    CLEARED_EVENT,
    RAISED_EVENT,
    file_size,
    mark_diagnosis,
    raised_findings,
    read_events,
    read_lines_backwards,
    record_event,
)
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_record

# The first minutes of an attempt show most mistakes. Then a diagnosis a minute, or fewer: the CPU time of all of them
# stays below this share of one core.
_YOUNG_SECONDS = 300.0
_YOUNG_PAUSE_SECONDS, _PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 10.0, 60.0, 1800.0
_YOUNG_SHARE, _SHARE = 0.01, 0.001
_NOTIFY_SECONDS = 5.0  # between two readings of new events
_LAST_NOTIFY_SECONDS = 1.0  # for an answer at the end; the process that records the end sends the rest
_END_SECONDS = 1.0  # between two looks whether the run has finished
_NEWEST_EVENTS = 8
logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Diagnose until the standard input ends; return the exit code of the process, which nobody needs."""
    parser = argparse.ArgumentParser(prog="live_diagnosis", description="Diagnose a run while it trains.")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    options = parser.parse_args(arguments)
    if not die_with_parent(options.parent_pid, signal.SIGKILL):
        return ExitCode.CRASHED
    yield_to_training()
    set_up_logging("live diagnosis")
    run = RunDir(options.run_folder)
    try:
        record = read_record(run)
        with _notifying(run, record):
            _run_until_asked(LiveDiagnosis(run, record, options.attempt), descriptor=0)
    except (ScaletrainError, OSError) as error:
        logger.warning("the run is not diagnosed while it trains: %s", error)
        return ExitCode.CRASHED
    return ExitCode.DONE


@contextlib.contextmanager
def _notifying(run: RunDir, record: RunRecord) -> Iterator[None]:
    """Send notifications in a thread, so that a slow receiver delays no diagnosis."""
    if not record.spec.notify:
        yield
        return
    notifier, over = Notifier(run, record, receivers_environment(run, record)), threading.Event()

    def send() -> None:
        while not over.wait(_NOTIFY_SECONDS):
            try:
                notifier.work(_NOTIFY_SECONDS, is_living=True)
            except Exception as error:  # the next try may succeed, as after a full disk
                logger.warning("notifications were not sent: %s", error)

    thread = threading.Thread(target=send, name="notify", daemon=True)
    thread.start()
    yield
    over.set()
    thread.join(_LAST_NOTIFY_SECONDS)


def _run_until_asked(diagnosis: "LiveDiagnosis", descriptor: int) -> None:
    """Diagnose at intervals, and a last time once the run has finished or ``descriptor`` can be read, which is its end.

    Returns after the end of ``descriptor``.
    """
    began = time.monotonic()
    diagnosis.mark(is_over=False)
    while True:
        cost = diagnosis.look()
        until = time.monotonic() + pause_seconds(time.monotonic() - began, cost)
        while (left := until - time.monotonic()) > 0:
            is_asked = bool(select.select([descriptor], [], [], min(left, _END_SECONDS))[0])
            if is_asked or diagnosis.has_finished():
                diagnosis.look(is_last=True)
                diagnosis.mark(is_over=True)
                select.select([descriptor], [], [])
                return


def pause_seconds(age: float, cost: float) -> float:
    """Return the time until the next diagnosis, for the age of this process and the CPU time of the last one."""
    shortest, share = (_YOUNG_PAUSE_SECONDS, _YOUNG_SHARE) if age < _YOUNG_SECONDS else (_PAUSE_SECONDS, _SHARE)
    return min(_LONGEST_PAUSE_SECONDS, max(shortest, cost / share))


@dataclass
class LiveDiagnosis:
    """Diagnoses one run again and again. Findings that an earlier attempt has raised are not raised again."""

    run: RunDir
    record: RunRecord
    attempt: int
    _began: float = field(default_factory=time.time, init=False)
    _events_size: int = field(default=-1, init=False)
    _seen: tuple[int, int] = field(default=(-1, -1), init=False)
    _problem: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._hysteresis = self._recorded()

    def _recorded(self) -> Hysteresis:
        return Hysteresis({key: finding.severity for key, finding in raised_findings(read_events(self.run)).items()})

    def mark(self, *, is_over: bool) -> None:
        """Record for the trackers whether findings may follow."""
        with contextlib.suppress(OSError):
            mark_diagnosis(self.run, self.attempt, is_over=is_over)

    def has_finished(self) -> bool:
        """Return whether the engine has recorded the last step since this process began. Reads the newest events."""
        size = file_size(self.run.events)
        if size == self._events_size:
            return False
        self._events_size = size
        newest = itertools.islice(read_lines_backwards(self.run.events), _NEWEST_EVENTS)
        return any(
            event.get("event") == "finished"
            and isinstance(event.get("time"), int | float)
            and event["time"] >= self._began
            for event in newest
        )

    def look(self, *, is_last: bool = False) -> float:
        """Diagnose once if there are new measurements or events; return the CPU time in seconds.

        A failure is logged once and changes nothing else: the next diagnosis may succeed.
        """
        before = time.process_time()
        try:
            if is_last or self._sizes() != self._seen:
                case = read_case(self.run, self.record)
                findings = diagnose(self.run.run_id, case).findings
                step = case.history.last_step
                for transition in self._hysteresis.next(findings, is_last=is_last):
                    self._write(transition, step)
                self._seen = self._sizes()
        except Exception as error:  # a damaged file or an error of a check must not end the later diagnoses
            if repr(error) != self._problem:
                logger.warning("a diagnosis failed: %r", error)
            self._problem = repr(error)
            with contextlib.suppress(Exception):  # what could not be recorded, as on a full disk, is raised again later
                self._hysteresis = self._recorded()
        return time.process_time() - before

    def _sizes(self) -> tuple[int, int]:
        return file_size(self.run.metrics), file_size(self.run.events)

    def _write(self, transition: Transition, step: int) -> None:
        if transition.finding is None:
            raised = raised_findings(read_events(self.run)).get(transition.key)
            if raised is None:  # the run has started again from scratch
                return
            lasted = round(max(0.0, time.time() - raised.time), 3)
            known = {"subject": raised.subject, "severity": raised.severity, **raised.reason.to_document()}
            known |= {"text": str(raised.reason), "seconds": lasted}
            record_event(self.run, CLEARED_EVENT, attempt=self.attempt, step=step, **known)
            return
        finding = transition.finding  # recorded without its causes, which depend on the spec alone
        fields = {"subject": finding.subject, "severity": finding.severity, "confidence": finding.confidence}
        fields |= {**json_value(finding.reason.to_document()), "text": str(finding.reason)}
        record_event(self.run, RAISED_EVENT, attempt=self.attempt, step=step, change=transition.change, **fields)


if __name__ == "__main__":
    sys.exit(main())
