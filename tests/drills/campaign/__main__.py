"""``python -m tests.drills.campaign``: hurt real runs by the hundred, and print what came of it as a table.

Each line is the claim of a promise: how often it was tried, and how often it was broken. Exit code 1 if any was.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.engine.data.dataset import prepare_dataset
from scaletrain_cli.spec import DataSpec
from tests.drills.campaign.damages import damage_files, fill_disks
from tests.drills.campaign.elastic import reshard
from tests.drills.campaign.kills import kill
from tests.drills.campaign.requests import request

_LARGEST_LOSS_DIFFERENCE = 1e-4  # relative, in fp32, of sums in another order


@dataclass(frozen=True)
class Line:
    """One of the table; ``broken`` names each case."""

    promise: str
    tried: str
    broken: list[str]


def main() -> int:
    """Run the campaign; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills.campaign", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--damages", type=int, default=200)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="of what is hit, and when")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the table, as a page")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCALETRAIN_RUNS"] = f"{folder}/runs"
        dataset = _dataset(Path(folder))
        began, lines = time.monotonic(), list[Line]()
        for part in _parts(dataset, options, random.Random(options.seed)):
            lines += part()
    minutes = (time.monotonic() - began) / 60
    table = _table(lines)
    print(f"\n{table}\n{minutes:.0f} minutes")
    for line in lines:
        print(*(f"BROKEN {line.promise}: {case}" for case in line.broken), sep="\n", end="")
    if options.write:
        options.write.write_text(_page(table, options.seed, minutes), encoding="utf-8")
    return int(any(line.broken for line in lines))


def _parts(dataset: Path, options: argparse.Namespace, chance: random.Random) -> list[Callable[[], list[Line]]]:
    def kills() -> list[Line]:
        found = kill(dataset, options.kills, chance)
        tried = f"{found.kills} kills, {found.in_saves} of them inside a save, ZeRO 0 to 3"
        return [
            Line("a run that is killed goes on from its newest checkpoint", tried, found.failed_resumes),
            Line("and comes to the same losses, weights and moments, to the bit", tried, found.different),
        ]

    def requests() -> list[Line]:
        found = request(dataset, options.requests, chance)
        tried = f"{found.requests} signals and save files, while compiling, evaluating, saving, training"
        return [
            Line("a run that is asked to leave or to save commits its last step", tried, found.unanswered),
            Line("and loses nothing by it, to the bit", tried, found.different),
        ]

    def damages() -> list[Line]:
        found = damage_files(dataset, options.damages, chance)
        fill_disks(dataset, found)
        tried = (
            f"{found.damages} files cut, flipped or deleted; {found.full_disks} disks full at one write after the other"
        )
        return [
            Line("what is damaged or half written is never restored", tried, found.wrong_restores),
            Line("and is reported by name", tried, found.unreported),
            Line("and the run comes to the same, to the bit", tried, found.different),
        ]

    def elastic() -> list[Line]:
        found = reshard(dataset)
        tried = f"{found.reshards} changes: 4, 2, 3, 4, 1 ranks; ZeRO 3, 1, 2; {found.values:,} values"
        strays = [f"{found.loss:.1e}"] if found.loss > _LARGEST_LOSS_DIFFERENCE else []
        return [
            Line(
                "weights and moments are the same, value by value, right after a change of layout",
                tried,
                found.other_values,
            ),
            Line("and each step trains on the same samples", tried, found.other_samples),
            Line(
                f"and the final loss is that of the undisturbed run (largest difference {found.loss:.0e})",
                tried,
                strays,
            ),
        ]

    return [kills, requests, damages, elastic]


def _dataset(folder: Path) -> Path:
    source = Path(os.__file__).parent
    data = {"source": f"{source}/[a-d]*.py", "tokenizer": {"kind": "bpe", "vocab_size": 512}}
    return prepare_dataset(DataSpec.model_validate(data), folder / "data")


def _table(lines: list[Line]) -> str:
    rows = [f"| {line.promise} | {line.tried} | {len(line.broken)} |" for line in lines]
    return "\n".join(["| promise | tried | broken |", "|---|---|---|", *rows])


def _page(table: str, seed: int, minutes: float) -> str:
    return (
        "# What runs survive\n\n"
        f"Made by `make drills` (seed {seed}, {minutes:.0f} minutes on two cores): real runs of a small model on CPU "
        "ranks, each rank\nthe engine's own entry in a process of its own.\n\n"
        f"{table}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
