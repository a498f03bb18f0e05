"""The talk: short notes and useful commands, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from scaletrain_cli.text import visible

# The two consoles, stdout for the answer and stderr for the talk; text of others shown as text, never as markup.


_WIDEST = 120  # further apart than this, the eye loses the line
_PIPED = 100
_ASCII = str.maketrans("×→·•–≤", "x>-*-<") | {ord("µ"): "u"}  # each of one column, so that tables stay straight


def stdout_console() -> Console:
    """Stdout."""
    return _console(sys.stdout)


def stderr_console() -> Console:
    """Stderr."""
    return _console(sys.stderr)


def plain(text: str) -> str:
    """``text`` without anything that a terminal obeys; line ends and escapes become visible."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def document(text: str) -> str:
    """Return a document for stdout: for a file or a pipe as it is, for a terminal as visible()."""
    return visible(text) if sys.stdout.isatty() else text


def escaped_text(text: str, style: str = "") -> Text:
    """Text of a user or a machine, for any rich renderable."""
    return Text(plain(text), style=style)


def line(console: Console, text: str | Text, style: str = "") -> None:
    """One line that is never wrapped by us, so that a path or an id in it can be copied."""
    console.print(escaped_text(text, style) if isinstance(text, str) else text, soft_wrap=True)


def show(console: Console, renderable: RenderableType) -> None:
    """A table or the like, without the blanks that rich leaves at the ends of lines."""
    with console.capture() as capture:
        console.print(renderable)
    text = capture.get() if speaks_unicode(console) else capture.get().translate(_ASCII)
    console.file.write("".join(f"{row.rstrip(' ')}\n" for row in text.splitlines()))
    console.file.flush()


def speaks_unicode(console: Console) -> bool:
    """Whether the stream can show block characters."""
    return console.encoding.lower().startswith("utf")


def _console(stream: TextIO) -> Console:
    console = Console(file=stream, highlight=False, markup=False, emoji=False, safe_box=True)
    if not console.is_terminal:
        console.width = _PIPED
    elif console.width > _WIDEST:
        console.width = _WIDEST
    return console


def say(text: str) -> None:
    """One line of information."""
    line(stderr_console(), text)


def warn(text: str) -> None:
    """One line about something that may matter."""
    line(stderr_console(), Text.assemble(("warning: ", "bold yellow"), plain(text)))


def suggest(commands: Mapping[str, str]) -> None:
    """Commands that come next, by what they are for."""
    console = stderr_console()
    width = max(map(len, commands.values()))
    for purpose, command in commands.items():
        line(console, Text.assemble("  ", (plain(command).ljust(width), "cyan"), (f"  {plain(purpose)}", "dim")))
