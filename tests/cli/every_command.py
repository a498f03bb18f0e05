"""Every command of the application that answers by itself, with a command line that it accepts. No tests here."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from scaletrain_cli.cli.app import app
from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from tests.cli.command_line import SMALL

# What stands for an argument or an option that a command needs, by the name that its help gives it.
VALUES = dict.fromkeys(("SPEC", "SPEC|RUN", "SPEC|DATASET|RUN"), str(SMALL))
VALUES |= {"RUN": "r1", "DIR": "out", "URL": "s3://bucket/data", "PROMPT": "Hi", "NAME": "lab"}
# Options that make a command that would wait, ask or start something end by itself.
ALSO = {"init": ["-o", "new.yaml"], "drill": ["--list"], "rm": ["--yes"], "preflight": ["--yes"], "submit": ["--yes"]}
ALSO |= {"watch": ["--once"], "report": ["-o", "report.html"], "rehearse": ["--yes"]}
# They connect streams or ports, and answer nothing: tests/launch/test_sessions.py, tests/cli/test_mcp.py.
CONNECTIONS = ("exec", "shell", "port-forward", "mcp")


def commands(command: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command of the application, with the words that call it."""
    command = command or typer.main.get_command(app)
    if not hasattr(command, "list_commands"):
        yield words, command
        return
    context = command.make_context("scaletrain", [], resilient_parsing=True)
    for name in command.list_commands(context):
        if name in CONNECTIONS:
            continue
        yield from commands(command.get_command(context, name), (*words, name))


def _name(parameter: Any) -> str:
    """The name in help, without the brackets of an optional value and the dots of a repeated one."""
    return (parameter.metavar or "").strip("[].")


ALL = dict(commands())
OF_A_RUN = [words for words, command in ALL.items() if any(_name(p) == "RUN" for p in command.params)]


def command_line(words: tuple[str, ...]) -> list[str]:
    """The words with all that the command needs."""
    given = list(words)
    for parameter in ALL[words].params:
        is_argument = parameter.param_type_name == "argument"
        if parameter.required or _name(parameter) == "RUN":
            value = VALUES[_name(parameter)]
            given += [value] if is_argument else [parameter.opts[0], value]
    return [*given, *ALSO.get(words[0], [])]


def start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are taken and never run; what would start a process and wait for it is refused."""

    def refuse(*arguments: object, **options: object) -> None:
        raise SchedulerError("nothing is started here.")

    monkeypatch.setattr(LocalBackend, "submit", lambda self, run, record: "7")
    monkeypatch.setattr("scaletrain_cli.launch.short_jobs.run_preflight", refuse)
    monkeypatch.setattr(LocalBackend, "run_in_foreground", refuse)
    monkeypatch.setattr("scaletrain_cli.launch.engine_process.run_engine_command", refuse)
    monkeypatch.setattr("scaletrain_cli.launch.drill.run_drill", refuse)
    monkeypatch.setattr("scaletrain_cli.launch.profile.await_profile", refuse)
    monkeypatch.setattr("scaletrain_cli.launch.short_jobs.run_rehearsal", refuse)
