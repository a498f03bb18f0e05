from pathlib import Path
from typing import Any

from scaletrain_cli.engine.metrics.data_waits import DataWaits
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import RunDir
from tests.engine.alone import context_of


class Others:
    """A consensus with three other ranks, of which one waits for a share of the time."""

    def __init__(self, share: float) -> None:
        self.given = share
        self.calls = 0

    def share(self, value: float) -> list[float]:
        self.calls += 1
        return [value, 0.0, self.given, 0.01]


def reported(folder: Path, waits: list[float], others: float = 0.0, first: int = 1) -> list[dict[str, Any]]:
    """Return the events of an attempt whose steps of one second have these waits."""
    now = [0.0]
    consensus: Any = Others(others)
    watch = DataWaits(context_of(RunDir(folder), consensus=consensus), clock=lambda: now[0])
    for step, wait in enumerate(waits, start=first):
        now[0] += 1.0
        watch.add(step, wait, workers=2, prefetch=4)
    ends = [step for step in range(first + 1, first + len(waits)) if step % 50 == 0]
    assert consensus.calls == len(ends)
    return [event for event in read_events(RunDir(folder)) if event["event"] == "data-wait"]


def test_a_long_wait_is_reported_once_until_a_window_without(tmp_path: Path) -> None:
    waits = [0.0] + [0.2] * 99 + [0.0] * 50 + [0.1] * 50
    first, second = reported(tmp_path, waits)
    assert (first["step"], first["rank"], first["share"], first["steps"]) == (50, 0, 0.2, 49)
    assert (first["workers"], first["prefetch"]) == (2, 4)
    assert (second["step"], second["share"]) == (200, 0.1)


def test_the_rank_that_waits_most_is_named_whichever_it_is(tmp_path: Path) -> None:
    (event,) = reported(tmp_path, [0.06] * 60, others=0.3)
    assert (event["rank"], event["share"]) == (2, 0.3)


def test_short_waits_and_the_first_one_of_an_attempt_are_not_reported(tmp_path: Path) -> None:
    assert reported(tmp_path, [40.0] + [0.04] * 120, first=731) == []
