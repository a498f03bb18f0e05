"""Notifications of a run to a real HTTP server: once, later after failures, and never in the way of training."""

import email.utils
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.attempts import Decision
from scaletrain_cli.launch.restart import conclude_run
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.notify import delivery, notifier
from scaletrain_cli.notify.notices import Notice, Receiver
from scaletrain_cli.notify.notifier import Notifier, read_receivers, send_waiting, state_file
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.spec.notify import NotifySpec
from tests.launch.conftest import MadeRun, make_plan, make_spec
from tests.notify.webhook import Webhook
from tests.waiting import Clock, wait_until

HOOK = NotifySpec.model_validate({"webhook": "HOOK"})
MakeHook = Callable[..., Webhook]


@pytest.fixture
def hook() -> Iterator[MakeHook]:
    made: list[Webhook] = []

    def make(*answers: tuple[int, dict[str, str]] | str) -> Webhook:
        made.append(Webhook(*answers))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(round(time.time()))
    monkeypatch.setattr(notifier, "time", clock)
    return clock


def notifying(*receivers: dict[str, Any]) -> MadeRun:
    spec = make_spec(f"notify={json.dumps(list(receivers) or [{'webhook': 'HOOK'}])}")
    made = create_run(spec, make_plan(spec), None)
    record_event(made.run, "submitted", job_id="1", scheduler="local")
    return MadeRun(made.run, made.record)


def fail(made: MadeRun, why: str = "too many crashes") -> None:
    record_event(made.run, "stopped", exit_code=93, why=why, code="launch.stop-no-progress", params={"attempts": 3})


def work(made: MadeRun, environment: dict[str, str], seconds: float = 2.0, *, is_living: bool = True) -> None:
    Notifier(made.run, made.record, environment).work(seconds, is_living=is_living)


def receiver_of(made: MadeRun) -> Any:
    (found,) = read_receivers(made.run).values()
    return found


def test_slack_gets_text_and_blocks_once_and_the_url_is_in_no_file(hook: MakeHook) -> None:
    made, server = notifying(), hook()
    fail(made, "a < b & c")
    for _ in range(3):  # as by several attempts
        work(made, {"HOOK": server.url})
    (message,) = server.received
    assert message.keys() == {"text", "blocks"}
    assert message["text"].startswith(f"{made.run.run_id}: failed: not requeued: a &lt; b &amp; c")
    assert [block["type"] for block in message["blocks"]] == ["section", "context"]
    assert server.headers[0]["Content-Type"] == "application/json"
    assert receiver_of(made).sent == 1
    written = b"".join(path.read_bytes() for path in made.run.path.rglob("*") if path.is_file())
    assert b"opaque-part" not in written


@pytest.mark.parametrize(("exception", "count"), [("", 0), ("127.0.0.1", 1)])
def test_a_proxy_in_the_environment_of_the_run_is_used(
    hook: MakeHook, exception: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server, proxy = hook(), hook()
    environment = {"HOOK": server.url, "HTTP_PROXY": "http://[", "http_proxy": proxy.url, "NO_PROXY": exception}
    notice = Notice("1", "failed", "critical", "it failed", 0.0, {})
    assert delivery.deliver(notice, HOOK, delivery.Origin("a", "a", "/a"), environment) == delivery.Delivery()
    assert (len(server.received), len(proxy.received)) == (count, 1 - count)


@pytest.mark.parametrize("name", ["模型-7b", "run-🙂", "two\nlines"])
def test_a_run_of_any_name_is_announced(hook: MakeHook, name: str) -> None:
    server = hook()
    origin = delivery.Origin(name, name, f"/runs/{name}", ())
    notice = Notice("1", "failed", "critical", "it failed", 0.0, {})
    assert delivery.deliver(notice, HOOK, origin, {"HOOK": server.url}) == delivery.Delivery()
    (message,) = server.received
    assert name.split("\n")[0] in message["text"]
    assert server.ids[0].isascii()


def test_json_has_the_event_and_hides_secrets(hook: MakeHook) -> None:
    made, server = notifying({"webhook": "HOOK", "format": "json"}), hook()
    fail(made, "the key hf_abcdefghijklmnopqrstuvwx and opaque-token-1 were rejected")
    work(made, {"HOOK": server.url, "MY_TOKEN": "opaque-token-1"})
    (message,) = server.received
    assert message["schema"] == "scaletrain.notification/v1"
    assert (message["run_id"], message["kind"], message["severity"]) == (made.run.run_id, "failed", "error")
    assert message["event"]["exit_code"] == 93
    assert "the key (not shown) and (not shown) were rejected" in message["text"]
    assert server.ids == [message["id"]]


def test_a_busy_receiver_is_asked_again_later(hook: MakeHook, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery.time, "time", clock.time)
    began = clock.now
    date = email.utils.formatdate(began + 30, usegmt=True)
    server = hook((429, {"Retry-After": "1.5"}), (503, {"Retry-After": date}))
    made = notifying()
    fail(made)
    work(made, {"HOOK": server.url}, 1.0)
    assert len(server.received) == 1
    work(made, {"HOOK": server.url}, 2.0)
    assert (len(server.received), clock.now) == (2, began + 1.5)
    work(made, {"HOOK": server.url}, 60.0)
    assert (len(server.received), clock.now) == (3, began + 30)
    assert len(set(server.ids)) == 1


def test_failures_are_tried_later_and_by_later_processes(hook: MakeHook, caplog: pytest.LogCaptureFixture) -> None:
    made, server = notifying(), hook((500, {}), (500, {}), (500, {}))
    fail(made)
    work(made, {}, 10.0)  # the variable is not set
    assert "HOOK is not set" in receiver_of(made).problem
    work(made, {"HOOK": "http://127.0.0.1:9/opaque-part"}, 10.0)
    assert "no connection" in receiver_of(made).problem
    assert server.received == []
    work(made, {"HOOK": server.url}, 600.0)
    assert len(server.received) == 4
    assert receiver_of(made).pending == []
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("HTTP status 500" in line for line in logged) == 1  # not once per try
    assert "opaque-part" not in "".join(logged)


def test_the_end_of_a_run_does_not_wait_for_the_next_try(hook: MakeHook, clock: Clock) -> None:
    made, server = notifying(), hook()
    fail(made)
    receivers = {"webhook HOOK": Receiver(0)}
    receivers["webhook HOOK"].take(Notice("1-hang", "hang", "error", "a hang", 0.0, {"event": "hang"}), HOOK)
    receivers["webhook HOOK"].postponed(receivers["webhook HOOK"].pending[0], "HTTP status 500", clock.now + 600)
    write_document(state_file(made.run), {"receivers": {name: each.to_json() for name, each in receivers.items()}})
    work(made, {"HOOK": server.url})
    assert server.received == []
    work(made, {"HOOK": server.url}, is_living=False)
    assert len(server.received) == 2


@pytest.mark.parametrize("answer", [(404, {}), (302, {"Location": "http://127.0.0.1:9/elsewhere"})])
def test_a_refusal_is_final(hook: MakeHook, answer: tuple[int, dict[str, str]]) -> None:
    made, server = notifying(), hook(answer)
    fail(made)
    for _ in range(2):
        work(made, {"HOOK": server.url})
    assert len(server.received) == 1
    assert (receiver_of(made).dropped, receiver_of(made).problem) == (1, f"HTTP status {answer[0]}")


def test_a_receiver_that_never_answers_delays_the_end_by_a_bounded_time(hook: MakeHook, clock: Clock) -> None:
    """The next process sends the end late, and findings in the meantime are not lost."""
    made, server, before = notifying(), hook("hang"), threading.enumerate()
    fail(made)
    send_waiting(made.run, made.record, {"HOOK": server.url}, 0.3)
    (left,) = (thread for thread in threading.enumerate() if thread.name == "notify" and thread not in before)
    wait_until(lambda: server.received, "the request has arrived")
    assert receiver_of(made).pending
    clock.now += 1.0
    server.released.set()
    left.join()
    assert receiver_of(made).pending
    work(made, {"HOOK": server.url}, 60.0)
    assert len(server.received) == 2
    assert len(set(server.ids)) == 1
    assert receiver_of(made).pending == []


def test_a_request_that_is_never_answered_is_given_up(hook: MakeHook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "REQUEST_SECONDS", 0.3)
    made, server = notifying(), hook("hang")
    fail(made)
    work(made, {"HOOK": server.url}, 1.0)
    assert receiver_of(made).pending
    assert receiver_of(made).problem
    assert not server.released.is_set()


def test_a_crash_before_sending_neither_loses_nor_repeats(hook: MakeHook, monkeypatch: pytest.MonkeyPatch) -> None:
    made, server = notifying(), hook()
    fail(made)
    with monkeypatch.context() as patch:
        patch.setattr(notifier, "deliver", lambda *_: sys.exit(1))
        with pytest.raises(SystemExit):
            work(made, {"HOOK": server.url})
    assert len(receiver_of(made).pending) == 1
    work(made, {"HOOK": server.url})
    work(made, {"HOOK": server.url})
    assert len(server.received) == 1


def test_a_new_receiver_gets_no_events_of_earlier_submissions_and_a_damaged_state_is_replaced(hook: MakeHook) -> None:
    made, server = notifying(), hook()
    fail(made)
    record_event(made.run, "submitted", job_id="2", scheduler="local")
    write_document(state_file(made.run), {"receivers": {"webhook HOOK": {"pending": 3}}})
    work(made, {"HOOK": server.url})
    assert server.received == []
    assert receiver_of(made).read_bytes == made.run.events.stat().st_size


def test_the_end_of_a_run_is_sent_before_its_secrets_are_forgotten(hook: MakeHook) -> None:
    made, server = notifying(), hook()
    write_document(made.run.secrets, {"HOOK": server.url})
    conclude_run(made.run, Decision.because(False, 93, Reason("launch.stop-no-progress", {"attempts": 3})))
    assert len(server.received) == 1
    assert not made.run.secrets.exists()


def test_a_command_gets_the_notification_as_json_and_is_tried_three_times(tmp_path: Path) -> None:
    got = tmp_path / "got"
    code = f"import os, sys; open({str(got)!r}, 'a').write(sys.stdin.read() + os.environ['SCALETRAIN_NOTIFY_KIND'])"
    made = notifying({"command": [sys.executable, "-c", code]}, {"command": [sys.executable, "-c", "exit('no luck')"]})
    fail(made)
    work(made, {"PATH": "/usr/bin"}, 60.0)
    text = got.read_text(encoding="utf-8")
    assert text.endswith("failed")
    assert json.loads(text.removesuffix("failed"))["run_id"] == made.run.run_id
    refused = read_receivers(made.run)[made.record.spec.notify[1].name]
    assert (refused.dropped, refused.pending) == (1, [])
    assert refused.problem.endswith("ended with code 1: no luck")


def test_a_command_that_does_not_end_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "COMMAND_SECONDS", 0.3)
    made = notifying({"command": ["sh", "-c", "sleep 100000"]})
    fail(made)
    work(made, {"PATH": "/usr/bin:/bin"}, 5.0)
    assert receiver_of(made).problem == "sh did not end within 0 s"


def test_a_clock_that_was_set_back_delays_no_notification_for_long(hook: MakeHook, clock: Clock) -> None:
    made, server = notifying(), hook()
    receiver = Receiver(read_bytes=0, last_sent=clock.now + 86_400)
    write_document(state_file(made.run), {"receivers": {made.record.spec.notify[0].name: receiver.to_json()}})
    fail(made)
    work(made, {"HOOK": server.url})
    assert len(server.received) == 1


@pytest.mark.parametrize("change", [{"read_bytes": -1}, {"read_bytes": "0"}, {"last_sent": None}])
def test_a_damaged_state_of_a_receiver_counts_as_none(hook: MakeHook, change: dict[str, Any]) -> None:
    made, server = notifying(), hook()
    damaged = {**Receiver(read_bytes=0).to_json(), **change}
    write_document(state_file(made.run), {"receivers": {made.record.spec.notify[0].name: damaged}})
    fail(made)
    work(made, {"HOOK": server.url})
    assert len(server.received) == 1


def test_a_process_without_threads_concludes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    made = notifying()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    send_waiting(made.run, made.record, {}, 1.0)
    assert "notifications were not sent: can't start new thread" in caplog.text
