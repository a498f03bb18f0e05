"""Arguments and options that several verbs share, so that they read the same everywhere, and their completion.

A function that completes takes the typed prefix and returns what begins with it. Errors are suppressed.
"""

from __future__ import annotations

import contextlib
import select
import sys
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from scaletrain_cli.errors import DeclinedError, ExitCode, SpecError, UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import can_be_replaced
from scaletrain_cli.text import bytes_text

if TYPE_CHECKING:
    from scaletrain_cli.launch.hub_fetch import FetchProgress
    from scaletrain_cli.launch.preparation import Choice
    from scaletrain_cli.spec import RunSpec


def completer(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a completion function over ``names``; it returns no completions if reading the names fails."""

    def complete(incomplete: str) -> list[str]:
        try:
            return list(dict.fromkeys(name for name in names() if name.startswith(incomplete)))
        except Exception:  # a traceback would garble the command line
            return []

    return complete


def _runs() -> Iterator[str]:
    from scaletrain_cli.launch.login_node.sent_runs import sent_runs
    from scaletrain_cli.rundir.paths import list_runs

    yield from (run.run_id for run in list_runs())
    yield from (run.run_id for run in sent_runs())


def _names_in(module: str, function: str, *more: str) -> Callable[[str], list[str]]:
    """Return a completion function over ``more`` and the names that a function of a module returns."""
    return completer(lambda: [*more, *getattr(import_module(f"scaletrain_cli.{module}"), function)()])


def _settings() -> Iterator[str]:
    """Yield ``key=`` for each key of the spec, and ``key=value`` for keys with a fixed set of values."""
    from scaletrain_cli.plan.catalogue.hardware import accelerator_names
    from scaletrain_cli.spec.presets import hub_presets, presets, vision_presets
    from scaletrain_cli.spec.problems import spec_keys

    named = {
        "model.preset": [*presets(), *hub_presets(), *vision_presets()],
        "cluster.gpu": ["cpu", *accelerator_names()],
    }
    for key, annotation in spec_keys():
        yield f"{key}="
        for value in named.get(key, _choices(annotation)):
            yield f"{key}={value}"


def _choices(annotation: Any) -> list[str]:
    """Return the values of a field with a fixed set of values: literals, or true and false."""
    if annotation is bool:
        return ["true", "false"]
    if typing.get_origin(annotation) is typing.Literal:
        return [str(value) for value in typing.get_args(annotation)]
    return [word for inner in typing.get_args(annotation) for word in _choices(inner)]


complete_run = completer(_runs)
complete_recipe = _names_in("project_files", "recipes")
complete_preset = _names_in("spec.presets", "presets")
complete_gpu = _names_in("plan.catalogue.hardware", "accelerator_names", "cpu")
complete_cluster = _names_in("spec.clusters_file", "cluster_names")
_all_settings = completer(_settings)


def complete_setting(incomplete: str) -> list[str]:
    """Return keys that begin with the prefix, or the values of a key after ``key=``."""
    settings = _all_settings(incomplete)
    return settings if "=" in incomplete else [setting for setting in settings if setting.endswith("=")]


def load_varied(
    path: Path, overrides: Sequence[str], varied: Sequence[str], option: str, cluster: str | None
) -> RunSpec:
    """Return the spec with its overrides and those of one variant.

    Raises SpecError; a problem with a value of the variant names ``option``.
    """
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


def seconds_of(option: str, text: str) -> float:
    """Return the duration given for an option, in seconds. Raises UsageError."""
    from scaletrain_cli.spec.quantities import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}.") from error


_FETCH_SECONDS = 5.0  # between two lines about a fetch


def show_fetch() -> Callable[[FetchProgress], None]:
    """Return a function that prints the progress of a fetch from the hub to stderr, at most every few seconds."""
    shown = float("-inf")

    def show(progress: FetchProgress) -> None:
        nonlocal shown
        from scaletrain_cli.ui.console import say

        if progress.state not in ("waiting", "fetching") or time.monotonic() - shown < _FETCH_SECONDS:
            return
        shown = time.monotonic()
        if progress.state == "waiting":
            say("waiting for another process that fetches the same files of the hub")
        else:
            done, total = bytes_text(progress.done_bytes), bytes_text(progress.total_bytes)
            say(f"fetching {progress.files} files of the hub to {progress.cache}: {done} of {total}")

    return show


def pause(seconds: float) -> None:
    """Wait in a verb that follows a run. Raises BrokenPipeError once nobody reads stdout any more.

    As after `| head`, or on a login node after Ctrl-C or a cut connection: a verb without a terminal gets no signal.
    """
    readers = select.poll()
    with contextlib.suppress(OSError, ValueError):  # no file, as in a test
        readers.register(sys.stdout.fileno(), 0)
    longest = 2**31 - 1  # milliseconds, in poll(2)
    if any(state & (select.POLLERR | select.POLLHUP) for _, state in readers.poll(min(1e3 * seconds, longest))):
        raise BrokenPipeError


def confirm(question: str, yes: bool) -> None:
    """Ask before an action; return if the answer is yes. Raises DeclinedError if it is no.

    Does not ask with ``yes``, or without a terminal.
    """
    if yes or not can_ask():
        return
    if not typer.confirm(question, default=True, err=True):
        typer.echo("Nothing was done.", err=True)
        raise DeclinedError("not confirmed. Nothing was done.")


def require_replaceable(option: str, file: Path) -> None:
    """Raise UsageError if the file that an option names cannot be written, before anything is started."""
    if not can_be_replaced(file):
        where = {"option": option, "file": str(file), "folder": str(file.absolute().parent)}
        raise UsageError(Reason("report.place", where))


def can_ask() -> bool:
    """Return True if a person at a terminal can answer a question."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def run_to_change(run: str | None, yes: bool) -> str:
    """Return the run that a verb changes: the named one, or the newest, which is shown.

    Raises UsageError for the newest one without ``yes`` where nobody can be asked.
    """
    if run is not None:
        return run
    from scaletrain_cli.rundir.paths import find_run_or_newest
    from scaletrain_cli.ui.console import say

    newest = find_run_or_newest(None)
    if not yes and not can_ask():
        raise UsageError(f"RUN is missing. The newest run is {newest.run_id}: name it, or add --yes.")
    say(f"the newest run is {newest.run_id}")
    return str(newest.path)


# Shown by --help; docs/exit-codes.md has the full definitions.
MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.CRASHED: "failed",
    ExitCode.USAGE: "usage or spec error",
    ExitCode.INFEASIBLE: "the plan is infeasible",
    ExitCode.SCHEDULER: "the scheduler rejected the request or is unreachable",
    ExitCode.WRONG_NODES: "the nodes do not match the plan",
    ExitCode.PREEMPTED: "preempted or stopped after saving a checkpoint",
    ExitCode.DO_NOT_REQUEUE: "permanent failure, not retried",
}


def describe(codes: Sequence[ExitCode]) -> str:
    """Return the line of a verb's help: ``Exit codes: 0 done; 2 usage or spec error.``"""
    return f"Exit codes: {'; '.join(f'{code.value} {MEANINGS[code]}' for code in codes)}."


def verb_group(text: str) -> typer.Typer:
    """Return the ``app`` of a group of verbs; ``text`` is its help."""
    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True, help=text
    )

    @app.callback()
    def group() -> None:  # without it, a group of one verb would be that verb
        pass

    return app


SpecPath = Annotated[Path, typer.Argument(metavar="SPEC", help="Path of the run spec (YAML); - reads stdin.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the spec, e.g. training.steps=100; repeatable.",
        autocompletion=complete_setting,
    ),
]


def _cluster_option(text: str) -> Any:
    return typer.Option("--cluster", metavar="NAME", help=text, autocompletion=complete_cluster)


ClusterName = Annotated[
    str | None,
    _cluster_option("Cluster from ~/.config/scaletrain/clusters.yaml; overrides the spec's cluster section."),
]
GpusPerNode = Annotated[
    int | None, typer.Option("--gpus-per-node", metavar="N", min=1, max=1024, help="Number of devices per node.")
]
JobTimeout = Annotated[
    str, typer.Option("--timeout", metavar="TIME", help="Time limit for the job, including its time in the queue.")
]
# Of a verb that needs no run; cli/elsewhere.py sends the command line there.
OnLoginNode = Annotated[str | None, _cluster_option("Do this on the login node of a cluster of clusters.yaml.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]


def run_argument(text: str, metavar: str = "RUN") -> Any:
    """Return the argument of a verb that names runs, which are completed; ``text`` is its help."""
    return typer.Argument(metavar=metavar, help=text, autocompletion=complete_run)


def nodes_option(text: str) -> Any:
    """Return the option for a number of nodes; ``text`` is its help."""
    return typer.Option("--nodes", metavar="N", min=1, max=100_000, help=text)


RunName = Annotated[str, run_argument("Run id, unique prefix of a run id, or run directory.")]
RunOrNewest = Annotated[
    str | None, run_argument("Run id, unique prefix of a run id, or run directory (default: the newest run).")
]
OneNode = Annotated[
    str | None, typer.Option("--node", metavar="N", help="Node by its number, from 0, or its name (default: 0).")
]
OneRank = Annotated[
    int | None,
    typer.Option(
        "--rank",
        metavar="R",
        min=0,
        help="Node of this rank; RANK, LOCAL_RANK etc. are also set, and its pid as SCALETRAIN_RANK_PID.",
    ),
]


TrustOwner = Annotated[
    bool,
    typer.Option(
        "--trust-owner", help="Act on a run of another user; its code and settings run with your permissions."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Prepare = Annotated[
    str,
    typer.Option(
        "--prepare",
        metavar="WHERE",
        help="Where data that are not prepared are prepared first: now (here, before the run is queued), job (by a job "
        "that the run waits for), or auto (now if that takes less than 5 minutes).",
        autocompletion=lambda: ["auto", "now", "job"],
    ),
]


def as_choice(text: str) -> Choice:
    """Return the value of --prepare. Raises UsageError for another one."""
    from scaletrain_cli.launch.preparation import CHOICES

    if text not in CHOICES:
        raise UsageError(Reason("preparation.unknown-choice", {"given": text, "choices": list(CHOICES)}))
    return cast("Choice", text)
