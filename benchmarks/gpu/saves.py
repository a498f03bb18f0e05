"""Time that a save holds up training beyond the copy off the device, and the cost of saves to a run."""

from __future__ import annotations

import functools
import os
import shutil

from engine_loops.gpu_table import first_line, recipe_of

from gpu.piece import Piece, Result, Setting, verdict
from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.spec import load_spec


def measure(setting: Setting, model: str, pairs: int, stretch: int) -> Result:
    """Return one line on a model: ``pairs`` stretches with a save and as many without, after one pair to warm up."""
    from checkpoint_cost import MOST_BEYOND_COPY_SECONDS, cost_of_saves, train_with_saves  # imports the engine

    steps = 2 * stretch * (pairs + 1)
    overrides = [f"training.steps={steps}", "checkpoint.keep=1"]
    try:
        spec = load_spec(recipe_of(model, setting.gpu, setting.folder), overrides)
        cost = cost_of_saves(*train_with_saves(spec, stretch), stretch)
    except ScaletrainError as error:
        return Result([[model, f"not measured: {first_line(error)}"]])
    finally:
        _remove_checkpoints()
    worst = max(cost.blocked_first, cost.blocked_worst)
    line = [
        *(model, f"{cost.bytes / 1e9:.2f}", str(cost.saves), f"{cost.copy * 1e3:.1f}"),
        *(f"{cost.blocked_first * 1e3:.1f}", f"{cost.blocked_worst * 1e3:.1f}", f"{cost.whole:.2f}"),
        *(f"{cost.added * 1e3:.0f}", f"{cost.interval:.0f}", f"{cost.overhead:.2%}"),
        verdict(stall=worst <= MOST_BEYOND_COPY_SECONDS),
    ]
    return Result([line], {"beyond_copy_seconds": worst})


def _remove_checkpoints() -> None:
    """Remove the checkpoints of this process's run, for the disk may not hold those of two rows."""
    for folder in runs_root().glob("*/checkpoints"):
        shutil.rmtree(folder, ignore_errors=True)
    os.sync()  # the next row does not wait for this one's files


PIECE = Piece(
    name="saves",
    title="Checkpoints",
    text="Target: training is blocked for the copy off the device and at most 50 ms more.",
    columns=(
        *("model", "GB", "saves", "copy, ms", "blocked beyond it, ms: first", "worst of the others"),
        *("until committed, s", "added to training, ms", "best interval at 3 h, s", "overhead", "targets"),
    ),
    rows={
        "0.2B": functools.partial(measure, model="0.2B", pairs=5, stretch=24),
        "1B": functools.partial(measure, model="1B", pairs=2, stretch=10),
    },
    tiny={"0.2B": functools.partial(measure, model="0.2B", pairs=3, stretch=4)},
    seconds=300,
    row_seconds=180,
)
