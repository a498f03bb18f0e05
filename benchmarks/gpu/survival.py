"""Kill and resume to the bit with deterministic kernels: the drills of ``scaletrain drill``, compared exactly."""

from __future__ import annotations

import functools
import shutil

from engine_loops.gpu_table import first_line, recipe_of

from gpu.piece import Piece, Result, Setting
from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.launch.drill import (
    KINDS,
    UNDISTURBED,
    Course,
    DrillSetup,
    compare_runs,
    drill_spec,
    make_jobs_folder,
    run_drill,
)
from scaletrain_cli.launch.submit import plan_for_engine
from scaletrain_cli.spec import load_spec

_ENGINE = "gpu.deterministic_engine"
_SECONDS = 150.0  # of one run
_STEPS = 12


def measure(setting: Setting, model: str, kinds: tuple[str, ...], compiled: bool) -> Result:
    """Return a line for each kind of drill: what became of the run, and how far it equals the undisturbed one."""
    overrides = [f"training.compile={str(compiled).lower()}", "training.global_batch_size=4"]
    try:
        spec = drill_spec(load_spec(recipe_of(model, setting.gpu, setting.folder), overrides), _STEPS)
        backend = LocalBackend(engine=_ENGINE)
        setup = DrillSetup(make_jobs_folder(), spec, plan_for_engine(spec, model), backend, _SECONDS)
        try:
            _, undisturbed = run_drill(setup, UNDISTURBED, lambda status: None)
            return Result([_line(setup, model, kind, undisturbed) for kind in kinds])
        finally:
            shutil.rmtree(setup.folder, ignore_errors=True)  # several checkpoints of several runs
    except ScaletrainError as error:
        return Result([[model, f"not measured: {first_line(error)}"]])


def _line(setup: DrillSetup, model: str, name: str, undisturbed: Course) -> list[str]:
    kind = KINDS[name]
    run, course = run_drill(setup, kind, lambda status: None)
    found = compare_runs(kind, str(run.path), course, undisturbed, exact=True)
    survived = "met: to the bit" if found.survived else f"missed: {'; '.join(found.complaints)[:200]}"
    return [model, kind.summary, str(found.attempts), str(found.steps_lost), found.sameness, survived]


PIECE = Piece(
    name="survival",
    title="Kill and resume",
    text=(
        f"{_STEPS} steps with deterministic kernels (`torch.use_deterministic_algorithms`), beside an undisturbed run. "
        "Target: losses, gradient norms and the files of the last checkpoint equal to the bit."
    ),
    columns=("model", "what happens", "attempts", "steps lost", "beside the undisturbed run", "targets"),
    rows={
        "0.2B": functools.partial(measure, model="0.2B", kinds=("sigkill", "sigterm"), compiled=False),
        "0.2B, compiled": functools.partial(measure, model="0.2B", kinds=("sigkill",), compiled=True),
    },
    tiny={"0.2B": functools.partial(measure, model="0.2B", kinds=("sigkill",), compiled=False)},
    seconds=300,
    row_seconds=240,
)
