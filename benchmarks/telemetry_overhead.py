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
from engine_loops.telemetry import TURNS
from engine_speed import QUIET, RECIPE, SMALL, TINY, print_page

from scaletrain_cli import __version__

SIZES: dict[str, tuple[str, ...]] = {
    "tiny": (*SMALL, *TINY),
    "small": SMALL,
    "wide": (*SMALL, "model.hidden_size=512", "model.intermediate_size=1408", "model.num_hidden_layers=2"),
}
ALLOWED = 0.005
_WARM = 2  # rounds


def lines(options: argparse.Namespace) -> Iterator[str]:
    """Yield the results in Markdown."""
    yield "# Overhead of telemetry"
    yield ""
    versions = f"scaletrain {__version__}, " + ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed"))
    yield f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()} ({versions}):"
    yield f"`benchmarks/telemetry_overhead.py {' '.join(sys.argv[1:])}`"
    yield ""
    yield "Steps are trained in turns without, with, with and without telemetry: the median of what the two with it"
    yield "took more than the two without, and its 95 % confidence interval. Then what the noise scale and the norms of"
    yield "layers take more in the steps that measure them, how many steps have one such, and all in all."
    yield ""
    yield "| run | clock | ms a step | telemetry | 95 % | noise scale | one in | layers | one in | in all |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for size in options.size or SIZES:
        for stage in options.zero or (1,):
            yield from rows(size, stage, options)


def rows(size: str, stage: int, options: argparse.Namespace) -> Iterator[str]:
    """Yield a row for the wall clock and one for the time on the processor."""
    steps = len(TURNS) * (options.rounds + _WARM) + 1
    settings = [*SIZES[size], *QUIET, f"layout.zero_stage={stage}", f"training.steps={steps}", *options.set]
    run, spec = made_run(options.recipe, settings)
    found = on_ranks("engine_loops.telemetry", run, spec.world_size)
    measured = found["steps"][_WARM * len(TURNS) :]
    for clock, name in enumerate(("wall", "processor")):
        times = [(turn, each[clock]) for turn, each in measured]
        off = statistics.median(seconds for turn, seconds in times if turn == "off")
        low, middle, high = median_with_interval(added(times))
        total, cells = middle, []
        for part in ("noise", "layers"):
            more, interval = statistics.median(added_by(part, times)) - middle, found["intervals"][part]
            total += max(0.0, more) / interval if interval else 0.0
            cells += [f"{more:+.1%}", str(interval)] if interval else ["-", "-"]
        yield (
            f"| {size}, {spec.world_size} ranks, ZeRO-{stage} | {name} | {1e3 * off:.2f} | {middle:+.2%} | "
            f"{low:+.2%} to {high:+.2%} | {' | '.join(cells)} | "
            f"{total:+.2%}{'' if total <= ALLOWED else ' (over the target)'} |"
        )


def added(times: Sequence[tuple[str, float]]) -> list[float]:
    """Return what the two steps with telemetry of each four took more than the two without."""
    found = []
    for at in range(len(times) - 3):
        turns, seconds = zip(*times[at : at + 4], strict=True)
        if turns == ("off", "on", "on", "off"):
            found.append((seconds[1] + seconds[2]) / (seconds[0] + seconds[3]) - 1)
    return found


def added_by(part: str, times: Sequence[tuple[str, float]]) -> list[float]:
    """Return what each step of a kind took more than the mean of the steps without telemetry before and after it."""
    around = zip(times, times[1:], times[2:], strict=False)
    return [2 * mine / (before + after) - 1 for (_, before), (turn, mine), (_, after) in around if turn == part]


def median_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median between the bounds of its 95 % confidence interval, which are order statistics."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    middle = (len(values) - 1) / 2
    low, high = max(0, int(middle - half)), min(len(values) - 1, int(middle + half + 1))
    return ordered[low], statistics.median(ordered), ordered[high]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=100, help="of 24 steps")
    parser.add_argument("--size", choices=list(SIZES), action="append", help="again for more (default all)")
    parser.add_argument("--zero", type=int, action="append", help="ZeRO stage, again for more (default 1)")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="the spec of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the run's spec")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the table as a page, too")
    options: Any = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCALETRAIN_RUNS"] = str(Path(folder) / "runs")
        print_page(lines(options), options.write)


if __name__ == "__main__":
    main()
