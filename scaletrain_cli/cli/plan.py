"""`scaletrain plan`: memory, time, network and cost of a run. Starts nothing."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from scaletrain_cli.cli.options import (
    AsJson,
    ClusterName,
    Overrides,
    complete_gpu,
    complete_run,
    complete_setting,
    load_varied,
)
from scaletrain_cli.errors import ExitCode, InfeasibleError, Problem, UsageError
from scaletrain_cli.extras import install_command
from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.launch.calibration import keep_measurement, measure_run, read_measurements
from scaletrain_cli.launch.data_summary import summarize_data
from scaletrain_cli.plan.catalogue.hardware import Accelerator, find_accelerator, full_name
from scaletrain_cli.plan.catalogue.prices import Quote, live_price
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import find_run
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.text import dollars_text, seconds_text
from scaletrain_cli.ui.console import say
from scaletrain_cli.ui.json import print_json

if TYPE_CHECKING:
    from scaletrain_cli.plan.advice.answer import Answer
    from scaletrain_cli.plan.planning import Measurements
    from scaletrain_cli.plan.reliability.spot_trace import SpotTrace
    from scaletrain_cli.plan.search.cluster_limits import Limits

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE, ExitCode.INFEASIBLE)
_SHOWN = ("needed", "smallest")  # problems that the table above already shows


def command(
    specs: Annotated[
        list[str],
        typer.Argument(
            metavar="SPEC",
            help="Run specs (YAML), - for stdin, or models of the hub (hf://org/name); several are compared.",
        ),
    ],
    overrides: Overrides = None,
    cluster: ClusterName = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B,C",
            help="Compare values of a key, e.g. layout.zero_stage=1,2,3; repeatable.",
            autocompletion=complete_setting,
        ),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Explain step by step how the layout was chosen.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a figure of the plan: FILE.html, .svg or .png.")
    ] = None,
    objective: Annotated[
        Literal["time", "cost", "gpus"] | None,
        typer.Option(help="Choose the number of GPUs by shortest time, lowest cost, or fewest GPUs."),
    ] = None,
    max_gpus: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Maximum number of GPUs (default: as in the spec)."),
    ] = None,
    deadline: Annotated[str | None, typer.Option(metavar="TIME", help="Maximum training time, e.g. 30d.")] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="USD", help="Maximum cost in US dollars, e.g. 50000 or 50k.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Number of GPUs for a model of the hub (default: 8)."),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="GPU to consider instead of the spec's; repeatable.",
            autocompletion=complete_gpu,
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Simulate the run on a recorded spot-market trace.")
    ] = None,
    live_prices: Annotated[
        bool,
        typer.Option("--live-prices", help="Use current cloud prices; requires the extra [prices] and network access."),
    ] = False,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN",
            help="Keep the measured step time of a run for this and later plans; repeatable.",
            autocompletion=complete_run,
        ),
    ] = None,
    uncalibrated: Annotated[
        bool, typer.Option("--uncalibrated", help="Use the planner's own times, not measurements of earlier runs.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every layout considered, and the assumptions.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Estimate layout, memory, step time, network, reliability and cost of a run. Starts nothing.

    If the run does not fit, the exit code is 3 and the output has the reason, the smallest layout and what would make
    it fit. The keys of --json (scaletrain.plan/v1) are stable.

    Data files are read if this machine can see them: the plan then shows tokens and epochs of each source of text, and
    the exit code is 2 if the run could not use a file. Files that are missing are warnings, because a plan may be made
    before the data are there.

    Several specs, or --vary, are compared side by side with the first one; --json lists them under `runs`. The exit
    code is 3 only if none of them fits.

    --objective, --max-gpus, --deadline and --budget choose the number of GPUs. A deadline alone chooses the fewest
    GPUs that meet it, also more than in the spec.

    Step times that were measured before (--calibrate, and every rehearsal) scale those of a plan for the same GPU,
    model family, precision and framework; --uncalibrated leaves them out. A number of GPUs is chosen without them.

    hf://org/name plans full fine-tuning of a model of the Hugging Face Hub without a spec file, from its config.json.
    """
    from scaletrain_cli.plan.search.cluster_limits import parse_limits
    from scaletrain_cli.spec.source import variants

    for name in calibrate or ():
        measured = measure_run(find_run(name))
        kept = keep_measurement(measured)  # and print it to stderr
        step = f"{seconds_text(measured.seconds)} per step, planned {seconds_text(measured.planned_seconds)}"
        say(f"{measured.source}: {step}, factor {measured.factor:.3g}; kept in {kept}")
    models = [name for name in specs if is_reference(name)]
    if gpus is not None and len(models) < len(specs):
        raise UsageError("--gpus requires hf://org/name. For a spec file use --set cluster.nodes=N or --max-gpus.")
    hardware: tuple[int | None, str | None] = (gpus, None)
    if models and gpu and len(gpu) == 1:  # one GPU is that of the spec; several are compared as for a spec file
        hardware, gpu = (gpus, full_name(gpu[0])), None
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
                raise UsageError(f"{option} requires a single run, but {len(specs) * len(sets)} are compared.")
        _compare(specs, overrides or [], sets, cluster, hardware, uncalibrated=uncalibrated, as_json=as_json)
        return
    if plot is not None:
        from scaletrain_cli.ui.plan_figure import PLOT_KINDS
        from scaletrain_cli.ui.plots import check_plot_file

        check_plot_file(plot, PLOT_KINDS)
    recorded = None
    if trace is not None:
        from scaletrain_cli.plan.reliability.spot_trace import read_trace

        recorded = read_trace(trace)
    run, epochs = _load(specs[0], overrides or [], sets[0], cluster, hardware)
    measurements = None if uncalibrated else read_measurements(run)
    if live_prices:
        run, prices = with_live_prices(run)
        for key, quote in prices.items():
            say(f"{_MARKETS[key]}: {dollars_text(quote.usd)} per GPU and hour, {quote.source}")
    answer = _ask(run, limits, explain, recorded, measurements, as_json=as_json)
    if calibrate and not uncalibrated and answer.plan.calibration is None:
        say(_DOES_NOT_APPLY)
    data = summarize_data(run)
    if as_json:
        in_data = {"data": None if data is None else data.to_json()}
        print_json(answer.to_json() | in_data | {"epochs": None if epochs is None else epochs.to_json()})
    else:
        from scaletrain_cli.ui.plan import show_data
        from scaletrain_cli.ui.plan_answer import show_answer

        show_answer(answer, everything=everything)
        if data is not None:
            show_data(data)
    if plot is not None:
        from scaletrain_cli.plan.search.sizing import scaling_curve
        from scaletrain_cli.plan.speed.pipeline import plan_timeline
        from scaletrain_cli.ui.plan_figure import write_plot

        scaling = scaling_curve(answer.spec) if answer.plan.memory.fits else ()
        write_plot(plot, answer, plan_timeline(answer.plan), scaling)
        say(f"wrote {plot}")
    if answer.infeasible is not None:
        problems = answer.infeasible.problems
        if not as_json:
            problems = tuple(problem for problem in problems if problem.where not in _SHOWN)
        raise InfeasibleError(answer.infeasible.message, problems)
    if data is not None and data.wrong:
        raise UsageError(Reason("checks.spec-unusable", {"problems": len(data.wrong)}), data.wrong)
    if data is not None and data.infeasible is not None:
        raise InfeasibleError(data.infeasible)


_DOES_NOT_APPLY = (
    "this plan is not corrected: no measurement is of its GPU, model family, precision and framework, and near its "
    "size (docs/planner.md#calibration)"
)


def _load(
    name: str, overrides: list[str], varied: tuple[str, ...], cluster: str | None, on: tuple[int | None, str | None]
) -> tuple[RunSpec, Reason | None]:
    """Return the spec, and how its epochs were counted in steps, which is printed to stderr; None without epochs.

    ``on``: the number and the name of the GPUs to plan a model of the hub for; None for the default.
    """
    from scaletrain_cli.spec.source import VARY_OPTION as VARY

    if is_reference(name):
        from scaletrain_cli.cli.models import USUAL_GPU, USUAL_GPUS, spec_of_model

        gpus, gpu = on[0] or USUAL_GPUS, on[1] or USUAL_GPU
        return spec_of_model(name, [*overrides, *varied], gpus=gpus, gpu=gpu, cluster=cluster), None
    run = load_varied(Path(name), overrides, varied, VARY, cluster)
    if run.training.epochs is None and run.training.objective not in ("sft", "dpo"):
        return run, None
    from scaletrain_cli.launch.epochs import in_steps, note_prepared_size

    if run.training.epochs is None:
        note_prepared_size(run)
        return run, None
    run, epochs = in_steps(run, name)
    say(f"{', '.join(varied)}: {epochs}" if varied else str(epochs))
    return run, epochs


def _ask(
    run: RunSpec,
    limits: Limits | None,
    explain: bool,
    trace: SpotTrace | None,
    measurements: Measurements | None,
    *,
    as_json: bool,
) -> Answer:
    """Return the answer. Prints partial results before it raises InfeasibleError."""
    from scaletrain_cli.plan.advice.answer import answer

    try:
        return answer(run, limits, explained=explain, trace=trace, measurements=measurements)
    except InfeasibleError as error:
        from scaletrain_cli.plan.search.sizing import SizingError

        if as_json:
            from scaletrain_cli.plan.search.infeasible import infeasible_json

            print_json(error.to_json() if isinstance(error, SizingError) else infeasible_json(error))
        elif isinstance(error, SizingError):
            from scaletrain_cli.ui.plan_answer import show_considered

            show_considered(error.considered)
        raise


def _compare(
    specs: list[str],
    overrides: list[str],
    sets: list[tuple[str, ...]],
    cluster: str | None,
    on: tuple[int | None, str | None],
    *,
    uncalibrated: bool,
    as_json: bool,
) -> None:
    from scaletrain_cli.plan.advice.answer import compare, name_runs, none_feasible

    runs = [(Path(name), chosen, _load(name, overrides, chosen, cluster, on)[0]) for name in specs for chosen in sets]
    compared = compare([(name, run, None if uncalibrated else read_measurements(run)) for name, run in name_runs(runs)])
    if as_json:
        print_json({"schema": "scaletrain.plan-comparison/v1", "runs": [column.to_json() for column in compared]})
    else:
        from scaletrain_cli.ui.plan_comparison import show_comparison

        show_comparison(compared)
    if error := none_feasible(compared):
        raise error


# Providers whose prices gpuhunt hosts; the others require credentials or one request each.
_PROVIDERS = ["aws", "azure", "gcp", "lambdalabs", "nebius", "oci", "runpod", "verda"]
_TIMEOUT_SECONDS = 30.0
_MARKETS = {"price_per_gpu_hour": "on demand", "spot_price_per_gpu_hour": "spot"}  # by the key of the cluster


def with_live_prices(spec: RunSpec) -> tuple[RunSpec, dict[str, Quote]]:
    """Return the run with current prices in place of ``auto``, and these prices by the key of the cluster.

    Raises UsageError if gpuhunt is not installed, cannot download its price lists, or lists no such GPU.
    """
    cluster, device = spec.cluster, find_accelerator(spec.cluster)
    quotes = {key: _quote(device, market == "spot", cluster.gpus_per_node) for key, market in _MARKETS.items()}
    prices = {key: quote for key, quote in quotes.items() if quote is not None}
    if not prices:
        raise _no_prices(f"no provider known to gpuhunt offers {device.name}.", "Set cluster.price_per_gpu_hour.")
    updates = {key: quote.usd for key, quote in prices.items() if getattr(cluster, key) == "auto"}
    return spec.with_changes("cluster", **updates), prices


def _quote(device: Accelerator, spot: bool, gpus_per_node: int) -> Quote | None:
    """Return the median over providers of each provider's median over regions, for whole nodes if offered."""
    # gpuhunt's name and memory in GB: RTX4090 and 24 for ``rtx-4090-24gb``; SXM and PCIe are the same.
    if (size := re.search(r"-(\d+)gb$", device.name)) is None:
        raise _no_prices(f"{device.name} is not a GPU of the catalogue.", "Set cluster.price_per_gpu_hour.")
    name = re.sub(r"-(sxm\d?|pcie|gcd)$", "", device.name[: size.start()])
    offers = _offers(name.replace("-", "").upper(), float(size[1]), spot)
    whole = [offer for offer in offers if offer.gpu_count == gpus_per_node]
    by_provider: dict[str, list[float]] = {}
    for offer in whole or offers:
        by_provider.setdefault(offer.provider, []).append(offer.price / offer.gpu_count)
    return live_price(by_provider)


def _offers(name: str, gigabytes: float, spot: bool) -> list[Any]:
    try:
        import gpuhunt
    except ImportError as error:
        raise _no_prices("gpuhunt is not installed.", f"Run {install_command('prices')}.") from error
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
            raise _no_prices(f"gpuhunt cannot download its price lists: {error}.", "Check the network.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress log messages of providers that fail, and limit the time of each request."""
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
