"""Fixtures: a run for a fake API server, and objects as controllers write them."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.backends.kubernetes.api import Cluster, connect
from tests.cli.command_line import SMALL, Ended, scaletrain
from tests.launch.backends.kubernetes.fake_api import FakeApi, serve, write_kubeconfig
from tests.launch.backends.kubernetes.pods import Gang
from tests.launch.conftest import MadeRun, MakeRun

IMAGE = "registry.example/scaletrain@sha256:" + "a" * 64
SETTINGS = (
    *("cluster.scheduler=kubernetes", "cluster.nodes=2", "cluster.kubernetes.namespace=ml"),
    *(f"cluster.kubernetes.image={IMAGE}", "cluster.kubernetes.runs.claim=runs"),
)


# The server is not one that kubectl could use.
_NO_KUBECTL = """#!/bin/sh
echo 'error: unable to upgrade connection: this is a stand-in' >&2
exit 1
"""


def put_kubectl(folder: Path, script: str) -> None:
    """Put a stand-in for kubectl into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "kubectl").write_text(script)
    (folder / "kubectl").chmod(0o755)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    """Yield a fake API server, the current context of the kubeconfig. Unanswered requests are repeated at once."""
    fake = FakeApi()
    put_kubectl(tmp_path / "programs", _NO_KUBECTL)
    monkeypatch.setenv("PATH", str(tmp_path / "programs"), prepend=os.pathsep)
    monkeypatch.setattr("scaletrain_cli.launch.backends.kubernetes.objects._LOST_ANSWER_PAUSES", (0.0, 0.0))
    monkeypatch.setattr("scaletrain_cli.launch.backends.kubernetes.view_pod._START_SECONDS", 0.0)  # no pod ever runs
    with serve(fake) as url:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "kubeconfig", url)))
        yield fake


@pytest.fixture
def start_gang(tmp_path: Path) -> Iterator[Callable[..., Gang]]:
    """Yield a function that starts pods of a run."""
    gangs: list[Gang] = []

    def start(made: MadeRun, incarnation: int = 0, pods: tuple[int, ...] = ()) -> Gang:
        gangs.append(Gang(made, tmp_path / "volume", incarnation).start(*pods))
        return gangs[-1]

    yield start
    for gang in gangs:
        gang.end()


@pytest.fixture
def cluster(api: FakeApi) -> Cluster:
    return connect(None, "ml")


@pytest.fixture
def made(make_run: MakeRun) -> MadeRun:
    return make_run(*SETTINGS)


def put_cluster(api: FakeApi) -> None:
    """Set up the namespace and the claim of a run, and two nodes with enough resources for it."""
    api.put("namespaces", {"metadata": {"name": "ml"}}, namespace="")
    bound = {"spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
    api.put("persistentvolumeclaims", {"metadata": {"name": "runs"}, **bound})
    for name in ("n0", "n1"):
        allocatable = {"cpu": "8", "memory": "64Gi"}
        api.put("nodes", {"metadata": {"name": name}, "status": {"allocatable": allocatable}}, namespace="")


def submit_small(*more: str, settings: Iterable[str] = SETTINGS, code: int | None = None) -> Ended:
    """Submit a small run, r1, by its command line."""
    words = ("--run-id", "r1", *(f"--set={setting}" for setting in settings), *more)
    return scaletrain("submit", SMALL, *words, code=code)


def put_pods(api: FakeApi, *pods: dict[str, Any]) -> None:
    for one in pods:
        api.put("pods", one)


def pod(
    workload: str, index: int = 0, *, phase: str = "Running", node: str | None = "node-a", **more: Any
) -> dict[str, Any]:
    """Return a pod of a gang as the kubelet reports it."""
    state = {"Running": {"running": {}}, "Pending": {"waiting": {"reason": "ContainerCreating"}}}
    metadata = {
        "name": f"{workload}-node-0-{index}-abcde",
        "uid": f"pod-uid-{workload}-{index}",
        "labels": {"app.kubernetes.io/instance": workload, "scaletrain.dev/run": workload.rpartition("-s")[0]},
        "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        "creationTimestamp": "2026-11-21T10:00:00Z",
    }
    container = {"name": "node", "state": state.get(phase, {})}
    found = {
        "metadata": metadata | more.pop("metadata", {}),
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": phase, "containerStatuses": [container] if node else [], **more},
    }
    return found


def ended(workload: str, index: int, exit_code: int, reason: str = "Error") -> dict[str, Any]:
    """Return a pod whose container has ended."""
    container = {"name": "node", "state": {"terminated": {"exitCode": exit_code, "reason": reason}}}
    return pod(workload, index, phase="Failed" if exit_code else "Succeeded", containerStatuses=[container])


def condition(kind: str, status: str = "True", reason: str = "", message: str = "") -> dict[str, str]:
    stamp = "2026-11-21T10:00:00Z"
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": stamp}
