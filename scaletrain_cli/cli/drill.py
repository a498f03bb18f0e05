"""`scaletrain drill`: inject faults into small runs on your cluster and verify that they recover."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scaletrain_cli.cli.options import (
    AsJson,
    ClusterName,
    GpusPerNode,
    Overrides,
    Yes,
    complete_gpu,
    confirm,
    nodes_option,
    seconds_of,
)
from scaletrain_cli.errors import ExitCode, ScaletrainError, UsageError
from scaletrain_cli.plugins import PluginError
from scaletrain_cli.text import visible
from scaletrain_cli.ui.console import say, warn
from scaletrain_cli.ui.json import print_json

if TYPE_CHECKING:
    from scaletrain_cli.launch.drill import DrillKind
    from scaletrain_cli.spec import RunSpec

EXIT_CODES = (ExitCode.DONE, ExitCode.CRASHED, ExitCode.USAGE, ExitCode.INFEASIBLE, ExitCode.SCHEDULER)


def command(
    kinds: Annotated[
        list[str] | None, typer.Argument(metavar="KIND", help="Kinds of faults to inject (default: all).")
    ] = None,
    list_kinds: Annotated[bool, typer.Option("--list", help="List the kinds of faults and exit.")] = False,
    spec: Annotated[
        Path | None,
        typer.Option(metavar="SPEC", help="Spec to shorten and use (default: a model with 10 M parameters)."),
    ] = None,
    overrides: Overrides = None,
    cluster: ClusterName = None,
    scheduler: Annotated[
        str | None, typer.Option(metavar="NAME", help="Scheduler, e.g. slurm (default: as in the spec).")
    ] = None,
    nodes: Annotated[int | None, nodes_option("Number of nodes.")] = None,
    gpus_per_node: GpusPerNode = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="Accelerator name, or cpu.", autocompletion=complete_gpu)
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Number of steps of each run.")] = 40,
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="Time limit for each run, including its time in the queue.")
    ] = "30m",
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep all run directories (default: keep those of failed drills).")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Inject faults into small runs on your scheduler and compare each with an undisturbed run.

    Runs one run per kind, one after another, each with the same model and data. A run passes if it reacts as required,
    finishes, and matches the undisturbed run: bit for bit on CPUs, within 1e-4 of the final loss on GPUs.
    """
    if list_kinds:
        every = _all_kinds()
        if as_json:
            print_json({"schema": "scaletrain.drill-list/v1", "kinds": {kind.name: kind.summary for kind in every}})
        width = max(len(kind.name) for kind in every)
        for kind in () if as_json else every:
            typer.echo(visible(f"{kind.name:<{width}}  {kind.summary}"))
        return
    from scaletrain_cli.launch.drill import drill_kind, drill_names

    named = {name: drill_kind(name) for name in kinds or ()}
    chosen = [named[name] for name in drill_names() if name in named] if named else _all_kinds()
    sizes = {
        "cluster.scheduler": scheduler,
        "cluster.nodes": nodes,
        "cluster.gpus_per_node": gpus_per_node,
        "cluster.gpu": gpu,
    }
    given = [*(overrides or ()), *(f"{key}={value}" for key, value in sizes.items() if value is not None)]
    base, seconds = _spec(spec, given, cluster), seconds_of("--timeout", timeout)
    raise typer.Exit(_drill(chosen, base, steps, seconds, keep=keep, yes=yes, as_json=as_json))


def _drill(
    kinds: list[DrillKind], base: RunSpec, steps: int, timeout: float, *, keep: bool, yes: bool, as_json: bool
) -> ExitCode:
    from scaletrain_cli.launch.backends.registry import backend_for
    from scaletrain_cli.launch.drill import (
        UNDISTURBED,
        DrillSetup,
        compare_runs,
        drill_spec,
        make_jobs_folder,
        run_drill,
    )
    from scaletrain_cli.launch.submit import plan_for_engine
    from scaletrain_cli.ui.live import StatusLine
    from scaletrain_cli.ui.short_jobs import show_verdicts, verdicts_json
    from scaletrain_cli.ui.submission import show_outlook

    if base.code.own_program:
        key = "code.command" if base.code.command is not None else "code.engine"
        given = " ".join(base.code.command or (base.code.engine or "",))
        raise UsageError(
            f"{key} = {given}: drills inject faults into the built-in engine only. Add "
            "--set code={} to run the drills with it."
        )
    small = drill_spec(base, steps)
    plan = plan_for_engine(small, "the drills' spec")
    cluster, scheduler = small.cluster, backend_for(small.cluster.scheduler)
    show_outlook(scheduler.preflight(small, plan))
    size = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu_name} on {cluster.scheduler}"
    confirm(f"Train {len(kinds) + 1} runs of {steps} steps, one after another, {size}?", yes)
    folder, verdicts = make_jobs_folder(), []
    with StatusLine() as line:
        say(f"undisturbed, in {folder}")
        run, undisturbed = run_drill(DrillSetup(folder, small, plan, scheduler, timeout), UNDISTURBED, line.update)
        if undisturbed.state != "finished":
            why = f"the undisturbed run did not finish ({undisturbed.state}): {undisturbed.why}"
            raise ScaletrainError(f"{why}. See `scaletrain logs {run.path}`.")
        for kind in kinds:
            say(f"{kind.name}: {kind.summary}")
            run, course = run_drill(DrillSetup(folder, small, plan, scheduler, timeout), kind, line.update)
            verdicts.append(compare_runs(kind, str(run.path), course, undisturbed, exact=cluster.gpu_name == "cpu"))
    survived = all(verdict.survived for verdict in verdicts)
    if as_json:
        print_json(verdicts_json(folder, undisturbed, verdicts))
    else:
        show_verdicts(verdicts)
    if survived and not keep:
        shutil.rmtree(folder)
    else:
        say(f"the run directories are kept in {folder}")
    return ExitCode.DONE if survived else ExitCode.CRASHED


def _spec(path: Path | None, overrides: list[str], cluster: str | None) -> RunSpec:
    from scaletrain_cli.spec import load_spec, parse_spec
    from scaletrain_cli.spec.clusters_file import choose_cluster
    from scaletrain_cli.spec.starting_spec import starting_spec

    if path is not None:
        return load_spec(path, overrides, cluster=cluster)
    chosen = choose_cluster(cluster) if cluster is not None else None
    return parse_spec(starting_spec(), file="the drills' spec", base_dir=Path(), overrides=overrides, cluster=chosen)


def _all_kinds() -> list[DrillKind]:
    """Return every kind; one of another package that cannot be used is left out with a warning."""
    from scaletrain_cli.launch.drill import drill_kind, drill_names

    kinds = []
    for name in drill_names():
        try:
            kinds.append(drill_kind(name))
        except PluginError as error:
            warn(str(error))
    return kinds
