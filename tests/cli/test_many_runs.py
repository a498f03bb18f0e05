"""A verb that names a run costs the same beside any number of others, and what a run shows is bounded."""

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch import status
from scaletrain_cli.launch.attempts import Decision, Outcome, begin_attempt, end_attempt
from scaletrain_cli.launch.status import SETTLED_SECONDS, runs_in_states
from scaletrain_cli.reasons import recorded
from scaletrain_cli.rundir import paths
from scaletrain_cli.rundir.journal import append_lines
from scaletrain_cli.rundir.paths import list_runs, runs_root
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.ui.watch import pages
from tests.cli.command_line import scaletrain
from tests.cli.prepared_runs import prepare


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Counter[str]:
    """Count the calls of a function by the text of its first argument."""
    calls: Counter[str] = Counter()
    function: Callable[..., Any] = getattr(module, name)

    def count(*arguments: Any, **options: Any) -> Any:
        calls[str(arguments[0])] += 1
        return function(*arguments, **options)

    monkeypatch.setattr(module, name, count)
    return calls


def test_an_exact_id_does_not_list_the_runs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare("failed", "r1")
    prepare("finished", "r2")
    listed = counted(monkeypatch, os, "listdir")
    assert scaletrain("status", "r1").code == 0
    assert scaletrain("report", "r1", "r2", "--json").code == 0
    assert scaletrain("rm", "r1", "r2", "--dry-run").code == 0
    assert listed[str(runs_root())] == 0
    assert scaletrain("status", "r").code == 2  # ambiguous
    assert 0 < listed[str(runs_root())] < 10


def test_the_state_of_a_run_whose_end_is_recorded_needs_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    for state in ("failed", "finished", "cancelled", "unknown"):
        prepare(state, state)
    later = time.time() + 2 * SETTLED_SECONDS
    full = counted(monkeypatch, status, "run_status")
    for state in ("failed", "finished", "cancelled", "unknown"):
        monkeypatch.setattr(status.time, "time", lambda: later)
        assert [run.run_id for run in runs_in_states(list_runs(), {state})] == [state]
    assert not full
    assert [run.run_id for run in runs_in_states(list_runs(), {"damaged"})] == []  # for which each record is read
    assert len(full) == 4


def test_status_shows_the_latest_attempts_and_counts_the_others() -> None:
    run = paths.RunDir(prepare("preempted", "r1"))
    spec = read_record(run).spec
    for _ in range(14):
        number = begin_attempt(run, spec, scheduler="local", job_id="7", nodes=("n",))
        end_attempt(run, spec, number, Outcome(75, "preempted", recorded("again")), Decision(True, 75, "again"))
    shown = scaletrain("status", "r1").out
    assert "5 earlier attempts not shown" in shown
    rows = [line.split()[0] for line in shown.splitlines() if line.endswith("again")]
    assert rows == [str(number) for number in range(6, 16)]
    assert len(scaletrain("status", "r1", "--json").data["attempts"]) == 15


def test_the_overview_makes_lines_of_the_events_that_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    run = paths.RunDir(prepare("finished", "r1"))
    append_lines(run.events, [{"event": "checkpoint", "time": 1.7e9, "step": step} for step in range(3000)])
    made = counted(monkeypatch, pages, "event_line")
    assert "step 2999" in scaletrain("watch", "r1", "--once").out
    assert 0 < made.total() < 100
    assert len(scaletrain("events", "r1").out.splitlines()) > 3000


def test_what_only_reads_needs_no_folder_that_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a runs root that is mounted read-only."""
    run = paths.RunDir(prepare("failed", "r1"))
    can_access = os.access
    monkeypatch.setattr(os, "access", lambda *given, **more: not given[1] & os.W_OK and can_access(*given, **more))
    monkeypatch.setattr("scaletrain_cli.launch.remove.submit_lock", lambda run: pytest.fail("a lock was taken"))
    assert scaletrain("checkpoint", "prune", "r1", "--dry-run").code == 0
    assert scaletrain("checkpoint", "prune", "r1", "--yes").code == 2
    ended = scaletrain("report", "r1", "-o", tmp_path / "report.html")
    assert (ended.code, "cannot be written" in ended.err, (run.path / "report.html").exists()) == (2, True, False)
