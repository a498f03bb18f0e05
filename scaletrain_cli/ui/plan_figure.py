"""Plots of a plan as HTML, SVG or PNG: memory by stage, step by cause, pipeline timeline, scaling."""

import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from scaletrain_cli.markup import document, safe, table
from scaletrain_cli.plan.advice.answer import Answer
from scaletrain_cli.plan.result import Memory, RunPlan, Time
from scaletrain_cli.plan.search.sizing import ScalingPoint
from scaletrain_cli.plan.speed.pipeline import Timeline
from scaletrain_cli.safe_files import replace_file
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.text import bytes_text, count_text, percent_text, seconds_text, whole_text
from scaletrain_cli.ui.plan import headline
from scaletrain_cli.ui.plan_answer import show_answer
from scaletrain_cli.ui.plan_breakdown import MEMORY_PARTS, TIME_PARTS
from scaletrain_cli.ui.plots import image

_MEMORY_COLORS = ("#0072B2", "#56B4E9", "#009E73", "#2B2B2B", "#F0E442", "#E69F00", "#CC79A7", "#777777", "#C8C8C8")
_TIME_COLORS = ("#0072B2", "#E69F00", "#DDDDDD", "#009E73", "#CC79A7")
PLOT_KINDS = (".html", ".svg", ".png")
_FORWARD, _BACKWARD = "#0072B2", "#E69F00"
_MOST_LABELS = 16  # of stages; with more stages only every n-th has a label


def draw_memory(axes: Any, memory: Memory) -> None:
    """Draw one stacked bar for each stage, against the device."""
    count = len(memory.by_stage)
    left = [0.0] * count
    for (field, name), color in zip(MEMORY_PARTS.items(), _MEMORY_COLORS, strict=True):
        sizes = [getattr(stage, field) / 1e9 for stage in memory.by_stage]
        if any(sizes):
            label = name if count > 1 else f"{name}: {bytes_text(getattr(memory, field))}"
            axes.barh(range(count), sizes, left=left, color=color, label=label, height=0.72, edgecolor="white", lw=0.4)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
    capacity = memory.capacity / 1e9
    axes.axvline(capacity, color="#D55E00", lw=1.8, label=f"device: {bytes_text(memory.capacity)}")
    axes.set_xlim(0, 1.04 * max(capacity, *left))
    _name_stages(axes, count, "rank")
    axes.set_xlabel("GB of one rank")
    axes.set_title(f"Memory: {bytes_text(memory.peak)} of {bytes_text(memory.capacity)}, {memory.verdict}", loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, fontsize=8)


def draw_step(axes: Any, time: Time) -> None:
    """Draw one bar for the step, divided by cause."""
    unit, name = (1e-3, "milliseconds") if time.step < 1 else (1.0, "seconds")
    left = 0.0
    for (field, label), color in zip(TIME_PARTS.items(), _TIME_COLORS, strict=True):
        seconds = getattr(time, field)
        if seconds:
            axes.barh(
                [0], [seconds / unit], left=left, color=color, label=f"{label}: {seconds_text(seconds)}", height=0.6
            )
            left += seconds / unit
    axes.set_xlim(0, left * 1.001)
    axes.set_yticks([])
    axes.set_xlabel(name)
    axes.set_title(f"Step: {seconds_text(time.step)}, MFU {percent_text(time.mfu)}", loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.15), frameon=False, fontsize=8)


def draw_pipeline(axes: Any, drawn: Timeline) -> None:
    """Draw each pass as a box, one row per stage; white is idle time.

    Micro-batches of the steady state may be missing.
    """
    unit, name = (1e-3, "milliseconds") if drawn.seconds < 1 else (1.0, "seconds")
    chunks = 1 + max(box.chunk for box in drawn.passes)
    dense = len(drawn.passes) > 3000
    for backward, color, label in ((False, _FORWARD, "forward"), (True, _BACKWARD, "backward")):
        for chunk in range(chunks):
            shade = 1 - 0.55 * chunk / max(1, chunks - 1) if chunks > 1 else 1.0
            for stage in range(drawn.stages):
                boxes = [
                    (box.start / unit, box.seconds / unit)
                    for box in drawn.passes
                    if (box.stage, box.backward, box.chunk) == (stage, backward, chunk)
                ]
                axes.broken_barh(
                    boxes,
                    (stage - 0.42, 0.84),
                    facecolor=color,
                    alpha=shade,
                    label=label if not stage and not chunk else None,
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
        axes.set_xlabel(f"{name}; {left_out} are not shown: {seconds_text(drawn.left_out_seconds)} of steady state")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, fontsize=8)


def draw_rate(axes: Any, points: Sequence[ScalingPoint], chosen: int, unit: str) -> None:
    """Draw tokens (or images) per second against GPUs, with a line for linear scaling."""
    from matplotlib.ticker import LogLocator

    gpus, rates = [point.gpus for point in points], [point.tokens_per_second for point in points]
    axes.plot(gpus, [rates[0] * count / gpus[0] for count in gpus], "--", color="#777777", lw=1.2, label="linear")
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
    """Draw the rate per GPU relative to that of the fewest GPUs."""
    gpus, shares = [point.gpus for point in points], [100 * point.efficiency for point in points]
    axes.plot(gpus, shares, "o-", color="#009E73", lw=1.8)
    _mark(axes, [(g, s) for g, s in zip(gpus, shares, strict=True) if g == chosen])
    axes.set_xscale("log", base=2)
    _count_ticks(axes, gpus)
    axes.set_ylim(0, 1.1 * max(100.0, *shares))
    axes.set_ylabel("throughput per rank, %")
    axes.set_title(f"Efficiency, relative to {gpus[0]} ranks", loc="left")


def _mark(axes: Any, here: list[tuple[float, float]]) -> None:
    if here:
        axes.plot(*here[0], "o", ms=11, mfc="none", mec="#D55E00", mew=1.8, ls="none", label="this plan")


def _count_ticks(axes: Any, gpus: Sequence[int]) -> None:
    axes.set_xticks(gpus, [str(count) for count in gpus])
    axes.minorticks_off()
    axes.set_xlabel("ranks")


def _name_stages(axes: Any, count: int, alone: str) -> None:
    shown = range(0, count, -(-count // _MOST_LABELS))
    axes.set_yticks(list(shown), [f"stage {stage}" for stage in shown] if count > 1 else [alone])
    axes.set_ylim(count - 0.4, -0.6)


_WIDTH_INCHES = 11.0
_ROW_INCHES = 0.2  # of one stage
_SCALING_INCHES = 2.6


def draw(spec: RunSpec, plan: RunPlan, pipeline: Timeline | None, scaling: Sequence[ScalingPoint]) -> Any:
    """Return a matplotlib figure: memory, step, the pipeline's timeline if there is one, and scaling if given."""
    from matplotlib.figure import Figure

    by_stage = max(1.9, min(6.0, 0.9 + _ROW_INCHES * len(plan.memory.by_stage)))
    panels: list[tuple[float, Callable[[Any], None]]] = [(by_stage, partial(draw_memory, memory=plan.memory))]
    if plan.memory.fits:
        panels.append((1.1, partial(draw_step, time=plan.time)))
    if pipeline:
        panels.append((by_stage, partial(draw_pipeline, drawn=pipeline)))
    scaling_height = _SCALING_INCHES if len(scaling) > 1 else 0.0
    height = sum(inches for inches, _ in panels)
    figure: Any = Figure(figsize=(_WIDTH_INCHES, height + scaling_height + 0.4), layout="constrained")
    # a run's name may contain dollar signs
    figure.suptitle(headline(spec, plan).plain, x=0.01, ha="left", fontweight="bold", parse_math=False)
    # Two subfigures, so that the legends of the upper panels do not narrow the lower ones.
    parts = figure.subfigures(2, 1, height_ratios=(height, scaling_height)) if scaling_height else [figure]
    rows = parts[0].subplots(len(panels), 1, squeeze=False, height_ratios=[inches for inches, _ in panels])
    for axes, (_, panel) in zip(rows[:, 0], panels, strict=True):
        panel(axes)
    if scaling_height:
        left, right = parts[1].subplots(1, 2)
        draw_rate(left, scaling, plan.layout.world_size, spec.unit)
        draw_efficiency(right, scaling, plan.layout.world_size)
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    return figure


_WIDTH = 110  # of the terminal's text, in characters


def page(answer: Answer, scaling: Sequence[ScalingPoint], svg: str) -> str:
    """Return an HTML document with the plot."""
    picture = svg[svg.index("<svg") :]
    # The terminal output, without colors.
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    console = Console(file=stream, width=_WIDTH, highlight=False, markup=False, emoji=False)
    show_answer(answer, everything=True, console=console)
    stream.flush()
    stream.seek(0)
    text = "\n".join(map(safe, stream.read().splitlines()))
    body = [f'<div class="picture">{picture}</div>', *_memory(answer), *_scaling(answer, scaling)]
    return document(f"{answer.spec.name}: plan", [*body, "<h2>Plan</h2>", f'<pre class="wide">{text}</pre>'])


def _memory(answer: Answer) -> Iterator[str]:
    memory = answer.plan.memory
    named = len(memory.by_stage) > 1
    rows = [
        [
            f"stage {index}" if named else "rank",
            *(bytes_text(getattr(stage, part)) for part in MEMORY_PARTS),
            bytes_text(stage.peak),
            percent_text(stage.peak / memory.capacity),
        ]
        for index, stage in enumerate(memory.by_stage)
    ]
    yield f"<h2>Memory of one rank, of {bytes_text(memory.capacity)}</h2>"
    yield table(["", *MEMORY_PARTS.values(), "total", "of the device"], rows, "l" + "n" * (len(MEMORY_PARTS) + 2))


def _scaling(answer: Answer, scaling: Sequence[ScalingPoint]) -> Iterator[str]:
    if not scaling:
        return
    yield "<h2>Scaling, same global batch</h2>"
    yield table(
        ["ranks", "step", f"{answer.spec.unit} per second", "efficiency"],
        (
            [
                whole_text(point.gpus),
                seconds_text(point.step_seconds),
                count_text(point.tokens_per_second),
                percent_text(point.efficiency),
            ]
            for point in scaling
        ),
        "nnnn",
    )


def write_plot(path: Path, answer: Answer, pipeline: Timeline | None, scaling: Sequence[ScalingPoint]) -> None:
    """Draw the plan in the format of the file's suffix. An existing file is replaced. Raises OSError."""
    kind = path.suffix.lower()[1:]
    data = image(partial(draw, answer.spec, answer.plan, pipeline, scaling), "svg" if kind == "html" else kind)
    if kind == "html":
        data = page(answer, scaling, data.decode()).encode()
    replace_file(path, data, public=True)
