"""Pods of a gang without Kubernetes: their agents as processes of this machine, with the environment that pods have."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scaletrain_cli.launch.attempts import AttemptRecord, read_attempts
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import documents_of
from tests.forked import Forked, forking
from tests.launch.conftest import ENGINE, MadeRun
from tests.ports import OF_A_GANG, reserved_port
from tests.waiting import wait_until

WORKLOAD = "jobset/fake-s1"


def put_documents(documents: Mapping[str, str | bytes], folder: Path) -> Path:
    """Write the files of a ConfigMap as they are mounted in a pod; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in documents.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def variables_of_a_pod(number: int, gang: int, workload: str = WORKLOAD, port: int = 29500) -> dict[str, str]:
    """Return what the manifest sets in the environment of a pod."""
    found = {"WORKLOAD": workload, "GANG": str(gang), "NODE_RANK": str(number)}
    found |= {"NODE_NAME": f"gpu-{number}.ec2.internal", "POD": f"fake-s1-node-0-{number}"}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {f"SCALETRAIN_{name}": value for name, value in found.items()} | master


@dataclass
class Gang:
    """One gang of a workload's pods; ``volume`` is shared by them and not visible to the submitter."""

    made: MadeRun
    volume: Path
    incarnation: int = 0
    workload: str = WORKLOAD
    pods: dict[int, Forked] = field(default_factory=dict)
    port: int = field(default_factory=lambda: reserved_port(OF_A_GANG))

    def start(self, *numbers: int) -> Gang:
        """Start these pods; without numbers all of them."""
        documents = put_documents(documents_of(self.made.run, self.made.record), self.volume / ".documents")
        words = ["--engine", ENGINE, "--documents", str(documents), "--runs-root", str(self.volume)]
        for number in numbers or range(self.made.record.spec.cluster.nodes):
            self.termination_log(number).touch()
            environment = variables_of_a_pod(number, self.incarnation, self.workload, self.port)
            self.pods[number] = Forked(
                "scaletrain_cli.launch.backends.kubernetes.pod_agent",
                [*words, "--termination-log", str(self.termination_log(number))],
                forking({**os.environ, **environment}),
            )
        return self

    def termination_log(self, number: int) -> Path:
        """The file that the kubelet copies into the status of a pod."""
        return self.volume / f".termination-{number}"

    @property
    def run(self) -> RunDir:
        """The run directory as the pods see it."""
        return RunDir(self.volume / self.made.run.run_id)

    @property
    def attempts(self) -> list[AttemptRecord]:
        return read_attempts(self.run)

    def wait_until_up(self) -> None:
        """Wait until all ranks of the newest attempt run."""
        world = self.made.record.spec.world_size
        wait_until(lambda: len(self._logs_with("up")) == world, "all ranks are up")

    def wait_until_heeding(self) -> None:
        """Wait until the agents have blocked SIGTERM. Before that PID 1 ignores it, and these processes end."""
        bit = 1 << (signal.SIGTERM - 1)
        for pod in self.pods.values():
            wait_until(lambda pod=pod: _blocked(pod.pid) & bit, "SIGTERM is blocked")

    def signal(self, signum: int) -> None:
        """Send a signal to the first process of each pod, as the kubelet does."""
        for pod in self.pods.values():
            pod.send_signal(signum)

    def wait(self) -> list[int]:
        """Wait for the pods and return their exit codes; their output is then in ``output``."""
        self.output = {number: pod.communicate() for number, pod in sorted(self.pods.items())}
        return [pod.wait() for _, pod in sorted(self.pods.items())]

    def end(self) -> None:
        for pod in self.pods.values():
            if pod.poll() is None:
                pod.kill()
                pod.communicate()

    def _logs_with(self, word: str) -> list[Path]:
        attempts = self.run.attempts()
        logs = (self.run.attempt(attempts[-1]) / "logs").glob("*.log") if attempts else ()
        return [path for path in logs if word in path.read_text()]


def _blocked(pid: int) -> int:
    found = re.search(r"SigBlk:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1], 16) if found else 0
