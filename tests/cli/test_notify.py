"""`scaletrain notify`: tests of receivers, what was sent, and what is sent late."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaletrain_cli.launch.attempts import Outcome, begin_attempt, end_attempt
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.launch.job import Job, JobState
from scaletrain_cli.launch.recover import why_lost
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.notify import notifier
from scaletrain_cli.reasons import recorded
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir
from tests.cli.command_line import SMALL, scaletrain
from tests.launch.conftest import make_plan, make_spec
from tests.notify.webhook import Webhook
from tests.waiting import Clock


@pytest.fixture
def server() -> Iterator[Webhook]:
    made = Webhook()
    yield made
    made.close()


@pytest.fixture
def run() -> RunDir:
    spec = make_spec("notify=[{webhook: HOOK}]")
    made = create_run(spec, make_plan(spec), "notified").run
    record_event(made, "stopped", exit_code=93, why="w", code="x", params={})
    return made


def test_a_test_notification_goes_to_every_receiver_of_a_spec_or_a_run(
    server: Webhook, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", server.url)
    path = tmp_path / "run.yaml"
    path.write_text(Path(SMALL).read_text() + "notify: [{webhook: HOOK, format: json}, {webhook: MISSING}]\n")
    ended = scaletrain("notify", "test", str(path), code=1)
    assert ended.out.splitlines() == ["webhook HOOK: accepted", "webhook MISSING: the variable MISSING is not set"]
    ended = scaletrain("notify", "test", run.run_id, "--json")
    assert json.loads(ended.out)["receivers"] == [{"receiver": "webhook HOOK", "accepted": True, "problem": ""}]
    assert [message.get("kind", "slack") for message in server.received] == ["test", "slack"]
    assert server.received[0]["text"] == "a test of the receivers of this run"


def test_what_waits_after_the_end_is_listed(server: Webhook, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "time", Clock(round(time.time())))
    ended = scaletrain("notify", "send", "notified", code=1)
    assert ended.out.startswith("webhook HOOK: 1 waiting; the variable HOOK is not set")
    monkeypatch.setenv("HOOK", server.url)
    assert scaletrain("notify", "send", "notified").code == 0
    assert scaletrain("notify", "list", "notified").out == "webhook HOOK: 1 sent, 0 waiting, 0 given up\n"
    (row,) = json.loads(scaletrain("notify", "list", "notified", "--json").out)["receivers"]
    assert row == {"receiver": "webhook HOOK", "sent": 1, "waiting": 0, "given_up": 0, "problem": ""}
    assert len(server.received) == 1
    assert run.run_id in server.received[0]["text"]


@pytest.mark.parametrize(
    ("state", "done", "sent"),
    [("running", False, []), ("unknown", False, []), ("ended", True, []), ("ended", False, ["failed"])],
)
def test_the_end_of_a_run_whose_job_could_not_record_it_is_sent_once(
    server: Webhook, monkeypatch: pytest.MonkeyPatch, state: JobState, sent: list[str], *, done: bool
) -> None:
    spec = make_spec("notify=[{webhook: HOOK, format: json}]", "restarts.lost=1")
    made = create_run(spec, make_plan(spec), "notified")
    submission = {"scheduler": "local", "job_id": "7", "submitted": 1.0, "first_attempt": 1}
    write_document(made.run.submission, {"state": "submitted", **submission})
    record_event(made.run, "submitted", job_id="7", first_attempt=1)
    begin_attempt(made.run, spec, scheduler="local", job_id="7", nodes=("here",))
    if done:  # a program of the user's records no end of the training
        end_attempt(made.run, spec, 1, Outcome(0, "done", recorded("finished")), None)
    job = Job.because("7", state, recorded("all of its nodes are off"), cause="node" if state == "ended" else None)
    monkeypatch.setattr(LocalBackend, "job", lambda self, run, record: job)
    monkeypatch.setenv("HOOK", server.url)
    for _ in range(2):
        scaletrain("notify", "send", "notified", code=0)
    assert [message["kind"] for message in server.received] == sent
    assert ["all of its nodes are off" in message["text"] for message in server.received] == [True] * len(sent)
    lost = why_lost(made.run, made.record, job, LocalBackend())
    assert (lost is not None) == bool(sent), "recover resumes it as before"
