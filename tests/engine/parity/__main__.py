"""``python -m tests.engine.parity [--write PAGE] [WORD ...]``: the parity table, or its rows that hold the words.

Exits with 1 when a row is beyond its limits.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.engine.objectives import layouts as fine_tuning
from tests.engine.parity.comparison import difference
from tests.engine.parity.dataset import write_dataset
from tests.engine.parity.layouts import stray_activations, stray_state_bytes, train_in_layout
from tests.engine.parity.reference import Trained, train_alone
from tests.engine.parity.rows import Row, families, features, grid, in_bf16, rings
from tests.engine.parity.table import HEADER, Line, page
from tests.engine.vision import table as vision


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.parity", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="rows whose names hold all of these; every row without")
    parser.add_argument("--write", type=Path, help="write the table as a page, too")
    options = parser.parse_args()
    sys.stderr = os.fdopen(os.dup(2), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where DeepSpeed talks on every rank
    rows = [
        row
        for row in [*grid(), *rings(), *features(), *families(), *in_bf16()]
        if all(word in row.name for word in options.words)
    ]
    print(HEADER if rows else "")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCALETRAIN_RUNS"] = folder
        lines = list(_measured(rows, write_dataset(Path(folder))))
    tuned = [row for row in fine_tuning.fine_tuning_rows() if all(word in row.name for word in options.words)]
    second: list[str] = []
    wrong_rows: list[str] = []
    print(f"\n{fine_tuning.HEADER}" if tuned else "")
    for row, (text, right) in zip(tuned, fine_tuning.measured(tuned), strict=True):
        print(text, flush=True)
        second.append(text)
        wrong_rows += [] if right else [row.name]
    networks = [row for row in vision.vision_rows() if all(word in vision.name_of(row) for word in options.words)]
    third: list[str] = []
    print(f"\n{vision.HEADER}" if networks else "")
    for network, (text, right) in zip(networks, vision.measured(networks), strict=True):
        print(text, flush=True)
        third.append(text)
        wrong_rows += [] if right else [vision.name_of(network)]
    if options.write is not None:
        text = "\n".join([*page(lines, "make parity"), *fine_tuning.page(second), *vision.page(third)])
        options.write.write_text(text + "\n", encoding="utf-8")
    wrong = [line.row.name for line in lines if not line.right] + wrong_rows
    rows_run = len(lines) + len(tuned) + len(networks)
    print(f"\n{rows_run} rows, {len(wrong)} of them wrong" + "".join(f"\n  {name}" for name in wrong))
    return 1 if wrong or not rows_run else 0


def _measured(rows: list[Row], dataset: Path) -> Iterator[Line]:
    @cache
    def alone(row: Row) -> Trained:
        return train_alone(row.spec(dataset))

    for row in rows:
        started = time.monotonic()
        try:
            run = train_in_layout(row.spec(dataset))
            found = difference(run.trained, alone(row.reference))
            line = Line(row, time.monotonic() - started, found, stray_state_bytes(run), stray_activations(run))
        except Exception as error:  # the other rows are worth their figures
            print(error)
            line = Line(row, time.monotonic() - started, problem=type(error).__name__)
        print(line, flush=True)
        yield line


if __name__ == "__main__":
    sys.exit(main())
