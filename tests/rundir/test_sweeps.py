"""A sweep is the runs whose files name it, and a name means it only where no run could be meant."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.sweeps import (
    Sweep,
    SweepPlace,
    find_run_or_sweep,
    find_sweep,
    list_sweeps,
    read_sweep_place,
    write_sweep_place,
)

Make = Callable[..., RunDir]


@pytest.fixture
def make() -> Make:
    """A run, of a sweep where one is given."""

    def make(run_id: str, sweep: str | None = None, number: int = 1, points: int = 2) -> RunDir:
        run = RunDir(runs_root() / run_id)
        run.path.mkdir(parents=True)
        run.record.write_text("{}")
        if sweep is not None:
            write_sweep_place(run, SweepPlace(sweep, number, points, (f"x={number}",)))
        return run

    return make


def test_a_sweep_is_its_runs_in_the_order_of_their_points(make: Make) -> None:
    runs = [make(f"s-{number}", "s", number, 10) for number in (10, 2, 1)]
    make("alone")
    assert list_sweeps() == {"s": Sweep("s", 10, tuple(reversed(runs)))}
    assert read_sweep_place(runs[0]) == SweepPlace("s", 10, 10, ("x=10",))


def test_a_sweep_is_meant_by_its_name_or_by_a_beginning_that_only_it_has(make: Make) -> None:
    make("llama-lr-1", "llama", 1)
    make("llama-lr-2", "llama", 2)
    for name in ("llama", "lla"):
        found = find_run_or_sweep(name)
        assert isinstance(found, Sweep)
        assert found.name == "llama"
    assert find_run_or_sweep("llama-lr-2") == RunDir(runs_root() / "llama-lr-2")


def test_the_beginning_of_some_of_its_runs_does_not_mean_the_whole_sweep(make: Make) -> None:
    make("s-a-1_b-1", "s", 1)
    make("s-a-1_b-2", "s", 2)
    make("s-a-2_b-1", "s", 3)
    with pytest.raises(UsageError, match="s-a-1 matches 2 runs"):
        find_run_or_sweep("s-a-1")


def test_a_beginning_that_another_run_has_too_is_ambiguous(make: Make) -> None:
    make("sweep-1", "sweep", 1)
    make("sweep-2", "sweep", 2)
    make("swift")
    with pytest.raises(UsageError, match="sw matches 3 runs"):
        find_run_or_sweep("sw")
    assert isinstance(find_run_or_sweep("sweep"), Sweep)
    assert find_run_or_sweep("swi") == RunDir(runs_root() / "swift")


def test_a_run_of_the_very_name_is_meant_before_a_sweep(make: Make) -> None:
    run = make("s")
    make("s-1", "s", 1)
    assert find_run_or_sweep("s") == run
    assert find_sweep("s").name == "s"


def test_the_last_run_of_a_sweep_is_still_a_sweep(make: Make) -> None:
    make("s-2", "s", 2)
    found = find_run_or_sweep("s")
    assert isinstance(found, Sweep)
    assert (len(found.runs), found.points) == (1, 2)


def test_a_name_that_nothing_has_is_the_same_error_as_ever(make: Make) -> None:
    make("a")
    with pytest.raises(UsageError, match="no run 'other' under"):
        find_run_or_sweep("other")


def test_a_sweep_that_is_not_there_is_an_error_with_those_that_are(make: Make) -> None:
    with pytest.raises(UsageError, match=r"no sweep 's' under .* There are no sweeps\."):
        find_sweep("s")
    make("s-1", "s-1st", 1)
    make("s-2", "s-2nd", 1)
    with pytest.raises(UsageError, match="s matches 2 sweeps: s-1st, s-2nd"):
        find_sweep("s")
    with pytest.raises(UsageError, match="Available sweeps: s-1st, s-2nd"):
        find_sweep("t")
    assert find_sweep("s-1").name == "s-1st"


def test_a_file_that_does_not_say_whose_it_is_hides_no_other_sweep(make: Make) -> None:
    sound, damaged = make("s-1", "s", 1), make("t-1", "t", 1)
    (damaged.path / "sweep.json").write_text('{"sweep": "t"}')
    assert read_sweep_place(damaged) is None
    assert list_sweeps().keys() == {"s"}
    assert find_sweep("s").runs == (sound,)
