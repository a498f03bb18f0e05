"""The time of a step by cause: the summary of ``scaletrain profile`` beside the plan."""

from __future__ import annotations

import functools
from typing import Any

from engine_loops.gpu_table import first_line, recipe_of
from engine_loops.start import train_here

from gpu.piece import Piece, Result, Setting
from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.launch.status import run_status
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.profiles import CAUSES, ProfileRequest, profile_folders, summary_of, write_request
from scaletrain_cli.spec import load_spec

_FIRST_STEP, _STEPS = 8, 3
_MOST_KERNELS = 10


def measure(setting: Setting, name: str, model: str, compiled: bool) -> Result:
    """Return a line for each cause that takes time, then for the kernels (on CPUs: operators) that take most."""
    overrides = [f"training.compile={str(compiled).lower()}"]
    request = ProfileRequest(step=_FIRST_STEP, steps=_STEPS)

    def ask(run: RunDir) -> None:
        write_request(run, request)

    try:
        spec = load_spec(recipe_of(model, setting.gpu, setting.folder), overrides)
        run = train_here(spec, fault=f"exception step={_FIRST_STEP + _STEPS + 2}", before=ask)
    except ScaletrainError as error:
        return Result([[name, f"not measured: {first_line(error)}"]])
    folders = profile_folders(run)
    summary = summary_of(folders[-1]) if folders else None
    if summary is None or not summary["measured"]:
        return Result([[name, f"no profile: {run_status(run).why[:160]}"]], failed=True)
    return Result([*_causes(name, summary), *_kernels(name, summary)])


def _causes(name: str, summary: dict[str, Any]) -> list[list[str]]:
    measured, planned = summary["measured"], summary["planned"]
    whole = measured["step"]["median"]
    lines = []
    for cause in ("step", *CAUSES):
        found, plan = measured[cause]["median"], planned.get(cause)
        if found or plan:
            share = "" if cause == "step" else f"{found / whole:.1%}"
            in_plan = "-" if plan is None else f"{plan * 1e3:.2f}"
            lines.append([name, cause.replace("_", " "), in_plan, f"{found * 1e3:.2f}", share, ""])
    return lines


def _kernels(name: str, summary: dict[str, Any]) -> list[list[str]]:
    figures = summary["by_rank"][0]
    rows = figures.get("top_kernels") or figures.get("top_operators") or []
    whole = summary["measured"]["step"]["median"]
    return [
        [
            *(name, f"`{row['name'][:80].replace('|', ' ')}`", ""),
            *(f"{row['seconds'] * 1e3:.2f}", f"{row['seconds'] / whole:.1%}", f"{row['count']:.3g}"),
        ]
        for row in rows[:_MOST_KERNELS]
    ]


PIECE = Piece(
    name="causes",
    title="A step by cause",
    text=(
        "Each moment of a profiled step counts for one cause, as in `scaletrain profile`; below them the kernels that "
        "take most of the time. The plan is calibrated by the rows above."
    ),
    columns=("row", "cause or kernel", "plan, ms", "run, ms", "share of the step", "calls per step"),
    rows={
        "1B, compiled": functools.partial(measure, name="1B, compiled", model="1B", compiled=True),
        "1B": functools.partial(measure, name="1B", model="1B", compiled=False),
    },
    tiny={"1B": functools.partial(measure, name="1B", model="1B", compiled=False)},
    seconds=180,
    row_seconds=120,
)
