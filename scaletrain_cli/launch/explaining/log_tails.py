"""The part of a rank's log that says why it ended: its last error, without the hundred lines around it."""

from __future__ import annotations

import re
from pathlib import Path

from scaletrain_cli.launch.logs import end_of

_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s*File "(?P<path>[^"]+)", line \d+, in ')
_SIGN = re.compile(r"error|exception|fatal|killed|abort|out of memory|refused|cannot|no such", re.I)
_MOST_LINES = 6


def last_error(path: Path) -> str:
    """The exception of the last traceback with the innermost frame that is not a library's; else the last lines that
    speak of an error; else the very last lines. Empty for an empty or missing file.
    """
    lines = end_of(path).splitlines()
    lines = [line.rstrip() for line in lines if line.strip()]
    starts = [index for index, line in enumerate(lines) if line.strip().endswith(_TRACEBACK)]
    if starts:
        return "\n".join(_of_traceback(lines[starts[-1] + 1 :]))
    signs = [line for line in lines if _SIGN.search(line)]
    return "\n".join((signs or lines)[-_MOST_LINES // 2 :])


def _of_traceback(lines: list[str]) -> list[str]:
    frames = [index for index, line in enumerate(lines) if _FRAME.match(line)]
    ends = [index for index, line in enumerate(lines) if not line.startswith((" ", "\t")) and line]
    message = lines[ends[0] : ends[0] + _MOST_LINES] if ends else []
    before = [index for index in frames if not ends or index < ends[0]]
    own = [index for index in before if "site-packages" not in lines[index] and "/lib/python" not in lines[index]]
    shown = (own or before)[-1:]
    return [line.strip() for index in shown for line in lines[index : index + 2] if line not in message] + message
