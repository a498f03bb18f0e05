"""A command in a terminal of its own, which the test reads and types into."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PROJECT = Path(__file__).parent.parent


class Terminal:
    """``text`` is all that was written to it, ``before`` its modes before the command."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], size: tuple[int, int], folder: Path
    ) -> None:
        self.ours, self.theirs = pty.openpty()
        self.resize(*size)
        self.text, self.before = "", self.modes
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self.theirs)
        self.process = subprocess.Popen(command, **streams, cwd=folder, env=environment, start_new_session=True)

    @property
    def modes(self) -> int:
        return int(termios.tcgetattr(self.theirs)[3])

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def wait_for(self, pattern: str) -> str:
        """Return what was written since the last answer, up to and with the pattern."""
        place = len(self.text)
        while not re.search(pattern, self.text[place:]):
            ended = self.process.poll() is not None  # before the read: its last output may come just before its end
            assert self._read() or not ended, self.text[place:]
        return self.text[place:]

    def to_the_end(self) -> int:
        """Read until the command has ended; return its exit code."""
        ended = False
        while self._read() or not ended:
            ended = self.process.poll() is not None
        return self.process.wait()

    def _read(self) -> bool:
        """Add what the command has written to the text; return False if it writes nothing for a tenth of a second."""
        comes = bool(select.select([self.ours], [], [], 0.1)[0])
        if comes:
            self.text += os.read(self.ours, 1 << 16).decode(errors="replace")
        return comes


@contextlib.contextmanager
def terminal(
    command: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    *,
    size: tuple[int, int] = (24, 80),
    folder: Path = PROJECT,
) -> Iterator[Terminal]:
    """Start the command; it is killed at the end of the block."""
    opened = Terminal(command, environment, size, folder)
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()
        os.close(opened.ours)
        os.close(opened.theirs)
