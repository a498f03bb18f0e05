"""Measure what the telemetry of a node costs the node agent, and how large its file becomes.

``python -m benchmarks.telemetry_cost`` prints the CPU time of reading this machine, and of writing the rows of 8 ranks,
8 GPUs and the node, whose values are drawn at random, then the size of the file after a minute, ten minutes, an hour
and a day of one row per second. Another process reads the driver of the GPUs; it is not measured here.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from scaletrain_cli.launch.node.telemetry import FLUSH_SECONDS, HostSampler
from scaletrain_cli.telemetry.series import SeriesWriter, read_series

SAMPLES = 200
SECONDS = 86_400
RANKS = GPUS = 8
RANK_SECONDS = ("step", "data_wait", "forward", "backward", "optimizer", "communication", "own", "host")


def rank_values(draw: random.Random) -> dict[str, float]:
    """Return a row of a rank."""
    times = {f"{name}_seconds": draw.gauss(1.0, 0.02) for name in RANK_SECONDS}
    return times | {"memory_bytes": 5e10, "memory_reserved_bytes": 6e10, "allocation_retries": 0.0}


def gpu_values(draw: random.Random) -> dict[str, float]:
    """Return a row of a GPU."""
    varying = {
        "utilization": draw.randint(95, 100) / 100,
        "sm_clock_hertz": 1e6 * draw.choice((1740, 1755, 1770)),
        "power_watts": draw.randint(650_000, 700_000) / 1000,
        "temperature_celsius": float(draw.randint(58, 64)),
        "throttled_by_power": draw.random(),
        "nvlink_bytes_per_second": draw.gauss(1e11, 1e9),
        "pcie_bytes_per_second": draw.gauss(1e9, 1e8),
    }
    steady = {"sm_clock_max_hertz": 1980e6, "power_limit_watts": 700.0, "memory_used_bytes": 6e10}
    return varying | steady | {"throttled_by_heat": 0.0, "throttled_by_hardware": 0.0, "uncorrected_errors": 0.0}


def main() -> None:
    """Print the figures."""
    host, draw = HostSampler(), random.Random(0)
    host.sample()
    began = time.process_time()
    for _ in range(SAMPLES):
        values = host.sample()
    print(f"reading this machine: {1e3 * (time.process_time() - began) / SAMPLES:.2f} ms of CPU per sample")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "node.jsonl.gz"
        writer, began, spent = SeriesWriter(path), time.time(), 0.0
        for second in range(SECONDS):
            rows = [(f"rank {rank}", rank_values(draw)) for rank in range(RANKS)]
            rows += [(f"gpu {gpu}", gpu_values(draw)) for gpu in range(GPUS)]
            start = time.process_time()
            for subject, row in [*rows, ("node", values)]:
                writer.add(subject, began + second, second, row)
            if second % FLUSH_SECONDS == 0:
                writer.flush()
            spent += time.process_time() - start
            if second in (60, 600, 3600):
                print(f"after {second} s: {path.stat().st_size} bytes")
        writer.close()
        print(f"after {SECONDS} s: {path.stat().st_size} bytes")
        print(f"writing: {1e3 * spent / SECONDS:.2f} ms of CPU per second of training")
        began = time.process_time()
        for _ in range(SAMPLES):
            read_series(path, newest=1)
        print(f"reading the newest rows: {1e3 * (time.process_time() - began) / SAMPLES:.2f} ms of CPU")
        found = read_series(path)["rank 0"]
        for count in sorted(set(found.counts)):
            print(f"rows of {count} values: {list(found.counts).count(count)}")


if __name__ == "__main__":
    main()
