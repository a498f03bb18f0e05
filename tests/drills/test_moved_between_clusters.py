"""One run that trains on a real Slurm, in pods, and on this machine: it moves through its mirror each time."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.backends.kubernetes.manifest import Manifest
from scaletrain_cli.launch.backends.kubernetes.names import Workload
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.launch.node.ranks import ENGINE_MODULE
from scaletrain_cli.rundir.journal import read_events, read_metrics
from scaletrain_cli.rundir.mirror_state import read_mirror_state
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from tests.cli.command_line import PROJECT, Ended, scaletrain
from tests.drills.conftest import Undisturbed
from tests.drills.training_runs import STEPS, Drill, assert_same_run, slowed, spec_text
from tests.launch.backends.kubernetes.conftest import IMAGE, api
from tests.launch.backends.kubernetes.fake_api import FakeApi
from tests.launch.backends.kubernetes.test_preparation import Controller
from tests.launch.backends.kubernetes.test_rendered_pods import mount_documents, start_pod
from tests.ports import OF_A_GANG, reserved_port
from tests.slurm_cluster.cluster import DevCluster
from tests.waiting import wait_until

__all__ = ["api"]
pytestmark = [pytest.mark.long, pytest.mark.slurm]
# The number of ranks per node changes with each move; that of all ranks does not, so that each bit is the same.
CLUSTERS = f"""
clusters:
  site: {{scheduler: slurm, nodes: 1, gpus_per_node: 2, slurm: {{partition: spot, time: 30m, memory_per_node: 4GB}}}}
  pods:
    scheduler: kubernetes
    nodes: 2
    gpus_per_node: 1
    kubernetes: {{namespace: ml, image: "{IMAGE}", runs: {{claim: runs, path: /volume}}}}
  here: {{scheduler: local, nodes: 1, gpus_per_node: 2}}
"""


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[DevCluster]:
    """A Slurm of one node, which the commands of this process use."""
    with DevCluster.running(nodes=1, grace_seconds=60) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        yield cluster


@pytest.fixture
def kubernetes(api: FakeApi) -> FakeApi:
    """An API server with two nodes; the data of each run count as prepared on its volume."""
    api.put("namespaces", {"metadata": {"name": "ml"}}, namespace="")
    bound = {"spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
    api.put("persistentvolumeclaims", {"metadata": {"name": "runs"}, **bound})
    for name in ("node-a", "node-b"):
        allocatable = {"cpu": "96", "memory": "1Ti"}
        api.put("nodes", {"metadata": {"name": name}, "status": {"allocatable": allocatable}}, namespace="")
    Controller(api)
    return api


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the clusters file, the mirror and the runs roots of both machines."""
    (tmp_path / "clusters.yaml").write_text(CLUSTERS)
    monkeypatch.setenv("SCALETRAIN_CLUSTERS", str(tmp_path / "clusters.yaml"))
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    monkeypatch.setenv("SCALETRAIN_FAULT", slowed({1: 12, 2: 22}))
    return tmp_path


def trained(run: RunDir, step: int) -> None:
    """Wait until the run has trained this step."""
    wait_until(lambda: (read_metrics(run) or [{"step": 0}])[-1]["step"] >= step, f"step {step}")


def events(run: RunDir, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["event"] == name]


def resume(run_id: str, place: Path, cluster: str, *more: str) -> Ended:
    return scaletrain("resume", run_id, "--from-mirror", place, "--cluster", cluster, "--yes", *more)


def run_pods_until(step: int, api: FakeApi, folder: Path, run: RunDir) -> list[int | None]:
    """Run the pods of the JobSet as processes until this step; terminate them as an eviction does.

    ``run``: its directory on their volume. Return their exit codes.
    """
    (config_map,) = (one for one in api.all("configmaps") if "run.json" in one["data"])
    (jobset,) = api.all("jobsets")
    made = Manifest(Workload(run.run_id, 1), (config_map, jobset))
    mount_documents(made, folder)
    port, pods = reserved_port(OF_A_GANG), list[subprocess.Popen[str]]()
    try:
        pods += (start_pod(made, "jobset", number, folder, port, ENGINE_MODULE) for number in (0, 1))
        trained(run, step)
        for pod in pods:
            pod.send_signal(signal.SIGTERM)
        for pod in pods:
            pod.communicate()
    finally:
        for pod in pods:
            pod.kill()
    return [pod.returncode for pod in pods]


def test_a_run_moves_from_slurm_to_pods_to_this_machine_with_the_same_losses(
    slurm: DevCluster,
    kubernetes: FakeApi,
    here: Path,
    dataset: Path,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = here / "mirror"
    (here / "drill.yaml").write_text(spec_text(dataset))
    monkeypatch.setenv("SCALETRAIN_RUNS", str(here / "site"))
    sent = scaletrain("submit", here / "drill.yaml", "--cluster=site", "--yes", "--set", f"checkpoint.mirror={place}")
    assert sent.code == 0, sent.err
    run_id = sent.out.strip()
    first = RunDir(here / "site" / run_id)
    tracked = read_record(first).wandb_run_id
    trained(first, 12)
    slurm.submit("sleep 600", "-p", "high", "-N", "1", "--exclusive")
    wait_until(lambda: events(first, "attempt-ended"), "it is preempted")
    (left,) = events(first, "preempted")
    state = read_mirror_state(first)
    assert state is not None
    assert state.step == left["step"], "the last checkpoint is copied within the grace period"
    (here / "site").rename(here / "lost")

    monkeypatch.setenv("SCALETRAIN_RUNS", str(here / "laptop"))
    refused = resume(run_id, place, "pods")
    assert refused.code == 2
    assert "may still train in" in refused.err
    assert not (here / "laptop" / run_id).exists()
    moved = resume(run_id, place, "pods", "--take-over")
    assert moved.code == 0, moved.err
    (here / "cluster").mkdir()
    volume = RunDir(here / "cluster" / "volume" / run_id)
    assert run_pods_until(22, kubernetes, here / "cluster", volume) == [75, 75]
    reached = events(volume, "preempted")[-1]
    assert scaletrain("cancel", run_id, "--yes").code == 0

    beside = scaletrain("resume", run_id, "--cluster", "here", "--yes", code=2)
    assert f"--from-mirror {place}" in beside.err
    monkeypatch.delenv("SCALETRAIN_FAULT")
    back = resume(run_id, place, "here")
    assert back.code == 0, back.err
    third = Drill(RunDir(here / "laptop" / run_id), LocalBackend())
    third.wait_for_end()
    assert_same_run(third, undisturbed())
    assert [begun["step"] for begun in third.beginnings()] == [0, left["step"], reached["step"]]
    assert left["step"] < reached["step"] < STEPS
    assert [attempt.scheduler for attempt in read_attempts(third.run)] == ["slurm", "kubernetes", "local"]
    assert [move["step"] for move in third.events("moved")] == [left["step"], reached["step"]]
    assert read_record(third.run).wandb_run_id == tracked
    state = read_mirror_state(third.run)
    assert state is not None
    assert (state.state, state.generation, state.step) == ("current", 3, STEPS)
    shown = " ".join(scaletrain("status", run_id).out.split())  # a long path begins a line of its own
    assert f"step {STEPS} in {place}" in shown
    listed = scaletrain("checkpoint", "list", run_id, "--json").data
    assert {entry["step"]: entry["mirrored"] for entry in listed["checkpoints"]}[STEPS]
