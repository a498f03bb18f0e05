"""A real Slurm of several nodes for tests: start it, run commands and jobs on it, power nodes off, stop it.

A test that needs nothing special takes the fixture `slurm` or `accounting` of conftest.py, which all tests of a worker
share. Another one starts its own:

    @pytest.fixture
    def cluster() -> Iterator[DevCluster]:
        with DevCluster.running(nodes=4) as cluster:
            yield cluster

Mark the tests `slurm`. They are skipped, with the reason, where Slurm cannot run; in CI a skip is a failure. A test
that starts other programs passes them `cluster.environment`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until

DEV_CLUSTER = Path(__file__).parents[2] / "slurm" / "dev_cluster.py"
# Short: the path of a unix socket has at most 107 bytes, and pytest's tmp_path is long. The name contains the pid of
# the tests that own the cluster, so that the next run can remove the remains of one that was killed.
PARENT = Path("/tmp")
PREFIX = "scaletrain-slurm-"
LOCK = PARENT / "scaletrain-slurm.lock"
# On a busy machine daemons answer late and ranks save slowly. Slurm would take their node for lost, or kill them.
PATIENT = {"slurmd_timeout_seconds": 600, "kill_wait_seconds": 300}
# For tests of how Slurm itself detects a lost node.
HASTY: Mapping[str, Any] = {"slurmd_timeout_seconds": 30, "kill_wait_seconds": 30, "conf": ["MessageTimeout=10"]}
# Exit code of dev_cluster.py on a machine without the packages, root rights or namespaces.
MACHINE_LACKS = 4
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}


class DevCluster:
    """One cluster with its own directory, port, network and nodes n1, n2, ..."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.port = port
        self.renew_environment()
        self._nodes_down: set[str] = set()
        self._controller_is_down = False

    def renew_environment(self) -> None:
        """Begin again with the variables of this process."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        self.environment = kept | {"SLURM_CONF": str(self.directory / "etc" / "slurm.conf")}

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
        arguments = [*words, *(f"--{name.replace('_', '-')}={value}" for name, value in (PATIENT | options).items())]
        arguments += [f"--conf={line}" for line in conf]
        done = self.control("start", f"--port={self.port}", "--netns", *arguments, check=False)
        if done.returncode == MACHINE_LACKS:
            pytest.skip(f"no Slurm on this machine: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr

    def stop(self) -> None:
        self.control("stop")

    def node_down(self, node: str) -> None:
        """Power a node off: kill all its processes at once; Slurm detects it after SlurmdTimeout."""
        self.control("node-down", node)

    def lose_node(self, node: str) -> None:
        """Power a node off, and tell Slurm at once."""
        self.node_down(node)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=powered off")

    def cut_node(self, node: str) -> None:
        """Cut the network of a node; its processes continue."""
        self.control("node-down", node, "--cut")

    def node_up(self, node: str) -> None:
        self.control("node-up", node)

    def restore(self) -> None:
        """Cancel all jobs, start what a test has left down, and wait until no job is left and all nodes are idle.

        Raises NotRestoredError if that takes twice as long as Slurm waits before it kills (KillWait).
        """
        if self._controller_is_down:
            self.control("controller-up")
        self.run("scancel", "--me")
        for node in sorted(self._nodes_down):
            self.node_up(node)
        deadline = time.monotonic() + 2 * PATIENT["kill_wait_seconds"]
        while left := self.run("squeue", "-h").stdout + self._busy_nodes():
            if time.monotonic() > deadline:
                raise NotRestoredError(left)
            time.sleep(0.2)

    def _busy_nodes(self) -> str:
        """Return the lines of the nodes that are not idle, after undraining those that a test has drained."""
        lines = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").stdout.splitlines(keepends=True)
        busy = [line for line in lines if line.split()[1] != "idle"]
        for node in (line.split()[0] for line in busy if "drain" in line):
            self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        return "".join(busy)

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

    def run(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node, which is this machine: squeue, srun, python, ..."""
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, f"{argv} exited {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def submit(self, script: str, *options: str) -> str:
        """Submit the text of a script, without its #! line, with sbatch; return the job id."""
        return self.run("sbatch", "--parsable", f"--chdir={self.directory}", *options, "--wrap", script).stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`: {"JobState": "RUNNING", "Restarts": "0", ...}"""
        text = self.run("scontrol", "-o", "show", "job", job_id).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def suspend(self, job_id: str, steps: int) -> None:
        """Suspend a job and wait until its steps, counted on each node, are frozen: Slurm stops them 2 seconds later.

        Slurm may freeze for good what is resumed and signaled in between.
        """

        def frozen() -> int:
            logs = (self.directory / "log").glob("n*.log")
            return sum(log.read_text().count(f"Suspended StepId={job_id}.") for log in logs)

        before = frozen()
        self.run("scontrol", "suspend", job_id)
        wait_until(lambda: frozen() >= before + steps, "all steps are frozen")

    def end_soon(self, job_id: str) -> None:
        """Let a running job end in 80 seconds by its time limit.

        Slurm checks limits every half minute and signals the ranks a minute ahead: 20 to 50 seconds from now.
        """
        end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 80))
        self.run("scontrol", "update", f"jobid={job_id}", f"EndTime={end}")

    def wait_for(self, job_id: str, ready: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        """Poll a job until it is `ready`; return its last fields. Fails if the job has ended otherwise."""
        polls_after_end = 0
        while not ready(job := self.job(job_id)):
            polls_after_end = polls_after_end + 1 if job["JobState"] in ENDED else 0
            assert polls_after_end < 100, job
            time.sleep(0.2)
        return job

    def wait_for_state(self, job_id: str, *states: str) -> dict[str, str]:
        return self.wait_for(job_id, lambda job: job["JobState"] in states)


class NotRestoredError(Exception):
    """Jobs or nodes of a cluster are not as they were before a test; the message lists them."""


class InfrastructureRetry(UserWarning):
    """A cluster was replaced after a test. It is shown in pytest's summary, and fails nothing."""


class SharedCluster:
    """A cluster that tests use one after the other. It starts with the first one; `close` stops it."""

    def __init__(
        self,
        *words: str,
        conf: Sequence[str] = (),
        prepare: Callable[[DevCluster], None] = lambda cluster: None,
        **options: int,
    ) -> None:
        self._start = lambda: DevCluster.running(*words, conf=conf, **options)
        self._prepare = prepare
        self._stack = contextlib.ExitStack()
        self._cluster: DevCluster | None = None

    def close(self) -> None:
        self._cluster = None
        self._stack.close()

    @contextlib.contextmanager
    def lent(self) -> Iterator[DevCluster]:
        """Return the cluster with all nodes idle and no job, and the variables of the test's own environment."""
        if self._cluster is None:
            cluster = self._stack.enter_context(self._start())
            self._prepare(cluster)
            self._cluster = cluster
        self._cluster.renew_environment()
        try:
            yield self._cluster
        finally:
            self._take_back(self._cluster)

    def _take_back(self, cluster: DevCluster) -> None:
        cluster.renew_environment()
        try:
            cluster.restore()
        except (NotRestoredError, AssertionError) as error:
            jobs = cluster.run("squeue", "-h", "-o", "%i %T %j", check=False).stdout
            self.close()
            assert not jobs, f"the test left jobs that do not end: {jobs}"
            with warnings.catch_warnings():
                warnings.simplefilter("always", InfrastructureRetry)
                warnings.warn(f"the next test gets another cluster: {error}", InfrastructureRetry, stacklevel=2)


def free_port() -> int:
    """Return the first port, in steps of 200, that no other dev cluster uses.

    A cluster binds its port only seconds after it was chosen; until then its directory, named after it and made under
    LOCK, reserves it. No system gives these ports to a program that asks for any free one.
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
