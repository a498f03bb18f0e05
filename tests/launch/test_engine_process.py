"""A verb that is interrupted ends its engine process at once, without a traceback of a thread."""

import os
import signal
import sys
from pathlib import Path

import pytest

from scaletrain_cli.launch import engine_process
from scaletrain_cli.launch.engine_process import run_engine_command

# What a command of the engine does at its start and at its end, without the libraries that it loads.
ENGINE = """
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path(sys.argv[1]).write_text("removed what it had begun")
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
print("ready", file=sys.stderr, flush=True)
while True:
    print("at work", file=sys.stderr, flush=True)
    time.sleep(0.01)
"""


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_verb_ends_it(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", ENGINE, str(tmp_path / "end")]
    monkeypatch.setattr(engine_process, "python_command", lambda *_: command)
    monkeypatch.setattr(engine_process, "_CTRL_C_SECONDS", 0.01)
    monkeypatch.setattr(engine_process, "_PATIENCE_SECONDS", 600.0)
    lines: list[str] = []

    def interrupted(line: str) -> None:
        lines.append(line)
        if line == "ready":
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
        run_engine_command("prepare", needs=(), on_line=interrupted)
    assert (tmp_path / "end").read_text() == "removed what it had begun"
    assert "ready" in lines
