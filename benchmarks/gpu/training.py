"""Step time, MFU and memory beside the plan: the first rows by size and compilation, then the variants."""

from __future__ import annotations

import functools

from engine_loops.gpu_table import Outcome, first_line, recipe_of, train_row

from gpu.piece import Piece, Result, Setting, verdict
from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.calibration import keep_measurement, measure_run, read_measurements
from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.rundir.measured import Figure
from scaletrain_cli.rundir.record import read_record

LEAST_MFU = 0.5
_MFU_OF = ("1B", "8B")  # the models of that target
MOST_TIME_OFF, MOST_MEMORY_OFF = 0.10, 0.05
_COMPILED, _PLAIN = "training.compile=true", "training.compile=false"
_COLUMNS = (
    *("row", "states", "recomputed", "loss", "batch"),
    *("step ms: plan", "calibrated", "run", "off by"),
    *("MFU: plan", "run", "of the ceiling"),
    *("allocated GB: plan", "run", "off by", "reserved GB: plan", "run", "targets"),
)


def measure(setting: Setting, name: str, model: str, settings: tuple[str, ...]) -> Result:
    """Return one line: a run of ``model`` with its settings beside its plan.

    The plan is also corrected by the rows before (the product's calibration); then this row is kept for later ones.
    """
    outcome = train_row(recipe_of(model, setting.gpu, setting.folder), settings)
    if outcome.plan is None or outcome.run is None or outcome.problem:
        return Result([[name, outcome.states, f"not measured: {outcome.problem}"]], failed=outcome.run is not None)
    planned, layout = outcome.plan.time, outcome.plan.layout
    calibrated = _calibrated_seconds(outcome)
    reference = planned.step if calibrated is None else calibrated
    time_off = reference / outcome.seconds - 1
    allocated, reserved = ((outcome.memory or {}).get(kind) for kind in ("allocated", "reserved"))
    memory_off = allocated.planned / allocated.measured - 1 if allocated else None
    at_target = model in _MFU_OF and not settings[1:] and settings[0] == _COMPILED
    line = [
        *(name, outcome.states, layout.activation_checkpointing, layout.cross_entropy),
        f"{layout.micro_batch_size} × {layout.gradient_accumulation_steps}",
        *(_milliseconds(planned.step), _milliseconds(calibrated), _milliseconds(outcome.seconds), f"{time_off:+.1%}"),
        *(_share(planned.mfu if outcome.mfu is not None else None), _share(outcome.mfu)),
        _share(_of_ceiling(outcome, setting.ceiling)),
        *_gigabytes(allocated),
        "-" if memory_off is None else f"{memory_off:+.1%}",
        *_gigabytes(reserved),
        verdict(
            MFU=None if outcome.mfu is None or not at_target else outcome.mfu >= LEAST_MFU,
            time=None if calibrated is None or setting.gpu is None else abs(time_off) <= MOST_TIME_OFF,
            memory=None if memory_off is None else abs(memory_off) <= MOST_MEMORY_OFF,
        ),
    ]
    return Result([line], {"seconds": outcome.seconds, "mfu": outcome.mfu})


def _calibrated_seconds(outcome: Outcome) -> float | None:
    """Return the planned seconds of a step corrected by earlier rows, None without one; keep this row for the next."""
    assert outcome.run is not None
    spec = read_record(outcome.run).spec
    plan = make_plan(spec, read_measurements(spec))
    try:
        keep_measurement(measure_run(outcome.run))
    except UsageError as error:
        print(f"not kept for calibration: {first_line(error)}")
    return plan.time.step if plan.calibration is not None else None


def _of_ceiling(outcome: Outcome, ceiling: float | None) -> float | None:
    """Return model FLOP/s over those of the measured matrix product."""
    if outcome.mfu is None or ceiling is None or outcome.run is None:
        return None
    spec = read_record(outcome.run).spec
    return outcome.mfu * find_accelerator(spec.cluster).peak_flops(spec.training.precision) / ceiling


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.0f}" if seconds >= 1 else f"{seconds * 1e3:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _gigabytes(figure: Figure | None) -> list[str]:
    if figure is None:
        return ["-", "-"]
    return [f"{figure.planned / 1e9:.2f}", f"{figure.measured / 1e9:.2f}"]


def _row(name: str, model: str, *settings: str) -> dict[str, functools.partial[Result]]:
    return {name: functools.partial(measure, name=name, model=model, settings=settings)}


STEPS = Piece(
    name="steps",
    title="Step time, MFU and memory beside the plan",
    text=(
        "Targets: MFU of at least 50 % for compiled 1B and 8B at 4,096 tokens, allocated memory within 5 % of the plan,"
        " time within 10 % of the plan after calibration by the rows before it. MFU is by the data sheet's dense peak. "
        "Off by: plan over run."
    ),
    columns=_COLUMNS,
    rows={
        **_row("1B, compiled", "1B", _COMPILED),
        **_row("8B, compiled", "8B", _COMPILED),
        **_row("1B", "1B", _PLAIN),
        **_row("8B", "8B", _PLAIN),
        **_row("3B, compiled", "3B", _COMPILED),
        **_row("0.2B, compiled", "0.2B", _COMPILED),
        **_row("0.2B", "0.2B", _PLAIN),
    },
    tiny={**_row("1B", "1B", _PLAIN), **_row("8B", "8B", _PLAIN)},
    seconds=540,
    row_seconds=180,
)
_RECOMPUTED = "layout.activation_checkpointing"
VARIANTS = Piece(
    name="variants",
    title="Offload, optimizers, precision, loss and recomputation",
    text="As above; each row is a run with one setting changed.",
    columns=_COLUMNS,
    rows={
        **_row("1B, offloaded optimizer", "1B", _COMPILED, "layout.offload=optimizer"),
        **_row("3B, 8-bit AdamW", "3B", _COMPILED, "training.optimizer.name=adamw_8bit", "training.grad_dtype=bf16"),
        **_row("1B, fp8", "1B", _COMPILED, "training.precision=fp8"),
        **_row("1B, all logits at once", "1B", _COMPILED, "training.cross_entropy=whole"),
        **_row("1B, logits in parts", "1B", _COMPILED, "training.cross_entropy=chunked"),
        **_row("1B, Liger's loss", "1B", _COMPILED, "training.cross_entropy=liger"),
        **_row("1B, selective recomputation", "1B", _COMPILED, f"{_RECOMPUTED}=selective"),
        **_row("1B, full recomputation", "1B", _COMPILED, f"{_RECOMPUTED}=full"),
        **_row("1B, Muon", "1B", _COMPILED, "training.optimizer.name=muon"),
        **_row("8B, fp8", "8B", _COMPILED, "training.precision=fp8"),
        **_row("1B, offloaded activations", "1B", _COMPILED, f"{_RECOMPUTED}=full", "layout.activation_offload=true"),
        **_row("1B, full recomputation, not compiled", "1B", _PLAIN, f"{_RECOMPUTED}=full"),
    },
    tiny=_row("1B, Liger's loss", "1B", _PLAIN, "training.cross_entropy=liger"),
    seconds=480,
    row_seconds=120,
)
