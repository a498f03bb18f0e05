"""CPU time of starting the command line, compared with an empty interpreter and `import torch`.

CPU (user + system), not wall time, so that a busy machine does not change the figures much. Each row is the median of
nine runs, taken in turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

RUNS = 9
RECIPE = str(Path(__file__).parents[1] / "recipes" / "llama-10m-cpu.yaml")
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "scaletrain --help": ["-m", "scaletrain_cli", "--help"],
    "scaletrain validate": ["-m", "scaletrain_cli", "validate", RECIPE],
    "scaletrain plan": ["-m", "scaletrain_cli", "plan", RECIPE],
    "python -c 'import torch'": ["-c", "import torch"],
}


def cpu_seconds(arguments: list[str]) -> float:
    """Return user and system time of one run of the interpreter, including its children."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Print the table."""
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(RUNS):
        for name, arguments in COMMANDS.items():
            taken[name].append(cpu_seconds(arguments))
    print(f"{'command':<26}{'CPU ms, median':>16}{'least':>8}{'most':>8}")
    for name, seconds in taken.items():
        median, least, most = statistics.median(seconds), min(seconds), max(seconds)
        print(f"{name:<26}{median * 1e3:>16.0f}{least * 1e3:>8.0f}{most * 1e3:>8.0f}")


if __name__ == "__main__":
    main()
