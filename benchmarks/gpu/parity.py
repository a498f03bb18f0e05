"""Losses on this device beside those of one plain torch loop on the CPU in fp32: the reference of ``make parity``."""

from __future__ import annotations

import functools

from engine_loops.gpu_table import first_line
from engine_loops.start import train_here

from gpu.piece import Piece, Result, Setting, verdict
from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.launch.status import run_status
from scaletrain_cli.rundir.journal import read_metrics


def measure(setting: Setting, name: str, precision: str, compiled: bool) -> Result:
    """Return one line: the largest difference of the loss (nats) and of the gradient norm (relative) over all steps."""
    from tests.engine.parity.comparison import BF16, FP32
    from tests.engine.parity.dataset import write_dataset
    from tests.engine.parity.reference import train_alone
    from tests.engine.parity.rows import STEPS, Row

    dataset = write_dataset(setting.folder)
    settings = (
        *(f"cluster.gpu={setting.gpu or 'cpu'}", f"training.precision={precision}"),
        f"training.compile={str(compiled).lower()}",
    )
    try:
        run = train_here(Row(zero=0 if precision == "fp32" else 1, overrides=settings).spec(dataset))
    except ScaletrainError as error:
        return Result([[name, f"not run: {first_line(error)}"]])
    rows = read_metrics(run)
    if len(rows) < STEPS:
        return Result([[name, f"failed: {run_status(run).why[:160]}"]], failed=True)
    alone = train_alone(Row().spec(dataset))
    pairs = list(zip(rows, alone.losses, alone.norms, strict=True))
    loss = max(abs(row["loss"] - reference) for row, reference, _ in pairs)
    norm = max(abs(row["grad_norm"] / reference - 1) for row, _, reference in pairs)
    limit = FP32 if precision == "fp32" else BF16
    within = verdict(loss=loss <= limit.loss, norm=None if precision != "fp32" else norm <= limit.norm)
    line = [name, str(STEPS), f"{loss:.1e}", f"{limit.loss:.0e}", f"{norm:.1e}", f"{limit.norm:.0e}", within]
    return Result([line], {"loss": loss, "norm": norm})


def _row(precision: str, compiled: bool = False) -> dict[str, functools.partial[Result]]:
    name = f"{precision}, compiled" if compiled else precision
    return {name: functools.partial(measure, name=name, precision=precision, compiled=compiled)}


PIECE = Piece(
    name="parity",
    title="Losses beside one plain process on the CPU in fp32",
    text=(
        "The model, data and reference of [the parity table](parity.md), trained on this device. The limits of bf16 "
        "also apply to fp8."
    ),
    columns=("precision", "steps", "loss off by, nats", "limit", "gradient norm off by", "limit", "targets"),
    rows={**_row("fp32"), **_row("bf16"), **_row("fp8"), **_row("fp32", True), **_row("bf16", True)},
    tiny={**_row("fp32"), **_row("fp8")},
    seconds=180,
    row_seconds=90,
)
