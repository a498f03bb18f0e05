"""A plan for people: does it fit, how fast, what does it cost, and why this layout. Computes nothing but widths."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from scaletrain_cli.plan.result import Alternative, Durability, Layout, Market, Memory, Rejection, RunPlan, Sanity, Time
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.text import (
    binary_bytes_text,
    bytes_text,
    count_text,
    dollars_text,
    percent_text,
    seconds_text,
    whole_text,
)
from scaletrain_cli.ui.console import escaped_text, plain, show, speaks_unicode, stderr_console, stdout_console
from scaletrain_cli.ui.tables import LABEL_WIDTH, Row, labelled

# Bars of a breakdown: each part starts where the one before it ended, so that together they fill the whole.


PART, AMOUNT = 22, 9  # columns of a part's name and size
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


def waterfall(parts: list[float], whole: float, width: int, *, unicode: bool) -> list[str]:
    """One bar per part, ``width`` characters for ``whole``; a part too small to see is a tick."""
    bars, before = [], 0.0
    for part in parts:
        bars.append(_bar(before / whole * width, part / whole * width, unicode) if whole > 0 else "")
        before += part
    return bars


def _bar(start: float, length: float, unicode: bool) -> str:
    first = math.floor(start + 1e-9)
    if length <= 0:
        return ""
    if not unicode:
        return " " * first + "#" * max(1, round(start + length) - first)
    # Blocks of an eighth fill from the left only, so the start is cut to a whole cell and the end keeps its eighth.
    end = start + length
    eighths = max(1, round((end - first) * 8))
    return " " * first + "█" * (eighths // 8) + _EIGHTHS[eighths % 8]


def part_line(name: str, amount: str, bar: str, style: str) -> Text:
    """One part of a whole: what, how much, and its bar."""
    return Text.assemble(f"  {name:<{PART}}{amount:>{AMOUNT}} ", (bar, style))


# Layouts for people: one in words, and the table of those that were considered.


_AXES = {
    "data": "data_parallel",
    "tensor": "tensor_parallel",
    "pipe": "pipeline_parallel",
    "virtual": "virtual_pipeline",
    "seq": "sequence_parallel",
    "context": "context_parallel",
    "expert": "expert_parallel",
}
_SHORT = {"data": "dp", "tensor": "tp", "pipe": "pp", "virtual": "vp", "seq": "sp", "context": "cp", "expert": "ep"}
_MANY_COLUMNS = 5


def layout_view(layout: Layout, samples: str) -> RenderableType:
    """The axes and the batch, two lines; ``samples`` is what a batch counts."""
    batch = (
        f"{whole_text(layout.global_batch_size)} {samples} per step = micro-batch {layout.micro_batch_size} "
        f"× accumulation {layout.gradient_accumulation_steps} × data {layout.data_parallel}"
    )
    return Group(escaped_text(layout_text(layout)), escaped_text(batch))


def layout_text(layout: Layout) -> str:
    """``data 4 × tensor 8 × pipeline 4, ZeRO-1, activation checkpointing selective``."""
    axes = {
        "data": layout.data_parallel,
        "tensor": layout.tensor_parallel,
        "pipeline": layout.pipeline_parallel,
        "sequence": layout.sequence_parallel,
        "context": layout.context_parallel,
    }
    used = [f"{name} {degree}" for name, degree in axes.items() if degree > 1] or ["one rank"]
    extras = [f"ZeRO-{layout.zero_stage}"]
    if layout.expert_parallel > 1:
        extras.append(f"expert {layout.expert_parallel}")
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
    """A row for each layout that was not chosen, with the reason."""
    columns = differing([chosen, *(alternative.layout for alternative in shown)])
    if len(columns) > _MANY_COLUMNS:  # then the reason would have no room beside them
        columns = {_SHORT.get(name, name): field for name, field in columns.items()}
    table = Table.grid(padding=(0, 1 if len(columns) > _MANY_COLUMNS else 2, 0, 0))
    for name in columns:
        table.add_column(name, no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("why not", overflow="fold")
    table.add_row(*(Text(name, "dim") for name in (*columns, "step", "memory", "why not")))
    for alternative in shown:
        table.add_row(
            *(str(getattr(alternative.layout, field)) for field in columns.values()),
            seconds_text(alternative.step_seconds),
            Text(bytes_text(alternative.peak_bytes), "" if alternative.fits else "red"),
            escaped_text(alternative.why if alternative.fits else "does not fit"),
        )
    them = "it" if hidden == 1 else "them"
    more = [escaped_text(f"and {whole_text(hidden)} more; --all shows {them}", "dim")] if hidden else []
    return Group(table, *more)


def rejected_view(rejected: Sequence[Rejection], hidden: int, *, examples: bool = False) -> RenderableType:
    """How many layouts each reason rules out, in the order given; with ``examples`` also one of them."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(escaped_text("layouts", "dim"), escaped_text("why not", "dim"))
    for rejection in rejected:
        example = f" ({rejection.example})" if examples and rejection.example else ""
        table.add_row(whole_text(rejection.count), escaped_text(f"{rejection.reason}{example}"))
    reasons = "more reason; --all shows it" if hidden == 1 else "more reasons; --all shows them"
    more = [escaped_text(f"and {whole_text(hidden)} {reasons}", "dim")] if hidden else []
    return Group(table, *more)


def differing(layouts: Sequence[Layout]) -> dict[str, str]:
    """Column titles and fields; of the parallel axes only those in which the layouts differ."""
    differ = {name: field for name, field in _AXES.items() if len({getattr(layout, field) for layout in layouts}) > 1}
    return {**differ, "ZeRO": "zero_stage", "micro": "micro_batch_size", "recompute": "activation_checkpointing"}


# The memory of a plan for people: the sum against the device, its parts as bars, each pipeline stage.


VERDICT_STYLES = {"fits": "green", "tight": "yellow", "does not fit": "red"}
MEMORY_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "step_temporaries": "optimizer step",
    "activations": "activations",
    "logits": "logits and loss",
    "communication_buffers": "communication buffers",
    "framework": "framework",
    "fragmentation": "fragmentation",
}
# Below this the chance of running out is not worth a word: the estimate of the chance itself is no better.
_WORTH_SAYING = 0.005


def memory_view(plan: RunPlan, bar: int, unicode: bool) -> RenderableType:
    """All of it; ``bar`` characters are the device's memory."""
    memory = plan.memory
    style = VERDICT_STYLES[memory.verdict]
    rest = memory.capacity - memory.peak
    sizes = {name: getattr(memory, field) for field, name in MEMORY_PARTS.items()}
    rows = {**sizes, "free": rest} if rest >= 0 else sizes
    bars = waterfall(list(map(float, rows.values())), max(memory.capacity, memory.peak), bar, unicode=unicode)
    lines = [
        part_line(name, bytes_text(size), drawn, "dim" if name == "free" else style)
        for (name, size), drawn in zip(rows.items(), bars, strict=True)
        if size
    ]
    if rest < 0:
        lines.append(part_line("too much", bytes_text(-rest), "", "red"))
    return Group(memory_total(plan), *_risk(memory), *lines, *_kinds(memory), *_stages(memory))


def memory_total(plan: RunPlan) -> Text:
    """``72.8 GB of 84.9 GB (86 %) per rank``, in both kinds of gigabytes."""
    memory = plan.memory
    rank = "per rank" if plan.layout.pipeline_parallel == 1 else "on the fullest stage"
    return Text.assemble(
        (bytes_text(memory.peak), f"bold {VERDICT_STYLES[memory.verdict]}"),
        f" of {bytes_text(memory.capacity)} ({percent_text(memory.peak / memory.capacity)}) {rank}",
        (f" · {binary_bytes_text(memory.peak)} of {binary_bytes_text(memory.capacity)}", "dim"),
    )


def risk_text(memory: Memory) -> str:
    """How likely an out-of-memory error is, where it is worth a word; else nothing."""
    chance = memory.out_of_memory_probability
    if not memory.fits or chance < _WORTH_SAYING:
        return ""
    return f"chance of running out of memory: {percent_text(chance)}"


def _risk(memory: Memory) -> Iterator[Text]:
    if text := risk_text(memory):
        yield escaped_text(text, "yellow" if memory.verdict == "tight" else "dim")


def _kinds(memory: Memory) -> Iterator[Text]:
    if memory.reserved:
        yield escaped_text(
            f"  of it PyTorch allocates {bytes_text(memory.allocated)} and reserves {bytes_text(memory.reserved)}",
            "dim",
        )
    if memory.host:
        yield escaped_text(f"  in the node's memory: {bytes_text(memory.host)} for each rank")


def _stages(memory: Memory) -> Iterator[Text]:
    peaks = [stage.peak for stage in memory.by_stage]
    if 1 < len(peaks) <= 8:
        yield escaped_text(f"  by pipeline stage: {', '.join(map(bytes_text, peaks))}")
    elif peaks[1:]:
        fullest, emptiest = peaks.index(max(peaks)), peaks.index(min(peaks))
        yield escaped_text(
            f"  by pipeline stage: {bytes_text(max(peaks))} on stage {fullest} to {bytes_text(min(peaks))} "
            f"on stage {emptiest} of {len(peaks)}"
        )


# The time of a plan for people: a step, its parts as bars, the whole run.


TIME_PARTS = {
    "compute": "compute",
    "exposed_communication": "exposed communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "data_wait": "waiting for data",
}
_CONVENTION = (
    "MFU: FLOPs that the model needs, over the dense peak of its precision; HFU counts what is computed again too"
)


def time_view(spec: RunSpec, time: Time, bar: int, unicode: bool, *, everything: bool = False) -> RenderableType:
    """All of it; ``bar`` characters are a step. ``everything`` adds how MFU is counted."""
    seconds = {name: getattr(time, field) for field, name in TIME_PARTS.items()}
    bars = waterfall(list(seconds.values()), max(time.step, sum(seconds.values())), bar, unicode=unicode)
    lines = [
        part_line(name, seconds_text(part), drawn, "blue")
        for (name, part), drawn in zip(seconds.items(), bars, strict=True)
        if part
    ]
    convention = [escaped_text(_CONVENTION, "dim")] if everything else []
    again = (
        [escaped_text(f"  of the compute {seconds_text(time.recompute)} is recomputation", "dim")]
        if time.recompute
        else []
    )
    return Group(time_total(spec, time), *lines, *again, whole_run(spec, time), *convention)


def time_total(spec: RunSpec, time: Time) -> Text:
    """``15.4 s per step, MFU 40 %, 272 k tokens/s (8.51 k/rank)``."""
    hardware = f" (HFU {percent_text(time.hfu)})" if f"{time.hfu:.2f}" != f"{time.mfu:.2f}" else ""
    each = count_text(time.tokens_per_second_per_gpu)
    rates = f"{count_text(time.tokens_per_second)} {spec.unit}/s ({each}/rank)"
    return Text.assemble(
        (seconds_text(time.step), "bold"), f" per step, MFU {percent_text(time.mfu)}{hardware}, {rates}"
    )


def whole_run(spec: RunSpec, time: Time) -> Text:
    """How long all steps take, without interruptions."""
    seen = count_text(spec.total_steps * spec.training.global_batch_size * spec.units_per_sample)
    return escaped_text(
        f"{seconds_text(time.to_train)} for all {whole_text(spec.total_steps)} steps ({seen} {spec.unit})"
    )


# What a whole run means, for people: checkpoints and interruptions, dollars on either market, the recipe's figures.


_VERDICT_STYLES = {"ok": "", "note": "cyan", "warning": "yellow"}


def durability_view(spec: RunSpec, durability: Durability) -> RenderableType:
    """How often it saves, whether the notice suffices, what interruptions cost."""
    grace = "within" if durability.grace_ok else "NOT within"
    steps = durability.interval_steps
    every = f"{whole_text(steps)} steps" if steps > 1 else "step"
    saves = (
        f"checkpoint of {bytes_text(durability.checkpoint_bytes)} every {every} "
        f"({seconds_text(durability.interval_seconds)}), saved in {seconds_text(durability.save_seconds)}, {grace} "
        f"the {seconds_text(spec.cluster.grace_seconds)} of grace"
    )
    lines = [escaped_text(saves), escaped_text(_interruptions(durability))]
    if durability.copy_bytes_per_node:
        copy = f"written from a copy that takes {bytes_text(durability.copy_bytes_per_node)} of each node's memory"
        lines.insert(1, escaped_text(copy))
    return Group(*lines)


def goodput_text(goodput: float) -> str:
    """Two nines must not read as 100 %."""
    return f"{min(goodput, 0.9999) * 100:.4g} %"


def cost_view(plan: RunPlan) -> RenderableType:
    """Dollars and days on demand and on spot; in one sentence where no price is known."""
    cost = plan.cost
    markets = {"on demand": cost.on_demand, "spot": cost.spot}
    known = {name: market for name, market in markets.items() if market and market.price_per_gpu_hour is not None}
    if not known:
        return escaped_text(cost_text(plan))
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "right", "left", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for name, market in known.items():
        table.add_row(name, *_market(market))
    sources = [escaped_text(f"{name}: {market.price_source}", "dim") for name, market in known.items()]
    return Group(table, *sources)


def cost_text(plan: RunPlan) -> str:
    """The expected cost in a few words."""
    cost = plan.cost
    if cost.price_per_gpu_hour is None:
        return cost.price_source
    price = f"{dollars_text(cost.price_per_gpu_hour)} per GPU and hour ({cost.price_source})"
    if cost.expected_usd is None:
        return f"without end: interruptions come faster than it can load; {price}"
    return f"{dollars_text(cost.expected_usd)} expected with interruptions; {price}"


def sanity_view(checks: Sequence[Sanity]) -> RenderableType:
    """A bullet for each check: topic, figure, and what to think of it."""
    table = Table.grid(padding=0)
    table.add_column(width=2)
    table.add_column(overflow="fold")
    for check in checks:
        style = _VERDICT_STYLES[check.verdict]
        said = f"{check.topic} {check.value}{f': {check.message}' if check.message else ''}"
        table.add_row(Text("• ", style), escaped_text(said, style))
    return table


def _interruptions(durability: Durability) -> str:
    goodput = f"expected goodput {goodput_text(durability.expected_goodput)}"
    expected = durability.interruptions_expected
    if expected is None:
        return goodput
    if durability.wall_seconds is None:
        return f"{goodput}: interruptions come so fast that the run would never end"
    count = f"{expected:,.0f}" if expected >= 9.5 else f"{expected:.2g}"
    lost = (
        f"{seconds_text(durability.lost_work_seconds)} of work on average"
        if durability.lost_work_seconds
        else "no work"
    )
    each = f"each losing {lost} and {seconds_text(durability.restart_seconds)} to restart"
    return f"{count} interruptions expected, {each}; {goodput}, {seconds_text(durability.wall_seconds)} in all"


def _market(market: Market) -> Iterator[Text]:
    yield escaped_text("never ends" if market.usd is None else dollars_text(market.usd), "bold")
    yield escaped_text("" if market.wall_seconds is None else seconds_text(market.wall_seconds))
    assert market.price_per_gpu_hour is not None
    yield escaped_text(f"{dollars_text(market.price_per_gpu_hour)} per GPU and hour")


_LONGEST_BAR = 48
_FEW_ALTERNATIVES = 5
_FEW_REASONS = 3
CANNOT_RUN = "this engine version cannot run this: "
_MANY_WARNINGS = 3


def show_plan(spec: RunSpec, plan: RunPlan, *, everything: bool = False, console: Console | None = None) -> None:
    """The whole plan; ``everything`` adds every layout considered and every assumption."""
    console = console or stdout_console()
    show(console, Group(headline(spec, plan), "", labelled(_sections(spec, plan, console, everything))))


def show_plan_summary(spec: RunSpec, plan: RunPlan) -> None:
    """The plan in five lines, on stderr: what is about to run."""
    cost: list[Row] = [("Cost", escaped_text(cost_text(plan)))] if plan.cost.price_per_gpu_hour is not None else []
    show(
        stderr_console(), Group(headline(spec, plan), labelled([*summary_rows(spec, plan), *cost, *warning_rows(plan)]))
    )


def summary_rows(spec: RunSpec, plan: RunPlan) -> list[Row]:
    """Layout, memory and time, a line or two each."""
    return [
        ("Layout", layout_view(plan.layout, samples(spec))),
        ("Memory", memory_total(plan)),
        ("Time", Group(time_total(spec, plan.time), whole_run(spec, plan.time))),
    ]


def warning_rows(plan: RunPlan) -> list[Row]:
    """One row, or none."""
    return [("Warnings", _bullets(condensed(plan.warnings), "yellow"))] if plan.warnings else []


def headline(spec: RunSpec, plan: RunPlan) -> Text:
    """One line: what, on what, and the verdict."""
    size = f"{count_text(plan.model.parameters)} parameters"
    if plan.model.active_parameters != plan.model.parameters:
        size += f" ({count_text(plan.model.active_parameters)} active)"
    verdict = plan.memory.verdict
    said = "fits, but is tight" if verdict == "tight" else verdict
    return Text.assemble(
        (plain(spec.name), "bold"),
        f", {size}, on {plain(devices_text(spec))}: ",
        (said, f"bold {VERDICT_STYLES[verdict]}"),
    )


def devices_text(spec: RunSpec) -> str:
    """``4 × 8 h100-sxm-80gb`` or ``2 CPU processes``."""
    cluster = spec.cluster
    device = cluster.gpu if isinstance(cluster.gpu, str) else cluster.gpu.name
    if device == "cpu":
        return f"{spec.world_size} CPU process{'es' if spec.world_size > 1 else ''}"
    where = f"{cluster.nodes} × {cluster.gpus_per_node}" if cluster.nodes > 1 else f"{cluster.gpus_per_node} ×"
    return f"{where} {device}"


def samples(spec: RunSpec) -> str:
    """What a batch counts."""
    return "sequences" if spec.unit == "tokens" else spec.unit


def condensed(warnings: Sequence[str]) -> tuple[str, ...]:
    """Where many say that this engine cannot run something, one that names the things; --all has what to do."""
    same = [warning for warning in warnings if warning.startswith(CANNOT_RUN)]
    if len(same) < _MANY_WARNINGS:
        return tuple(warnings)
    things = ", ".join(warning.removeprefix(CANNOT_RUN).partition(": ")[0] for warning in same)
    return (f"{CANNOT_RUN}{things}.", *(warning for warning in warnings if warning not in same))


def _sections(spec: RunSpec, plan: RunPlan, console: Console, everything: bool) -> Iterator[Row]:
    bar = min(_LONGEST_BAR, console.width - LABEL_WIDTH - PART - AMOUNT - 3)
    unicode = speaks_unicode(console)
    yield "Layout", layout_view(plan.layout, samples(spec))
    yield "Memory", memory_view(plan, bar, unicode)
    if not plan.memory.fits:
        return  # how fast it would be is no answer
    yield "Time", time_view(spec, plan.time, bar, unicode, everything=everything)
    yield "Network", escaped_text(_network(plan))
    yield "Durability", durability_view(spec, plan.durability)
    yield "Cost", cost_view(plan)
    checks = plan.sanity if everything else [check for check in plan.sanity if check.verdict != "ok"]
    if checks:
        yield "Recipe", sanity_view(checks)
    if plan.warnings:
        yield "Warnings", _bullets(plan.warnings if everything else condensed(plan.warnings), "yellow")
    if plan.alternatives:
        shown = plan.alternatives if everything else plan.alternatives[:_FEW_ALTERNATIVES]
        yield "Considered", alternatives_view(plan.layout, shown, hidden=len(plan.alternatives) - len(shown))
    if plan.rejected:
        reasons = plan.rejected if everything else plan.rejected[:_FEW_REASONS]
        yield "Ruled out", rejected_view(reasons, hidden=len(plan.rejected) - len(reasons), examples=everything)
    if everything:
        yield "Assumes", _bullets(plan.assumptions, "dim")


def _bullets(sentences: Sequence[str], style: str) -> RenderableType:
    table = Table.grid(padding=(0, 0, 0, 0))
    table.add_column(width=2)
    table.add_column(ratio=1, overflow="fold")
    for sentence in sentences:
        table.add_row(Text("• ", style), escaped_text(sentence, style))
    return table


def _network(plan: RunPlan) -> str:
    sent = {name: size for name, size in vars(plan.network.per_step_bytes).items() if size}
    if not sent:
        return "no traffic between ranks"
    listed = ", ".join(f"{name} {bytes_text(size)}" for name, size in sent.items())
    if len(sent) == 1:
        return f"each rank sends {bytes_text(sum(sent.values()))} per step, for {next(iter(sent))} parallelism"
    return f"each rank sends {bytes_text(sum(sent.values()))} per step: {listed}"
