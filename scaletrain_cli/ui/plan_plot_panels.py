"""The single pictures of a plan: memory by stage, the step, the pipeline, the scaling curve. Draws what it is given.

Colours are those of Okabe and Ito, which the colour-blind tell apart; the order alternates light and dark for print.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scaletrain_cli.plan.result import Memory, Time
from scaletrain_cli.plan.search.sizing import ScalingPoint
from scaletrain_cli.plan.speed.pipeline_schedule import Timeline
from scaletrain_cli.ui.plan_memory_view import PARTS as MEMORY_PARTS
from scaletrain_cli.ui.plan_time_view import PARTS as TIME_PARTS
from scaletrain_cli.ui.units import bytes_text, count_text, percent_text, seconds_text

_MEMORY_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#2B2B2B", "#F0E442", "#E69F00", "#CC79A7", "#777777", "#C8C8C8")
_TIME_COLOURS = ("#0072B2", "#E69F00", "#DDDDDD", "#009E73", "#CC79A7")
_FORWARD, _BACKWARD = "#0072B2", "#E69F00"
_MOST_LABELS = 16  # stages named one by one; of more, every few


def draw_memory(axes: Any, memory: Memory) -> None:
    """One stacked bar for each stage, against the device."""
    count = len(memory.by_stage)
    left = [0.0] * count
    for (field, name), colour in zip(MEMORY_PARTS.items(), _MEMORY_COLOURS, strict=True):
        sizes = [getattr(stage, field) / 1e9 for stage in memory.by_stage]
        if any(sizes):
            label = name if count > 1 else f"{name}: {bytes_text(getattr(memory, field))}"
            axes.barh(range(count), sizes, left=left, color=colour, label=label, height=0.72, edgecolor="white", lw=0.4)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
    capacity = memory.capacity / 1e9
    axes.axvline(capacity, color="#D55E00", lw=1.8, label=f"device: {bytes_text(memory.capacity)}")
    axes.set_xlim(0, 1.04 * max(capacity, *left))
    _name_stages(axes, count, "rank")
    axes.set_xlabel("GB of one rank")
    axes.set_title(f"Memory: {bytes_text(memory.peak)} of {bytes_text(memory.capacity)}, {memory.verdict}", loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, fontsize=8)


def draw_step(axes: Any, time: Time) -> None:
    """One bar for the step, cut into what it goes into."""
    unit, name = (1e-3, "milliseconds") if time.step < 1 else (1.0, "seconds")
    left = 0.0
    for (field, label), colour in zip(TIME_PARTS.items(), _TIME_COLOURS, strict=True):
        seconds = getattr(time, field)
        if seconds:
            axes.barh(
                [0], [seconds / unit], left=left, color=colour, label=f"{label}: {seconds_text(seconds)}", height=0.6
            )
            left += seconds / unit
    axes.set_xlim(0, left * 1.001)
    axes.set_yticks([])
    axes.set_xlabel(name)
    axes.set_title(f"Step: {seconds_text(time.step)}, MFU {percent_text(time.mfu)}", loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.15), frameon=False, fontsize=8)


def draw_pipeline(axes: Any, drawn: Timeline) -> None:
    """Every pass as a box, stage by stage; white is waiting. Steady micro-batches in the middle may be left out."""
    unit, name = (1e-3, "milliseconds") if drawn.seconds < 1 else (1.0, "seconds")
    chunks = 1 + max(each.chunk for each in drawn.passes)
    dense = len(drawn.passes) > 3000
    for backward, colour, label in ((False, _FORWARD, "forward"), (True, _BACKWARD, "backward")):
        for chunk in range(chunks):
            shade = 1 - 0.55 * chunk / max(1, chunks - 1) if chunks > 1 else 1.0
            for stage in range(drawn.stages):
                boxes = [
                    (each.start / unit, each.seconds / unit)
                    for each in drawn.passes
                    if (each.stage, each.backward, each.chunk) == (stage, backward, chunk)
                ]
                named = label if not stage and not chunk else None
                axes.broken_barh(
                    boxes,
                    (stage - 0.42, 0.84),
                    facecolor=colour,
                    alpha=shade,
                    label=named,
                    rasterized=dense,
                    edgecolor="white",
                    lw=0.0 if dense else 0.5,
                )
    axes.set_xlim(0, drawn.seconds / unit)
    _name_stages(axes, drawn.stages, "stage")
    schedule = "1F1B" if chunks == 1 else f"interleaved, {chunks} virtual stages, later ones paler"
    axes.set_title(f"Pipeline: {schedule}", loc="left")
    axes.set_xlabel(name)
    if drawn.left_out_seconds:
        left_out = f"{drawn.micro_batches - drawn.drawn} of {drawn.micro_batches} micro-batches"
        axes.set_xlabel(f"{name}, without {left_out} in the middle: {seconds_text(drawn.left_out_seconds)} of the same")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, fontsize=8)


def draw_rate(axes: Any, points: Sequence[ScalingPoint], chosen: int, unit: str) -> None:
    """Tokens (or images) per second against GPUs, with the straight line of perfect scaling."""
    from matplotlib.ticker import LogLocator

    gpus, rates = [point.gpus for point in points], [point.tokens_per_second for point in points]
    axes.plot(gpus, [rates[0] * count / gpus[0] for count in gpus], "--", color="#777777", lw=1.2, label="perfect")
    axes.plot(gpus, rates, "o-", color="#0072B2", lw=1.8, label="planned")
    _mark(axes, [(g, r) for g, r in zip(gpus, rates, strict=True) if g == chosen])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", subs=(2, 5))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    _count_ticks(axes, gpus)
    axes.yaxis.set_major_formatter(lambda value, _: count_text(value))
    axes.set_ylabel(f"{unit} per second")
    axes.set_title("Scaling, same global batch", loc="left")
    axes.legend(frameon=False, fontsize=8)


def draw_efficiency(axes: Any, points: Sequence[ScalingPoint], chosen: int) -> None:
    """Rate per GPU against that of the fewest GPUs."""
    gpus, shares = [point.gpus for point in points], [100 * point.efficiency for point in points]
    axes.plot(gpus, shares, "o-", color="#009E73", lw=1.8)
    _mark(axes, [(g, s) for g, s in zip(gpus, shares, strict=True) if g == chosen])
    axes.set_xscale("log", base=2)
    _count_ticks(axes, gpus)
    axes.set_ylim(0, 1.1 * max(100.0, *shares))
    axes.set_ylabel("% of the rate per rank")
    axes.set_title(f"Efficiency, against {gpus[0]}", loc="left")


def _mark(axes: Any, here: list[tuple[float, float]]) -> None:
    if here:
        axes.plot(*here[0], "o", ms=11, mfc="none", mec="#D55E00", mew=1.8, ls="none", label="this plan")


def _count_ticks(axes: Any, gpus: Sequence[int]) -> None:
    axes.set_xticks(gpus, [str(count) for count in gpus])
    axes.minorticks_off()
    axes.set_xlabel("ranks")


def _name_stages(axes: Any, count: int, alone: str) -> None:
    every = -(-count // _MOST_LABELS)
    shown = range(0, count, every)
    axes.set_yticks(list(shown), [f"stage {stage}" for stage in shown] if count > 1 else [alone])
    axes.set_ylim(count - 0.4, -0.6)
