"""The cost of telemetry to the ranks of a run: steps with it beside steps without it, in turns in the same processes.

``python benchmarks/telemetry_overhead.py`` prints a table for several sizes. What the node agent does for it, which is
another process, is not in it. Target: 0.5 % of the time of a step.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine_loops.start import made_run, on_ranks
from engine_speed import QUIET, RECIPE, SMALL, TINY

from scaletrain_cli import __version__

# Title, overrides, and steps of a block: a multiple of 10, because the noise scale is measured every 10th step.
SIZES: dict[str, tuple[tuple[str, ...], int]] = {
    "tiny": ((*SMALL, *TINY), 50),
    "small": (SMALL, 10),
    "wide": ((*SMALL, "model.hidden_size=512", "model.intermediate_size=1408", "model.num_hidden_layers=2"), 10),
}
ALLOWED = 0.005


def lines(options: argparse.Namespace) -> Iterator[str]:
    """Yield the results in Markdown."""
    yield "# Overhead of telemetry"
    yield ""
    versions = f"scaletrain {__version__}, " + ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed"))
    yield f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()} ({versions}):"
    yield f"`benchmarks/telemetry_overhead.py {' '.join(sys.argv[1:])}`"
    yield ""
    yield "Each block of steps with telemetry over the mean of the blocks without it before and after: the median, and"
    yield "half of the blocks. Then: a step in which layers are measured, how many steps have one such, and all in all."
    yield ""
    yield "| run | clock | ms a step | telemetry | half of the blocks | a step with layers | one in | in all |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for size in options.size or SIZES:
        for stage in options.zero or (1,):
            yield from rows(size, stage, options)


def rows(size: str, stage: int, options: argparse.Namespace) -> Iterator[str]:
    """Yield a row for the wall clock and one for the time on the processor."""
    overrides, block = SIZES[size]
    steps = 4 * block * options.rounds + 1
    settings = [*overrides, *QUIET, f"layout.zero_stage={stage}", f"training.steps={steps}", *options.set]
    run, spec = made_run(options.recipe, settings)
    found = on_ranks("engine_loops.telemetry", run, spec.world_size, str(block))
    blocks = found["blocks"][4:]  # the first round warms up
    for clock, name in enumerate(("wall", "processor")):
        off = statistics.median(each[clock] for turn, each in blocks if turn == "off") / block
        low, middle, high = statistics.quantiles(added(blocks, "on", clock), n=4)
        with_layers = statistics.median(added(blocks, "layers", clock))
        total = middle + max(0.0, with_layers - middle) / found["interval"]
        yield (
            f"| {size}, {spec.world_size} ranks, ZeRO-{stage} | {name} | {1e3 * off:.2f} | {middle:+.2%} | "
            f"{low:+.2%} to {high:+.2%} | {with_layers:+.1%} | {found['interval']} | "
            f"{total:+.2%}{'' if total <= ALLOWED else ' (over the target)'} |"
        )


def added(blocks: Sequence[tuple[str, list[float]]], turn: str, clock: int) -> list[float]:
    """Return what each block of a kind took more than the mean of the blocks without telemetry around it."""
    found = []
    for before, (name, mine), after in zip(blocks, blocks[1:], blocks[2:], strict=False):
        if name == turn:
            found.append(mine[clock] / ((before[1][clock] + after[1][clock]) / 2) - 1)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=30, help="of four blocks")
    parser.add_argument("--size", choices=list(SIZES), action="append", help="again for more (default all)")
    parser.add_argument("--zero", type=int, action="append", help="ZeRO stage, again for more (default 1)")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="the spec of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the run's spec")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the table as a page, too")
    options: Any = parser.parse_args()
    kept = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCALETRAIN_RUNS"] = str(Path(folder) / "runs")
        for line in lines(options):
            print(line, flush=True)
            kept.append(line)
    if options.write is not None:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text("\n".join(kept) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
