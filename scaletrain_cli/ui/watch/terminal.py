"""The terminal of `watch`: an alternate screen without a cursor, keys one by one, and only changed lines drawn."""

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Sequence
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[?25h\x1b[?1049l"
_SEQUENCES = {
    "[A": "up",
    "[B": "down",
    "[C": "right",
    "[D": "left",
    "[H": "home",
    "[F": "end",
    "[1~": "home",
    "[4~": "end",
    "[5~": "page-up",
    "[6~": "page-down",
    "[7~": "home",
    "[8~": "end",
    "[Z": "shift-tab",
}
_NAMES = {"\t": "tab", "\x03": "q", "\x04": "q", "\x0c": "r", " ": "page-down", "j": "down", "k": "up"}
_NAMES |= {"g": "home", "G": "end", "Q": "q", "h": "?", "<": "left", ">": "right", "=": "+", "\x1b": "escape"}
_REST_SECONDS = 0.05  # within which the rest of an escape sequence arrives


def is_capable() -> bool:
    """Return True if stdin and stdout are a terminal that can place its cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


class Terminal:
    """A context manager; the terminal is restored at its end, after an exception, and while the process is stopped.

    SIGTERM and SIGHUP raise SystemExit in it.
    """

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, force_terminal=True)
        self._input = sys.stdin.fileno()
        self._before: list[Any] = []
        self._handlers: dict[int, Any] = {}
        self._drawn: list[str] = []
        self._bytes = b""

    def __enter__(self) -> "Terminal":
        self._before = termios.tcgetattr(self._input)
        self._handlers = {
            signal.SIGTSTP: signal.signal(signal.SIGTSTP, self._stop),
            signal.SIGTERM: signal.signal(signal.SIGTERM, _exit),
            signal.SIGHUP: signal.signal(signal.SIGHUP, _exit),
        }
        self._enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        size = os.get_terminal_size(sys.stdout.fileno())
        return max(20, size.columns), max(5, size.lines)

    @property
    def unicode(self) -> bool:
        return self._console.encoding.lower().startswith("utf")

    def draw(self, lines: Sequence[Text]) -> None:
        """Show the lines from the top; only those that have changed are written."""
        columns, rows = self.size
        rendered = [self._codes(line, columns) for line in lines[:rows]]
        rendered += [""] * (rows - len(rendered))
        out = []
        for number, line in enumerate(rendered):
            if number >= len(self._drawn) or self._drawn[number] != line:
                out.append(f"\x1b[{number + 1};1H{line}\x1b[K")
        self._drawn = rendered
        if out:
            sys.stdout.write("".join(out))
            sys.stdout.flush()

    def forget(self) -> None:
        """Draw everything the next time."""
        self._drawn = []
        sys.stdout.write("\x1b[2J")

    def key(self, seconds: float) -> str | None:
        """Return the name of the next key; None if none is pressed within ``seconds``."""
        if not self._bytes and not self._receive(seconds):
            return None
        if self._bytes[:1] == b"\x1b":
            if len(self._bytes) == 1:
                self._receive(_REST_SECONDS)
            if self._bytes[1:2] not in (b"[", b"O"):
                self._bytes = self._bytes[1:]
                return "escape"
            end = 2
            while end < len(self._bytes) and not 0x40 <= self._bytes[end] <= 0x7E:
                end += 1
            sequence = "[" + self._bytes[2 : end + 1].decode(errors="ignore")
            self._bytes = self._bytes[end + 1 :]
            return _SEQUENCES.get(sequence, "escape")
        first = self._bytes.decode(errors="ignore")[:1] or "?"
        self._bytes = self._bytes[max(1, len(first.encode())) :]
        return _NAMES.get(first, first)

    def _receive(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._input], [], [], seconds)
        data = os.read(self._input, 1024) if ready else b""
        if ready and not data:  # the terminal is gone
            raise SystemExit(0)
        self._bytes += data
        return bool(data)

    def _codes(self, line: Text, columns: int) -> str:
        text = line.copy()
        text.truncate(columns, overflow="crop")
        with self._console.capture() as capture:
            self._console.print(text, end="", soft_wrap=True)
        return capture.get().replace("\n", "")

    def _enter(self) -> None:
        tty.setcbreak(self._input)
        self._drawn = []
        sys.stdout.write(_ENTER)
        sys.stdout.flush()

    def _leave(self) -> None:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Give the terminal back to the shell until the process is continued."""
        self._leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0)  # the signal is delivered before the next line
        self._enter()


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
