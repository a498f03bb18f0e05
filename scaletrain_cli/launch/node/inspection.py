"""The inspection of a node before an attempt starts ranks on it: attempts/NNNN/preflight/<node>.json.

It finds a bad node within seconds. Measurements that need several ranks are in the engine's preflight. And the probe of
`submit --probe` before a job is queued: ``python -m scaletrain_cli.launch.node.inspection FOLDER TOKEN``, started on
every node, writes its facts to the folder as JSON.
"""

import dataclasses
import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from scaletrain_cli.available_memory import available_bytes
from scaletrain_cli.errors import Problem
from scaletrain_cli.extras import install_command
from scaletrain_cli.launch.code import code_hash
from scaletrain_cli.launch.node.gpu_health import (
    GpuHealth,
    NodeHealth,
    gpu_notes,
    gpu_problems,
    gpus_of_ranks,
    query_driver,
)
from scaletrain_cli.own_processes import usable_cores
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.safe_files import create_file, locked, make_folder, touch
from scaletrain_cli.spec import ClusterSpec, RunSpec
from scaletrain_cli.text import bytes_text, counted

SCHEMA = "scaletrain.node-inspection/v1"
_SHM = Path("/dev/shm")
# /dev/shm for NCCL (per pair of GPUs of a node) and torch's data workers; Docker and Kubernetes default to 64 MB.
_SHM_BYTES_PER_GPU = 128 * 2**20
_CLOCK_SECONDS = 30.0
_DEVICE = re.compile(r"nvidia\d+")


def problems_of_node(
    cluster: ClusterSpec, environment: Mapping[str, str], devices: Path = Path("/dev")
) -> list[Reason]:
    """Return why this node cannot run its ranks. More devices than planned are no problem."""
    gpus, source = count_gpus(environment, devices)
    if cluster.gpu == "cpu" or gpus >= cluster.gpus_per_node:
        return []
    return [Reason("node.too-few-gpus", {"found": gpus, "source": source, "planned": cluster.gpus_per_node})]


def count_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[int, str]:
    """Return how many GPUs a process here may use, and the source of the number."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
        return len(names), f"CUDA_VISIBLE_DEVICES={visible!r}"
    return sum(bool(_DEVICE.fullmatch(entry.name)) for entry in devices.iterdir()), f"{devices}/nvidia*"


@dataclass(frozen=True)
class NodeInspection:
    """The state of a node, in bytes and seconds; None for what cannot be read. ``problems`` make it unfit for ranks."""

    node: str
    driver: str
    gpus: tuple[GpuHealth, ...]
    code_hash: str  # of this package as it is installed here
    cores: int
    memory_available_bytes: int | None
    shm_free_bytes: int | None
    run_free_bytes: int | None
    clock_ahead_seconds: float | None  # relative to the file system of the run directory
    problems: tuple[Reason, ...]
    notes: tuple[Reason, ...]


def inspect_node(
    run: RunDir, record: RunRecord, node: str, environment: Mapping[str, str], locks: ExitStack | None = None
) -> NodeInspection:
    """Return the state of this node. Never raises: values that cannot be read are None.

    ``locks``: on a machine where no scheduler gives GPUs to a run, those of the GPUs that are chosen, until it ends.
    """
    cluster, environment = record.spec.cluster, {**environment, **record.spec.env}
    health = None if cluster.gpu == "cpu" else query_driver()
    if health is not None and locks is not None and "CUDA_VISIBLE_DEVICES" not in environment:
        free = _free_gpus(health.gpus, record, run.path.parent, locks)
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in free)} if free else {}
    gpus = () if health is None else gpus_of_ranks(health, environment, cluster.gpus_per_node)
    memory, shm = available_bytes(), _free(_SHM)
    ahead, code, cores = _clock_ahead(run.path), code_hash(), usable_cores()
    return NodeInspection(
        node=node,
        driver="" if health is None else health.driver,
        gpus=gpus,
        code_hash=code,
        cores=cores,
        memory_available_bytes=memory,
        shm_free_bytes=shm,
        run_free_bytes=_free(run.path),
        clock_ahead_seconds=ahead,
        problems=tuple(_problems(record, environment, health, gpus, memory)),
        notes=tuple(_notes(record, health, gpus, shm, ahead, code, cores)),
    )


def _free_gpus(gpus: Sequence[GpuHealth], record: RunRecord, root: Path, locks: ExitStack) -> list[GpuHealth]:
    """Return the first GPUs that are fit and that no other run below ``root`` has; empty if there are too few.

    They are locked: a run that starts uses no memory yet, by which another one could see it.
    """
    free: list[GpuHealth] = []
    with ExitStack() as tried, suppress(OSError):
        for gpu in gpus:
            lock = locked(root / f".gpu-{gpu.uuid}.lock", wait_seconds=0, shared=True)
            if not any(gpu_problems(NodeHealth(), (gpu,), record.plan.memory.peak)) and tried.enter_context(lock):
                free.append(gpu)
            if len(free) == record.spec.cluster.gpus_per_node:
                locks.push(tried.pop_all())
                return free
    return []


def write_inspection(run: RunDir, attempt: int, report: NodeInspection) -> None:
    """Write the inspection into the attempt. Raises OSError."""
    folder = run.attempt(attempt) / "preflight"
    make_folder(folder)
    texts = {"problems": list(map(str, report.problems)), "notes": list(map(str, report.notes))}
    codes = {
        "problem_reasons": [reason.to_document() for reason in report.problems],
        "note_reasons": [reason.to_document() for reason in report.notes],
    }
    write_document(folder / f"{report.node}.json", {"schema": SCHEMA, **dataclasses.asdict(report), **texts, **codes})


def _problems(
    record: RunRecord,
    environment: Mapping[str, str],
    health: NodeHealth | None,
    gpus: tuple[GpuHealth, ...],
    memory: int | None,
) -> Iterator[Reason]:
    yield from problems_of_node(record.spec.cluster, environment)
    if health is not None:
        yield from gpu_problems(health, gpus, record.plan.memory.peak)
    # The staging copy for checkpoints, and offloaded states.
    needed = record.plan.durability.copy_bytes_per_node + record.plan.memory.host * record.spec.cluster.gpus_per_node
    if memory is not None and memory < needed:
        yield Reason("node.host-memory-short", {"free_bytes": memory, "needed_bytes": needed})


def _notes(
    record: RunRecord,
    health: NodeHealth | None,
    gpus: tuple[GpuHealth, ...],
    shm: int | None,
    ahead: float | None,
    code: str,
    cores: int,
) -> Iterator[Reason]:
    if health is not None and health.note:
        yield recorded(health.note)
    if code != record.code_hash:
        yield Reason("node.other-version", {"installed": code[:12], "submitted": record.code_hash[:12]})
    yield from gpu_notes(gpus)
    cluster = record.spec.cluster
    if cluster.gpu != "cpu" and cores < cluster.gpus_per_node:
        yield Reason("node.few-cores", {"cores": cores, "ranks": cluster.gpus_per_node})
    needed = _SHM_BYTES_PER_GPU * cluster.gpus_per_node
    if cluster.gpu != "cpu" and cluster.gpus_per_node > 1 and shm is not None and shm < needed:
        yield Reason("node.shm-small", {"folder": str(_SHM), "free_bytes": shm, "needed_bytes": needed})
    if ahead is not None and abs(ahead) > _CLOCK_SECONDS:
        yield Reason("node.clock-ahead" if ahead > 0 else "node.clock-behind", {"seconds": abs(ahead)})


def _free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _clock_ahead(folder: Path) -> float | None:
    """Return the seconds by which this clock is ahead of the file system's, from the mtime of a new file."""
    probe = folder / f".clock-{os.getpid()}-{time.monotonic_ns()}"
    try:
        before = time.time()
        touch(probe)
        made = probe.stat().st_mtime
        probe.unlink()
    except OSError:
        return None
    return round((before + time.time()) / 2 - made, 3)


NEEDED_PACKAGES = ("torch", "deepspeed")
_TOKEN = "token"


@dataclass(frozen=True)
class NodeFacts:
    """The facts of one node. ``packages``: versions of NEEDED_PACKAGES; ``folder_problem``: empty if it is usable."""

    hostname: str
    gpus: int
    gpus_source: str
    cores: int
    memory_bytes: int
    free_bytes: int
    python: str
    packages: dict[str, str]
    folder_problem: str


def facts_file(folder: Path, task: int) -> Path:
    """Return the file to which the task of this number writes its facts."""
    return folder / f"node-{task}.json"


def place_token(folder: Path, token: str) -> None:
    """Write the token to ``folder``; every node must be able to read it there."""
    create_file(folder / _TOKEN, token)


def probe_node(folder: str, token: str) -> NodeFacts:
    """Return the facts of this node. ``folder``, below the runs root, contains ``token`` if the nodes share it."""
    packages = {}
    for name in NEEDED_PACKAGES:  # without imports, which take seconds and could crash the probe
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    gpus, source = count_gpus(os.environ)
    problem = _problem_of(Path(folder), token)
    usage = os.statvfs(folder if not problem else "/")
    return NodeFacts(
        hostname=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        gpus=gpus,
        gpus_source=source,
        cores=usable_cores(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        free_bytes=usage.f_bavail * usage.f_frsize,
        python=platform.python_version(),
        packages=packages,
        folder_problem=problem,
    )


def probe_problems(spec: RunSpec, plan: RunPlan, nodes: Sequence[NodeFacts]) -> tuple[Problem, ...]:
    """Return every problem that keeps these nodes from running the plan."""
    return (*(problem for node in nodes for problem in _problems_of_facts(spec, plan, node)), *_differences(nodes))


def _problems_of_facts(spec: RunSpec, plan: RunPlan, node: NodeFacts) -> Iterator[Problem]:
    cluster, needed, size = spec.cluster, spec.cluster.slurm.memory_per_node, plan.durability.checkpoint_bytes
    if cluster.gpu != "cpu" and node.gpus < cluster.gpus_per_node:
        gpus = f"{counted(node.gpus, 'GPU')} ({node.gpus_source})"
        yield _problem(node, f"{gpus}, but the plan needs {cluster.gpus_per_node} per node.")
    if needed is not None and node.memory_bytes < needed:
        yield _problem(node, f"has {bytes_text(node.memory_bytes)} of memory; memory_per_node is {bytes_text(needed)}.")
    if node.folder_problem:
        yield _problem(node, node.folder_problem, "Set $SCALETRAIN_RUNS to a folder that all nodes share.")
    elif spec.checkpoint.dir == "auto" and node.free_bytes < size:
        free = bytes_text(node.free_bytes)
        yield _problem(node, f"{free} are free in the runs root; a checkpoint takes {bytes_text(size)}.")
    missing = [name for name in NEEDED_PACKAGES if name not in node.packages]
    if missing:
        hint = f"Run {install_command('train')}, in an environment that the nodes share."
        yield _problem(node, f"{', '.join(missing)} not installed for Python {node.python}.", hint)


def _differences(nodes: Sequence[NodeFacts]) -> Iterator[Problem]:
    """Yield the packages whose versions differ between nodes."""
    for name in NEEDED_PACKAGES:
        first = next((node for node in nodes if name in node.packages), None)
        for node in nodes:
            if first is not None and node.packages.get(name, first.packages[name]) != first.packages[name]:
                what = f"has {name} {node.packages[name]}, but {first.hostname} has {first.packages[name]}."
                yield _problem(node, what, "All ranks need the same version.")


def _problem(node: NodeFacts, message: str, hint: str | None = None) -> Problem:
    return Problem(node.hostname, "", message, hint=hint)


def _problem_of(folder: Path, token: str) -> str:
    """Return why this node cannot use the folder for runs; empty if it can."""
    try:
        if (folder / _TOKEN).read_text(encoding="utf-8") != token:
            return f"{folder} is another folder than on the submitting machine."
        touch(folder / f"written-by-{socket.gethostname()}")
    except OSError as error:
        return f"{error.filename} cannot be used here: {error.strerror or error}."
    return ""


def main(folder: str, token: str) -> None:
    """Write the facts of this node, under the number that Slurm gave this task."""
    task = int(os.environ["SLURM_PROCID"])
    write_document(facts_file(Path(folder), task), dataclasses.asdict(probe_node(folder, token)))


if __name__ == "__main__":
    main(*sys.argv[1:])
