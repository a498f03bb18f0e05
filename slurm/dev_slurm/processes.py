"""Start and record daemons; find and end the processes of a cluster, and no others."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dev_slurm import network
from dev_slurm.settings import Cluster, ClusterError, conf_path

COMMANDS = {"munged", "slurmctld", "slurmd", "slurmstepd", "slurmdbd", "mariadbd"}
FREEZER = Path("/sys/fs/cgroup/freezer")
NODE_MARK = "SCALETRAIN_DEV_NODE"


def start_ticks(pid: int) -> int | None:
    """Return the start time of a live process in clock ticks since boot; None if it has ended. Detects reused pids."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def daemons(directory: Path) -> dict[str, tuple[int, int]]:
    """Return the recorded daemons: name → (pid, start time in ticks)."""
    try:
        lines = (directory / "daemons").read_text().splitlines()
    except FileNotFoundError:
        return {}
    return {name: (int(pid), int(ticks)) for name, pid, ticks in map(str.split, lines)}


def record(directory: Path, known: dict[str, tuple[int, int]]) -> None:
    (directory / "daemons").write_text("".join(f"{name} {pid} {ticks}\n" for name, (pid, ticks) in known.items()))


def forget(directory: Path, name: str) -> None:
    record(directory, {other: entry for other, entry in daemons(directory).items() if other != name})


def spawn(directory: Path, name: str, argv: list[str], marks: dict[str, str] | None = None) -> None:
    with (directory / "log" / f"{name}.out").open("ab") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env=environment(directory) | (marks or {}),
            start_new_session=True,
        )
    record(directory, daemons(directory) | {name: (process.pid, start_ticks(process.pid) or 0)})


def environment(directory: Path) -> dict[str, str]:
    """Return this process's environment for the cluster, without variables of a Slurm job that it may run in."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SLURMD_"))}
    return kept | {"SLURM_CONF": str(conf_path(directory))}


def query(directory: Path, *argv: str) -> str:
    """Return the output of a client of Slurm or munge; empty if it fails, as its daemon may not run yet."""
    done = subprocess.run(argv, env=environment(directory), capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def wait_for(directory: Path, what: str, ready: Callable[[], bool], seconds: float = 600) -> None:
    """Poll until ready. Raises ClusterError with the log of a daemon as soon as one dies."""
    deadline = time.monotonic() + seconds
    while not ready():
        for name, (pid, ticks) in daemons(directory).items():
            if start_ticks(pid) != ticks:
                raise ClusterError(f"{name} died\n{log_tail(directory, name)}")
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not ready after {seconds:.0f} s\n{log_tail(directory, 'slurmctld')}")
        time.sleep(0.05)


def log_tail(directory: Path, name: str) -> str:
    log = directory / "log" / f"{name}.out"
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join([f"--- {log}", *text.splitlines()[-15:]])


def members(directory: Path, node: str | None = None) -> set[int]:
    """Return the live processes of the cluster, or of one node, and their descendants.

    They are in its network namespaces, or have its SLURM_CONF and are a daemon or in a job: a shell may export it too.
    """
    spaces = network.identities(directory, node)
    ours = f"SLURM_CONF={conf_path(directory)}".encode()
    marks = {f"{name}={node}".encode() for name in (NODE_MARK, "SLURMD_NODENAME")}
    found: set[int] = set()
    parents: dict[int, int] = {}
    for proc in Path("/proc").glob("[0-9]*"):
        pid = int(proc.name)
        if start_ticks(pid) is None or pid == os.getpid():
            continue
        try:
            parents[pid] = int((proc / "stat").read_text().rpartition(")")[2].split()[1])
            environ = set((proc / "environ").read_bytes().split(b"\0"))
            command = (proc / "comm").read_text().strip()
            inside = network.identity(proc / "ns" / "net") in spaces
        except OSError:
            continue  # ended since, or another user's
        of_slurm = command in COMMANDS or any(entry.startswith(b"SLURM_JOB_ID=") for entry in environ)
        if inside or (ours in environ and of_slurm and (node is None or marks & environ)):
            found.add(pid)
    while children := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= children
    return found


def kill_all(pids_left: Callable[[], set[int]]) -> None:
    deadline = time.monotonic() + 120
    while pids := pids_left():
        if time.monotonic() > deadline:
            raise ClusterError(f"processes survive SIGKILL: {sorted(pids)}")
        # All are stopped first, as by a power failure: none may see that another one has ended, and record it.
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
        time.sleep(0.02)


def freezer_writable() -> bool:
    return (FREEZER / "release_agent").exists() and os.access(FREEZER, os.W_OK)


def job_freezers(cluster: Cluster, node: str = "n*") -> Iterator[Path]:
    """Yield the cgroups of the cluster's jobs that proctrack/cgroup created, of all nodes or one, innermost first."""
    for job in FREEZER.glob(f"slurm_{node}/uid_*/job_*"):
        if int(job.name.removeprefix("job_")) in cluster.job_ids:
            for folder, _, _ in os.walk(job, topdown=False):
                yield Path(folder)


def pids_in(group: Path) -> list[str]:
    return (group / "cgroup.procs").read_text().split()


def thaw(cluster: Cluster, node: str = "n*") -> None:
    """Resume suspended jobs: SIGKILL does not end a frozen process."""
    for group in job_freezers(cluster, node):
        with contextlib.suppress(FileNotFoundError):  # its last process has just ended
            (group / "freezer.state").write_text("THAWED")


def clear_freezers(cluster: Cluster) -> None:
    """Kill the processes in the cgroups of the cluster's jobs, and remove the cgroups."""
    thaw(cluster)
    kill_all(lambda: {int(pid) for group in job_freezers(cluster) for pid in pids_in(group)})
    for group in job_freezers(cluster):
        group.rmdir()


def remove_unused_freezers() -> None:
    """Remove the cgroups that all clusters share, unless a cluster still runs."""
    names = (path.read_text() for path in Path("/proc").glob("[0-9]*/comm") if start_ticks(int(path.parent.name)))
    if "slurmd\n" in names:
        return
    for group in [*FREEZER.glob("slurm_n*/uid_*"), *FREEZER.glob("slurm_n*")]:
        with contextlib.suppress(OSError):  # another Slurm has jobs in it
            group.rmdir()
