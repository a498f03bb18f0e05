"""`scaletrain plan`: does the run fit, how fast is it, what does it cost? Starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from scaletrain_cli.cli.completion import complete_gpu, complete_setting
from scaletrain_cli.cli.options import AsJson, ClusterName, Overrides
from scaletrain_cli.errors import ExitCode, InfeasibleError, UsageError

if TYPE_CHECKING:
    from scaletrain_cli.plan.advice.answer import Answer
    from scaletrain_cli.plan.reliability.spot_trace import SpotTrace
    from scaletrain_cli.plan.search.cluster_limits import Limits
    from scaletrain_cli.spec import RunSpec

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE, ExitCode.INFEASIBLE)
_SHOWN = ("needed", "smallest")  # what the table has just shown, part by part


def command(
    specs: Annotated[
        list[Path], typer.Argument(metavar="SPEC", help="Run spec, a YAML file, or - for stdin; several are compared.")
    ],
    overrides: Overrides = None,
    cluster: ClusterName = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="KEY=A,B,C",
            help="Compare values of a key, as in layout.zero_stage=1,2,3; repeatable.",
            autocompletion=complete_setting,
        ),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Walk the decision with the numbers of this run.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the plan: FILE.html, .svg or .png.")
    ] = None,
    objective: Annotated[
        Literal["time", "cost", "gpus"] | None,
        typer.Option("--objective", help="Choose the number of GPUs: soonest done, cheapest, or fewest."),
    ] = None,
    max_gpus: Annotated[
        int | None,
        typer.Option("--max-gpus", metavar="N", min=1, help="Maximum number of GPUs (default: as in the spec)."),
    ] = None,
    deadline: Annotated[
        str | None, typer.Option("--deadline", metavar="TIME", help="Be done in this time, as in 30d.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="USD", help="Spend no more dollars, as in 50000 or 50k.")
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="Consider clusters of this GPU instead of the spec's; repeatable.",
            autocompletion=complete_gpu,
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Replay the run on a recorded spot-market trace.")
    ] = None,
    live_prices: Annotated[
        bool, typer.Option("--live-prices", help="Ask for today's prices; needs the extra [prices] and a network.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every layout considered, and what the numbers assume.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Size a run: layout, memory, time, network, durability, cost. Starts nothing.

    A run that cannot fit exits with 3, the reason and what would make it fit; the smallest layout is shown all the
    same. The keys of --json (scaletrain.plan/v1) are stable.

    Several specs, or --vary, are shown side by side, each against the first; --json then has them as `runs`. The exit
    code is 3 only if none of them can run.

    --objective, --max-gpus, --deadline and --budget choose the number of GPUs. A deadline alone asks for the
    fewest GPUs that keep it, also beyond those of the spec.
    """
    from scaletrain_cli.plan.search.cluster_limits import parse_limits
    from scaletrain_cli.spec.source import variants

    limits = parse_limits(objective, max_gpus=max_gpus, deadline=deadline, budget=budget, gpus=gpu or ())
    sets = variants(vary or ())
    if len(specs) * len(sets) > 1:
        single = {
            "--live-prices": live_prices,
            "--explain": explain,
            "--plot": plot,
            "--trace": trace,
            "choosing the number of GPUs": limits,
        }
        for option, given in single.items():
            if given:
                raise UsageError(f"{option} takes one run, not the {len(specs) * len(sets)} that are compared.")
        _compare(specs, overrides or [], sets, cluster, as_json=as_json)
        return
    if plot is not None:
        from scaletrain_cli.ui.plan_figure import check_plot_file

        check_plot_file(plot)
    recorded = None
    if trace is not None:
        from scaletrain_cli.plan.reliability.spot_trace import read_trace

        recorded = read_trace(trace)
    run = _load(specs[0], overrides or [], sets[0], cluster)
    found = _ask(_priced(run) if live_prices else run, limits, explain, recorded, as_json=as_json)
    if as_json:
        from scaletrain_cli.ui.json import print_json

        print_json(found.to_json())
    else:
        from scaletrain_cli.ui.plan_answer import show_answer

        show_answer(found, everything=everything)
    if plot is not None:
        _draw(found, plot)
    if found.infeasible is not None:
        told = found.infeasible.problems
        if not as_json:
            told = tuple(problem for problem in told if problem.where not in _SHOWN)
        raise InfeasibleError(found.infeasible.message, told)


def _load(path: Path, overrides: list[str], varied: tuple[str, ...], cluster: str | None) -> RunSpec:
    from scaletrain_cli.cli.overrides import load_varied
    from scaletrain_cli.spec.source import VARY_OPTION as VARY

    return load_varied(path, overrides, varied, VARY, cluster)


def _ask(run: RunSpec, limits: Limits | None, explain: bool, trace: SpotTrace | None, *, as_json: bool) -> Answer:
    """The answer; where there is none, what is known all the same is printed before the error is raised."""
    from scaletrain_cli.plan.advice.answer import answer

    try:
        return answer(run, limits, explained=explain, trace=trace)
    except InfeasibleError as error:
        from scaletrain_cli.plan.search.sizing import SizingError

        if as_json:
            from scaletrain_cli.plan.search.infeasible import refusal
            from scaletrain_cli.ui.json import print_json

            print_json(error.to_json() if isinstance(error, SizingError) else refusal(error))
        elif isinstance(error, SizingError):
            from scaletrain_cli.ui.plan_answer import show_considered

            show_considered(error.considered)
        raise


def _priced(run: RunSpec) -> RunSpec:
    """The run with the prices of today, which are told on stderr with their source."""
    from scaletrain_cli.cli.live_prices import with_live_prices
    from scaletrain_cli.text import dollars_text
    from scaletrain_cli.ui.console import say

    priced, prices = with_live_prices(run)
    for market, quote in (("on demand", prices.on_demand), ("spot", prices.spot)):
        if quote is not None:
            say(f"{market}: {dollars_text(quote.usd)} per GPU and hour, {quote.source}")
    return priced


def _compare(
    specs: list[Path], overrides: list[str], sets: list[tuple[str, ...]], cluster: str | None, *, as_json: bool
) -> None:
    from scaletrain_cli.plan.advice.answer import compare, name_runs, none_feasible

    runs = [(path, chosen, _load(path, overrides, chosen, cluster)) for path in specs for chosen in sets]
    compared = compare(name_runs(runs))
    if as_json:
        from scaletrain_cli.ui.json import print_json

        print_json({"schema": "scaletrain.plan-comparison/v1", "runs": [column.to_json() for column in compared]})
    else:
        from scaletrain_cli.ui.plan_comparison import show_comparison

        show_comparison(compared)
    if error := none_feasible(compared):
        raise error


def _draw(found: Answer, path: Path) -> None:
    from scaletrain_cli.plan.advice.pictures import pictures
    from scaletrain_cli.ui.console import say
    from scaletrain_cli.ui.plan_figure import write_plot

    write_plot(path, found, pictures(found.spec, found.plan))
    say(f"wrote {path}")
