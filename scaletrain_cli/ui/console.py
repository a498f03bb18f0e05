"""The two consoles: stdout for results and events, stderr for notes, warnings, errors and suggested commands.

Text from users and machines is shown literally, never as markup.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, TextIO

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.event_texts import Event, event_sentence
from scaletrain_cli.text import bytes_text, visible

_WIDEST = 120  # wider tables are hard to read
_PIPED = 100
_LONGEST_SHOWN, _SHOWN_OF_LONGER = 2000, 200  # characters of a line of a document, on a terminal
_ASCII = str.maketrans("×→·•–≤", "x>-*-<") | {ord("µ"): "u"}  # one column wide each, so that tables stay aligned


def stdout_console() -> Console:
    """Return the console of stdout, for results."""
    return _console(sys.stdout)


def stderr_console() -> Console:
    """Return the console of stderr, for notes and questions."""
    return _console(sys.stderr)


def plain(text: str) -> str:
    """Return ``text`` with control characters escaped, including line ends."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def document(text: str) -> str:
    """Return a document for stdout: unchanged for a file or pipe; for a terminal escaped by visible(), long lines cut.

    A manifest has the record of the run and the code in lines of tens of kilobytes, between which the rest is lost.
    """
    if not sys.stdout.isatty():
        return text
    rest = "... ({size}; whole in a pipe or a file)"
    return "\n".join(
        part if len(part) <= _LONGEST_SHOWN else part[:_SHOWN_OF_LONGER] + rest.format(size=bytes_text(len(part)))
        for part in visible(text).split("\n")
    )


def escaped_text(text: str, style: str = "") -> Text:
    """Return text from a user or a machine as rich text, with control characters escaped."""
    return Text(plain(text), style=style)


def line(console: Console, text: str | Text, style: str = "") -> None:
    """Print one line without wrapping, so that paths and ids in it can be copied."""
    if console.is_terminal:
        console.print(escaped_text(text, style) if isinstance(text, str) else text, soft_wrap=True)
        return
    # A run may have hundreds of thousands of events, and rich takes five times as long for a line without a style.
    console.file.write(f"{plain(text) if isinstance(text, str) else text.plain}\n")
    console.file.flush()


def show(console: Console, renderable: RenderableType) -> None:
    """Print a rich renderable without trailing blanks."""
    with console.capture() as capture:
        console.print(renderable)
    text = capture.get() if supports_unicode(console) else capture.get().translate(_ASCII)
    try:
        console.file.write("".join(f"{row.rstrip(' ')}\n" for row in text.splitlines()))
        console.file.flush()
    except OSError:
        if console.file is not sys.stderr:
            raise
        drop_output(sys.stderr)


def supports_unicode(console: Console) -> bool:
    """Return True if the stream can encode block characters."""
    return console.encoding.lower().startswith("utf")


def _console(stream: TextIO) -> Console:
    console = Console(file=stream, highlight=False, markup=False, emoji=False, safe_box=True)
    if not console.is_terminal:
        console.width = _PIPED
    elif console.width > _WIDEST:
        console.width = _WIDEST
    return console


def say(text: str) -> None:
    """Print a note to stderr."""
    _note(escaped_text(text))


def warn(text: str) -> None:
    """Print a warning to stderr."""
    _note(Text.assemble(("warning: ", "bold yellow"), plain(text)))


def _note(text: Text) -> None:
    try:
        line(stderr_console(), text)
    except OSError:  # a full disk behind it, or a reader that has ended: no reason to end the work
        drop_output(sys.stderr)


def drop_output(stream: IO[str]) -> None:
    """Lead a stream that cannot be written to /dev/null, so that Python does not fail when it closes the stream."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def suggest(commands: Mapping[str, str]) -> None:
    """Print suggested commands with their purposes to stderr."""
    width = max(map(len, commands.values()))
    for purpose, command in commands.items():
        _note(Text.assemble("  ", (plain(command).ljust(width), "cyan"), (f"  {plain(purpose)}", "dim")))


def show_error(error: ScaletrainError) -> None:
    """Print the error; if stderr is not a terminal, each problem is one line that starts with ``file:line``."""
    console = stderr_console()
    headline = Text.assemble(("error: ", "bold red"), (plain(error.message), "bold"))
    if error.remedy:
        headline.append(f" {plain(error.remedy)}", "green")
    if not console.is_terminal:
        line(console, headline)
        for problem in error.problems:
            line(console, f"  {problem}")
        return
    console.print(headline)
    for problem in error.problems:
        place = Text.assemble("  ", (plain(problem.where), "cyan"))
        if problem.key:
            place.append("  ").append(plain(problem.key), "bold")
        if problem.given is not None:
            place.append(f" = {plain(problem.given)}")
        console.print(place, soft_wrap=True)
        text = escaped_text(problem.message)
        if problem.hint:
            text.append(f" {plain(problem.hint)}", "green")
        show(console, Padding(text, (0, 0, 0, 6)))


def titled_table(titles: Sequence[str], kinds: str, gap: int = 2) -> Table:
    """Return a table with its row of titles. ``kinds``, by column: l left, r right, w left and wrapped.

    ``gap``: blanks between columns.
    """
    table = grid(kinds, gap)
    table.add_row(*(Text(title, "dim") for title in titles))
    return table


def grid(kinds: str, gap: int = 2, first_style: str = "") -> Table:
    """Return a table without titles; ``kinds`` and ``gap`` as in titled_table(). ``first_style``: of the first one."""
    table = Table.grid(padding=(0, gap, 0, 0))
    for kind in kinds:
        style, first_style = first_style, ""
        table.add_column(justify="right" if kind == "r" else "left", no_wrap=kind != "w", overflow="fold", style=style)
    return table


def marked(rows: Iterable[tuple[str | Text, Text]]) -> Table:
    """Return a row for each mark, such as a number, with its text wrapped beside it."""
    table = grid("lw", 1)
    for mark, text in rows:
        table.add_row(mark, text)
    return table


def bullets(sentences: Iterable[tuple[str, str]]) -> Table:
    """Return a bullet for each (text, style)."""
    return marked((Text("•", style), escaped_text(text, style)) for text, style in sentences)


def event_line(event: Event, *, with_date: bool = False) -> Text:
    """Return ``12:30:05  checkpoint  step 40 committed, 1.2 GB in 3.1 s``."""
    moment = event.get("time", "")
    form = "%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S"
    try:
        when = time.strftime(form, time.localtime(float(moment)))
    except (TypeError, ValueError, OverflowError, OSError):  # missing or invalid time
        when = "no time"
    name = plain(str(event.get("event", "")))
    return Text.assemble((when, "dim"), f"  {name:<14}", (f"  {plain(event_sentence(event))}", "dim"))


def show_events(events: Iterable[Event]) -> None:
    """Print events to stdout, one per line."""
    console = stdout_console()
    for event in events:
        line(console, event_line(event, with_date=True))
