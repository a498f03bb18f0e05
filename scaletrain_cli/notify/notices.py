"""Turn events into notifications, and keep the state of each receiver. Uses no clock, files or network."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.event_texts import event_sentence
from scaletrain_cli.rundir.journal import CLEARED_EVENT, RAISED_EVENT, SEVERITIES, finding_key
from scaletrain_cli.spec.notify import NotifySpec

# As many preemptions within this time are too many; one notification is sent in the time of ``repeat``.
_PREEMPTIONS, _PREEMPTED_WITHIN_SECONDS = 3, 3600.0
_PREEMPTED = ("preempted", "out-of-grace")
_TOO_OFTEN = ("launch.stop-no-progress-preempted", "launch.stop-budget-used-up")
_MOST_PENDING = 50
_SEVERITIES = {"failed": "error", "hang": "error", "corruption": "error", "finished": "note", "test": "note"}
_WARNINGS = ("preempted-too-often", "idle", "rolled-back", "nodes-excluded", "spike", "stragglers", "tracker-off")


@dataclass(frozen=True)
class Notice:
    """One notification.

    ``id``: the same however often it is sent. ``kind``: an event's name, or one of spec.notify.KINDS. ``change`` of a
    finding: raised, worse, cleared, or lasts (a reminder). ``subject``: what it is about; a receiver gets it once.
    ``time``: Unix seconds of the event.
    """

    id: str
    kind: str
    severity: str
    text: str
    time: float
    event: Mapping[str, Any]
    change: str = ""
    subject: str = ""

    def is_one_of(self, events: Collection[str]) -> bool:
        """Return True if the kind, or the name of the event, is in ``events`` of a receiver."""
        # The engine's event of this name stands for no notification: the launcher confirms the end.
        names = {self.kind} if self.event.get("event") == "finished" else {self.kind, self.event.get("event")}
        return not names.isdisjoint(events)


def notice_of(event: Mapping[str, Any], place: int) -> Notice | None:
    """Return the notification of an event; None if it has none. ``place``: the offset of its line in events.jsonl."""
    name = event.get("event")
    if not isinstance(name, str):
        return None
    kind, change, subject = _kind(event, name), "", ""
    severity = _SEVERITIES.get(kind, "warning" if kind in _WARNINGS else "note")
    if name in (RAISED_EVENT, CLEARED_EVENT):
        change = "cleared" if name == CLEARED_EVENT else str(event.get("change", "raised"))
        subject = finding_key(str(event.get("code")), str(event.get("subject") or ""))
        severity = str(event.get("severity"))
        if severity not in SEVERITIES:
            return None
    elif kind == "nodes-excluded" and not event.get("nodes"):
        return None
    seconds = event.get("time")
    time = float(seconds) if isinstance(seconds, int | float) else 0.0
    return Notice(f"{place}-{change or kind}", kind, severity, event_sentence(event), time, event, change, subject)


def _kind(event: Mapping[str, Any], name: str) -> str:
    if name == CLEARED_EVENT:
        return RAISED_EVENT
    if name == "attempt-ended" and event.get("reason") == "done":
        return "finished"
    if name == "finished":
        return "trained"
    if name == "stopped" and str(event.get("code", "")).startswith("launch.stop-cancelled"):
        return "cancelled-run"
    if name == "stopped" and event.get("code") == "launch.stop-idle":
        return "idle"
    if name == "stopped" and event.get("exit_code") == ExitCode.PREEMPTED:
        return "preempted-too-often" if event.get("code") in _TOO_OFTEN else "stopped"
    return "failed" if name == "stopped" else name


@dataclass
class Receiver:
    """The state of one receiver: notifications that were sent, and those that wait.

    ``read_bytes``: of events.jsonl; None before the first reading. ``known``: notifications about what lasts, by their
    subject, with the time of the latest one. ``blocked_until``: as the receiver has asked for. ``end``: the text of the
    latest end of an attempt. Times are Unix seconds.
    """

    read_bytes: int | None = None
    pending: list[Pending] = field(default_factory=list)
    known: dict[str, LastSent] = field(default_factory=dict)
    preemptions: list[float] = field(default_factory=list)
    sent: int = 0
    dropped: int = 0
    last_sent: float = 0.0
    blocked_until: float = 0.0
    problem: str = ""
    end: str = ""

    def take(self, notice: Notice, settings: NotifySpec) -> None:
        """Add a notification to those to be sent, if the receiver wants it and does not know it yet."""
        if notice.kind == "from-scratch":
            self.known = {}
        if notice.kind == "attempt-ended" and notice.event.get("reason") in _PREEMPTED:
            self._count_preemption(notice, settings)
        if notice.event.get("event") == "attempt-ended":
            self.end = notice.text
        if not notice.is_one_of(settings.events):
            return
        if notice.kind == "failed" and self.end:
            notice = replace(notice, text=f"{notice.text}; {self.end}")
        if notice.change == "cleared":
            known = self.known.pop(notice.subject, None)
            self.pending = [pending for pending in self.pending if pending.notice.subject != notice.subject]
            if known is not None:  # only a receiver that got the finding gets its end
                self._add(notice)
        elif notice.kind == RAISED_EVENT:
            if SEVERITIES.index(notice.severity) < SEVERITIES.index(settings.severity):
                return
            known = self.known.get(notice.subject)
            is_known = known is not None and known.notice.severity == notice.severity
            if not is_known and not any(
                pending.notice.subject == notice.subject and pending.notice.severity == notice.severity
                for pending in self.pending
            ):
                self._replace(notice)
        elif not notice.subject or notice.subject not in self.known:
            self._replace(notice)
            if notice.subject:
                self.known[notice.subject] = LastSent(notice, notice.time, lasts=False)

    def remind(self, now: float, settings: NotifySpec) -> None:
        """Add reminders of the findings that last for ``repeat`` seconds since the receiver got the last one."""
        for subject, known in self.known.items():
            waiting = any(pending.notice.subject == subject for pending in self.pending)
            if known.lasts and not waiting and now - known.time >= settings.repeat:
                number = known.reminders + 1
                name = f"{known.notice.id.partition('+')[0]}+{number}"
                self._add(replace(known.notice, id=name, change="lasts"))
                self.known[subject] = replace(known, reminders=number)

    def delivered(self, pending: Pending, now: float) -> None:
        """Note that a notification was sent."""
        notice = pending.notice
        self.pending.remove(pending)
        self.sent, self.last_sent, self.problem = self.sent + 1, now, ""
        if notice.kind == RAISED_EVENT and notice.change != "cleared":
            before = self.known.get(notice.subject)
            self.known[notice.subject] = LastSent(notice, now, reminders=before.reminders if before is not None else 0)

    def refused(self, pending: Pending, problem: str) -> None:
        """Note that a notification cannot be sent."""
        self.pending.remove(pending)
        self.dropped, self.problem = self.dropped + 1, problem

    def postponed(self, pending: Pending, problem: str, until: float) -> None:
        """Note that a notification is to be sent again at ``until``."""
        self.pending[self.pending.index(pending)] = replace(pending, tries=pending.tries + 1, not_before=until)
        self.problem = problem

    def _count_preemption(self, notice: Notice, settings: NotifySpec) -> None:
        recent = [time for time in self.preemptions if notice.time - time < _PREEMPTED_WITHIN_SECONDS]
        self.preemptions = [*recent, notice.time]
        known = self.known.get("preemptions")
        if len(self.preemptions) < _PREEMPTIONS or (known is not None and notice.time - known.time < settings.repeat):
            return
        if "preempted-too-often" in settings.events:
            text = f"{len(self.preemptions)} preemptions within an hour; {notice.text}"
            often = replace(notice, id=f"{notice.id}-often", kind="preempted-too-often", severity="warning", text=text)
            self._add(often)
            self.known["preemptions"] = LastSent(often, notice.time, lasts=False)

    def _replace(self, notice: Notice) -> None:
        if notice.subject:
            self.pending = [pending for pending in self.pending if pending.notice.subject != notice.subject]
        self._add(notice)

    def _add(self, notice: Notice) -> None:
        self.pending.append(Pending(notice))
        if len(self.pending) > _MOST_PENDING:
            del self.pending[0]
            self.dropped += 1

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the state file."""
        return asdict(self)


@dataclass(frozen=True)
class Pending:
    """A notification to be sent, after ``tries`` that failed, and not before ``not_before``."""

    notice: Notice
    tries: int = 0
    not_before: float = 0.0


@dataclass(frozen=True)
class LastSent:
    """The latest notification about something, its time, and whether it lasts until it is cleared."""

    notice: Notice
    time: float
    lasts: bool = True
    reminders: int = 0
