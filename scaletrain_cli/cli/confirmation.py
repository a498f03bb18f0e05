"""The one question before something happens. Asked where a person can answer it, and nowhere else."""

from __future__ import annotations

import sys

import typer

from scaletrain_cli.errors import DeclinedError


def confirm(question: str, yes: bool) -> None:
    """Return to go on. Raises DeclinedError when the answer is no."""
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    if not typer.confirm(question, default=True, err=True):
        typer.echo("Nothing was done.", err=True)
        raise DeclinedError("the question was answered with no. Nothing was done.")
