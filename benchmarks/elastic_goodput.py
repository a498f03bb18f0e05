"""Useful samples per hour of a run on recorded spot capacity: on a range of nodes, and waiting for all nodes.

``python benchmarks/elastic_goodput.py TRACES`` prints a table; TRACES is the JSON of several traces of
skypilot-org/spot-traces, with ``files``: name to trace. Traces of one node are combined: a node in each of four zones,
or of each kind of V100 instance in each of two zones. Both columns are what ``scaletrain plan --trace`` simulates, with
the planned step time of each size, and the planned seconds of a save and of a restart.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from local_sgd_goodput import traces

from scaletrain_cli.plan.planning import plan_or_raise
from scaletrain_cli.plan.reliability.elastic import PolicyOutcome, compare_on_trace
from scaletrain_cli.plan.reliability.node_sizes import plan_sizes, usable_plans
from scaletrain_cli.plan.reliability.spot_trace import SpotTrace
from scaletrain_cli.spec.loading import load_spec

NODES = 4
_RECIPE = Path(__file__).parent.parent / "recipes" / "llama-7b-h100.yaml"
_RUN = ("cluster.spot=true", "training.tokens=null", f"cluster.nodes={{min: 1, max: {NODES}}}")


def all_traces(path: Path) -> Iterator[tuple[str, list[tuple[float, list[bool]]]]]:
    """Yield (name, intervals of (seconds, which nodes are there))."""
    yield from traces(path)
    raw = path.read_bytes()
    files = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)["files"]
    found = [trace for name, trace in files.items() if "aws-10-26-2022" in name and "v100" in name]
    if len(found) == NODES:
        gap = found[0]["metadata"]["gap_seconds"]
        points = zip(*(trace["data"] for trace in found), strict=True)
        yield "aws-10-26-2022, 2 zones of v100_1 and v100_8", [(gap, [bool(n) for n in point]) for point in points]


def figures(found: PolicyOutcome) -> tuple[str, str, str]:
    """Return the medians of samples per hour, days, and node hours."""
    if found.samples_per_hour is None or found.days is None or found.node_hours is None:
        return "never", "never", "-"
    return f"{found.samples_per_hour.median:,.0f}", f"{found.days.median:.1f}", f"{found.node_hours.median:,.0f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    began = time.monotonic()
    spec = load_spec(_RECIPE, overrides=[*_RUN, f"training.steps={options.steps}"])
    sizes = plan_sizes(spec, lambda one: plan_or_raise(one, compared=False))
    spec = spec.with_changes("cluster", nodes=NODES)
    steps = ", ".join(f"{plan.time.step:.1f} s on {nodes}" for nodes, plan in usable_plans(sizes).items())
    print(f"{options.steps:,} steps of 7B on 1 to {NODES} nodes of 8 H100; a step takes {steps}.\n")
    print(
        "| trace | mean nodes | range: samples/h | waiting: samples/h | gain | days | days | node hours | node hours |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, intervals in all_traces(options.traces):
        trace = SpotTrace(name, tuple((float(seconds), sum(there)) for seconds, there in intervals))
        outcome = compare_on_trace(spec, sizes, trace)
        assert outcome is not None
        mean = sum(seconds * nodes for seconds, nodes in trace.intervals) / trace.seconds
        ours, theirs = figures(outcome.elastic), figures(outcome.waiting)
        gain = "-"
        if outcome.elastic.days is not None and outcome.waiting.days is not None:
            gain = f"{outcome.waiting.days.median / outcome.elastic.days.median:.2f}"
        pairs = [cell for pair in zip(ours[1:], theirs[1:], strict=True) for cell in pair]
        print(f"| {name} | {mean:.2f} | {ours[0]} | {theirs[0]} | {gain} | {' | '.join(pairs)} |", flush=True)
    print(f"\n{time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
