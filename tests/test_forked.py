"""Forked programs (tests/forked.py) have what a new interpreter has, and end as it does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.forked import FORKS_PYTHON, Forked, RealProcess

PROJECT = Path(__file__).parent.parent
SEEN = """
import json, os, signal, sys
state = {
    "argv": sys.argv, "name": __name__, "folder": os.getcwd(), "variable": os.environ.get("GIVEN"),
    "leads a session": os.getsid(0) == os.getpid(), "a child": os.getppid() == int(sys.argv.pop()),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "handlers": [str(signal.getsignal(each)) for each in (1, 2, 10, 12, 13, 15, 25)],
    "files": len([each for each in os.listdir("/proc/self/fd") if int(each) > 2]), "path": sys.path,
}
print(json.dumps(state, indent=1))
"""
ENDS = {
    "returns": "print(1)",
    "a number": "raise SystemExit(93)",
    "a text": "raise SystemExit('no disk')",
    "an error": "raise ValueError(3)",
    "interrupted": "raise KeyboardInterrupt",
    "a signal": "import os; os.kill(os.getpid(), 15)",
    "a closed output": "import os, sys; os.close(1); os.close(2); print('lost' * 9999)",
    "at exit": "import atexit; atexit.register(print, 'the end'); print('begins')",
}


@pytest.mark.parametrize("way", ["popen", "spawn", "become"])
@pytest.mark.parametrize("words", [("-c", SEEN), ("-I", "-S", "-c", SEEN), ("seen.py",)], ids=["code", "alone", "file"])
def test_a_forked_program_has_what_a_started_one_has(way: str, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    words = tuple(str(tmp_path / word) if word == "seen.py" else word for word in words)
    assert outcome(Forked, way, *words, folder=tmp_path) == outcome(RealProcess, way, *words, folder=tmp_path)


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_a_forked_program_ends_as_a_started_one(code: str, tmp_path: Path) -> None:
    forked = outcome(Forked, "spawn", "-c", code, folder=tmp_path)
    real = outcome(RealProcess, "spawn", "-c", code, folder=tmp_path)
    assert (forked[0], forked[1].splitlines()[-1:]) == (real[0], real[1].splitlines()[-1:])


def outcome(kind: type[Forked] | type[RealProcess], way: str, *words: str, folder: Path) -> tuple[str, str]:
    """Return what the starting process prints, and what the program does."""
    output = folder / kind.__name__
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), FORKS_PYTHON: ""}
    process = kind("tests.starting_python", [way, str(output), *words], environment)
    printed = process.communicate()
    process.wait()
    return printed, output.read_text().replace(sys.executable, "python")
