"""One network namespace per node, connected by a bridge. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from dev_slurm.settings import PORTS_PER_CLUSTER, Cluster, ClusterError, tag

NETNS_ROOT = Path("/run/netns")


def ip(*options: str, batch: str) -> None:
    done = subprocess.run(["ip", *options, "-batch", "-"], input=batch, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"ip failed: {done.stderr.strip()}")


def possible() -> bool:
    """Return whether namespaces, bridges and veths can be created: containers often lack permission or the module."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        return False
    probe = "ip link add name probe type bridge && ip link add name probe-a type veth peer name probe-b"
    argv = ["unshare", "--net", "--uts", "--mount", "sh", "-c", probe]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def free_subnet(port: int) -> str:
    """Return a free /24 of 198.18.0.0/15, which is reserved for benchmarks, so that it hides no real network.

    Clusters that start at the same time have other ports, and begin to look at other places.
    """
    used = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=False).stdout
    first = port // PORTS_PER_CLUSTER
    subnets = (f"198.{18 + index // 256}.{index % 256}" for index in ((first + step) % 512 for step in range(512)))
    return next(subnet for subnet in subnets if f" {subnet}." not in used)


def create(cluster: Cluster) -> None:
    bridge = tag(cluster.directory)
    address = cluster.controller_address
    ip(batch=f"link add name {bridge} type bridge\naddr add {address}/24 dev {bridge}\nlink set {bridge} up\n")
    for node in cluster.node_names:
        space, link = space_name(cluster.directory, node), link_name(cluster.directory, node)
        ip(batch=f"netns add {space}\nlink add name {link} type veth peer name eth0 netns {space}\n")
        ip(batch=f"link set {link} master {bridge} up\n")
        address, _ = cluster.node_address(node)
        ip("-n", space, batch=f"addr add {address}/24 dev eth0\nlink set eth0 up\nlink set lo up\n")


def set_link(directory: Path, node: str, state: str) -> None:
    ip(batch=f"link set {link_name(directory, node)} {state}\n")


def remove(directory: Path) -> None:
    links = [path.name for path in Path("/sys/class/net").glob(f"{tag(directory)}*")]
    spaces = [path.name for path in NETNS_ROOT.glob(f"{tag(directory)}-n*")]
    for argv in [["link", "del", name] for name in links] + [["netns", "del", name] for name in spaces]:
        # A link may already be deleted together with the namespace of its other end.
        subprocess.run(["ip", *argv], capture_output=True, check=False)


def space_name(directory: Path, node: str) -> str:
    return f"{tag(directory)}-{node}"


def link_name(directory: Path, node: str) -> str:
    return f"{tag(directory)}-{node[1:]}"


def identity(path: Path) -> tuple[int, int]:
    """Return the device and inode, which are equal for two paths of the same namespace."""
    status = path.stat()
    return status.st_dev, status.st_ino


def identities(directory: Path, node: str | None) -> set[tuple[int, int]]:
    """Return the identities of the namespaces of the cluster, or of one of its nodes."""
    return {identity(path) for path in NETNS_ROOT.glob(space_name(directory, node or "n*"))}
