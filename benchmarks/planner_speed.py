"""Measure the planner's CPU time and memory: one layout, searches over 16,384 GPUs with every axis on auto, and the
choice of a cluster of up to 16,384 GPUs.

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
DENSE = ("model.preset=llama-405b", "training.global_batch_size=2048", "model.seq_len=8192")
# The recipe pins ZeRO-3.
ANY_ZERO = ("layout.zero_stage=auto",)
EXPERTS = ("model.preset=deepseek-v3", "training.global_batch_size=16384", "model.seq_len=4096")
CASES = {
    "70B on 128 GPUs, given layout": GIVEN,
    "70B on 128 GPUs, as the engine runs it": (),
    "405B on 16,384 GPUs, every axis": (*DENSE, *EVERYTHING),
    "256 experts on 16,384 GPUs, every axis": (*EXPERTS, *EVERYTHING),
}
# The choice of a cluster within 16,384 GPUs: overrides, and the objective with a deadline in days. With ZeRO-3 alone no
# cluster trains 405B within 60 days.
CHOICES = {
    f"{model}, up to 16,384 GPUs: {wanted}": ((*overrides, *EVERYTHING, *zero), (objective, days))
    for model, overrides, wanted, objective, days, zero in (
        ("405B", DENSE, "cheapest", "cost", 0, ()),
        ("405B", DENSE, "fastest", "time", 0, ()),
        ("405B", DENSE, "cheapest, any ZeRO", "cost", 0, ANY_ZERO),
        ("405B", DENSE, "fewest, 60 days, any ZeRO", "gpus", 60, ANY_ZERO),
        ("405B", DENSE, "cheapest, 60 days, any ZeRO", "cost", 60, ANY_ZERO),
        ("256 experts", EXPERTS, "cheapest", "cost", 0, ()),
        ("256 experts", EXPERTS, "fastest", "time", 0, ()),
        ("256 experts", EXPERTS, "fewest, 60 days", "gpus", 60, ()),
        ("256 experts", EXPERTS, "cheapest, 60 days", "cost", 60, ()),
        ("256 experts", EXPERTS, "cheapest, any ZeRO", "cost", 0, ANY_ZERO),
    )
}


def measure(overrides: tuple[str, ...], choice: tuple[str, int] = ("", 0)) -> tuple[float, float, int]:
    """Return the CPU seconds of a first and a second plan, and the peak memory of the process in bytes.

    ``choice``: objective and deadline in days of a choice of the cluster; empty for a plan on the spec's.
    """
    arguments = [sys.executable, __file__, "--one", choice[0], str(choice[1]), *overrides]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    first, again, memory = json.loads(done.stdout)
    return first, again, memory


def plan_one(objective: str, days: float, overrides: list[str]) -> None:
    """Plan twice and print the measurements; the process of a row runs this."""
    import resource
    import time

    from scaletrain_cli.plan import make_plan
    from scaletrain_cli.plan.search.sizing import size_cluster
    from scaletrain_cli.spec import load_spec

    spec = load_spec(Path(RECIPE), overrides)
    taken = []
    for _ in range(2):
        before = time.process_time()
        if objective:
            size_cluster(spec, objective, deadline_seconds=days * 86400 or None)
        else:
            make_plan(spec)
        taken.append(time.process_time() - before)
    print(json.dumps([*taken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))


def main() -> None:
    """Print the table."""
    print(f"{'plan':<56}{'CPU ms, least':>14}{'most':>8}{'again':>8}{'peak MB':>9}")
    every = {name: (overrides, ("", 0)) for name, overrides in CASES.items()} | CHOICES
    for name, (overrides, choice) in every.items():
        rows = [measure(overrides, choice) for _ in range(RUNS)]
        firsts, agains = [row[0] for row in rows], [row[1] for row in rows]
        memory = max(row[2] for row in rows) / 1e6
        print(f"{name:<56}{min(firsts) * 1e3:>14.1f}{max(firsts) * 1e3:>8.1f}{min(agains) * 1e3:>8.1f}{memory:>9.0f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        plan_one(sys.argv[2], float(sys.argv[3]), sys.argv[4:])
    else:
        main()
