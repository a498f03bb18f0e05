"""`scaletrain rehearse`: try a run for minutes before the expensive job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scaletrain_cli.cli.options import (
    AsJson,
    ClusterName,
    JobTimeout,
    Overrides,
    SpecPath,
    Yes,
    confirm,
    nodes_option,
    seconds_of,
)
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.text import counted
from scaletrain_cli.ui.console import say
from scaletrain_cli.ui.json import print_json

if TYPE_CHECKING:
    from scaletrain_cli.diagnosis.rehearsal import Options
    from scaletrain_cli.launch.short_jobs import RehearsalResult
    from scaletrain_cli.spec import RunSpec

DEFAULT_BUDGET_SECONDS, DEFAULT_TIMEOUT_SECONDS = 100.0, 1800.0
EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE, ExitCode.INFEASIBLE, ExitCode.SCHEDULER)


def command(
    spec: SpecPath,
    overrides: Overrides = None,
    cluster: ClusterName = None,
    items: Annotated[str, typer.Option(metavar="A,B", help="Items to rehearse (default: all).")] = "",
    skip: Annotated[str, typer.Option(metavar="A,B", help="Items to leave out.")] = "",
    nodes: Annotated[int | None, nodes_option("Number of nodes (default: as few as hold one replica).")] = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Time for the items that train, together.")] = "100s",
    timeout: JobTimeout = "30m",
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the curve of the range test as PNG, SVG or PDF."),
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Try a run for minutes before the expensive job, and give a verdict on each item.

    Submits a short job with the spec, data and layout of the run. Its ranks look at labels, the first loss, gradients
    and the learning rate, compare speed and memory with the plan, and restore a checkpoint and a preemption. Exits with
    3 if an item fails.
    """
    from scaletrain_cli.diagnosis.rehearsal import Options
    from scaletrain_cli.launch.short_jobs import chosen_items
    from scaletrain_cli.spec import load_spec
    from scaletrain_cli.ui.plots import check_plot_file
    from scaletrain_cli.ui.short_jobs import PLOT_KINDS, show_rehearsal, write_plot

    options = Options(chosen_items(_names(items), _names(skip)), seconds_of("--budget", budget))
    timeout_seconds = seconds_of("--timeout", timeout)
    if plot is not None:
        check_plot_file(plot, PLOT_KINDS)
    given = load_spec(spec, overrides or [], cluster=cluster)
    result = rehearse(given, spec, options, nodes, timeout_seconds, yes=yes)
    if plot is not None and write_plot(result.rehearsal, plot):
        say(f"wrote {plot}")
    if as_json:
        print_json(result.to_json())
    else:
        show_rehearsal(result)
    raise typer.Exit(result.exit_code)


def rehearse(
    given: RunSpec, file: Path, options: Options, nodes: int | None, timeout_seconds: float, *, yes: bool
) -> RehearsalResult:
    """Confirm, submit the short job of a run, wait for it with a status line, and return the verdicts.

    ``nodes``: None for as few as hold one replica. Raises UsageError for a program of the user's, and what refuses a
    job.
    """
    from scaletrain_cli.launch.backends.registry import backend_for
    from scaletrain_cli.launch.epochs import in_steps
    from scaletrain_cli.launch.short_jobs import fewest_nodes, rehearsal_spec, run_rehearsal
    from scaletrain_cli.launch.submit import plan_for_engine
    from scaletrain_cli.ui.live import StatusLine
    from scaletrain_cli.ui.submission import show_outlook

    if given.code.own_program:
        key = "code.command" if given.code.command is not None else "code.engine"
        raise UsageError(f"{key}: rehearsals run the built-in engine only. Add --set code={{}} to rehearse with it.")
    given, epochs = in_steps(given, file)
    if epochs is not None:
        say(str(epochs))
    small = rehearsal_spec(given, options, nodes or fewest_nodes(given))
    plan, scheduler = plan_for_engine(small, file), backend_for(small.cluster.scheduler)
    show_outlook(scheduler.preflight(small, plan))
    cluster = small.cluster
    where = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu_name} on {cluster.scheduler}"
    confirm(f"Rehearse {counted(len(options.items), 'item')} for some minutes, {where}?", yes)
    with StatusLine() as line:
        return run_rehearsal(given, small, plan, scheduler, options, timeout_seconds, line.update)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
