"""Is this node what was planned? Asked by the agent before it starts a rank; needs no driver library to look."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from scaletrain_cli.spec import ClusterSpec

_DEVICE = re.compile(r"nvidia\d+")


def problems_of_node(cluster: ClusterSpec, environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """What keeps this node from running its ranks, one line each. More devices than planned are no problem."""
    if cluster.gpu == "cpu":
        return []
    found, source = count_gpus(environment, devices)
    if found >= cluster.gpus_per_node:
        return []
    return [f"{found} GPUs ({source}), but the plan needs {cluster.gpus_per_node} per node"]


def count_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[int, str]:
    """GPUs that a process here may use, and what says so."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
        return len(names), f"CUDA_VISIBLE_DEVICES={visible!r}"
    return sum(bool(_DEVICE.fullmatch(entry.name)) for entry in devices.iterdir()), f"{devices}/nvidia*"


def usable_cores() -> int:
    """CPU cores that this process may run on, which a scheduler may have limited."""
    return len(os.sched_getaffinity(0))
