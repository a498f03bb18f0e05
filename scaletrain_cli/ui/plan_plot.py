"""The figure of a plan: panels one above the other, as many as the plan has something to show. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

from scaletrain_cli.plan.advice.pictures import Pictures
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.ui.plan_plot_panels import draw_efficiency, draw_memory, draw_pipeline, draw_rate, draw_step
from scaletrain_cli.ui.plan_view import headline

_WIDTH_INCHES = 11.0
_ROW_INCHES = 0.2  # of one stage
_SCALING_INCHES = 2.6
_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # a run's name may hold dollars
    "svg.hashsalt": "scaletrain",  # the same plan gives the same file
}


def draw(spec: RunSpec, plan: RunPlan, pictures: Pictures) -> Any:
    """A matplotlib figure, not yet written anywhere."""
    import matplotlib
    from matplotlib.figure import Figure

    stages = len(plan.memory.by_stage)
    by_stage = max(1.9, min(6.0, 0.9 + _ROW_INCHES * stages))
    panels: list[tuple[float, Callable[[Any], None]]] = [(by_stage, partial(draw_memory, memory=plan.memory))]
    if plan.memory.fits:
        panels.append((1.1, partial(draw_step, time=plan.time)))
    if pictures.pipeline:
        panels.append((by_stage, partial(draw_pipeline, drawn=pictures.pipeline)))
    scaling = _SCALING_INCHES if len(pictures.scaling) > 1 else 0.0
    height = sum(inches for inches, _ in panels)
    with matplotlib.rc_context(_STYLE):
        figure: Any = Figure(figsize=(_WIDTH_INCHES, height + scaling + 0.4), layout="constrained")
        figure.suptitle(headline(spec, plan).plain, x=0.01, ha="left", fontweight="bold")
        # Each in a figure of its own, so that the legends beside the upper panels do not narrow the lower ones.
        parts = figure.subfigures(2, 1, height_ratios=(height, scaling)) if scaling else [figure]
        rows = parts[0].subplots(len(panels), 1, squeeze=False, height_ratios=[inches for inches, _ in panels])
        for axes, (_, panel) in zip(rows[:, 0], panels, strict=True):
            panel(axes)
        if scaling:
            left, right = parts[1].subplots(1, 2)
            draw_rate(left, pictures.scaling, plan.layout.world_size, spec.unit)
            draw_efficiency(right, pictures.scaling, plan.layout.world_size)
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    return figure


def image(figure: Any, kind: str, dots_per_inch: int) -> bytes:
    """The figure as ``svg`` or ``png``; the same figure gives the same bytes."""
    import matplotlib

    stream = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(stream, format=kind, dpi=dots_per_inch, metadata={"Date": None} if kind == "svg" else None)
    return stream.getvalue()
