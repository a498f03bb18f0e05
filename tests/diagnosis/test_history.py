"""Reading metrics.jsonl into columns: which lines count, and what a long file costs."""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.diagnosis.history import History, read_history
from scaletrain_cli.launch.view import RunView, Shown, ViewReader, read_view
from scaletrain_cli.rundir.journal import append_line, read_metrics, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.tracking.prometheus import exposition, families
from scaletrain_cli.ui.watch.layout import Choices
from scaletrain_cli.ui.watch.screen import screen_lines
from scaletrain_cli.worker.trackers import run_figures
from tests.counting import bytes_read_by, calls_of
from tests.launch.large_run import make_large_run


def train(run: RunDir, first: int, last: int, **more: Any) -> None:
    for step in range(first, last + 1):
        append_line(run.metrics, {"step": step, "loss": 10.0 - step, "grad_norm": 0.5, **more})


def begun(run: RunDir, name: str, **details: Any) -> None:
    run.events.touch()
    record_event(run, name, **details)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def history_of(run: RunDir, every: int = 0) -> History:
    from scaletrain_cli.rundir.journal import read_events

    return read_history(run.metrics, read_events(run), every)


def test_a_run_without_metrics_has_an_empty_history(run: RunDir) -> None:
    history = history_of(run)
    assert (len(history), history.last_step, list(history.column("loss"))) == (0, 0, [])


def test_steps_whose_loss_is_not_finite_are_kept_apart(run: RunDir) -> None:
    train(run, 1, 3)
    append_line(run.metrics, {"step": 4, "loss": None, "grad_norm": 0.5})
    append_line(run.metrics, {"step": 5, "validation_loss": 2.0})
    history = history_of(run)
    assert (history.steps, history.not_finite) == ([1, 2, 3], [4])


def test_columns_have_a_value_for_each_step_and_nan_where_nothing_was_measured(run: RunDir) -> None:
    append_line(run.metrics, {"step": 1, "loss": 3.0, "loss/web": 3.5, "mfu": None, "attempt": 1})
    append_line(run.metrics, {"step": 2, "loss": 2.0, "skipped": 1.0, "attempt": 1})
    append_line(run.metrics, {"step": 2, "validation_loss": 2.5, "validation_loss/web": 2.7, "validation_sequences": 8})
    history = history_of(run)
    assert history.steps == [1, 2]
    assert list(history.column("loss")) == [3.0, 2.0]
    assert history.known("loss/web") == ([1], [3.5])
    assert math.isnan(history.column("grad_norm")[0])
    assert history.sources == ("web",)
    (validation,) = history.validations
    assert (validation.step, validation.loss, validation.sequences, validation.by_source) == (2, 2.5, 8, {"web": 2.7})


def test_steps_that_were_undone_do_not_count(run: RunDir) -> None:
    """Those before a start from scratch, after a rollback's target, and those that a later attempt repeats."""
    train(run, 1, 30, attempt=1)
    begun(run, "from-scratch")
    begun(run, "started", step=0)
    train(run, 1, 20, attempt=2)
    begun(run, "rolled-back", from_step=20, to_step=10, skip=[11, 20])
    train(run, 11, 14, attempt=2)
    begun(run, "resumed", step=12)
    train(run, 13, 13, attempt=3)
    history = history_of(run)
    assert history.steps == list(range(1, 14))
    assert list(history.column("attempt")) == [2.0] * 12 + [3.0]


def test_a_short_file_is_read_as_the_journal_reads_it(run: RunDir) -> None:
    train(run, 1, 40, attempt=1)
    run.metrics.write_text(run.metrics.read_text() + '{"step": 41, "loss": ')
    assert history_of(run).steps == [line["step"] for line in read_metrics(run)]


STEPS = 1_000_000
EVERY = 1000
NODES = 512


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDir]:
    """A run of a million steps on 4,096 ranks, with telemetry of 512 nodes."""
    run = make_large_run(tmp_path_factory.mktemp("long"), steps=STEPS, nodes=NODES)
    yield run
    run.metrics.unlink()


@pytest.fixture(scope="module")
def long_file(long_run: RunDir) -> Path:
    """Its metrics.jsonl, about 200 MB."""
    return long_run.metrics


def with_costs(work: Callable[[], Any]) -> tuple[Any, int, int]:
    """Return the result of some work, and how many bytes it reads and functions it calls."""
    found: list[Any] = []
    calls: list[int] = []
    read = bytes_read_by(lambda: calls.append(calls_of(lambda: found.append(work()))))
    return found[0], read, calls[0]


def test_of_a_million_steps_three_megabytes_are_read(long_file: Path) -> None:
    history, read, calls = with_costs(lambda: read_history(long_file, (), EVERY))
    assert read < 3.2e6
    assert calls < 1e6  # 0.2 s of a core
    assert not history.is_whole
    assert 3000 < len(history) < 20_000
    assert (history.steps[0], history.last_step) == (1, STEPS)
    assert max(after - before for before, after in zip(history.steps, history.steps[1:], strict=False)) < STEPS / 200


def test_for_the_status_of_a_million_steps_on_4096_ranks_four_megabytes_are_read(long_run: RunDir) -> None:
    """All that `status` and `watch` show."""

    def shown() -> RunView:
        view = read_view(long_run)
        view.to_json()
        return view

    view, read, calls = with_costs(shown)
    assert read < 4.5e6
    assert calls < 2.3e6  # 0.4 s of a core
    assert view.status.step == STEPS
    assert view.hardware is not None
    assert not view.hardware.is_whole
    assert view.hardware.memory is not None
    assert (view.hardware.memory.count, view.hardware.memory.highest_name) == (512, "rank 5")
    assert view.hardware.gpu_spreads["temperature_celsius"].highest_name == "gpu0000/3"


def test_for_the_figures_for_trackers_of_4096_ranks_little_is_read(long_run: RunDir) -> None:
    """Rank 0 reads these figures once a minute, less often if that takes over 60 ms, and writes them every 5 s."""
    record = read_record(long_run)
    found, read, calls = with_costs(lambda: run_figures(long_run, record))
    assert read < 250_000
    assert calls < 130_000  # 0.06 s of a core
    assert (found.ranks, found.measured_ranks) == (4096, 512)
    labels = {"run": "large", "name": "large", "tracking_id": "abcdefgh"}
    steps = {"step": STEPS, "loss": 3.0}
    text = partial(families, labels, steps, found, {}, training=True)
    assert calls_of(lambda: exposition(text(), openmetrics=False)) < 3000
    assert len(exposition(text(), openmetrics=False)) < 40_000


def test_the_more_a_reading_costs_the_rarer_it_is(tmp_path: Path) -> None:
    """A look every half second for a minute, by clocks of the test: by one of them each reading takes 0.2 s of CPU."""
    clock, ticks, cost, minute = [0.0], itertools.count(), 0.2, 60
    run = make_large_run(tmp_path, steps=2000, nodes=2)
    reader = ViewReader(run, clock=lambda: clock[0], cpu_clock=lambda: cost * next(ticks))
    drawn, before = 0, None
    for clock[0] in (second / 2 for second in range(2 * minute)):
        view, nodes = reader.read(), reader.nodes()
        if view is not before:
            screen_lines(Shown(view, nodes), Choices(), 120, 40)
            before, drawn = view, drawn + 1
    assert 1 < drawn < 5
    readings, kinds = next(ticks) / 2, 4
    assert kinds < readings <= kinds + 0.03 * minute / cost  # the first of each kind, then 3 % of a core


def test_validations_of_a_long_file_are_found_between_the_blocks(long_file: Path) -> None:
    validations = read_history(long_file, (), EVERY).validations
    assert len(validations) >= 45
    assert validations[-1].step == STEPS
    for validation in validations:
        assert validation.loss == pytest.approx(10.4 * (validation.step - EVERY + 1) ** -0.08, abs=1e-5)


def test_steps_of_a_long_file_that_were_undone_do_not_count(long_file: Path) -> None:
    size = long_file.stat().st_size
    events = [{"event": "rolled-back", "to_step": 600_000, "metrics_bytes": int(size * 0.8)}]
    steps = read_history(long_file, events, EVERY).steps
    assert not [step for step in steps if 600_000 < step < 790_000]
    assert [step for step in steps if step > 810_000]
