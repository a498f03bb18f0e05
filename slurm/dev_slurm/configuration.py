"""Write the files of Slurm and munge: slurm.conf from the template in this folder, gres.conf, key, hosts."""

from __future__ import annotations

import getpass
import os
import socket
import string
from dataclasses import asdict
from pathlib import Path

from dev_slurm import accounting
from dev_slurm.processes import freezer_writable
from dev_slurm.settings import Cluster, conf_path

TEMPLATE = Path(__file__).with_name("slurm.conf")
FOLDERS = ("etc", "state", "log", "run", "dev", "spool")


def write(cluster: Cluster) -> None:
    directory = cluster.directory
    for folder in (*FOLDERS, *(f"spool/{node}" for node in cluster.node_names)):
        (directory / folder).mkdir(parents=True)
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o755)  # Slurm and munge refuse wider permissions, and need these
    cluster.save()
    etc = directory / "etc"
    key = etc / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    conf_path(directory).write_text(slurm_conf(cluster))
    (etc / "gres.conf").write_text(gres_conf(cluster))
    (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainDevices=no\n")
    if cluster.accounting:
        accounting.write(cluster)
    hosts = {node: cluster.node_address(node)[0] for node in cluster.node_names}
    hosts = {"localhost": "127.0.0.1", socket.gethostname(): cluster.controller_address} | hosts
    (etc / "hosts").write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))


def slurm_conf(cluster: Cluster) -> str:
    # proctrack/cgroup is usual in production: signals reach only the task, not its children, and no orphaned process
    # survives a job. linuxproc signals every descendant and leaves orphaned processes.
    values = {
        **asdict(cluster),
        "controller_host": socket.gethostname(),
        "controller_address": cluster.controller_address,
        "accounting_conf": (
            accounting.slurm_conf(cluster) if cluster.accounting else "AccountingStorageType=accounting_storage/none"
        ),
        "extra": "\n".join(cluster.conf),
        "first_job_id": cluster.job_ids.start,
        "memory_per_cpu_mb": cluster.memory_mb // cluster.cpus,
        "nodes": "\n".join(node_line(cluster, node) for node in cluster.node_names),
        "proctrack": "cgroup" if freezer_writable() else "linuxproc",
        "user": getpass.getuser(),
    }
    return string.Template(TEMPLATE.read_text()).substitute(values)


def node_line(cluster: Cluster, node: str) -> str:
    address, port = cluster.node_address(node)
    host = node if cluster.netns else socket.gethostname()
    gres = f" Gres={found}" if (found := cluster.gres_of(node)) else ""
    return (
        f"NodeName={node} NodeHostname={host} NodeAddr={address} Port={port} "
        f"CPUs={cluster.cpus} RealMemory={cluster.memory_mb}{gres} State=UNKNOWN"
    )


def gres_conf(cluster: Cluster) -> str:
    """Return gres.conf, and create its character devices: for regular files CUDA_VISIBLE_DEVICES would be empty."""
    gpus = {node: _gpus(cluster.gres_of(node)) for node in cluster.node_names}
    most = max(sum(count for _, count in kinds) for kinds in gpus.values())
    prefix = str(cluster.directory / "dev" / "gpu")
    try:
        for index in range(most):
            os.mknod(f"{prefix}{index}", 0o020666, os.makedev(1, 3))
    except PermissionError:
        prefix = "/dev/tty"
    lines = []
    for node, kinds in gpus.items():
        first = 0
        for kind, count in kinds:
            typed = f"Type={kind} " if kind else ""
            lines.append(f"NodeName={node} Name=gpu {typed}File={prefix}[{first}-{first + count - 1}]\n")
            first += count
    return "".join(lines)


def _gpus(gres: str) -> list[tuple[str, int]]:
    """Return type and number of the GPUs in ``gpu:h100:2,gpu:a100:1``; the type is empty in ``gpu:8``."""
    words = [word.split(":") for word in gres.split(",") if word]
    return [(":".join(word[1:-1]), int(word[-1])) for word in words]
