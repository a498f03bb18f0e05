"""Error messages on stderr: the error, each problem with its location, and what to do."""

from __future__ import annotations

from rich.padding import Padding
from rich.text import Text

from scaletrain_cli.errors import Problem, ScaletrainError
from scaletrain_cli.ui.console import escaped_text, line, plain, stderr_console
from scaletrain_cli.ui.console import show as show_block


def show(error: ScaletrainError) -> None:
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
        console.print(_place(problem), soft_wrap=True)
        show_block(console, Padding(_advice(problem), (0, 0, 0, 6)))


def _place(problem: Problem) -> Text:
    text = Text.assemble("  ", (plain(problem.where), "cyan"))
    if problem.key:
        text.append("  ").append(plain(problem.key), "bold")
    if problem.given is not None:
        text.append(f" = {plain(problem.given)}")
    return text


def _advice(problem: Problem) -> Text:
    text = escaped_text(problem.message)
    if problem.hint:
        text.append(f" {plain(problem.hint)}", "green")
    return text
