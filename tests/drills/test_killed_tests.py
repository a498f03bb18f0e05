"""The tests themselves are killed while ranks train: no process, shared memory or lock is left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.leftovers import abandoned_shared_memory, children
from tests.waiting import wait_until

pytestmark = pytest.mark.drill
_PROJECT = Path(__file__).parents[2]
_ROW = ["tests/engine/parity/test_parity.py", "-k", "trains_the_model and zero0 and dp2"]


def _measured(folder: Path) -> bool:
    """Return True if a run below the folder has reported measured memory. Folders may be removed meanwhile."""
    found = (Path(parent) / "events.jsonl" for parent, _, files in os.walk(folder) if "events.jsonl" in files)
    return any("measured" in path.read_text() for path in found)


@pytest.mark.long
def test_killing_the_tests_leaves_no_process_no_shared_memory_and_no_lock(tmp_path: Path) -> None:
    folder, abandoned = tmp_path / "killed", abandoned_shared_memory()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}", *_ROW]
    tests = subprocess.Popen([*command, "-k", "trains_the_model"], cwd=_PROJECT)  # more rows than are over soon
    wait_until(lambda: _measured(folder) or tests.poll() is not None, "a run trains")
    assert tests.poll() is None
    started = children(tests.pid)
    assert len(started) >= 3  # the server and two ranks
    tests.kill()
    tests.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started), "its processes have ended")
    # That of tests beside this one does not stay.
    wait_until(lambda: abandoned_shared_memory() <= abandoned, "its shared memory is gone")
    assert subprocess.run(command, cwd=_PROJECT).returncode == 0
