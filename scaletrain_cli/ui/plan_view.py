"""A plan for people: does it fit, how fast, what does it cost, and why this layout. Computes nothing but widths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.ui.bars import AMOUNT, PART
from scaletrain_cli.ui.console import answer, plain, show, speaks_unicode, talk, words
from scaletrain_cli.ui.labelled import LABEL_WIDTH, Row, labelled
from scaletrain_cli.ui.plan_layout_view import alternatives_view, layout_view, rejected_view
from scaletrain_cli.ui.plan_memory_view import VERDICT_STYLES, memory_total, memory_view
from scaletrain_cli.ui.plan_run_view import cost_text, cost_view, durability_view, sanity_view
from scaletrain_cli.ui.plan_time_view import time_total, time_view, whole_run
from scaletrain_cli.ui.units import bytes_text, count_text

_LONGEST_BAR = 48
_FEW_ALTERNATIVES = 5
_FEW_REASONS = 3
CANNOT_RUN = "this engine version cannot run this: "
_MANY_WARNINGS = 3


def show_plan(spec: RunSpec, plan: RunPlan, *, everything: bool = False, console: Console | None = None) -> None:
    """The whole plan; ``everything`` adds every layout considered and every assumption."""
    console = console or answer()
    show(console, Group(headline(spec, plan), "", labelled(_sections(spec, plan, console, everything))))


def show_plan_summary(spec: RunSpec, plan: RunPlan) -> None:
    """The plan in five lines, on stderr: what is about to run."""
    cost: list[Row] = [("Cost", words(cost_text(plan)))] if plan.cost.price_per_gpu_hour is not None else []
    show(talk(), Group(headline(spec, plan), labelled([*summary_rows(spec, plan), *cost, *warning_rows(plan)])))


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
    yield "Network", words(_network(plan))
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
        table.add_row(Text("• ", style), words(sentence, style))
    return table


def _network(plan: RunPlan) -> str:
    sent = {name: size for name, size in vars(plan.network.per_step_bytes).items() if size}
    if not sent:
        return "no traffic between ranks"
    listed = ", ".join(f"{name} {bytes_text(size)}" for name, size in sent.items())
    if len(sent) == 1:
        return f"each rank sends {bytes_text(sum(sent.values()))} per step, for {next(iter(sent))} parallelism"
    return f"each rank sends {bytes_text(sum(sent.values()))} per step: {listed}"
