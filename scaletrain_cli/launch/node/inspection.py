"""What a node is like as an attempt begins on it: attempts/NNNN/preflight/<node>.json, for people and for later.

Asked by the agent before it starts a rank, so that a bad node costs seconds. What can only be measured by ranks
together is the engine's. Knows no scheduler.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.launch.code.snapshot import code_hash
from scaletrain_cli.launch.node.gpu_health import (
    GpuHealth,
    NodeHealth,
    ask_driver,
    gpu_notes,
    gpu_problems,
    visible_gpus,
)
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.safe_files import make_folder, touch
from scaletrain_cli.spec import ClusterSpec

# How much memory a job may still take on this node: the machine's, or what its memory cgroups leave of it.


_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB", re.MULTILINE)
# Page cache and what the kernel keeps of files: given back when it is wanted. Version 1 has ``total_`` for the group
# and all below it.
_GIVEN_BACK = ("active_file", "inactive_file", "slab_reclaimable")
_FILES = {
    2: ("memory.max", "memory.current", "memory.stat"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
}


def available_bytes(root: Path = Path("/")) -> int | None:
    """The least that the machine and every group above this process leave; None where /proc does not say."""
    try:
        found = _AVAILABLE.search((root / "proc/meminfo").read_text(encoding="utf-8"))
    except OSError:
        return None
    if found is None:
        return None
    return min([int(found[1]) * 1024, *_left_by_groups(root)])


def _left_by_groups(root: Path) -> Iterator[int]:
    for folder, version in _folders(root):
        limit, usage, statistics = (_text(folder / name) for name in _FILES[version])
        if limit.strip().isdigit() and usage.strip().isdigit():  # "max": no limit here
            yield max(0, int(limit) - int(usage) + _given_back(statistics))


def _given_back(statistics: str) -> int:
    told = dict(line.split(maxsplit=1) for line in statistics.splitlines() if " " in line)
    return sum(int(told.get(f"total_{name}", told.get(name, "0"))) for name in _GIVEN_BACK)


def _folders(root: Path) -> Iterator[tuple[Path, int]]:
    """This process's group and all above it: the limit of a job is above that of its step."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            version = 2 if controllers == "" else 1
            top = root / "sys/fs/cgroup" if version == 2 else root / "sys/fs/cgroup/memory"
            group = top / path.strip("/")
            yield group, version
            for parent in group.parents:
                if parent.is_relative_to(top):
                    yield parent, version


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


# Is this node what was planned? Asked by the agent before it starts a rank; needs no driver library to look.


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


SCHEMA = "scaletrain.node-inspection/v1"
_SHM = Path("/dev/shm")
# What NCCL takes there for each pair of GPUs of a node, and torch's data workers; Docker and Kubernetes give 64 MB.
_SHM_BYTES_PER_GPU = 128 * 2**20
_CLOCK_SECONDS = 30.0


@dataclass(frozen=True)
class NodeInspection:
    """Bytes and seconds; None for what cannot be read. ``problems`` keep ranks off the node, ``notes`` do not."""

    node: str
    driver: str
    gpus: tuple[GpuHealth, ...]
    code_hash: str  # of this package as it is installed here
    cores: int
    memory_available_bytes: int | None
    shm_free_bytes: int | None
    run_free_bytes: int | None
    clock_ahead_seconds: float | None  # of the clock of the run directory's file system
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def inspect_node(run: RunDir, record: RunRecord, node: str, environment: Mapping[str, str]) -> NodeInspection:
    """Look at this node. Raises nothing: what cannot be read is None."""
    health = None if record.spec.cluster.gpu == "cpu" else ask_driver()
    gpus = () if health is None else visible_gpus(health, environment)
    memory, shm = available_bytes(), _free(_SHM)
    ahead, code = _clock_ahead(run.path), code_hash()
    return NodeInspection(
        node=node,
        driver="" if health is None else health.driver,
        gpus=gpus,
        code_hash=code,
        cores=usable_cores(),
        memory_available_bytes=memory,
        shm_free_bytes=shm,
        run_free_bytes=_free(run.path),
        clock_ahead_seconds=ahead,
        problems=tuple(_problems(record, environment, health, gpus, memory)),
        notes=tuple(_notes(record, gpus, shm, ahead, code)),
    )


def write_inspection(run: RunDir, attempt: int, found: NodeInspection) -> None:
    """Raises OSError."""
    folder = run.attempt(attempt) / "preflight"
    make_folder(folder)
    write_document(folder / f"{found.node}.json", {"schema": SCHEMA, **dataclasses.asdict(found)})


def host_bytes_needed(record: RunRecord) -> int:
    """Of a node's memory: the copy that checkpoints are written from, and what is offloaded."""
    return record.plan.durability.copy_bytes_per_node + record.plan.memory.host * record.spec.cluster.gpus_per_node


def _problems(
    record: RunRecord,
    environment: Mapping[str, str],
    health: NodeHealth | None,
    gpus: tuple[GpuHealth, ...],
    memory: int | None,
) -> Iterator[str]:
    yield from problems_of_node(record.spec.cluster, environment)
    if health is not None:
        yield from gpu_problems(health, gpus, record.plan.memory.peak)
    needed = host_bytes_needed(record)
    if memory is not None and memory < needed:
        yield (
            f"{memory / 1e9:.1f} GB of memory are left for this job on the node, and the copy that checkpoints are "
            f"written from and what is offloaded take {needed / 1e9:.1f} GB"
        )


def _notes(
    record: RunRecord, gpus: tuple[GpuHealth, ...], shm: int | None, ahead: float | None, code: str
) -> Iterator[str]:
    if code != record.code_hash:
        yield (
            f"scaletrain here is {code[:12]}, the run was made with {record.code_hash[:12]}: another version, image or "
            "checkout"
        )
    yield from gpu_notes(gpus)
    cluster = record.spec.cluster
    wanted = _SHM_BYTES_PER_GPU * cluster.gpus_per_node
    if cluster.gpu != "cpu" and cluster.gpus_per_node > 1 and shm is not None and shm < wanted:
        yield (
            f"{_SHM} has {shm / 1e6:.0f} MB of room; NCCL may want {wanted / 1e6:.0f} MB and then fails with 'No space "
            "left on device'. Give the container more (cluster.kubernetes.shm_size, docker --shm-size)"
        )
    if ahead is not None and abs(ahead) > _CLOCK_SECONDS:
        side = "ahead of" if ahead > 0 else "behind"
        yield f"its clock is {abs(ahead):.0f} s {side} that of the run directory's file system: times in logs will lie"


def _free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _clock_ahead(folder: Path) -> float | None:
    """By the time that the file system gives to a file that is made now: a server's own, on a shared one."""
    probe = folder / f".clock-{os.getpid()}-{time.monotonic_ns()}"
    try:
        before = time.time()
        touch(probe)
        made = probe.stat().st_mtime
        probe.unlink()
    except OSError:
        return None
    return round((before + time.time()) / 2 - made, 3)
