"""`scaletrain plan`: memory, time, network and cost of a run. Starts nothing."""

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
import logging
import re
import socket
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.errors import Problem
from scaletrain_cli.extras import install_command
from scaletrain_cli.plan.catalogue.hardware import Accelerator, find_accelerator
from scaletrain_cli.plan.catalogue.prices import Quote
from scaletrain_cli.spec import RunSpec

# `scaletrain plan`: does the run fit, how fast is it, what does it cost? Starts nothing.


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
    from scaletrain_cli.cli.options import load_varied
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


# Whose lists gpuhunt takes from its own storage; for the others it would need credentials or ask each of them.
_PROVIDERS = ["aws", "azure", "gcp", "lambdalabs", "nebius", "oci", "runpod", "verda"]
_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class LivePrices:
    """Quotes of today; None on a market where nobody offers the GPU."""

    on_demand: Quote | None
    spot: Quote | None


def with_live_prices(spec: RunSpec) -> tuple[RunSpec, LivePrices]:
    """The run with the prices of today where the spec leaves them ``auto``, and what they are.

    Raises UsageError where gpuhunt is not installed, cannot reach its lists, or lists no such GPU.
    """
    device = find_accelerator(spec.cluster)
    prices = LivePrices(*(_quote(device, spot, spec.cluster.gpus_per_node) for spot in (False, True)))
    if prices.on_demand is None and prices.spot is None:
        raise _no_prices(f"no provider that gpuhunt knows offers {device.name}.", "Set cluster.price_per_gpu_hour.")
    cluster = spec.cluster
    updates = {
        key: quote.usd
        for key, quote in (("price_per_gpu_hour", prices.on_demand), ("spot_price_per_gpu_hour", prices.spot))
        if quote is not None and getattr(cluster, key) == "auto"
    }
    return spec.model_copy(update={"cluster": cluster.model_copy(update=updates)}), prices


def _quote(device: Accelerator, spot: bool, gpus_per_node: int) -> Quote | None:
    """The median over providers of each one's median over regions; of whole nodes where they are on offer."""
    offers = _offers(*_gpuhunt_name(device), spot)
    whole = [offer for offer in offers if offer.gpu_count == gpus_per_node]
    by_provider: dict[str, list[float]] = {}
    for offer in whole or offers:
        by_provider.setdefault(offer.provider, []).append(offer.price / offer.gpu_count)
    if not by_provider:
        return None
    median = statistics.median(statistics.median(prices) for prices in by_provider.values())
    return Quote(median, f"gpuhunt today, median of {len(by_provider)} providers: {', '.join(sorted(by_provider))}")


def _gpuhunt_name(device: Accelerator) -> tuple[str, float]:
    """``rtx-4090-24gb`` -> RTX4090 of 24 GB. gpuhunt does not tell SXM from PCIe."""
    size = re.search(r"-(\d+)gb$", device.name)
    if size is None:
        raise _no_prices(f"{device.name} is not a GPU of the catalogue.", "Set cluster.price_per_gpu_hour.")
    name = re.sub(r"-(sxm\d?|pcie|gcd)$", "", device.name[: size.start()])
    return name.replace("-", "").upper(), float(size[1])


def _offers(name: str, gigabytes: float, spot: bool) -> list[Any]:
    try:
        import gpuhunt
    except ImportError as error:
        raise _no_prices("gpuhunt is not installed.", f"Run {install_command('prices')}, or go without.") from error
    with _quiet():
        try:
            return list(
                gpuhunt.query(
                    provider=_PROVIDERS,
                    gpu_name=name,
                    min_gpu_memory=0.9 * gigabytes,
                    max_gpu_memory=1.1 * gigabytes,
                    spot=spot,
                )
            )
        except (gpuhunt.GPUHuntError, OSError) as error:
            raise _no_prices(f"gpuhunt cannot reach its price lists: {error}.", "Check the network.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No tracebacks on the terminal for a provider that fails while others answer, and an end to waiting."""
    logger, waits = logging.getLogger("gpuhunt"), socket.getdefaulttimeout()
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    socket.setdefaulttimeout(_TIMEOUT_SECONDS)
    try:
        yield
    finally:
        logger.setLevel(level)
        socket.setdefaulttimeout(waits)


def _no_prices(message: str, hint: str) -> UsageError:
    hint += " The embedded catalogue needs no network."
    return UsageError("no live prices", (Problem("--live-prices", "", message, None, hint),))
