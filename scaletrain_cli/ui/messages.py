"""The talk: short notes and useful commands, on stderr."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from scaletrain_cli.ui.console import line, plain, talk


def say(text: str) -> None:
    """One line of information."""
    line(talk(), text)


def warn(text: str) -> None:
    """One line about something that may matter."""
    line(talk(), Text.assemble(("warning: ", "bold yellow"), plain(text)))


def suggest(commands: Mapping[str, str]) -> None:
    """Commands that come next, by what they are for."""
    console = talk()
    width = max(map(len, commands.values()))
    for purpose, command in commands.items():
        line(console, Text.assemble("  ", (plain(command).ljust(width), "cyan"), (f"  {plain(purpose)}", "dim")))
