"""Compare with the plan what one rank of a large run sends and allocates in a step: 8B and 70B, 8 to 4,096 ranks.

Each rank runs the engine and DeepSpeed on fake tensors in a process of its own; no GPU and no other rank is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version

from fake_ranks.cases import Case, cases, planned, planned_bytes
from fake_ranks.rank import RankStep, train_rank

AXES = ("data", "tensor", "sequence", "pipeline")
HEAD = ["model", "ranks", "layout", "stage", "memory, GB", "plan, GB", ""]
HEAD += [f"{axis}, MB" for axis in AXES] + ["", "data beside compute", "waits"]


def step_of(case: Case, stage: int) -> tuple[RankStep, float]:
    """Return what a rank of a stage measured, and the seconds that took."""
    spec, plan = planned(case)
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints the place of every rank in a pipeline
        step = train_rank(spec, plan.layout, stage)
    return step, time.perf_counter() - began


def row(case: Case, stage: int, step: RankStep) -> list[str]:
    """Return the row of a rank in the table."""
    spec, plan = planned(case)
    memory, sent = plan.memory.by_stage[stage].allocated, step.bytes_by_axis()
    wanted = planned_bytes(spec, plan.layout, stage)
    wrong = {axis: wanted.get(axis, 0) - sent.get(axis, 0) for axis in {*sent, *wanted}}
    verdict = ", ".join(f"{axis} {wrong[axis] / max(1, sent.get(axis, 0)):+.3%}" for axis in wrong if wrong[axis])
    beside = step.beside_products("data") / sent["data"] if sent.get("data") else 0.0
    return [
        case.model,
        f"{case.ranks:,}",
        str(case),
        f"{stage + 1} of {case.pipeline}",
        f"{step.peak / 1e9:.2f}",
        f"{memory / 1e9:.2f}",
        f"{memory / step.peak - 1:+.1%}",
        *(f"{sent[axis] / 1e6:,.1f}" if sent.get(axis) else "" for axis in AXES),
        verdict or "exact",
        f"{beside:.0%}",
        str(step.reads),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose model, ranks and layout contain this text")
    parser.add_argument("--phases", action="store_true", help="print the peak of each phase, and the planned parts")
    arguments = parser.parse_args()
    chosen = [each for each in cases() if arguments.only in f"{each.model} {each.ranks} {each}"]
    ranks = [(case, stage) for case in chosen for stage in sorted({0, case.pipeline // 2, case.pipeline - 1})]
    print(f"Python {platform.python_version()}, torch {version('torch')}, deepspeed {version('deepspeed')}\n")
    print(f"| {' | '.join(HEAD)} |\n|{'-|' * len(HEAD)}", flush=True)
    context = multiprocessing.get_context("fork")
    for case, stage in ranks:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                step, seconds = pool.submit(step_of, case, stage).result()
            except Exception as error:
                print(f"{case}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
        print(f"| {' | '.join(row(case, stage, step))} |", flush=True)
        if arguments.phases:
            _, plan = planned(case)
            print(f"  {seconds:.1f} s, held {step.states}, peaks {step.peaks}\n  {plan.memory.by_stage[stage]}")


if __name__ == "__main__":
    main()
