from pathlib import Path

import pytest

from scaletrain_cli.engine.metrics.goodput_ledger import LedgerClock
from scaletrain_cli.rundir.goodput import Ledger, read_ledger
from scaletrain_cli.rundir.paths import RunDir
from tests.waiting import Clock


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    made.new_attempt()
    return made


def written(run: RunDir) -> Ledger:
    return read_ledger(run, 1)


def test_each_second_counts_once_for_the_innermost_activity(run: RunDir) -> None:
    clock = Clock()
    ledger = LedgerClock(run, 1, 0, clock)
    clock.now += 7
    ledger.set_up_is_done()
    with ledger.during("step"):
        clock.now += 1
        with ledger.during("data"):
            clock.now += 0.5
        clock.now += 2
    ledger.step_trained()
    clock.now += 0.25
    with ledger.during("save"):
        clock.now += 4
    ledger.close()
    found = written(run)
    counted = {name: seconds for name, seconds in found.seconds.items() if seconds}
    assert counted == {"restore": 7, "step": 3, "data": 0.5, "other": 0.25, "save": 4}
    assert found.updated - found.began == pytest.approx(14.75)
    assert (found.steps, found.closed, found.attempt) == (1, True, 1)


def test_an_activity_is_in_the_file_before_it_ends(run: RunDir) -> None:
    clock = Clock()
    ledger = LedgerClock(run, 1, 0, clock)
    ledger.set_up_is_done()
    with ledger.during("evaluation"):
        clock.now += 30
        ledger.write()
        assert (written(run).seconds["evaluation"], written(run).closed) == (30, False)
        clock.now += 1
    ledger.close()
    assert written(run).seconds["evaluation"] == 31


def test_the_ledger_is_correct_after_an_error_within_an_activity(run: RunDir) -> None:
    clock = Clock()
    ledger = LedgerClock(run, 1, 0, clock)

    def fail() -> None:
        with ledger.during("step"):
            clock.now += 1
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    clock.now += 2
    ledger.close()
    assert (written(run).seconds["step"], written(run).seconds["restore"]) == (1, 2)


def test_other_ranks_write_nothing(run: RunDir) -> None:
    ledger = LedgerClock(run, 1, 3, Clock())
    ledger.close()
    assert read_ledger(run, 1) is None
