"""Days that a run takes on recorded spot capacity: synchronous, with local SGD, and with groups that come and go.

``python benchmarks/local_sgd_goodput.py TRACES`` prints a table; TRACES is the JSON of several traces of
skypilot-org/spot-traces, with ``files``: name to trace. Each of four nodes is a group. Traces of one node in several
zones are combined: a group in each zone. The first two columns are what ``scaletrain plan --trace`` simulates: the run
needs all nodes at once, as the engine does. The last one is a bound that the engine does not reach: groups that train
whenever their node is there, at the pace of a quarter of the run each, and lose half an outer interval when it goes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.reliability.spot_trace import SpotTrace, simulate
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.loading import load_spec

GROUPS = 4
_RECIPE = Path(__file__).parent.parent / "recipes" / "llama-7b-h100.yaml"
_RUN = ("cluster.nodes=4", "cluster.spot=true", "training.tokens=null", "training.steps=20000")
_DAY = 86400.0
_STARTS = 16  # as in spot_trace.py


def runs(bandwidth: str, inner_steps: int) -> tuple[tuple[RunSpec, RunPlan], tuple[RunSpec, RunPlan]]:
    """Return the synchronous run and the one with local SGD, each in its fastest layout."""
    found = []
    for groups in (1, GROUPS):
        local = f"training.local_sgd={{groups: {groups}" + (f", inner_steps: {inner_steps}}}" if groups > 1 else "}")
        spec = load_spec(_RECIPE, overrides=[*_RUN, f"cluster.inter_node_bandwidth={bandwidth}", local])
        found.append((spec, make_plan(spec)))
    return found[0], found[1]


def traces(path: Path) -> Iterator[tuple[str, list[tuple[float, list[bool]]]]]:
    """Yield (name, intervals of (seconds, which nodes are there)) of traces with four nodes or four zones."""
    raw = path.read_bytes()
    files: dict[str, Any] = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)["files"]
    zones: dict[tuple[str, str], list[Any]] = {}
    for name, trace in files.items():
        nodes, days, zone = name.split("/")[-3:]
        if nodes == "4-node":
            yield name, [(trace["metadata"]["gap_seconds"], [n > g for g in range(GROUPS)]) for n in trace["data"]]
        else:
            zones.setdefault((days, zone.partition("_")[2]), []).append(trace)
    for (days, kind), found in zones.items():
        if len(found) >= GROUPS:
            gap = found[0]["metadata"]["gap_seconds"]
            columns = zip(*(trace["data"] for trace in found[:GROUPS]), strict=True)
            yield f"{days}, {GROUPS} zones of {kind}", [(gap, [bool(n) for n in point]) for point in columns]


def gang(spec: RunSpec, plan: RunPlan, name: str, intervals: list[tuple[float, list[bool]]]) -> float:
    """Return the median days of a run that needs all nodes at once; infinite if it never ends."""
    counted = tuple((seconds, sum(there)) for seconds, there in intervals)
    if not any(nodes == GROUPS for _, nodes in counted):
        return math.inf
    try:
        return simulate(spec, plan, SpotTrace(name, counted)).days.median
    except UsageError:
        return math.inf


def apart(plan: RunPlan, inner_steps: int, intervals: list[tuple[float, list[bool]]]) -> float:
    """Return the median days, over starting points, until groups that come and go have done the work of the run."""
    starts = [len(intervals) * start // _STARTS for start in range(_STARTS)]
    return statistics.median(_days_apart(plan, inner_steps, intervals[at:] + intervals[:at]) for at in starts)


def _days_apart(plan: RunPlan, inner_steps: int, intervals: list[tuple[float, list[bool]]]) -> float:
    left, wall, restart = plan.time.to_train, 0.0, plan.durability.restart_seconds
    lost = inner_steps * plan.time.step / 2
    starting = [restart] * GROUPS
    worked = [0.0] * GROUPS
    for _ in range(1000):
        for seconds, there in intervals:
            for group, up in enumerate(there):
                if not up:
                    if worked[group]:
                        left += min(lost, worked[group]) / GROUPS
                    starting[group], worked[group] = restart, 0.0
                    continue
                waited = min(seconds, starting[group])
                starting[group] -= waited
                worked[group] += seconds - waited
                left -= (seconds - waited) / GROUPS
            wall += seconds
            if left <= 0:
                return wall / _DAY
    return math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path)
    parser.add_argument("--bandwidth", default="1GB/s", help="of the network between nodes, per GPU")
    parser.add_argument("--inner-steps", type=int, default=100)
    options = parser.parse_args()
    together, local = runs(options.bandwidth, options.inner_steps)
    steps = [f"{plan.time.step:.2f} s" for _, plan in (together, local)]
    print(f"Four nodes, {options.bandwidth} between them; a step takes {steps[0]}, with local SGD {steps[1]}.\n")
    print("| trace | synchronous, days | local SGD, days | groups that come and go, days (not supported) |\n|-|-|-|-|")
    for name, intervals in traces(options.traces):
        days = [gang(*run, name, intervals) for run in (together, local)]
        days.append(apart(local[1], options.inner_steps, intervals))
        print(f"| {name} | " + " | ".join("never" if each == math.inf else f"{each:.1f}" for each in days) + " |")


if __name__ == "__main__":
    main()
