"""The cost of looking for silent corruption: steps with a check of the state beside steps without one, in turns.

``python benchmarks/state_check.py`` prints a table for several sizes and ZeRO stages. Target: 0.5 % of the time of a
step, which the engine keeps by the number of steps between two checks.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine_loops.checksums import TURNS, WARM_UP
from engine_loops.start import made_run, on_ranks
from engine_speed import QUIET, RECIPE, print_page
from telemetry_overhead import ALLOWED, SIZES, added, median_with_interval

from scaletrain_cli import __version__


def lines(options: argparse.Namespace) -> Iterator[str]:
    """Yield the results in Markdown."""
    yield "# The cost of looking for silent corruption"
    yield ""
    versions = f"scaletrain {__version__}, " + ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed"))
    yield f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()} ({versions}):"
    yield f"`benchmarks/state_check.py {' '.join(sys.argv[1:])}`"
    yield ""
    yield "Steps are trained in turns without, with, with and without a check: the median of what the two with one took"
    yield "more, and its 95 % confidence interval. Then the steps between two checks that the engine chose, and what"
    yield "the checks take in all."
    yield ""
    yield "| run | ms a step | a check | 95 % | one in | in all |"
    yield "|---|---:|---:|---:|---:|---:|"
    for size in options.size or SIZES:
        for stage in options.zero or (0, 1, 3):
            settings = [*SIZES[size], *QUIET, f"layout.zero_stage={stage}", "guard.checksum=auto"]
            run, spec = made_run(RECIPE, [*settings, f"training.steps={WARM_UP + 1 + len(TURNS) * options.rounds}"])
            found = on_ranks("engine_loops.checksums", run, spec.world_size)
            times = [(turn, seconds) for turn, (seconds, _) in found["steps"]]
            off = statistics.median(seconds for turn, seconds in times if turn == "off")
            low, middle, high = median_with_interval(added(times))
            total = max(0.0, middle) / max(1, found["chosen"])
            yield (
                f"| {size}, {spec.world_size} ranks, ZeRO-{stage} | {1e3 * off:.2f} | {middle:+.2%} | "
                f"{low:+.2%} to {high:+.2%} | {found['chosen']} | "
                f"{total:.2%}{'' if total <= ALLOWED else ' (over the target)'} |"
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=100, help="of four steps")
    parser.add_argument("--size", choices=list(SIZES), action="append", help="again for more (default all)")
    parser.add_argument("--zero", type=int, action="append", help="ZeRO stage, again for more (default 0, 1 and 3)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the table as a page, too")
    options: Any = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCALETRAIN_RUNS"] = str(Path(folder) / "runs")
        print_page(lines(options), options.write)


if __name__ == "__main__":
    main()
