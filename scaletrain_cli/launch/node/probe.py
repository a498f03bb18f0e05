"""The probe of a node before a job is queued, and the comparison of its facts with the plan.

Started on every node as ``python -m scaletrain_cli.launch.node.probe FOLDER TOKEN``, it writes its facts to the folder
as JSON. probe_node uses the standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from scaletrain_cli.errors import Problem
from scaletrain_cli.extras import install_command
from scaletrain_cli.launch.node.inspection import count_gpus
from scaletrain_cli.own_processes import usable_cores
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.safe_files import create_file, touch
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.text import bytes_text, counted

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
        with contextlib.suppress(PackageNotFoundError):
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
    cluster, found = spec.cluster, []
    for node in nodes:
        if cluster.gpu != "cpu" and node.gpus < cluster.gpus_per_node:
            gpus = f"{counted(node.gpus, 'GPU')} ({node.gpus_source})"
            what = f"{gpus}, but the plan needs {cluster.gpus_per_node} per node."
            found.append(_problem(node, what))
        needed = cluster.slurm.memory_per_node
        if needed is not None and node.memory_bytes < needed:
            found.append(
                _problem(
                    node, f"has {bytes_text(node.memory_bytes)} of memory; memory_per_node is {bytes_text(needed)}."
                )
            )
        if node.folder_problem:
            found.append(_problem(node, node.folder_problem, "Set $SCALETRAIN_RUNS to a folder that all nodes share."))
        elif spec.checkpoint.dir == "auto" and node.free_bytes < plan.durability.checkpoint_bytes:
            size = plan.durability.checkpoint_bytes
            found.append(
                _problem(
                    node,
                    f"{bytes_text(node.free_bytes)} are free in the runs root; a checkpoint takes {bytes_text(size)}.",
                )
            )
        missing = [name for name in NEEDED_PACKAGES if name not in node.packages]
        if missing:
            hint = f"Run {install_command('train')}, in an environment that the nodes share."
            found.append(_problem(node, f"{', '.join(missing)} not installed for Python {node.python}.", hint))
    return (*found, *_differences(nodes))


def _differences(nodes: Sequence[NodeFacts]) -> list[Problem]:
    """Return the packages whose versions differ between nodes."""
    found = []
    for name in NEEDED_PACKAGES:
        first = next((node for node in nodes if name in node.packages), None)
        for node in nodes:
            if first is not None and node.packages.get(name, first.packages[name]) != first.packages[name]:
                what = f"has {name} {node.packages[name]}, but {first.hostname} has {first.packages[name]}."
                found.append(_problem(node, what, "All ranks need the same version."))
    return found


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
