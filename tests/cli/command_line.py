"""Run the command line in this process; return its output and exit code. No tests here."""

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.__main__ import main

PROJECT = Path(__file__).parent.parent.parent
RECIPES = sorted((PROJECT / "recipes").glob("*.yaml"))
BUG = "This is a bug in ScaleTrain."
SMALL = Path(__file__).parent / "small.yaml"


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """Stdout as JSON."""
        return json.loads(self.out)


def scaletrain(*arguments: object, code: int | None = None, expect_bug: bool = False) -> Ended:
    """Run one command line through the process border, as the console script does; a bug fails the test.

    ``code``: the exit code that it must end with.
    """
    out, err = io.StringIO(), io.StringIO()
    status: object = "it never left the process"
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code
    assert isinstance(status, int), status
    ended = Ended(int(status), out.getvalue(), err.getvalue())
    assert expect_bug or BUG not in ended.out + ended.err, ended
    assert code in (None, ended.code), ended
    return ended
