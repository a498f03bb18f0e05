"""`scaletrain train` where stderr is not a terminal: lines of events and of the step."""

import pytest

from scaletrain_cli.cli.train import Watcher
from scaletrain_cli.data.commands import ProgressLines
from scaletrain_cli.rundir.journal import append_line
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.ui.live import StatusLine
from tests.cli.prepared_runs import living_process, prepare


def test_a_line_with_step_loss_and_time_left_is_printed_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with living_process() as supervisor, StatusLine() as line:
        run = RunDir(prepare("running", "r1", supervisor))
        watcher = Watcher(run, line, lambda: now)
        printed = []
        for moment in range(22):
            now = float(moment)
            measured = {"step_seconds": 1.0, "tokens_per_second": 500.0, "attempt": 1}
            append_line(run.metrics, {"step": 4 + moment, "loss": 2.5, **measured})
            watcher.look()
            printed += [(moment, row) for row in capsys.readouterr().err.splitlines() if "running" in row]
    assert [moment for moment, _ in printed] == [0, 10, 20]
    assert printed[1][1].split(maxsplit=2)[2] == "step 14 of 100 (14 %), loss 2.5000, 500 tokens/s, 86 s left"


def test_the_status_line_is_drawn_only_if_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    drawn = []
    with StatusLine() as line:
        monkeypatch.setattr(line._progress, "refresh", lambda: drawn.append(line._progress.tasks[0].completed))
        for done in (1, 1, 2, 2, 2, 3):
            line.show("running", done, 100, "")
    assert drawn == [1, 2, 3]
    assert not line._progress.live.auto_refresh


def test_progress_prints_nothing_twice(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    show, now = ProgressLines(), 0.0
    monkeypatch.setattr("scaletrain_cli.data.commands.time.monotonic", lambda: now)
    for done in (0, 0, 1, 2, 2):
        now += 10.0
        show("tokenize", done, 2)
    for _ in range(2):
        show("finish", 1, 1)
    assert capsys.readouterr().err.splitlines() == [f"tokenize: {done} of 2" for done in (0, 1, 2)] + ["finish"]
