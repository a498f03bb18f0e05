"""``python -m tests.engine.parity [--write PAGE] [WORD ...]``: the parity table, or its rows that hold the words.

Exits with 1 when a row is beyond its limits.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path

from tests.engine.objectives import layouts as fine_tuning
from tests.engine.parity.comparison import BF16, FP32, difference
from tests.engine.parity.dataset import write_dataset
from tests.engine.parity.layouts import stray_activations, stray_state_bytes, train_in_layout
from tests.engine.parity.reference import Trained, train_alone
from tests.engine.parity.rows import STEPS, Row, families, features, grid, in_bf16, rings
from tests.engine.parity.table import ACTIVATIONS, Table
from tests.engine.vision import table as vision


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.parity", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="rows whose names hold all of these; every row without")
    parser.add_argument("--write", type=Path, help="write the table as a page, too")
    options = parser.parse_args()
    sys.stderr = os.fdopen(os.dup(2), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where DeepSpeed talks on every rank
    pages, results = [], list[tuple[str, bool]]()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCALETRAIN_RUNS"] = folder
        for table in (layouts_table(write_dataset(Path(folder))), fine_tuning.TABLE, vision.TABLE):
            rows = [row for row in table.rows if all(word in table.name(row) for word in options.words)]
            if rows:
                print(f"\n{table.header}")
            lines = []
            for line in table.measured(rows):
                print(line[0], flush=True)
                lines.append(line)
            pages.append(table.page(lines))
            results += [(table.name(row), right) for row, (_, right) in zip(rows, lines, strict=True)]
    if options.write is not None:
        options.write.write_text("\n\n".join(pages) + "\n", encoding="utf-8")
    wrong = [name for name, right in results if not right]
    print(f"\n{len(results)} rows, {len(wrong)} of them wrong" + "".join(f"\n  {name}" for name in wrong))
    return 1 if wrong or not results else 0


def layouts_table(dataset: Path) -> Table:
    @cache
    def alone(row: Row) -> Trained:
        return train_alone(row.spec(dataset))

    def figures(row: Row) -> tuple[list[str], bool]:
        run = train_in_layout(row.spec(dataset))
        found, states = difference(run.trained, alone(row.reference)), stray_state_bytes(run)
        activations, limit = stray_activations(run), BF16 if "training.precision=bf16" in row.overrides else FP32
        right = found.within(limit) and states == 0 and abs(activations) <= ACTIVATIONS
        cells = [f"{figure:.1e}" for figure in (found.loss, found.norm, found.weight)]
        return [*cells, f"{states:+d} B" if states else "exact", f"{activations:+.1%}"], right

    rows = [*grid(), *rings(), *features(), *families(), *in_bf16()]
    columns = ("layout", "ranks", "loss", "gradient norm", "weights", "model states", "activations")
    return Table(columns, rows, lambda row: str(row.name), figures, about)


def about(rows: int, wrong: int) -> str:
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "deepspeed"))
    return f"""# Parity: every layout trains the model that one process trains

{rows} layouts of a small model, {STEPS} steps each, against a plain torch loop in one process \
with the same first weights and batches: the largest difference of the loss (nats), of the gradient norm \
(relative), and of any weight at the end. And the bytes of the rank that strays furthest from its plan: model \
states, and what its blocks save of one micro-batch (of mixtures the mean over ranks).

Allowed are {FP32.loss:g} of loss, {FP32.norm:g} of gradient norm and {FP32.weight:g} of a weight in fp32, \
{BF16.loss:g} of loss in bf16, no byte of model states, and {ACTIVATIONS:.0%} of activations. \
Rows beyond that: {wrong or "none"}.

{time.strftime("%Y-%m-%d")}, Python {platform.python_version()}, {versions}, CPU, gloo. `make parity`
"""


if __name__ == "__main__":
    sys.exit(main())
