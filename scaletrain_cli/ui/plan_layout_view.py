"""Layouts for people: one in words, and the table of those that were considered."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scaletrain_cli.plan.result import Alternative, Layout, Rejection
from scaletrain_cli.ui.console import words
from scaletrain_cli.ui.units import bytes_text, seconds_text, whole_text

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
    return Group(words(layout_text(layout)), words(batch))


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
            words(alternative.why if alternative.fits else "does not fit"),
        )
    them = "it" if hidden == 1 else "them"
    more = [words(f"and {whole_text(hidden)} more; --all shows {them}", "dim")] if hidden else []
    return Group(table, *more)


def rejected_view(rejected: Sequence[Rejection], hidden: int, *, examples: bool = False) -> RenderableType:
    """How many layouts each reason rules out, in the order given; with ``examples`` also one of them."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(words("layouts", "dim"), words("why not", "dim"))
    for rejection in rejected:
        example = f" ({rejection.example})" if examples and rejection.example else ""
        table.add_row(whole_text(rejection.count), words(f"{rejection.reason}{example}"))
    reasons = "more reason; --all shows it" if hidden == 1 else "more reasons; --all shows them"
    more = [words(f"and {whole_text(hidden)} {reasons}", "dim")] if hidden else []
    return Group(table, *more)


def differing(layouts: Sequence[Layout]) -> dict[str, str]:
    """Column titles and fields; of the parallel axes only those in which the layouts differ."""
    differ = {name: field for name, field in _AXES.items() if len({getattr(layout, field) for layout in layouts}) > 1}
    return {**differ, "ZeRO": "zero_stage", "micro": "micro_batch_size", "recompute": "activation_checkpointing"}
