"""The time of a plan for people: a step, its parts as bars, the whole run."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from scaletrain_cli.plan.result import Time
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.ui.bars import part_line, waterfall
from scaletrain_cli.ui.console import words
from scaletrain_cli.ui.units import count_text, percent_text, seconds_text, whole_text

PARTS = {
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
    seconds = {name: getattr(time, field) for field, name in PARTS.items()}
    bars = waterfall(list(seconds.values()), max(time.step, sum(seconds.values())), bar, unicode=unicode)
    lines = [
        part_line(name, seconds_text(part), drawn, "blue")
        for (name, part), drawn in zip(seconds.items(), bars, strict=True)
        if part
    ]
    convention = [words(_CONVENTION, "dim")] if everything else []
    again = (
        [words(f"  of the compute {seconds_text(time.recompute)} is recomputation", "dim")] if time.recompute else []
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
    return words(f"{seconds_text(time.to_train)} for all {whole_text(spec.total_steps)} steps ({seen} {spec.unit})")
