"""Output that cannot be written is dropped and ends no command: stderr on a full disk, a pipe without a reader."""

import errno
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from scaletrain_cli.cli.train import Watcher
from scaletrain_cli.launch.backends.local import backend
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.ui.console import say, show, stderr_console, suggest, warn
from scaletrain_cli.ui.live import StatusLine
from tests.cli.prepared_runs import prepare


@pytest.mark.parametrize(
    "note",
    [
        lambda: say("text"),
        lambda: warn("text"),
        lambda: suggest({"watch it": "scaletrain watch"}),
        lambda: show(stderr_console(), "text"),
    ],
)
def test_a_note_to_a_full_disk_is_dropped(note: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with pytest.raises(OSError, match="No space left"):
            os.write(full.fileno(), b"x")
        note()
        note()


def failing(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_training_goes_on_without_output_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(prepare("finished", "r1"))
    with open("/dev/full", "w") as full, StatusLine() as line:
        monkeypatch.setattr(sys, "stderr", full)
        monkeypatch.setattr(StatusLine, "note_event", failing)
        watcher = Watcher(run, line)
        watcher.look()
    dropped = [event for event in read_events(run) if event["event"] == "output-dropped"]
    assert [event["message"] for event in dropped] == ["No space left on device"]
    run.record.write_text("{")
    Watcher(run, line).look()  # nor does a document that cannot be read end it


def test_ctrl_c_as_a_supervisor_starts_leaves_a_submitted_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(prepare("failed", "r1"))

    def ctrl_c(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(backend, "_spawn", lambda command, log: 77)
    monkeypatch.setattr(backend, "_wait_for_start", ctrl_c)
    assert LocalBackend().submit(run, read_record(run)) == "77"
