"""The memory and time of a plan: totals, and their parts as a waterfall of bars."""

import math
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from scaletrain_cli.plan.result import Memory, RunPlan, Time
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.text import binary_bytes_text, bytes_text, count_text, percent_text, seconds_text, whole_text
from scaletrain_cli.ui.console import escaped_text

PART, AMOUNT = 22, 9  # columns of a part's name and size
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


def waterfall(parts: list[float], whole: float, width: int, *, unicode: bool) -> list[str]:
    """Return a bar per part, each starting where the one before ends; ``whole`` is ``width`` characters wide."""
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
    # Characters of n eighths fill from the left, so the start is rounded down to a full cell; the end keeps its
    # eighths.
    end = start + length
    eighths = max(1, round((end - first) * 8))
    return " " * first + "█" * (eighths // 8) + _EIGHTHS[eighths % 8]


def part_line(name: str, amount: str, bar: str, style: str) -> Text:
    """Return one line: name, size and bar."""
    return Text.assemble(f"  {name:<{PART}}{amount:>{AMOUNT}} ", (bar, style))


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
# A smaller probability of running out of memory is not shown: the estimate is not that accurate.
_SHOWN_PROBABILITY = 0.005


def memory_view(plan: RunPlan, bar: int, unicode: bool) -> RenderableType:
    """Return the memory section; a bar of ``bar`` characters is the device's memory."""
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
        lines.append(part_line("over capacity", bytes_text(-rest), "", "red"))
    chance = memory.out_of_memory_probability
    if memory.fits and chance >= _SHOWN_PROBABILITY:
        risk = f"probability of running out of memory: {percent_text(chance)}"
        lines.insert(0, escaped_text(risk, "yellow" if memory.verdict == "tight" else "dim"))
    return Group(memory_total(plan), *lines, *_kinds(memory), *_stages(memory))


def memory_total(plan: RunPlan) -> Text:
    """Return ``72.8 GB of 84.9 GB (86 %) per rank · 67.8 GiB of 79.1 GiB``."""
    memory = plan.memory
    rank = "per rank" if plan.layout.pipeline_parallel == 1 else "on the fullest stage"
    return Text.assemble(
        (bytes_text(memory.peak), f"bold {VERDICT_STYLES[memory.verdict]}"),
        f" of {bytes_text(memory.capacity)} ({percent_text(memory.peak / memory.capacity)}) {rank}",
        (f" · {binary_bytes_text(memory.peak)} of {binary_bytes_text(memory.capacity)}", "dim"),
    )


def _kinds(memory: Memory) -> Iterator[Text]:
    if memory.reserved:
        kept = f"; nvidia-smi may show {bytes_text(memory.cached)}" if memory.cached > memory.peak else ""
        allocated, reserved = bytes_text(memory.allocated), bytes_text(memory.reserved)
        yield escaped_text(f"  PyTorch allocates {allocated} of it and reserves {reserved}{kept}", "dim")
    if memory.host:
        yield escaped_text(f"  in the node's memory: {bytes_text(memory.host)} per rank")


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


TIME_PARTS = {
    "compute": "compute",
    "exposed_communication": "exposed communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "data_wait": "waiting for data",
}
_CONVENTION = "MFU: FLOPs of the model, divided by the dense peak of the precision; HFU also counts recomputation"


def time_view(spec: RunSpec, time: Time, bar: int, unicode: bool, *, everything: bool = False) -> RenderableType:
    """Return the time section; a bar of ``bar`` characters is a step. ``everything`` adds the definition of MFU."""
    seconds = {name: getattr(time, field) for field, name in TIME_PARTS.items()}
    bars = waterfall(list(seconds.values()), max(time.step, sum(seconds.values())), bar, unicode=unicode)
    lines = [
        part_line(name, seconds_text(part), drawn, "blue")
        for (name, part), drawn in zip(seconds.items(), bars, strict=True)
        if part
    ]
    convention = [escaped_text(_CONVENTION, "dim")] if everything else []
    again = (
        [escaped_text(f"  {seconds_text(time.recompute)} of the compute is recomputation", "dim")]
        if time.recompute
        else []
    )
    before = []
    if time.reference:
        pairs = f"reference log-probabilities of {count_text(time.reference_pairs)} pairs"
        before.append(escaped_text(f"{seconds_text(time.reference)} before step 1: {pairs}"))
    return Group(time_total(spec, time), *lines, *again, *before, whole_run(spec, time), *convention)


def time_total(spec: RunSpec, time: Time) -> Text:
    """Return ``15.4 s per step, MFU 40 %, 272 k tokens/s (8.51 k/rank)``."""
    hardware = f" (HFU {percent_text(time.hfu)})" if f"{time.hfu:.2f}" != f"{time.mfu:.2f}" else ""
    per_rank = count_text(time.tokens_per_second_per_gpu)
    rates = f"{count_text(time.tokens_per_second)} {spec.unit}/s ({per_rank}/rank)"
    return Text.assemble(
        (seconds_text(time.step), "bold"), f" per step, MFU {percent_text(time.mfu)}{hardware}, {rates}"
    )


def whole_run(spec: RunSpec, time: Time) -> Text:
    """Return the time of all steps, and of the reference pass, without interruptions."""
    seen = count_text(spec.total_steps * spec.training.global_batch_size * spec.units_per_sample)
    also = " and the reference" if time.reference else ""
    return escaped_text(
        f"{seconds_text(time.to_train)} for all {whole_text(spec.total_steps)} steps{also} ({seen} {spec.unit})"
    )
