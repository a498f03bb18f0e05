"""A sweep is the set of runs whose files name it; a name that matches a run is the run."""

from collections.abc import Callable

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.rundir.paths import (
    RunDir,
    Sweep,
    SweepPlace,
    find_run_or_sweep,
    find_sweep,
    list_sweeps,
    read_sweep_place,
    runs_root,
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


def test_a_sweep_lists_its_runs_in_the_order_of_their_points(make: Make) -> None:
    runs = [make(f"s-{number}", "s", number, 10) for number in (10, 2, 1)]
    make("alone")
    assert list_sweeps() == {"s": Sweep("s", 10, tuple(reversed(runs)))}
    assert read_sweep_place(runs[0]) == SweepPlace("s", 10, 10, ("x=10",))


def test_a_sweep_is_found_by_its_name_or_a_unique_prefix(make: Make) -> None:
    make("llama-lr-1", "llama", 1)
    make("llama-lr-2", "llama", 2)
    for name in ("llama", "lla"):
        found = find_run_or_sweep(name)
        assert isinstance(found, Sweep)
        assert found.name == "llama"
    assert find_run_or_sweep("llama-lr-2") == RunDir(runs_root() / "llama-lr-2")


def test_a_prefix_of_some_runs_is_not_the_whole_sweep(make: Make) -> None:
    make("s-a-1_b-1", "s", 1)
    make("s-a-1_b-2", "s", 2)
    make("s-a-2_b-1", "s", 3)
    with pytest.raises(UsageError, match="s-a-1 matches 2 runs"):
        find_run_or_sweep("s-a-1")


def test_a_prefix_shared_with_another_run_is_ambiguous(make: Make) -> None:
    make("sweep-1", "sweep", 1)
    make("sweep-2", "sweep", 2)
    make("swift")
    with pytest.raises(UsageError, match="sw matches 3 runs"):
        find_run_or_sweep("sw")
    assert isinstance(find_run_or_sweep("sweep"), Sweep)
    assert find_run_or_sweep("swi") == RunDir(runs_root() / "swift")


def test_a_run_with_the_exact_name_takes_precedence_over_a_sweep(make: Make) -> None:
    run = make("s")
    make("s-1", "s", 1)
    assert find_run_or_sweep("s") == run
    assert find_sweep("s").name == "s"


def test_the_last_run_of_a_sweep_is_still_a_sweep(make: Make) -> None:
    make("s-2", "s", 2)
    found = find_run_or_sweep("s")
    assert isinstance(found, Sweep)
    assert (len(found.runs), found.points) == (1, 2)


def test_an_unknown_name_is_the_error_of_find_run(make: Make) -> None:
    make("a")
    with pytest.raises(UsageError, match="no run 'other' under"):
        find_run_or_sweep("other")


def test_an_unknown_sweep_is_an_error_that_lists_the_known_ones(make: Make) -> None:
    with pytest.raises(UsageError, match=r"no sweep 's' under .* There are no sweeps\."):
        find_sweep("s")
    make("s-1", "s-1st", 1)
    make("s-2", "s-2nd", 1)
    with pytest.raises(UsageError, match="s matches 2 sweeps: s-1st, s-2nd"):
        find_sweep("s")
    with pytest.raises(UsageError, match="Available sweeps: s-1st, s-2nd"):
        find_sweep("t")
    assert find_sweep("s-1").name == "s-1st"


def test_an_invalid_sweep_file_does_not_hide_other_sweeps(make: Make) -> None:
    valid, damaged = make("s-1", "s", 1), make("t-1", "t", 1)
    (damaged.path / "sweep.json").write_text('{"sweep": "t"}')
    assert read_sweep_place(damaged) is None
    assert list_sweeps().keys() == {"s"}
    assert find_sweep("s").runs == (valid,)
