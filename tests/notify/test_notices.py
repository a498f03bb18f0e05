"""Which events one receiver is sent: kinds, severities, findings that last, and preemptions."""

import json
from typing import Any

import pytest

from scaletrain_cli.notify.notices import Notice, Receiver, notice_of
from scaletrain_cli.rundir.documents import typed
from scaletrain_cli.rundir.journal import SEVERITIES
from scaletrain_cli.spec.notify import NotifySpec

SETTINGS = NotifySpec.model_validate({"webhook": "HOOK"})
HOUR = 3600.0


def finding(severity: str = "warning", change: str = "raised", time: float = 0.0) -> dict[str, Any]:
    event = "finding-cleared" if change == "cleared" else "finding"
    known = {"code": "diagnosis.loss-flat", "params": {}, "subject": "", "text": "the loss does not fall", "step": 9}
    return {"event": event, "severity": severity, "change": change, "time": time, "seconds": 60.0, **known}


def ended(reason: str, time: float = 0.0, *, attempt: int = 1, requeue: bool = True) -> dict[str, Any]:
    known = {"event": "attempt-ended", "attempt": attempt, "exit_code": 1, "requeue": requeue, "message": "why"}
    return known | {"reason": reason, "time": time}


def notice(event: dict[str, Any], place: int = 0) -> Notice:
    found = notice_of(event, place)
    assert found is not None
    return found


class Told:
    """A receiver that is sent everything at once."""

    def __init__(self, **settings: Any) -> None:
        self.settings = NotifySpec.model_validate({"webhook": "HOOK", **settings})
        self.receiver, self.log, self.place = Receiver(), list[Notice](), 0

    def take(self, event: dict[str, Any]) -> str:
        """Return the kinds, and changes of findings, that an event sends."""
        self.place += 100
        if (found := notice_of(event, self.place)) is not None:
            self.receiver.take(found, self.settings)
        return self.send(float(event.get("time", 0.0)))

    def remind(self, now: float) -> str:
        self.receiver.remind(now, self.settings)
        return self.send(now)

    def send(self, now: float) -> str:
        sent = list(self.receiver.pending)
        for pending in sent:
            self.receiver.delivered(pending, now)
            self.log.append(pending.notice)
        return " ".join(each.notice.change or each.notice.kind for each in sent)


def test_a_finding_is_sent_when_raised_worse_lasting_and_cleared() -> None:
    told = Told(repeat="1h")
    assert told.take(finding("warning", time=0.0)) == "raised"
    assert told.take(finding("error", "worse", time=60.0)) == "worse"
    assert told.remind(60.0 + HOUR - 1) == ""
    assert told.remind(60.0 + HOUR) == "lasts"
    assert told.remind(61.0 + HOUR) == ""
    assert told.remind(60.0 + 2 * HOUR) == "lasts"
    assert told.take(finding("error", "cleared")) == "cleared"
    assert told.remind(9 * HOUR) == ""
    assert told.take(finding("warning")) == "raised"
    assert len({each.id for each in told.log}) == len(told.log)  # reminders have ids of their own


@pytest.mark.parametrize("least", SEVERITIES)
def test_findings_below_the_severity_are_not_sent_and_neither_is_their_end(least: str) -> None:
    for severity in SEVERITIES:
        told, is_sent = Told(severity=least), SEVERITIES.index(severity) >= SEVERITIES.index(least)
        assert told.take(finding(severity)) == ("raised" if is_sent else "")
        assert told.take(finding(severity, "cleared")) == ("cleared" if is_sent else "")
    told = Told(severity="error")
    assert told.take(finding("warning")) == ""
    assert told.take(finding("error", "worse")) == "worse"


def test_what_is_over_before_it_could_be_sent_is_not_sent() -> None:
    receiver = Receiver()
    receiver.take(notice(finding()), SETTINGS)
    receiver.take(notice(finding("error", "worse"), 1), SETTINGS)
    assert [each.notice.severity for each in receiver.pending] == ["error"]
    receiver.take(notice(finding("error", "cleared"), 2), SETTINGS)
    assert receiver.pending == []


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (ended("done", requeue=False), "finished"),
        (ended("crash"), ""),
        ({"event": "finished", "step": 9}, ""),  # of the engine; the launcher confirms it
        ({"event": "stopped", "exit_code": 93, "why": "w", "code": "launch.stop-no-progress"}, "failed"),
        ({"event": "stopped", "exit_code": 1, "why": "w", "code": "launch.stop-cancelled"}, ""),
        ({"event": "stopped", "exit_code": 75, "why": "w", "code": "launch.job-stopped"}, ""),
        (
            {"event": "stopped", "exit_code": 75, "why": "w", "code": "launch.stop-budget-used-up"},
            "preempted-too-often",
        ),
        ({"event": "rolled-back", "from_step": 9, "to_step": 5, "skip": [6, 9]}, "rolled-back"),
        ({"event": "nodes-excluded", "nodes": ["n1"]}, "nodes-excluded"),
        ({"event": "nodes-excluded", "nodes": []}, ""),
        ({"event": "checkpoint", "step": 5}, ""),
        ({"event": 3}, ""),
    ],
)
def test_what_is_sent_by_default(event: dict[str, Any], kind: str) -> None:
    assert Told().take(event) == kind


def test_other_events_are_sent_by_name() -> None:
    told = Told(events=["checkpoint", "attempt-ended", "finished"])
    assert told.take({"event": "checkpoint", "step": 5, "bytes": 10, "seconds": 1.0}) == "checkpoint"
    assert told.take(ended("crash")) == "attempt-ended"
    assert told.take({"event": "finished", "step": 9}) == ""
    assert told.take(ended("done", requeue=False)) == "finished"


def test_a_hang_is_sent_and_a_failure_has_the_end_of_its_attempt() -> None:
    told = Told()
    assert told.take({"event": "hang", "attempt": 1, "node": "n1", "message": "no progress"}) == "hang"
    told.take(ended("hang", requeue=False))
    assert told.take({"event": "stopped", "exit_code": 93, "why": "budget used up", "code": "x"}) == "failed"
    assert told.log[-1].text.endswith("attempt 1 ended with exit code 1, hang: why")


def test_three_preemptions_within_an_hour_are_too_many() -> None:
    told = Told()
    assert [told.take(ended("preempted", time)) for time in (0.0, 4000.0, 5000.0)] == ["", "", ""]
    assert told.take(ended("preempted", 5600.0)) == "preempted-too-often"
    assert told.log[-1].text.startswith("3 preemptions within an hour")
    assert told.take(ended("preempted", 6000.0)) == ""
    assert told.take(ended("time-limit", 6100.0)) == ""


def test_the_state_survives_its_file() -> None:
    receiver = Receiver(read_bytes=7)
    receiver.take(notice(finding()), SETTINGS)
    receiver.take(notice({"event": "hang", "attempt": 1, "node": "n", "message": "m"}, 9), SETTINGS)
    receiver.delivered(receiver.pending[0], 5.0)
    receiver.postponed(receiver.pending[0], "HTTP status 500", 9.0)
    assert typed(Receiver, json.loads(json.dumps(receiver.to_json()))) == receiver


def test_a_receiver_that_accepts_nothing_has_a_bounded_list() -> None:
    receiver, settings = Receiver(), NotifySpec.model_validate({"webhook": "HOOK", "events": ["checkpoint"]})
    for place in range(60):
        receiver.take(notice({"event": "checkpoint", "step": place}, place), settings)
    assert (len(receiver.pending), receiver.dropped, receiver.pending[0].notice.event["step"]) == (50, 10, 10)
