"""The memory of a plan for people: the sum against the device, its parts as bars, each pipeline stage."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from scaletrain_cli.plan.result import Memory, RunPlan
from scaletrain_cli.ui.bars import part_line, waterfall
from scaletrain_cli.ui.console import words
from scaletrain_cli.ui.units import binary_bytes_text, bytes_text, percent_text

VERDICT_STYLES = {"fits": "green", "tight": "yellow", "does not fit": "red"}
PARTS = {
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
    sizes = {name: getattr(memory, field) for field, name in PARTS.items()}
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
        yield words(text, "yellow" if memory.verdict == "tight" else "dim")


def _kinds(memory: Memory) -> Iterator[Text]:
    if memory.reserved:
        yield words(
            f"  of it PyTorch allocates {bytes_text(memory.allocated)} and reserves {bytes_text(memory.reserved)}",
            "dim",
        )
    if memory.host:
        yield words(f"  in the node's memory: {bytes_text(memory.host)} for each rank")


def _stages(memory: Memory) -> Iterator[Text]:
    peaks = [stage.peak for stage in memory.by_stage]
    if 1 < len(peaks) <= 8:
        yield words(f"  by pipeline stage: {', '.join(map(bytes_text, peaks))}")
    elif peaks[1:]:
        fullest, emptiest = peaks.index(max(peaks)), peaks.index(min(peaks))
        yield words(
            f"  by pipeline stage: {bytes_text(max(peaks))} on stage {fullest} to {bytes_text(min(peaks))} "
            f"on stage {emptiest} of {len(peaks)}"
        )
