"""A living run with an ill: one finding and one notification over its attempts, whatever a receiver does."""

import json
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.engine.faults import VARIABLE
from scaletrain_cli.notify.notifier import read_receivers
from tests.drills.training_runs import slowed, submit_drill
from tests.notify.webhook import Webhook

pytestmark = [pytest.mark.drill, pytest.mark.long]


def test_a_rate_that_is_too_high_is_raised_and_sent_once(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_receiver, hanging = Webhook(), Webhook(*["hang"] * 50)
    monkeypatch.setenv("OPEN", open_receiver.url)
    monkeypatch.setenv("HANGING", hanging.url)
    monkeypatch.setenv(VARIABLE, slowed({1: 150}))
    receivers = [{"webhook": "OPEN", "format": "json"}, {"webhook": "HANGING"}]

    def warned() -> list[dict[str, Any]]:
        return [event for event in drill.events("finding") if event["severity"] != "note"]

    try:
        rate = {"training__steps": 400, "training__optimizer__lr": 1.5, "training__schedule__warmup_steps": 16}
        quiet = {"guard__spike__action": "warn", "evaluation__every": 0, "checkpoint__every": 80}
        drill = submit_drill(dataset, cluster__gpus_per_node=1, **rate, **quiet, notify=json.dumps(receivers))
        drill.wait_for(warned)
        drill.wait_for(lambda: "finding" in {message["kind"] for message in open_receiver.received})
        drill.preempt()
        drill.wait_for_end()
    finally:
        open_receiver.close()
        hanging.close()
    assert [event["reason"] for event in drill.events("attempt-ended")] == ["preempted", "done"]
    assert drill.step() == 400
    raised = sorted(f"{event['code']} {event['change']}" for event in warned())
    sent = [one for one in open_receiver.received if one["kind"] == "finding" and one["change"] != "cleared"]
    assert sorted(f"{message['event']['code']} {message['change']}" for message in sent) == raised
    assert len(set(raised)) == len(raised)
    assert [message["kind"] for message in open_receiver.received].count("finished") == 1
    known = read_receivers(drill.run)
    assert known["webhook OPEN"].pending == []
    assert known["webhook HANGING"].sent == 0
    assert known["webhook HANGING"].pending
    assert hanging.received
