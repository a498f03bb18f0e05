"""docs/first-run.md works as it is typed: every command but those of the installation, in a new folder."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.rundir.checkpoints import list_checkpoints
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import RunDir
from tests.waiting import wait_until

PROJECT = Path(__file__).parent.parent.parent
PAGE = PROJECT / "docs" / "first-run.md"
AFTER_CANCEL, AFTER_RESUME = "scaletrain status second --wait 1m", "scaletrain status second --wait 10m"


def commands() -> list[str]:
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.long  # 4 CPU minutes: two runs of 40 steps
def test_the_first_run_works_as_it_is_typed(tmp_path: Path) -> None:
    (tmp_path / "docs").symlink_to(PROJECT / "docs")
    environment = {name: value for name, value in os.environ.items() if name != "SCALETRAIN_RUNS"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment["PYTHONPATH"] = str(PROJECT)
    second = RunDir(tmp_path / "runs" / "second")

    def ends() -> list[dict[str, Any]]:
        return [event for event in read_events(second) if event["event"] == "attempt-ended"]

    # What the page tells the reader to wait for, and what a busy machine may not do within the limits of `--wait`.
    waits: dict[str, tuple[Callable[[], bool], str]] = {
        "exec": (lambda: bool(list_checkpoints(second.checkpoints)), "the first checkpoint"),
        "cancel": (lambda: any(event["event"] == "resumed" for event in read_events(second)), "the restart"),
        AFTER_CANCEL: (lambda: len(ends()) == 2, "the stop"),
        AFTER_RESUME: (lambda: len(ends()) == 3, "the end"),
    }
    printed: dict[str, str] = {}
    for command in commands():
        if wait := waits.get(command, waits.get(command.split()[1])):
            wait_until(*wait)
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        assert done.returncode == (75 if command == AFTER_CANCEL else 0), command
        printed[command] = done.stdout
        if command == "scaletrain init":  # the page trains for 100 steps
            spec = tmp_path / "run.yaml"
            spec.write_text(spec.read_text(encoding="utf-8").replace("steps: 100 ", "steps: 40 "), encoding="utf-8")
    assert [(end["exit_code"], end["reason"]) for end in ends()] == [(1, "killed"), (75, "cancelled"), (0, "done")]
    first, other = (line.split()[0] for line in next(v for k, v in printed.items() if "sha256sum" in k).splitlines())
    assert first == other
    assert next(v for k, v in printed.items() if k.startswith("python")).startswith("    def __init__(self")
