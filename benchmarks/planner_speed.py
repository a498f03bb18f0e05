"""Measure the planner's CPU time and memory: one layout, and searches over 16,384 GPUs with every axis on auto.

Each row runs three times in a process of its own; only the arithmetic is timed, after the imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

RUNS = 3
RECIPE = str(Path(__file__).parents[1] / "recipes" / "llama-70b-spot.yaml")
GIVEN = (
    "layout.tensor_parallel=8",
    "layout.pipeline_parallel=4",
    "layout.sequence_parallel=1",
    "layout.zero_stage=1",
    "layout.activation_checkpointing=full",
    "training.micro_batch_size=1",
)
EVERYTHING = (
    "cluster.nodes=2048",
    "planner.search=everything",
    "layout.virtual_pipeline=auto",
    "layout.context_parallel=auto",
    "layout.offload=auto",
)
CASES = {
    "70B on 128 GPUs, given layout": GIVEN,
    "70B on 128 GPUs, as the engine runs it": (),
    "405B on 16,384 GPUs, every axis": (
        "model.preset=llama-405b",
        "training.global_batch_size=2048",
        "model.seq_len=8192",
        *EVERYTHING,
    ),
    "256 experts on 16,384 GPUs, every axis": (
        "model.preset=deepseek-v3",
        "training.global_batch_size=16384",
        "model.seq_len=4096",
        *EVERYTHING,
    ),
}


def measure(overrides: tuple[str, ...]) -> tuple[float, float, int]:
    """Return the CPU seconds of a first and a second plan, and the peak memory of the process in bytes."""
    arguments = [sys.executable, __file__, "--one", *overrides]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    first, again, memory = json.loads(done.stdout)
    return first, again, memory


def plan_one(overrides: list[str]) -> None:
    """Plan once and print the measurements; the process of a row runs this."""
    import resource
    import time

    from scaletrain_cli.plan import make_plan
    from scaletrain_cli.spec import load_spec

    spec = load_spec(Path(RECIPE), overrides)
    taken = []
    for _ in range(2):
        before = time.process_time()
        make_plan(spec)
        taken.append(time.process_time() - before)
    print(json.dumps([*taken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))


def main() -> None:
    """Print the table."""
    print(f"{'plan':<42}{'CPU ms, least':>14}{'most':>8}{'again':>8}{'peak MB':>9}")
    for name, overrides in CASES.items():
        rows = [measure(overrides) for _ in range(RUNS)]
        firsts, agains = [row[0] for row in rows], [row[1] for row in rows]
        memory = max(row[2] for row in rows) / 1e6
        print(f"{name:<42}{min(firsts) * 1e3:>14.1f}{max(firsts) * 1e3:>8.1f}{min(agains) * 1e3:>8.1f}{memory:>9.0f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        plan_one(sys.argv[2:])
    else:
        main()
