"""``python -m tests.drills.campaign [PART ...]``: inject hundreds of faults into real runs, and print tables.

Each line is a claim with the number of trials and of violations. The exit code is 1 if there are violations.
"""

import argparse
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.spec import DataSpec
from tests.drills.campaign.damages import damage_files, fill_disks
from tests.drills.campaign.elastic import reshard
from tests.drills.campaign.forked_attempts import ForkedRun
from tests.drills.campaign.kills import FINE_TUNING, OPTIMIZERS, ZERO_STAGES, Kills, kill, text_specs, vision_specs
from tests.drills.campaign.requests import request
from tests.drills.training_runs import drill_spec
from tests.drills.vision_runs import draw_pairs
from tests.prepared_text import prepared_text

_SHOWN = 20  # violations of a claim
_LARGEST_LOSS_DIFFERENCE = 1e-4  # relative, in fp32, of sums in another order


@dataclass(frozen=True)
class Line:
    """A line of the table; ``broken`` names each violation."""

    promise: str
    tried: str
    broken: list[str]


@dataclass(frozen=True)
class Section:
    """A part of the page: a table, the seed of its faults and the minutes that it took."""

    part: str
    lines: list[Line]
    seed: int
    minutes: float

    def __str__(self) -> str:
        rows = [f"| {line.promise} | {line.tried} | {len(line.broken)} |" for line in self.lines]
        took = f"Seed {self.seed}, {self.minutes:.0f} minutes."
        return "\n".join(
            [f"## {self.part}", "", took, "", "| claim | trials | violations |", "|---|---|---|", *rows, ""]
        )


def main() -> int:
    """Run the campaign and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills.campaign", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"all without; of {', '.join(PARTS)}")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--fine-tuning-kills", type=int, default=40)
    parser.add_argument("--optimizer-kills", type=int, default=40)
    parser.add_argument("--vision-kills", type=int, default=40)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--damages", type=int, default=200)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="seed of faults and times")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the tables to their sections of a page")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. Parts: {', '.join(PARTS)}")
    print(f"seed {options.seed}", flush=True)
    sections: list[Section] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCALETRAIN_RUNS"] = f"{folder}/runs"
        dataset = _dataset(Path(folder))
        for part in options.parts or PARTS:
            began = time.monotonic()
            lines = PARTS[part](dataset, options, random.Random(f"{options.seed} {part}"))
            sections.append(Section(part, lines, options.seed, (time.monotonic() - began) / 60))
            print(f"\n{sections[-1]}", flush=True)
    broken = [line for each in sections for line in each.lines if line.broken]
    for line in broken:
        print(*(f"BROKEN {line.promise}: {case}" for case in line.broken[:_SHOWN]), sep="\n")
        print(f"{len(line.broken)} violations: {line.promise}")
    if options.write:
        options.write.write_text(with_sections(options.write.read_text(encoding="utf-8"), sections), encoding="utf-8")
    return int(bool(broken))


def with_sections(page: str, sections: list[Section]) -> str:
    """Return the page with new sections; those of parts that did not run are kept."""
    head, *old = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    by_part = {text.splitlines()[0].removeprefix("## "): text.rstrip() + "\n" for text in old}
    by_part |= {section.part: str(section) for section in sections}
    return "\n".join([head.rstrip() + "\n", *(by_part[part] for part in PARTS if part in by_part)])


def _kills(dataset: Path, options: argparse.Namespace, chance: random.Random) -> list[Line]:
    found = kill(text_specs(dataset, ZERO_STAGES), options.kills, chance)
    return _lines_of_kills("a killed run", "ZeRO 0 to 3", found)


def _fine_tuning_kills(dataset: Path, options: argparse.Namespace, chance: random.Random) -> list[Line]:
    found = kill(text_specs(dataset, FINE_TUNING), options.fine_tuning_kills, chance)
    return _lines_of_kills("fine-tuning", ", ".join(FINE_TUNING), found)


def _optimizer_kills(dataset: Path, options: argparse.Namespace, chance: random.Random) -> list[Line]:
    found = kill(text_specs(dataset, OPTIMIZERS), options.optimizer_kills, chance)
    states = "losses, weights, moments and outer states"
    return _lines_of_kills("a killed run", "; ".join(OPTIMIZERS), found, states)


def _vision_kills(dataset: Path, options: argparse.Namespace, chance: random.Random) -> list[Line]:
    specs = vision_specs(draw_pairs(dataset.parent / "shapes"))
    found = kill(specs, options.vision_kills, chance)
    states = "losses, weights, moments, statistics and averages"
    return _lines_of_kills("training on images and pairs", "; ".join(specs), found, states)


def _lines_of_kills(subject: str, kinds: str, found: Kills, states: str = "losses, weights and moments") -> list[Line]:
    tried = f"{found.kills} kills, {found.in_saves} of them inside a save: {kinds}"
    return [
        Line(f"{subject} resumes from its latest checkpoint", tried, found.failed_resumes),
        Line(f"its {states} then equal an undisturbed run's bit for bit", tried, found.different),
    ]


def _requests(dataset: Path, options: argparse.Namespace, chance: random.Random) -> list[Line]:
    found = request(dataset, options.requests, chance)
    tried = f"{found.requests} signals and save files, while compiling, evaluating, saving, training"
    return [
        Line("a run that receives a signal or a save request commits its last step", tried, found.unanswered),
        Line("it then continues bit-identically to an undisturbed run", tried, found.different),
    ]


def _damages(dataset: Path, options: argparse.Namespace, chance: random.Random) -> list[Line]:
    undisturbed = ForkedRun.create(drill_spec(dataset, checkpoint__keep=4))
    undisturbed.attempts_to_end()
    found = damage_files(undisturbed.run, options.damages, chance)
    fill_disks(dataset, found)
    tried = f"{found.damages} files cut, flipped or deleted; {found.full_disks} full disks, one per write of a save"
    return [
        Line("a damaged or incomplete checkpoint is never restored", tried, found.wrong_restores),
        Line("it is reported by name", tried, found.unreported),
        Line("the run then ends bit-identically to an undisturbed run", tried, found.different),
    ]


def _elastic(dataset: Path, options: argparse.Namespace, chance: random.Random) -> list[Line]:
    found = reshard(dataset)
    chains = "4, 2, 3, 4, 1 ranks; 2, 1, 4 context ranks; shards over 2, 4, 2; ZeRO 3, 1, 2"
    tried = f"{found.reshards} changes: {chains}; {found.values:,} values"
    strays = [f"{found.loss:.1e}"] if found.loss > _LARGEST_LOSS_DIFFERENCE else []
    return [
        Line("after a change of layout, weights and moments are equal value by value", tried, found.other_values),
        Line("each step then trains on the same samples", tried, found.other_samples),
        Line(f"the final loss is that of the undisturbed run (largest difference {found.loss:.0e})", tried, strays),
    ]


PARTS: dict[str, Callable[[Path, argparse.Namespace, random.Random], list[Line]]] = {
    "kills": _kills,
    "fine-tuning-kills": _fine_tuning_kills,
    "optimizer-kills": _optimizer_kills,
    "vision-kills": _vision_kills,
    "requests": _requests,
    "damages": _damages,
    "elastic": _elastic,
}


def _dataset(folder: Path) -> Path:
    source = Path(os.__file__).parent
    data = {"source": f"{source}/[a-d]*.py", "tokenizer": {"kind": "bpe", "vocab_size": 512}}
    return prepared_text(DataSpec.model_validate(data), folder / "data")


if __name__ == "__main__":
    sys.exit(main())
