#!/usr/bin/env python3
"""Start and stop a real multi-node Slurm on this one Debian machine, for tests and drills.

One munged, one slurmctld and one slurmd per node, without systemd and without files in /etc or /var. As root, every
node has its own network namespace and hostname (n1, n2, ...), so that rendezvous by host and port works as between
machines.
Does not depend on ScaleTrain; needs only the standard library.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

from dev_slurm import accounting, configuration, network, processes
from dev_slurm.settings import MAX_DIR_LENGTH, Cluster, ClusterError, conf_path, load

PROGRAMS = ("munged", "slurmctld", "slurmd", "scontrol", "nsenter", "unshare")


def start(cluster: Cluster) -> None:
    directory = cluster.directory
    if len(cluster.dir) > MAX_DIR_LENGTH:
        raise ClusterError(f"--dir {directory}: longer than {MAX_DIR_LENGTH} characters; use a shorter one", 2)
    if (directory / "cluster.json").exists():
        stop(directory)
    elif directory.exists() and any(directory.iterdir()):
        raise ClusterError(f"--dir {directory}: not empty, and not a dev cluster; use another", 2)
    network.remove(directory)  # left over from a cluster whose directory was deleted
    try:
        configuration.write(cluster)
        start_controller(cluster)
        for node in cluster.node_names:
            start_node(cluster, node)
        processes.wait_for(directory, "nodes", lambda: nodes_up(directory) == cluster.nodes)
    except BaseException:
        stop(directory, keep=True)
        raise


def require_packages(*, with_accounting: bool = False) -> None:
    if all(map(shutil.which, (*PROGRAMS, *(accounting.PROGRAMS if with_accounting else ())))):
        return
    listed = Path(__file__).with_name("packages.txt").read_text().splitlines()
    packages = " ".join(line for line in listed if line and not line.startswith("#"))
    raise ClusterError(f"Slurm is not installed:\n  apt-get install -y --no-install-recommends {packages}", 4)


def start_controller(cluster: Cluster) -> None:
    directory = cluster.directory
    run = directory / "run"
    paths = {
        "--key-file": directory / "etc" / "munge.key",
        "--socket": run / "munge.socket",
        "--pid-file": run / "munged.pid",
        "--log-file": directory / "log" / "munged.log",
        "--seed-file": run / "munged.seed",
    }
    processes.spawn(directory, "munged", ["munged", "-F", "-f", *(f"{name}={path}" for name, path in paths.items())])
    socket_option = f"--socket={run / 'munge.socket'}"
    processes.wait_for(directory, "munged", lambda: bool(processes.query(directory, "munge", "-n", socket_option)))
    if cluster.netns:
        network.create(cluster)
    if cluster.accounting:
        accounting.start(cluster)
    controller_up(directory, "-c")


def controller_up(directory: Path, *options: str) -> None:
    """Start slurmctld with its saved state, or without it (option ``-c``)."""
    processes.spawn(directory, "slurmctld", ["slurmctld", "-D", *options])
    processes.wait_for(directory, "slurmctld", lambda: " UP" in processes.query(directory, "scontrol", "ping"))


def controller_down(directory: Path) -> None:
    """Kill slurmctld, as if its machine failed: jobs continue, and Slurm's commands get no answer."""
    pid, _ = processes.daemons(directory)["slurmctld"]
    processes.forget(directory, "slurmctld")
    processes.kill_all(lambda: {pid} if processes.start_ticks(pid) is not None else set())


def start_node(cluster: Cluster, node: str) -> None:
    argv = ["slurmd", "-D", "-N", node]
    if cluster.netns:
        # nsenter: `ip netns exec` would mount a new /sys, without the cgroups.
        hosts = shlex.quote(str(cluster.directory / "etc" / "hosts"))
        mounts = f"mount --bind {hosts} /etc/hosts && mount -t tmpfs -o mode=1777 tmpfs /dev/shm"  # lost with the node
        script = f"hostname {node} && {mounts} && exec {shlex.join(argv)}"
        space = network.NETNS_ROOT / network.space_name(cluster.directory, node)
        argv = ["nsenter", f"--net={space}", "unshare", "--uts", "--mount", "sh", "-c", script]
    processes.spawn(cluster.directory, node, argv, {processes.NODE_MARK: node})


def nodes_up(directory: Path, node: str = "") -> int:
    """Return the number of usable nodes, of all or of this one. The controller marks unreachable nodes with a `*`."""
    states = processes.query(directory, "sinfo", "-h", "-N", "-p", "main", "-o", "%t", *(["-n", node] if node else []))
    return sum(state in {"idle", "mix", "alloc", "comp"} for state in states.split())


def show_status(directory: Path) -> None:
    load(directory)
    for name, (pid, ticks) in processes.daemons(directory).items():
        print(f"{name:12} {'alive' if processes.start_ticks(pid) == ticks else 'dead'}")
    print(processes.query(directory, "sinfo") or "slurmctld does not answer\n", end="")


def stop(directory: Path, *, keep: bool = False) -> None:
    """End the cluster with SIGKILL: its state is not needed, and SIGTERM takes seconds per daemon."""
    known = load(directory) if (directory / "cluster.json").exists() else None
    if known is not None:
        processes.thaw(known)
    processes.kill_all(lambda: processes.members(directory))
    network.remove(directory)
    if known is not None:
        processes.clear_freezers(known)
        processes.record(directory, {})
        if not keep:
            shutil.rmtree(directory)
    processes.remove_unused_freezers()


def node_down(directory: Path, node: str, *, cut: bool) -> None:
    cluster = load(directory)
    check_node(cluster, node)
    if cut:
        network.set_link(directory, node, "down")
        return
    processes.forget(directory, node)
    processes.thaw(cluster, node)
    if cluster.netns:  # so that no daemon can report that its job was killed, before it is killed itself
        network.set_link(directory, node, "down")
    processes.kill_all(lambda: processes.members(directory, node))
    if cluster.netns:  # calls of the dead node are refused at once
        network.set_link(directory, node, "up")


def node_up(directory: Path, node: str) -> None:
    cluster = load(directory)
    check_node(cluster, node)
    if cluster.netns:
        network.set_link(directory, node, "up")
    if node not in processes.daemons(directory):
        start_node(cluster, node)
    processes.wait_for(directory, node, lambda: listens(cluster, node) and nodes_up(directory, node) == 1)


def check_node(cluster: Cluster, node: str) -> None:
    if node not in cluster.node_names:
        raise ClusterError(f"no node {node}; there are {', '.join(cluster.node_names)}", 2)


def listens(cluster: Cluster, node: str) -> bool:
    try:
        socket.create_connection(cluster.node_address(node), timeout=1).close()
    except OSError:
        return False
    return True


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--dir", required=True, type=lambda text: Path(text).resolve(), help="the cluster's directory")
        return sub

    sub = command("start", "start a cluster; one that runs in the directory is stopped first")
    sub.add_argument("--nodes", type=int, default=4, choices=range(1, 100), metavar="N", help="default 4")
    sub.add_argument("--gpus", type=int, default=0, help="fake GPUs per node; default 0: no GRES")
    sub.add_argument("--gpu-type", default="", metavar="TYPE", help="as in --gpus-per-node=TYPE:8; default: none")
    text = "GRES of one node in place of --gpus, e.g. n3=gpu:a100:4 or n4=gpu:h100:2,gpu:a100:2; may be repeated"
    sub.add_argument("--gres", action="append", default=[], metavar="NODE=GRES", help=text)
    sub.add_argument("--cpus", type=int, default=4, help="per node, independent of the machine; default 4")
    sub.add_argument("--memory-mb", type=int, default=8000, help="per node, independent of the machine; default 8000")
    sub.add_argument("--netns", action=argparse.BooleanOptionalAction, help="default: if root and possible")
    sub.add_argument("--port", type=int, default=17000, help="first port; 200 apart for concurrent clusters")
    sub.add_argument("--grace-seconds", type=int, default=30, help="GraceTime of partition spot; default 30")
    sub.add_argument("--kill-wait-seconds", type=int, default=5, help="KillWait, the time from TERM to KILL; default 5")
    sub.add_argument("--slurmd-timeout-seconds", type=int, default=10, help="time to detect a lost node; default 10")
    sub.add_argument("--accounting", action="store_true", help="with slurmdbd, and this user in the account lab")
    sub.add_argument("--conf", action="append", default=[], metavar="LINE", help="added to slurm.conf; may be repeated")
    sub = command("stop", "stop the cluster and remove the directory")
    sub.add_argument("--keep", action="store_true", help="keep the directory, with its logs")
    command("env", "print the shell command that sets SLURM_CONF")
    sub = command("node-down", "power a node off: kill its slurmd and all its processes")
    sub.add_argument("node")
    sub.add_argument("--cut", action="store_true", help="only cut its network; its processes continue")
    command("node-up", "bring a node back after node-down").add_argument("node")
    command("controller-down", "kill slurmctld; jobs continue")
    command("controller-up", "start slurmctld again, with its saved state")
    command("status", "print the daemons and the nodes with their states")
    return top


def run(arguments: argparse.Namespace) -> None:
    began = time.monotonic()
    directory: Path = arguments.dir
    if arguments.command == "start":
        require_packages(with_accounting=arguments.accounting)
        options = {name: value for name, value in vars(arguments).items() if name not in {"command", "dir", "netns"}}
        possible = arguments.netns is not False and network.possible()
        if arguments.netns and not possible:
            raise ClusterError("--netns needs root, and a kernel that makes network namespaces, bridges and veths", 4)
        subnet = network.free_subnet(arguments.port) if possible else ""
        cluster = Cluster(dir=str(directory), netns=possible, subnet=subnet, **options)
        start(cluster)
        print(
            f"{cluster.nodes} nodes ready in {time.monotonic() - began:.1f} s, netns={cluster.netns}", file=sys.stderr
        )
    elif arguments.command == "stop":
        stop(directory, keep=arguments.keep)
    elif arguments.command == "node-down":
        node_down(directory, arguments.node, cut=arguments.cut)
    elif arguments.command == "node-up":
        node_up(directory, arguments.node)
    elif arguments.command == "controller-down":
        controller_down(directory)
    elif arguments.command == "controller-up":
        controller_up(directory)
        alive = set(load(directory).node_names) & processes.daemons(directory).keys()
        processes.wait_for(directory, "nodes", lambda: nodes_up(directory) == len(alive))
    elif arguments.command == "status":
        show_status(directory)
    if arguments.command in {"start", "env"}:
        load(directory)
        print(f"export SLURM_CONF={shlex.quote(str(conf_path(directory)))}")


def terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> int:
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    signal.signal(signal.SIGTERM, terminated)  # so that an interrupted start cleans up
    try:
        run(parser().parse_args())
    except ClusterError as error:
        print(f"dev_cluster: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
