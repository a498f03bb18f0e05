"""``python -m tests.drills.campaign``: inject hundreds of faults into real runs, and print the results as a table.

Each line is a claim with the number of trials and of violations. The exit code is 1 if there are violations.
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

from scaletrain_cli.spec import DataSpec
from tests.drills.campaign.damages import damage_files, fill_disks
from tests.drills.campaign.elastic import reshard
from tests.drills.campaign.kills import FINE_TUNING, kill
from tests.drills.campaign.requests import request
from tests.prepared_text import prepared_text

_LARGEST_LOSS_DIFFERENCE = 1e-4  # relative, in fp32, of sums in another order


@dataclass(frozen=True)
class Line:
    """A line of the table; ``broken`` names each violation."""

    promise: str
    tried: str
    broken: list[str]


def main() -> int:
    """Run the campaign and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills.campaign", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--fine-tuning-kills", type=int, default=40)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--damages", type=int, default=200)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="seed of faults and times")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table as a page")
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
            Line("a killed run resumes from its latest checkpoint", tried, found.failed_resumes),
            Line("its losses, weights and moments then equal an undisturbed run's bit for bit", tried, found.different),
        ]

    def fine_tuning_kills() -> list[Line]:
        found = kill(dataset, options.fine_tuning_kills, chance, FINE_TUNING)
        tried = f"{found.kills} kills, {found.in_saves} of them inside a save: {', '.join(FINE_TUNING)}"
        return [
            Line("fine-tuning resumes from its latest checkpoint", tried, found.failed_resumes),
            Line("its losses, weights and moments then equal an undisturbed run's bit for bit", tried, found.different),
        ]

    def requests() -> list[Line]:
        found = request(dataset, options.requests, chance)
        tried = f"{found.requests} signals and save files, while compiling, evaluating, saving, training"
        return [
            Line("a run that receives a signal or a save request commits its last step", tried, found.unanswered),
            Line("it then continues bit-identically to an undisturbed run", tried, found.different),
        ]

    def damages() -> list[Line]:
        found = damage_files(dataset, options.damages, chance)
        fill_disks(dataset, found)
        tried = f"{found.damages} files cut, flipped or deleted; {found.full_disks} full disks, one per write of a save"
        return [
            Line("a damaged or incomplete checkpoint is never restored", tried, found.wrong_restores),
            Line("it is reported by name", tried, found.unreported),
            Line("the run then ends bit-identically to an undisturbed run", tried, found.different),
        ]

    def elastic() -> list[Line]:
        found = reshard(dataset)
        tried = f"{found.reshards} changes: 4, 2, 3, 4, 1 ranks; ZeRO 3, 1, 2; {found.values:,} values"
        strays = [f"{found.loss:.1e}"] if found.loss > _LARGEST_LOSS_DIFFERENCE else []
        return [
            Line(
                "after a change of layout, weights and moments are equal value by value",
                tried,
                found.other_values,
            ),
            Line("each step then trains on the same samples", tried, found.other_samples),
            Line(
                f"the final loss is that of the undisturbed run (largest difference {found.loss:.0e})",
                tried,
                strays,
            ),
        ]

    return [kills, fine_tuning_kills, requests, damages, elastic]


def _dataset(folder: Path) -> Path:
    source = Path(os.__file__).parent
    data = {"source": f"{source}/[a-d]*.py", "tokenizer": {"kind": "bpe", "vocab_size": 512}}
    return prepared_text(DataSpec.model_validate(data), folder / "data")


def _table(lines: list[Line]) -> str:
    rows = [f"| {line.promise} | {line.tried} | {len(line.broken)} |" for line in lines]
    return "\n".join(["| claim | trials | violations |", "|---|---|---|", *rows])


def _page(table: str, seed: int, minutes: float) -> str:
    return (
        "# Recovery from faults\n\n"
        f"Made by `make drills` (seed {seed}, {minutes:.0f} minutes on two cores): real runs of a small model on CPU "
        "ranks, each\nrank an engine process.\n\n"
        f"{table}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
