"""Arguments and options that several verbs share, so that they read the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scaletrain_cli.errors import SpecError

if TYPE_CHECKING:
    from scaletrain_cli.spec import RunSpec
import sys
from typing import Annotated

import typer

from scaletrain_cli.cli.completion import complete_cluster, complete_run, complete_setting
from scaletrain_cli.errors import DeclinedError, ExitCode

# Specs with the values of --vary or --sweep in them; what is wrong with such a value says which option it came by.


def load_varied(
    path: Path, overrides: Sequence[str], varied: Sequence[str], option: str, cluster: str | None
) -> RunSpec:
    """The spec with its overrides and those of one variant. Raises SpecError."""
    from scaletrain_cli.spec import load_spec
    from scaletrain_cli.spec.source import SET_OPTION as SET

    keys = {setting.partition("=")[0] for setting in varied}
    try:
        return load_spec(path, [*overrides, *varied], cluster=cluster)
    except SpecError as error:
        error.problems = tuple(
            replace(problem, where=option) if problem.where == SET and problem.key in keys else problem
            for problem in error.problems
        )
        raise


# The one question before something happens.


def confirm(question: str, yes: bool) -> None:
    """Return to go on. Raises DeclinedError when the answer is no."""
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    if not typer.confirm(question, default=True, err=True):
        typer.echo("Nothing was done.", err=True)
        raise DeclinedError("the question was answered with no. Nothing was done.")


# What each exit code means, as `--help` says it; docs/exit-codes.md has the whole story.


MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.CRASHED: "crashed",
    ExitCode.USAGE: "usage or spec error",
    ExitCode.INFEASIBLE: "the plan is infeasible",
    ExitCode.SCHEDULER: "the scheduler refused or cannot be reached",
    ExitCode.WRONG_NODES: "the nodes are not what was planned",
    ExitCode.PREEMPTED: "stopped early, checkpoint committed",
    ExitCode.DO_NOT_REQUEUE: "a verdict that a retry cannot cure",
}


def describe(codes: Sequence[ExitCode]) -> str:
    """``Exit codes: 0 done; 2 usage or spec error.``"""
    return f"Exit codes: {'; '.join(f'{code.value} {MEANINGS[code]}' for code in codes)}."


SpecPath = Annotated[
    Path, typer.Argument(metavar="SPEC", help="Run spec, a YAML file; - reads stdin.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the spec, as in training.steps=100; repeatable.",
        autocompletion=complete_setting,
    ),
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help="One of your clusters in ~/.config/scaletrain/clusters.yaml; stands above the spec's cluster section.",
        autocompletion=complete_cluster,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run id, the beginning of one, or a run directory.",
        show_default=False,
        autocompletion=complete_run,
    ),
]
TrustOwner = Annotated[
    bool,
    typer.Option("--trust-owner", help="Act on a run of another user as if it were yours: what is in it runs as you."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
