"""Send the notifications of a run: read new events, send what is due, and keep in notify.json what was sent.

Two processes use it: the first node's while an attempt lives (launch/live_diagnosis.py), and the one that records the
end of an attempt or of the run (launch/restart.py). A lock lets one of them work at a time. An event is read and its
notifications are recorded as pending in one write of the file; each delivery is another one. So a notification is lost
by no crash, and sent twice only if the process is killed between the receiver's answer and that write, with the same
id.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from scaletrain_cli.notify.delivery import LONGEST_RETRY_AFTER, Delivery, Origin, deliver
from scaletrain_cli.notify.notices import Pending, Receiver, notice_of
from scaletrain_cli.rundir.documents import typed, undamaged_document, write_document
from scaletrain_cli.rundir.journal import placed_lines
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.safe_files import locked
from scaletrain_cli.spec.notify import NotifySpec

_LEAST_GAP_SECONDS = 1.0  # between two notifications to a receiver
_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 2.0, 600.0
_COMMAND_TRIES = 3
_LOCK_SECONDS = 2.0
logger = logging.getLogger(__name__)


def receivers_environment(run: RunDir, record: RunRecord) -> dict[str, str]:
    """Return the variables for receivers: of this process, of the spec, and the values of ``secret_env``."""
    secrets: Mapping[str, Any] = {}
    with contextlib.suppress(OSError):
        secrets = undamaged_document(run.secrets) or {}
    return {**os.environ, **record.spec.env, **{name: str(value) for name, value in secrets.items()}}


def state_file(run: RunDir) -> Path:
    """Return the path of the file that holds what was sent."""
    return run.path / "notify.json"


def read_receivers(run: RunDir) -> dict[str, Receiver]:
    """Return the receivers in the state file by name; those of another form are left out."""
    recorded = (undamaged_document(state_file(run)) or {}).get("receivers")
    receivers: dict[str, Receiver] = {}
    for name, data in recorded.items() if isinstance(recorded, dict) else ():
        with contextlib.suppress(TypeError, LookupError, ValueError):
            receiver: Receiver = typed(Receiver, data)
            receivers |= {name: receiver} if (receiver.read_bytes or 0) >= 0 else {}
    return receivers


class Notifier:
    """The receivers of one run. ``environment``: as receivers_environment() returns it."""

    def __init__(self, run: RunDir, record: RunRecord, environment: Mapping[str, str]) -> None:
        self._run, self._environment = run, environment
        self._settings: dict[str, NotifySpec] = {settings.name: settings for settings in record.spec.notify}
        self._origin = Origin(run.run_id, record.spec.name, str(run.path), tuple(record.spec.secret_env))
        self._logged: dict[str, str] = {}

    def work(self, seconds: float, *, is_living: bool) -> None:
        """Read new events, and send what is due, until nothing is due within ``seconds``.

        ``is_living``: the run trains, so that findings last. Raises OSError if the run directory cannot be used.
        """
        if not self._settings:
            return
        until = time.monotonic() + seconds
        with locked(self._run.path / "notify.lock", wait_seconds=max(_LOCK_SECONDS, seconds)) as alone:
            if not alone:
                return
            receivers = self._collect(is_living)
            if not is_living:  # the last try may have been a long time ago, and there may be no later one
                for receiver in receivers.values():
                    receiver.pending = [replace(pending, not_before=0.0) for pending in receiver.pending]
            while (due := self._next(receivers)) is not None:
                name, pending, at = due
                if (pause := at - time.time()) > 0:
                    if time.monotonic() + pause > until:
                        return
                    time.sleep(pause)
                if time.monotonic() >= until and not is_living:
                    return
                self._send(name, receivers[name], pending)
                self._write(receivers)

    def _collect(self, is_living: bool) -> dict[str, Receiver]:
        """Return the receivers with what new events add, after that was written."""
        known = read_receivers(self._run)
        receivers = {name: known.get(name, Receiver()) for name in self._settings}
        before = {name: state.to_json() for name, state in receivers.items()}
        for name, receiver in receivers.items():
            settings = self._settings[name]
            if receiver.read_bytes is None:
                events = placed_lines(self._run.events)
                submitted = [place for place, _, event in events if event.get("event") == "submitted"]
                receiver.read_bytes = submitted[-1] if submitted else 0  # a new receiver gets no older events
            for place, end, event in placed_lines(self._run.events, receiver.read_bytes):
                if (notice := notice_of(event, place)) is not None:
                    receiver.take(notice, settings)
                receiver.read_bytes = end
            if is_living:
                receiver.remind(time.time(), settings)
        if before != {name: state.to_json() for name, state in receivers.items()}:
            self._write(receivers)
        return receivers

    def _write(self, receivers: Mapping[str, Receiver]) -> None:
        write_document(
            state_file(self._run), {"receivers": {name: receiver.to_json() for name, receiver in receivers.items()}}
        )

    def _next(self, receivers: Mapping[str, Receiver]) -> tuple[str, Pending, float] | None:
        """Return the receiver and the notification to be sent first, and its Unix time; None if there is none."""
        now = time.time()
        waiting = [
            (
                name,
                pending,
                # Limited, because the clock may have been set back since.
                max(
                    min(pending.not_before, now + _LONGEST_RETRY_SECONDS),
                    min(receiver.blocked_until, now + LONGEST_RETRY_AFTER),
                    min(receiver.last_sent, now) + _LEAST_GAP_SECONDS,
                ),
            )
            for name, receiver in receivers.items()
            for pending in receiver.pending[:1]
        ]
        return min(waiting, key=lambda one: one[2], default=None)

    def _send(self, name: str, receiver: Receiver, pending: Pending) -> None:
        settings = self._settings[name]
        result: Delivery = deliver(pending.notice, settings, self._origin, self._environment)
        now = time.time()
        if not result.problem:
            receiver.delivered(pending, now)
            self._logged.pop(name, None)
            return
        if self._logged.get(name) != result.problem:
            logger.warning("%s: a notification was not accepted: %s", name, result.problem)
        self._logged[name] = result.problem
        tried_out = settings.command is not None and pending.tries + 1 >= _COMMAND_TRIES
        if result.is_final or tried_out:
            receiver.refused(pending, result.problem)
            return
        pause = min(_LONGEST_RETRY_SECONDS, _FIRST_RETRY_SECONDS * 2.0**pending.tries)
        if result.retry_after is not None:
            receiver.blocked_until = now + result.retry_after
            pause = min(pause, result.retry_after)
        receiver.postponed(pending, result.problem, now + pause)


def send_waiting(run: RunDir, record: RunRecord, environment: Mapping[str, str], seconds: float) -> None:
    """Send what the end of an attempt adds, and what is pending, for at most ``seconds``. Never raises.

    The thread is left behind if a receiver does not answer; what it has not sent stays pending.
    """
    notifier = Notifier(run, record, environment)

    def send() -> None:
        try:
            notifier.work(seconds, is_living=False)
        except Exception as error:  # notifications never change the end of an attempt
            logger.warning("notifications were not sent: %s", error)

    thread = threading.Thread(target=send, name="notify", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no more threads may be created
        logger.warning("notifications were not sent: %s", error)
        return
    thread.join(seconds)
