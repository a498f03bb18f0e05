"""A real Slurm of several nodes for tests: start it, run commands and jobs on it, power nodes off, stop it.

    @pytest.fixture(scope="session")
    def cluster() -> Iterator[DevCluster]:
        with DevCluster.running(nodes=4) as cluster:
            yield cluster

Mark the tests `slurm`. They are skipped, with the reason, where Slurm cannot run; in CI a skip is a failure. A test
that starts other programs passes them `cluster.environment`.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

DEV_CLUSTER = Path(__file__).parents[2] / "slurm" / "dev_cluster.py"
# Short: the path of a unix socket has at most 107 bytes, and pytest's tmp_path is long. The name contains the pid of
# the tests that own the cluster, so that the next run can remove the remains of one that was killed.
PARENT = Path("/tmp")
PREFIX = "scaletrain-slurm-"
LOCK = PARENT / "scaletrain-slurm.lock"
# Lost nodes and a controller that is down are detected sooner than with the defaults of the development cluster.
HASTY: Mapping[str, Any] = {"slurmd_timeout_seconds": 5, "conf": ["MessageTimeout=5"]}
# Exit code of dev_cluster.py on a machine without the packages, root rights or namespaces.
MACHINE_LACKS = 4


class DevCluster:
    """One cluster with its own directory, port, network and nodes n1, n2, ..."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.port = port
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))
        }
        self.environment["SLURM_CONF"] = str(directory / "etc" / "slurm.conf")
        self._nodes_down: set[str] = set()
        self._controller_is_down = False

    @classmethod
    @contextlib.contextmanager
    def running(cls, *words: str, conf: Sequence[str] = (), **options: int) -> Iterator[DevCluster]:
        """Start a cluster and stop it at the end of the block; `words`, `conf` and `options` as for `start`."""
        with LOCK.open("w") as lock:  # other tests may run at the same time
            fcntl.flock(lock, fcntl.LOCK_EX)
            remove_abandoned()
            port = free_port()
            cluster = cls(PARENT / f"{PREFIX}{os.getpid()}-{port}", port)
            cluster.directory.mkdir()
        try:
            cluster.start(*words, conf=conf, **options)
            yield cluster
        finally:
            cluster.stop()
            with contextlib.suppress(FileNotFoundError):  # it still exists if the cluster did not start
                cluster.directory.rmdir()

    def start(self, *words: str, conf: Sequence[str] = (), **options: int) -> None:
        """Start the cluster with options of `dev_cluster.py start`: `start("--accounting", nodes=2)`."""
        arguments = [*words, *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]
        arguments += [f"--conf={line}" for line in conf]
        done = self.control("start", f"--port={self.port}", "--netns", *arguments, check=False)
        if done.returncode == MACHINE_LACKS:
            pytest.skip(f"no Slurm on this machine: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr

    def stop(self) -> None:
        self.control("stop")

    def node_down(self, node: str) -> None:
        """Power a node off: kill all its processes at once; Slurm detects it later."""
        self.control("node-down", node)

    def cut_node(self, node: str) -> None:
        """Cut the network of a node; its processes continue."""
        self.control("node-down", node, "--cut")

    def node_up(self, node: str) -> None:
        self.control("node-up", node)

    def restore(self) -> None:
        """Cancel all jobs, and start the controller and the nodes that a test has left down."""
        if self._controller_is_down:
            self.control("controller-up")
        self.run("scancel", "--me")
        for node in sorted(self._nodes_down):
            self.node_up(node)
        deadline = time.monotonic() + 120
        while self.run("squeue", "-h", "--me").stdout:
            assert time.monotonic() < deadline, self.run("squeue").stdout
            time.sleep(0.3)

    def slurmd(self, node: str) -> int:
        """Return the pid of the slurmd of a node; the tasks of the node are in the same namespaces."""
        mark = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        for line in self.run("pgrep", "--full", "--list-full", f"^slurmd -D -N {node}$").stdout.splitlines():
            pid = int(line.split()[0])
            if mark in Path("/proc", str(pid), "environ").read_bytes().split(b"\0"):
                return pid
        raise AssertionError(f"{node} has no slurmd")

    def control(self, command: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, str(DEV_CLUSTER), command, "--dir", str(self.directory), *arguments]
        if command == "node-down":
            self._nodes_down.add(arguments[0])
        elif command.startswith("controller-"):
            self._controller_is_down = command == "controller-down"
        done = self.run(*argv, check=check)
        if command == "node-up":
            self._nodes_down.discard(arguments[0])
        return done

    def run(self, *argv: str, check: bool = True, timeout: float = 180) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node, which is this machine: squeue, srun, python, ..."""
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == 0 or not check, f"{argv} exited {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def submit(self, script: str, *options: str) -> str:
        """Submit the text of a script, without its #! line, with sbatch; return the job id."""
        return self.run("sbatch", "--parsable", f"--chdir={self.directory}", *options, "--wrap", script).stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`: {"JobState": "RUNNING", "Restarts": "0", ...}"""
        text = self.run("scontrol", "-o", "show", "job", job_id).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def end_soon(self, job_id: str) -> None:
        """Set the time limit of a running job to end in 75 to 135 seconds.

        Slurm keeps limits in whole minutes since the start; an end between two of them could be one that has passed. It
        checks limits every half minute and signals the ranks a minute ahead, which is enough to save.
        """
        began = time.mktime(time.strptime(self.job(job_id)["StartTime"], "%Y-%m-%dT%H:%M:%S"))
        minutes = math.ceil((time.time() + 75 - began) / 60)
        self.run("scontrol", "update", f"jobid={job_id}", f"TimeLimit={minutes}")

    def wait_for(self, job_id: str, ready: Callable[[dict[str, str]], bool], seconds: float = 120) -> dict[str, str]:
        """Poll a job until it is `ready`; return its last fields."""
        deadline = time.monotonic() + seconds
        while not ready(job := self.job(job_id)):
            assert time.monotonic() < deadline, f"job {job_id} is not ready after {seconds:.0f} s: {job}"
            time.sleep(0.2)
        return job

    def wait_for_state(self, job_id: str, *states: str, seconds: float = 120) -> dict[str, str]:
        return self.wait_for(job_id, lambda job: job["JobState"] in states, seconds)


def free_port() -> int:
    """Return the first port, in steps of 200, that no other dev cluster uses.

    A cluster binds its port only seconds after it was chosen; until then its directory, named after it, reserves it.
    """
    for port in range(17000, 32000, 200):
        if any(PARENT.glob(f"{PREFIX}*-{port}")):
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("no free port between 17000 and 32000")


def remove_abandoned() -> None:
    """Stop the clusters of test runs that were killed."""
    for directory in PARENT.glob(f"{PREFIX}*"):
        owner = directory.name.removeprefix(PREFIX).split("-")[0]
        if not Path("/proc", owner).exists():
            DevCluster(directory, 0).stop()
