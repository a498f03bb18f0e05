"""The screens of a plan: layout, memory, time, durability, cost, recipe, warnings, and the other layouts."""

import time
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from scaletrain_cli.errors import sentences
from scaletrain_cli.launch.data_summary import DataSummary, PlannedSource
from scaletrain_cli.plan.result import (
    Alternative,
    Durability,
    Layout,
    Market,
    MeasuredError,
    Range,
    Rejection,
    RunPlan,
    Sanity,
)
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.text import (
    bytes_text,
    count_text,
    counted,
    dollars_text,
    percent_text,
    seconds_text,
    span_text,
    two_figures,
    whole_text,
)
from scaletrain_cli.ui.console import (
    bullets,
    escaped_text,
    grid,
    plain,
    show,
    stderr_console,
    stdout_console,
    supports_unicode,
    titled_table,
    warn,
)
from scaletrain_cli.ui.plan_breakdown import (
    AMOUNT,
    PART,
    VERDICT_STYLES,
    memory_total,
    memory_view,
    time_total,
    time_view,
    whole_run,
)
from scaletrain_cli.ui.tables import LABEL_WIDTH, Row, labelled

# The fields of Layout by the names of the axes of parallelism.
AXES = {
    "data": "data_parallel",
    "tensor": "tensor_parallel",
    "pipeline": "pipeline_parallel",
    "virtual": "virtual_pipeline",
    "sequence": "sequence_parallel",
    "context": "context_parallel",
    "expert": "expert_parallel",
}
_TITLES = {"pipeline": "pipe", "sequence": "seq"}  # of columns, where they differ from the names
_SHORT = {"data": "dp", "tensor": "tp", "pipe": "pp", "virtual": "vp", "seq": "sp", "context": "cp", "expert": "ep"}
_MANY_COLUMNS = 5


def layout_view(layout: Layout, samples: str) -> RenderableType:
    """Return two lines: the axes, and the batch; ``samples``: the unit of a batch."""
    batch = (
        f"{whole_text(layout.global_batch_size)} {samples} per step = micro-batch {layout.micro_batch_size} "
        f"× accumulation {layout.gradient_accumulation_steps} × data {layout.data_parallel}"
    )
    return Group(escaped_text(layout_text(layout)), escaped_text(batch))


def layout_text(layout: Layout) -> str:
    """Return ``data 4 × tensor 8 × pipeline 4, ZeRO-1, activation checkpointing selective``."""
    degrees = {name: getattr(layout, field) for name, field in AXES.items() if name not in ("virtual", "expert")}
    used = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1] or ["one rank"]
    extras = [f"ZeRO-{layout.zero_stage}"]
    if layout.zero_shard_size:
        extras[0] += f" over {layout.zero_shard_size} ranks"
    if layout.zero_secondary_shard_size > 1:
        extras.append(f"weights twice over {layout.zero_secondary_shard_size} ranks")
    if layout.expert_parallel > 1:
        extras.append(f"expert {layout.expert_parallel}")
    if layout.pipeline_split:
        extras.append(f"blocks {' + '.join(map(str, layout.pipeline_split))}")
    if layout.virtual_pipeline > 1:
        extras.append(f"{layout.virtual_pipeline} virtual stages")
    extras.append(f"activation checkpointing {layout.activation_checkpointing}")
    if layout.offload != "none":
        extras.append(f"offload {layout.offload}")
    if layout.cross_entropy != "whole":
        extras.append(f"cross-entropy {layout.cross_entropy}")
    if layout.compile:
        extras.append("compiled")
    return f"{' × '.join(used)}, {', '.join(extras)}"


def alternatives_view(chosen: Layout, shown: Sequence[Alternative], hidden: int) -> RenderableType:
    """Return a row for each layout that was not chosen, with the reason."""
    columns = differing([chosen, *(alternative.layout for alternative in shown)])
    if len(columns) > _MANY_COLUMNS:  # short titles leave more width for the reason
        columns = {_SHORT.get(name, name): field for name, field in columns.items()}
    gap = 1 if len(columns) > _MANY_COLUMNS else 2
    table = titled_table((*columns, "step", "memory", "why not"), "l" * len(columns) + "rrw", gap)
    for alternative in shown:
        table.add_row(
            *(str(getattr(alternative.layout, field)) for field in columns.values()),
            seconds_text(alternative.step_seconds),
            Text(bytes_text(alternative.peak_bytes), "" if alternative.fits else "red"),
            escaped_text(str(alternative.why) if alternative.fits else "does not fit"),
        )
    them = "it" if hidden == 1 else "them"
    more = [escaped_text(f"and {whole_text(hidden)} more; --all shows {them}", "dim")] if hidden else []
    return Group(table, *more)


def rejected_view(rejected: Sequence[Rejection], hidden: int, *, examples: bool = False) -> RenderableType:
    """Return a row for each reason, with the number of layouts that it excludes; ``examples`` adds an example."""
    table = titled_table(("layouts", "why not"), "rw")
    for rejection in rejected:
        example = f" ({rejection.example})" if examples and rejection.example else ""
        table.add_row(whole_text(rejection.count), escaped_text(f"{rejection.text}{example}"))
    reasons = "more reason; --all shows it" if hidden == 1 else "more reasons; --all shows them"
    more = [escaped_text(f"and {whole_text(hidden)} {reasons}", "dim")] if hidden else []
    return Group(table, *more)


def differing(layouts: Sequence[Layout]) -> dict[str, str]:
    """Return {column title: field of Layout}; of the axes of parallelism only those in which the layouts differ."""
    differ = [name for name, field in AXES.items() if len({getattr(layout, field) for layout in layouts}) > 1]
    axes = {_TITLES.get(name, name): AXES[name] for name in differ}
    return {**axes, "ZeRO": "zero_stage", "micro": "micro_batch_size", "recompute": "activation_checkpointing"}


_VERDICT_STYLES = {"ok": "", "note": "cyan", "warning": "yellow"}


def durability_view(spec: RunSpec, durability: Durability) -> RenderableType:
    """Return checkpoint size and interval, whether a save fits in the grace period, and the cost of interruptions."""
    grace = "within" if durability.grace_ok else "NOT within"
    steps = durability.interval_steps
    every = f"{whole_text(steps)} steps" if steps > 1 else "step"
    saves = (
        f"checkpoint of {bytes_text(durability.checkpoint_bytes)} every {every} "
        f"({seconds_text(durability.interval_seconds)}), saved in {seconds_text(durability.save_seconds)}, {grace} "
        f"the grace period of {seconds_text(spec.cluster.grace_seconds)}"
    )
    lines = [escaped_text(saves), escaped_text(_interruptions(durability))]
    if durability.copy_bytes_per_node:
        copy = f"written from a copy of the state, {bytes_text(durability.copy_bytes_per_node)} of each node's memory"
        lines.insert(1, escaped_text(copy))
    if (between := durability.memory_copy_steps) is not None:
        size = bytes_text(durability.memory_copy_bytes_per_node)
        where = "the host memory of two nodes" if durability.memory_copies_on_partners else "host memory"
        copied = f"copied to {where} every {f'{whole_text(between)} steps' if between > 1 else 'step'}"
        lines.insert(2, escaped_text(f"{copied}, which takes {size} more of each node's memory"))
    return Group(*lines)


def goodput_text(goodput: float) -> str:
    """Return a share as a percentage of at most 99.99 %, so that it is never rounded to 100 %."""
    return f"{min(goodput, 0.9999) * 100:.4g} %"


def cost_view(plan: RunPlan) -> RenderableType:
    """Return the dollars and days on demand and on spot; one sentence without a price."""
    cost = plan.cost
    markets = {"on demand": cost.on_demand, "spot": cost.spot}
    known = {name: market for name, market in markets.items() if market and market.price_per_gpu_hour is not None}
    if not known:
        return escaped_text(cost_text(plan))
    spans = {"on demand": plan.ranges.on_demand_usd, "spot": plan.ranges.spot_usd}
    table = grid("lrlll" if any(spans.values()) else "lrll")
    for name, market in known.items():
        table.add_row(name, *_market(market, spans, name))
    return Group(table, *[escaped_text(f"{name}: {market.price_source}", "dim") for name, market in known.items()])


def cost_text(plan: RunPlan) -> str:
    """Return the expected cost, the price and its source on one line."""
    cost = plan.cost
    if cost.price_per_gpu_hour is None:
        return str(cost.price_source)
    price = f"{dollars_text(cost.price_per_gpu_hour)} per GPU and hour ({cost.price_source})"
    if cost.expected_usd is None:
        return f"never finishes: interruptions arrive faster than a restart takes; {price}"
    span = plan.ranges.expected_usd
    likely = f" ({span_text(span.p10, span.p90, dollars_text)})" if span else ""
    return f"{dollars_text(cost.expected_usd)}{likely} expected with interruptions; {price}"


def _interruptions(durability: Durability) -> str:
    goodput = f"expected goodput {goodput_text(durability.expected_goodput)}"
    expected = durability.interruptions_expected
    if expected is None:
        return goodput
    if durability.wall_seconds is None:
        return f"{goodput}: the run never finishes, because interruptions arrive faster than a restart takes"
    count = f"{expected:,.0f}" if expected >= 9.5 else f"{expected:.2g}"
    lost = (
        f"{seconds_text(durability.lost_work_seconds)} of work on average"
        if durability.lost_work_seconds
        else "no work"
    )
    effect = f"each losing {lost} and {seconds_text(durability.restart_seconds)} to restart"
    return f"{count} interruptions expected, {effect}; {goodput}, {seconds_text(durability.wall_seconds)} in all"


def _market(market: Market, spans: Mapping[str, Range | None], name: str) -> Iterator[Text]:
    """Yield the cells of a market: dollars, their range if some market has one, time and price."""
    span = spans.get(name)
    usd = None if market.usd is None else market.usd if span is None else two_figures(market.usd)
    yield escaped_text("never finishes" if usd is None else dollars_text(usd), "bold")
    if any(spans.values()):
        yield escaped_text("" if span is None else f"({span_text(span.p10, span.p90, dollars_text)})")
    yield escaped_text("" if market.wall_seconds is None else seconds_text(market.wall_seconds))
    price = market.price_per_gpu_hour or 0.0
    # GPUs of one's own may have the price 0.
    hours = f"{two_figures(market.usd / price):,.0f} GPU-hours at " if market.usd and price else ""
    yield escaped_text(f"{hours}{dollars_text(price)}{'' if hours else ' per GPU-hour'}")


_LONGEST_BAR = 48
_FEW_ALTERNATIVES = 5
_FEW_REASONS = 3
CANNOT_RUN = "plan.cannot-run"
_MANY_WARNINGS = 3


def show_plan(spec: RunSpec, plan: RunPlan, *, everything: bool = False, console: Console | None = None) -> None:
    """Print the whole plan; ``everything`` adds every layout considered and every assumption."""
    console = console or stdout_console()
    show(console, Group(headline(spec, plan), "", labelled(_sections(spec, plan, console, everything))))


def show_plan_summary(spec: RunSpec, plan: RunPlan) -> None:
    """Print a summary of the plan on stderr: layout, memory, time, cost and warnings."""
    cost: list[Row] = [("Cost", escaped_text(cost_text(plan)))] if plan.cost.price_per_gpu_hour is not None else []
    show(
        stderr_console(), Group(headline(spec, plan), labelled([*summary_rows(spec, plan), *cost, *warning_rows(plan)]))
    )


def summary_rows(spec: RunSpec, plan: RunPlan) -> list[Row]:
    """Return the rows for layout, memory and time, each of one or two lines."""
    return [
        ("Layout", layout_view(plan.layout, spec.samples)),
        ("Memory", Group(memory_total(plan), *memory_range_lines(plan))),
        ("Time", Group(time_total(spec, plan.time), whole_run(spec, plan.time), *range_lines(plan))),
    ]


def range_lines(plan: RunPlan) -> list[Text]:
    """Return the range of the step and of the whole run with its source; that it is not calibrated if it has none."""
    evidence = plan.calibration
    if evidence is not None:
        low, high = (seconds_text(plan.time.step * ratio / evidence.factor) for ratio in (evidence.low, evidence.high))
        day = time.strftime("%Y-%m-%d", time.localtime(evidence.newest))
        of = "this layout" if evidence.same_workload else "similar runs"
        measured = f"measured: {low} to {high} (p10 to p90), {counted(evidence.runs, 'run')} of {of}, newest {day}"
        return [escaped_text(f"  {measured}; the planner's own times x {evidence.factor:.3g}", "dim")]
    ranges = plan.ranges
    if ranges.step_seconds is None or ranges.to_train_seconds is None:
        return [escaped_text(f"  {_not_calibrated(ranges.time)}", "dim")]
    step, whole = (
        span_text(spread.p10, spread.p90, _about_seconds) for spread in (ranges.step_seconds, ranges.to_train_seconds)
    )
    return [escaped_text(f"  p10 to p90: {step} per step, {whole} in all ({_measured_on(ranges.time)})", "dim")]


def memory_range_lines(plan: RunPlan) -> list[Text]:
    """Return the range of the peak memory with its source; that it is not calibrated if it has none.

    Nothing where the lines of the time, which follow if the plan fits, say the same.
    """
    ranges = plan.ranges
    if ranges.peak_bytes is None:
        lines = [escaped_text(f"  {_not_calibrated(ranges.memory)}", "dim")]
        return [] if plan.memory.fits and lines == range_lines(plan) else lines
    span = span_text(ranges.peak_bytes.p10, ranges.peak_bytes.p90, bytes_text)
    return [escaped_text(f"  p10 to p90: {span} ({_measured_on(ranges.memory)})", "dim")]


def _about_seconds(seconds: float) -> str:
    """Return a duration in one unit: ``830 ms``, ``14 s``, ``3.2 h``, ``12 d``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 3 * size:
            return f"{two_figures(seconds / size):,g} {unit}"
    return seconds_text(seconds)


def _measured_on(error: MeasuredError) -> str:
    # Plans of version 0.2.0 have only runs of their own framework and regime.
    runs = f"{counted(error.n, 'published run')} of {error.measured_framework or error.framework}"
    evidence = f"{runs}: {error.measured_regime or error.regime}, {error.measured_hardware or 'all GPUs'}"
    return evidence if error.calibrated else f"nearest evidence: {evidence}"


def _not_calibrated(error: MeasuredError) -> str:
    return f"not calibrated: no published run of {error.framework} was measured with {error.regime} on {error.hardware}"


def sanity_view(checks: Sequence[Sanity]) -> RenderableType:
    """Return the checks of a recipe, one per line."""
    return bullets(
        (f"{check.topic} {check.value}: {check.message}.", _VERDICT_STYLES[check.verdict]) for check in checks
    )


def warning_rows(plan: RunPlan, *, everything: bool = False) -> list[Row]:
    """Return the rows of what is unusual in the recipe and of warnings, where there is any."""
    checks = plan.sanity if everything else [check for check in plan.sanity if check.verdict != "ok"]
    warnings = [f"{warning}." for warning in plan.warnings] if everything else condensed(plan.warnings)
    return [
        *([("Recipe", sanity_view(checks))] if checks else []),
        *([("Warnings", bullets((warning, "yellow") for warning in warnings))] if warnings else []),
    ]


def headline(spec: RunSpec, plan: RunPlan) -> Text:
    """Return the first line: model, cluster and verdict."""
    size = f"{count_text(plan.model.parameters)} parameters"
    if plan.model.active_parameters != plan.model.parameters:
        size += f" ({count_text(plan.model.active_parameters)} active)"
    trained = plan.model.trainable_parameters
    if trained and trained != plan.model.parameters:
        size += f", {count_text(trained)} trained"
    verdict = plan.memory.verdict
    said = "fits, but is tight" if verdict == "tight" else verdict
    return Text.assemble(
        (plain(spec.name), "bold"),
        f", {size}, on {plain(devices_text(spec))}: ",
        (said, f"bold {VERDICT_STYLES[verdict]}"),
    )


def devices_text(spec: RunSpec) -> str:
    """Return ``4 × 8 h100-sxm-80gb`` or ``2 CPU processes``."""
    cluster, device = spec.cluster, spec.cluster.gpu_name
    if device == "cpu":
        return f"{spec.world_size} CPU process{'es' if spec.world_size > 1 else ''}"
    where = f"{cluster.nodes} × {cluster.gpus_per_node}" if cluster.nodes > 1 else f"{cluster.gpus_per_node} ×"
    spare = f", and {counted(cluster.spare_nodes, 'spare node')}" if cluster.spare_nodes else ""
    return f"{where} {device}{spare}"


def condensed(warnings: Sequence[Reason]) -> tuple[str, ...]:
    """Return the warnings as text; settings that this engine cannot run are merged into one warning."""
    beyond = [warning for warning in warnings if warning.code == CANNOT_RUN]
    if len(beyond) < _MANY_WARNINGS:
        return tuple(f"{warning}." for warning in warnings)
    settings = ", ".join(f"{warning.params['key']} = {warning.params['given']}" for warning in beyond)
    others = (f"{warning}." for warning in warnings if warning.code != CANNOT_RUN)
    return (f"this engine version cannot run {settings}.", *others)


def _sections(spec: RunSpec, plan: RunPlan, console: Console, everything: bool) -> Iterator[Row]:
    bar = min(_LONGEST_BAR, console.width - LABEL_WIDTH - PART - AMOUNT - 3)
    unicode = supports_unicode(console)
    yield "Layout", layout_view(plan.layout, spec.samples)
    yield "Memory", Group(memory_view(plan, bar, unicode), *memory_range_lines(plan))
    if not plan.memory.fits:
        return  # times and costs of a layout that cannot run would mislead
    yield "Time", Group(time_view(spec, plan.time, bar, unicode, everything=everything), *range_lines(plan))
    if plan.training_stages:
        table = titled_table(("steps", "trained", "of all", "memory", "step"), "lrrrr")
        for stage in plan.training_stages:
            table.add_row(
                f"{whole_text(stage.first_step)} to {whole_text(stage.last_step)}",
                count_text(stage.trainable_parameters),
                f"{100 * stage.trainable_parameters / max(1, plan.model.parameters):.3g} %",
                bytes_text(stage.peak),
                seconds_text(stage.step_seconds),
            )
        yield "Stages", table
    yield "Network", escaped_text(_network(plan))
    yield "Durability", durability_view(spec, plan.durability)
    yield "Cost", cost_view(plan)
    yield from warning_rows(plan, everything=everything)
    if plan.alternatives:
        shown = plan.alternatives if everything else plan.alternatives[:_FEW_ALTERNATIVES]
        yield "Considered", alternatives_view(plan.layout, shown, hidden=len(plan.alternatives) - len(shown))
    if plan.rejected:
        reasons = plan.rejected if everything else plan.rejected[:_FEW_REASONS]
        yield "Ruled out", rejected_view(reasons, hidden=len(plan.rejected) - len(reasons), examples=everything)
    if everything:
        yield "Assumes", bullets((str(assumption), "dim") for assumption in plan.assumptions)


def _network(plan: RunPlan) -> str:
    sent = {name: size for name, size in vars(plan.network.per_step_bytes).items() if size}
    if not sent:
        return "no traffic between ranks"
    listed = ", ".join(f"{name} {bytes_text(size)}" for name, size in sent.items())
    if len(sent) == 1:
        return f"each rank sends {bytes_text(sum(sent.values()))} per step, for {next(iter(sent))} parallelism"
    return f"each rank sends {bytes_text(sum(sent.values()))} per step: {listed}"


def show_data(data: DataSummary) -> None:
    """Print the sources to stdout, and problems and what is not checked to stderr."""
    rows = list(_data_rows(data))
    if rows:
        show(stdout_console(), Group("", escaped_text("Data", "bold"), bullets(rows)))
    for problem in data.absent:
        warn(f"submit would reject this: {problem}")
    for note in data.notes:
        warn(sentences(note))


def _data_rows(data: DataSummary) -> Iterator[tuple[str, str]]:
    for source in data.sources:
        advice = "" if source.advice is None else f". It {sentences(source.advice)}"
        yield f"{source.name}: {_use(source)}{advice}", "" if source.advice is None else "yellow"
    if data.preparation_seconds:
        yield f"preparation on this machine: about {seconds_text(data.preparation_seconds)}", ""


def _use(source: PlannedSource) -> str:
    """Return ``about 1.3 epochs of about 2.1B tokens in 12 files (8.4 GB), 70 % of the samples``."""
    size = source.size
    about = "" if size is not None and size.exact else "about "
    parts = []
    if size is None:
        parts.append("tokens not known here")
    else:
        stored = "" if not size.files else f" in {counted(size.files, 'file')} ({bytes_text(size.stored_bytes)})"
        epochs = ""
        if source.epochs is not None:
            epochs = f"{about}{source.epochs:{'.2g' if source.epochs < 100 else ',.0f'}} epochs of "
        parts.append(f"{epochs}{about}{count_text(size.tokens)} tokens{stored}")
    if source.share is not None and source.share < 1:
        parts.append(f"{percent_text(source.share)} of the samples")
    return ", ".join(parts)
