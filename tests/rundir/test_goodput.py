"""Goodput counts every second of a run's attempts once, however they ended."""

import json
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.rundir.goodput import AttemptSpan, Ledger, run_goodput, sum_goodput, write_ledger
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir


def ledger(began: float, steps: int, *, closed: bool = True, attempt: int = 1, **seconds: Any) -> Ledger:
    return Ledger(attempt, began, began + sum(seconds.values()), closed, steps, seconds)


def test_the_goodput_of_one_attempt_is_its_ledger_and_its_set_up() -> None:
    spent = ledger(1010, 50, restore=20.0, step=100.0, data=5.0, save=3.0, evaluation=7.0, other=1.0)
    found = sum_goodput([AttemptSpan(1000, 1150, spent)], 0)
    assert (found.productive, found.data, found.save, found.evaluation) == (100, 5, 3, 7)
    assert found.restore == 30
    assert found.other == 1 + 4  # from the ledger's end to the launcher's word
    assert found.wall == 150
    assert found.share == 100 / 150


def test_after_a_kill_lost_steps_count_a_mean_step_each() -> None:
    killed = AttemptSpan(0, 110, ledger(0, 40, closed=False, restore=20.0, step=80.0))
    second = AttemptSpan(140, 200, ledger(145, 20, attempt=2, restore=15.0, step=40.0))
    found = sum_goodput([killed, second], lost_steps=6)
    assert found.lost_work == 6 * 2.0
    assert found.productive == 80 + 10 + 40 - 12
    assert found.idle == 30
    assert found.restore == 20 + 5 + 15
    assert found.wall == 200


def test_an_attempt_without_a_ledger_counts_as_set_up() -> None:
    found = sum_goodput([AttemptSpan(0, 30, None), AttemptSpan(30, None, ledger(35, 10, step=50.0))], 0)
    assert (found.restore, found.productive, found.wall) == (35, 50, 85)


def test_steps_before_a_start_from_scratch_are_lost_work() -> None:
    spans = [
        AttemptSpan(0, 100, ledger(0, 50, step=100.0), in_vain=True),
        AttemptSpan(100, 200, ledger(100, 50, attempt=2, step=100.0)),
    ]
    found = sum_goodput(spans, 0)
    assert (found.lost_work, found.productive, found.share) == (100, 100, 0.5)


def test_lost_work_does_not_exceed_the_trained_steps() -> None:
    found = sum_goodput([AttemptSpan(0, 10, ledger(0, 5, step=10.0))], lost_steps=900)
    assert (found.productive, found.lost_work) == (0, 10)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def attempt(run: RunDir, started: float, ended: float | None, spent: Ledger | None) -> None:
    number = run.new_attempt()
    write_document(run.attempt(number) / "attempt.json", {"started": started, "ended": ended})
    if spent is not None:
        write_ledger(run, spent)


def test_the_goodput_of_a_run_is_summed_from_its_directory(run: RunDir) -> None:
    assert run_goodput(run) is None
    attempt(run, 0, 60, None)
    assert run_goodput(run) is None
    attempt(run, 60, 160, ledger(70, 45, attempt=2, closed=False, step=90.0))
    attempt(run, 170, None, ledger(175, 50, attempt=3, restore=5.0, step=100.0, rollback=10.0))
    record_event(run, "resumed", lost_steps=4)
    record_event(run, "rolled-back", lost_steps=11)
    found = run_goodput(run)
    assert found is not None
    assert found.lost_work == pytest.approx(15 * 2.0)
    assert (found.idle, found.rollback, found.wall) == (10, 10, 290)
    answer = json.loads(json.dumps(found.to_json()))
    assert answer["goodput"] == pytest.approx(160 / 290, abs=1e-6)
    assert answer["lost_work_seconds"] == 30


def test_time_in_suspension_is_not_productive(run: RunDir) -> None:
    attempt(run, 0, 700, ledger(0, 50, step=700.0))
    record_event(run, "suspended", attempt=1, seconds=600.0)
    found = run_goodput(run)
    assert found is not None
    assert (found.productive, found.suspended, found.wall) == (100, 600, 700)


def test_a_start_from_scratch_is_placed_by_the_order_of_events_not_by_clocks(run: RunDir) -> None:
    attempt(run, 5000, 5100, ledger(5000, 100, attempt=1, step=100.0))
    record_event(run, "resumed", attempt=1, lost_steps=7)
    record_event(run, "attempt-ended", attempt=1)
    record_event(run, "from-scratch")
    attempt(run, 60, 160, ledger(60, 100, attempt=2, step=100.0))  # on a machine whose clock is behind
    record_event(run, "started", attempt=2, lost_steps=0)
    found = run_goodput(run)
    assert found is not None
    assert (found.productive, found.lost_work) == (100, 100)


def test_an_unreadable_ledger_loses_only_its_own_figures(run: RunDir) -> None:
    attempt(run, 0, 50, None)
    run.ledger(1).write_text("{")
    attempt(run, 50, 100, ledger(50, 10, attempt=2, step=50.0))
    found = run_goodput(run)
    assert found is not None
    assert (found.restore, found.productive) == (50, 50)
