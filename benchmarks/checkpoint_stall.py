"""How long a checkpoint holds up the training thread: written in the background, and written in place, in one go.

Trains the demo's model for a few steps twice, with `checkpoint.async` true and false, and reads the run's own events.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RECIPE = str(Path(__file__).parents[1] / "recipes" / "llama-10m-cpu.yaml")
SHORT = ("training.steps=24", "training.schedule.warmup_steps=2", "evaluation.every=0", "checkpoint.every=4")


def train(runs: str, asynchronous: bool) -> Path:
    """One finished run; its directory."""
    settings = [*SHORT, f"checkpoint.async={str(asynchronous).lower()}"]
    sets = [word for setting in settings for word in ("--set", setting)]
    environment = {**os.environ, "SCALETRAIN_RUNS": runs}
    scaletrain = [sys.executable, "-m", "scaletrain_cli"]
    submitted = subprocess.check_output([*scaletrain, "submit", RECIPE, *sets, "--yes", "--json"], env=environment)
    run_id = str(json.loads(submitted)["run_id"])
    subprocess.run([*scaletrain, "status", run_id, "--wait", "600"], env=environment, check=True, stdout=sys.stderr)
    return Path(runs) / run_id


def read(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Print the table."""
    names = f"{'checkpoint.async':<18}{'saves':>6}{'MB':>6}{'decision to commit':>20}"
    print(f"{names}{'thread blocked':>16}{'of a step':>11}")
    with tempfile.TemporaryDirectory() as runs:
        for asynchronous in (True, False):
            run = train(runs, asynchronous)
            saves = [event for event in read(run / "events.jsonl") if event["event"] == "checkpoint"][:-1]
            step = statistics.median(line["step_seconds"] for line in read(run / "metrics.jsonl"))
            whole = statistics.median(event["seconds"] for event in saves)
            blocked = statistics.median(event["blocked_seconds"] for event in saves) if asynchronous else whole
            megabytes = saves[0]["bytes"] / 1e6
            print(
                f"{str(asynchronous).lower():<18}{len(saves):>6}{megabytes:>6.0f}{whole * 1e3:>17.0f} ms"
                f"{blocked * 1e3:>13.0f} ms{blocked / step:>10.0%}"
            )


if __name__ == "__main__":
    main()
