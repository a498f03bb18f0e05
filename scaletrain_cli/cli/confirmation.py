"""The one question before something happens. Asked where a person can answer it, and nowhere else."""

from __future__ import annotations

import sys

import typer

_DECLINED = 130  # as if ctrl-C had been the answer


def confirm(question: str, yes: bool) -> None:
    """Return to go on; leave the process when the answer is no."""
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    if not typer.confirm(question, default=True, err=True):
        typer.echo("Nothing was done.", err=True)
        raise typer.Exit(_DECLINED)
