"""The command line of a user, and the pods of their runs, on the cluster under test."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kubernetes_cluster.offers import amount, is_ready
from tests.kubernetes_cluster.place import CLAIM, Place, wait_for
from tests.kubernetes_cluster.proxy import Proxy, User
from tests.kubernetes_cluster.server import Object

PROJECT = Path(__file__).parents[2]
SPEC = PROJECT / "tests" / "cli" / "small.yaml"
ADMINISTRATOR = User()
GRACE_SECONDS = 10
RUN_LABEL = "scaletrain.dev/run"
_VERB_SECONDS = 600.0  # `submit` waits for the data to be prepared


@dataclass
class Site:
    """One user on one machine with their own run directories, who submits runs of two pods."""

    place: Place
    proxy: Proxy
    folder: Path
    user: User = ADMINISTRATOR

    # ---- the user

    def scaletrain(self, *words: str, check: bool = True) -> Any:
        """Run a verb; return what it printed with ``--json``, else the ended process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        kubeconfig = self.proxy.kubeconfig(self.user, self.place.namespace)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SCALETRAIN_")}
        environment |= {"KUBECONFIG": str(kubeconfig), "PYTHONPATH": str(PROJECT), "COLUMNS": "200"}
        environment["PATH"] = f"{self._programs()}:{environment['PATH']}"
        environment |= {"SCALETRAIN_RUNS": str(self.folder / "runs"), "XDG_CONFIG_HOME": str(self.folder)}
        argv = [sys.executable, "-m", "scaletrain_cli", *words]
        done = subprocess.run(
            argv, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=_VERB_SECONDS, check=False
        )
        assert done.returncode == 0 or not check, f"{words} exited {done.returncode}\n{done.stdout}{done.stderr}"
        return json.loads(done.stdout) if "--json" in words and check else done

    def _programs(self) -> Path:
        """Return a folder with a kubectl that goes to the cluster itself: the proxy passes no streams on."""
        folder, settings = self.folder / "programs", self.place.offers.settings
        folder.mkdir(exist_ok=True)
        known = "-u KUBECONFIG" if settings.kubeconfig is None else f"KUBECONFIG={shlex.quote(settings.kubeconfig)}"
        path = shlex.quote(os.environ["PATH"])
        command = settings.kubectl or "kubectl"
        (folder / "kubectl").write_text(f'#!/bin/sh\nexec env {known} PATH={path} {command} "$@"\n')
        (folder / "kubectl").chmod(0o755)
        return folder

    def submit(self, run_id: str, *settings: str, check: bool = True) -> Any:
        """Submit a run of two stand-in pods, or as the settings say, without data."""
        image = self.place.offers.settings.small_image
        return self._submit(run_id, image, SPEC, "env.SCALETRAIN_ENGINE=stand_in", *settings, check=check)

    def submit_training(self, run_id: str, image: str, *settings: str, check: bool = True) -> Any:
        """Submit a run that trains in the image of the project."""
        return self._submit(run_id, image, SPEC, *settings, check=check)

    def _submit(self, run_id: str, image: str, spec: Path, *settings: str, check: bool) -> Any:
        pairs = (
            *("cluster.scheduler=kubernetes", "cluster.nodes=2", "cluster.gpus_per_node=1"),
            *(f"cluster.grace_seconds={GRACE_SECONDS}", f"cluster.kubernetes.namespace={self.place.namespace}"),
            *(f"cluster.kubernetes.image={image}", f"cluster.kubernetes.runs={{claim: {CLAIM}}}"),
            *("cluster.kubernetes.cpus_per_node=1", "cluster.kubernetes.memory_per_node=2GB"),
            *("cluster.kubernetes.shm_size=64MB", "cluster.kubernetes.preparation={cpus: 1, memory: 2GB}"),
            *settings,
        )
        words = [word for pair in pairs for word in ("--set", pair)]
        return self.scaletrain("submit", str(spec), "--run-id", run_id, "--yes", *words, check=check)

    def status(self, run_id: str) -> dict[str, Any]:
        return dict(self.scaletrain("status", run_id, "--json"))

    def wait(self, run_id: str, *states: str, seconds: float = 180) -> dict[str, Any]:
        """Wait until ``status`` shows one of the states; return what it shows."""
        return self.wait_until(run_id, lambda now: now["state"] in states, f"the state is {states}", seconds)

    def wait_until(
        self, run_id: str, reached: Callable[[dict[str, Any]], bool], what: str, seconds: float = 180
    ) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while not reached(now := self.status(run_id)):
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}; {now}"
            time.sleep(1)
        return now

    def run_directory(self, run_id: str) -> Path:
        return self.folder / "runs" / run_id

    # ---- the cluster

    def workloads(self, run_id: str, resource: str = "jobsets") -> list[Object]:
        return self.place.server.list(resource, self.place.namespace, f"{RUN_LABEL}={run_id}")

    def pods(self, run_id: str) -> list[Object]:
        """Return the pods that are neither ended nor asked to end, in the order of their ranks."""
        found = self.place.server.list("pods", self.place.namespace, f"{RUN_LABEL}={run_id}")
        alive = [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]
        alive = [pod for pod in alive if pod["status"].get("phase") in ("Pending", "Running")]
        return sorted(alive, key=lambda pod: str(pod["metadata"]["name"]))

    def running(self, run_id: str, pods: int = 2, other_than: Sequence[Object] = (), seconds: float = 180) -> list[Any]:
        """Wait until this many pods run, none of them one of ``other_than``; return them."""
        old = {pod["metadata"]["uid"] for pod in other_than}

        def found() -> list[Object] | None:
            now = [pod for pod in self.pods(run_id) if pod["status"]["phase"] == "Running"]
            return now if len(now) == pods and not old & {pod["metadata"]["uid"] for pod in now} else None

        return wait_for(found, f"{pods} pods of {run_id} run", seconds) or []

    def end(self, pod: Object, code: int) -> None:
        """Let a stand-in pod end with this exit code."""
        name, namespace, server = pod["metadata"]["name"], self.place.namespace, self.place.server
        if self.place.offers.pods == "acted":
            server.patch("pods", name, {"metadata": {"annotations": {"fake/exit": str(code)}}}, namespace)
            return
        from kubernetes.client import CoreV1Api
        from kubernetes.stream import stream

        words = ["sh", "-c", f"echo {code} > /dev/shm/exit"]
        call = CoreV1Api(server.client).connect_get_namespaced_pod_exec
        stream(call, name, namespace, command=words, stdout=True, stderr=True, stdin=False, tty=False)

    def finish(self, run_id: str, pods: int = 2) -> None:
        """Let all pods of the run succeed."""
        for pod in self.running(run_id, pods):
            self.end(pod, 0)

    def cancel(self, run_id: str) -> dict[str, Any]:
        """Cancel the run, and wait until its last pod is gone."""
        self.scaletrain("cancel", run_id, "--yes")
        return self.wait(run_id, "cancelled")

    # ---- nodes

    def cordon(self, node: str, value: bool = True) -> None:
        self.place.server.patch("nodes", node, {"spec": {"unschedulable": value}})

    def silence(self, node: str) -> None:
        """Stop a node such that it reports nothing anymore."""
        self._act_on(node, "true", self.place.offers.settings.silence)

    def wake(self, node: str) -> None:
        self._act_on(node, None, self.place.offers.settings.wake)

        def ready() -> bool:
            found = self.place.server.get("nodes", node)
            return found is not None and is_ready(found)

        wait_for(ready, f"{node} is ready", 180)

    def _act_on(self, node: str, value: str | None, command: str | None) -> None:
        if self.place.offers.pods == "acted":
            self.place.server.patch("nodes", node, {"metadata": {"annotations": {"fake/dead": value}}})
        else:
            assert command is not None
            subprocess.run(shlex.split(command.replace("{}", node)), check=True, capture_output=True, timeout=60)

    def restore_node(self, node: Object) -> None:
        """Create a deleted Node object anew; its kubelet continues to report to it."""
        kept = ("name", "labels", "annotations")
        metadata = {name: node["metadata"][name] for name in kept if name in node["metadata"]}
        spec = {name: value for name, value in node["spec"].items() if name not in ("taints", "unschedulable")}
        taints = [one for one in node["spec"].get("taints", []) if not one["key"].startswith("node.kubernetes.io/")]
        body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {**spec, "taints": taints}}
        self.place.server.create("nodes", body)
        self.place.server.patch("nodes", metadata["name"], {"status": node["status"]}, part="status")

    def most_of_a_node(self, resource: str) -> int:
        return int(max(amount(node, resource) for node in self.place.offers.nodes))
