"""Two pods without a shared volume train one run: pod 0 keeps its directory, and the mirror is what lasts."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.backends.kubernetes.manifest import documents_for, manifest
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.launch.node.ranks import ENGINE_MODULE
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.launch.submit import CreatedRun, create_run
from scaletrain_cli.mirror.checkpoints import in_line, list_folders
from scaletrain_cli.mirror.claims import read_claims
from scaletrain_cli.mirror.object_store import open_store
from scaletrain_cli.plan import make_plan
from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec import parse_spec
from tests.drills.conftest import Undisturbed
from tests.drills.training_runs import STEPS, Drill, assert_same_run, slowed, spec_text
from tests.launch.backends.kubernetes.conftest import IMAGE
from tests.launch.backends.kubernetes.test_rendered_pods import mount_documents, start_pod
from tests.ports import OF_A_GANG, reserved_port
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount the volumes of the pods"),
]


@dataclass
class Gang:
    """Two pods, each with a new volume of its own below ``folder``, which both see at the path ``volume``."""

    made: CreatedRun
    folder: Path
    volume: Path
    pods: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self) -> None:
        rendered, port = (
            manifest(self.made.record, documents_for(self.made.run, self.made.record)),
            reserved_port(OF_A_GANG),
        )
        for number in (0, 1):
            own = self.folder / f"pod-{number}"
            mount_documents(rendered, own)
            self.pods.append(start_pod(rendered, "jobset", number, own, port, ENGINE_MODULE, self.volume))

    def run(self, number: int = 0) -> RunDir:
        return RunDir(self.folder / f"pod-{number}" / "volume" / self.made.run.run_id)

    def trained(self, step: int) -> None:
        wait_until(lambda: (read_metrics(self.run()) or [{"step": 0}])[-1]["step"] >= step, f"step {step}")

    def wait(self) -> list[int | None]:
        self.output = [pod.communicate()[0] for pod in self.pods]
        return [pod.returncode for pod in self.pods]

    def kill(self) -> None:
        for pod in self.pods:
            if pod.poll() is None:
                pod.kill()
                pod.communicate()


@pytest.fixture
def gangs(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path / "submitter"))
    settings = [
        *("cluster.scheduler=kubernetes", "cluster.nodes=2", "cluster.gpus_per_node=1"),
        f"cluster.kubernetes={{namespace: ml, image: '{IMAGE}', runs: {{per_pod: true, path: /volume}}}}",
        f"checkpoint.mirror.to={tmp_path}/mirror",
    ]
    spec = parse_spec(spec_text(dataset), file="drill.yaml", base_dir=tmp_path, overrides=settings)
    made, started, volume = create_run(spec, make_plan(spec)), list[Gang](), tmp_path / "volume"
    volume.mkdir()

    def start(name: str) -> Gang:
        started.append(Gang(made, tmp_path / name, volume))
        started[-1].start()
        return started[-1]

    yield start
    for gang in started:
        gang.kill()


def mirrored(gang: Gang) -> list[int]:
    store = open_store(str(gang.made.record.spec.checkpoint.mirror.to), gang.made.run.run_id)
    return [folder.step for folder in in_line(list_folders(store), read_claims(store))]


def test_a_gang_that_loses_a_pod_continues_from_the_mirror_with_the_same_losses(
    gangs: Any, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Mirroring has the lowest priority: the rank that is killed waits for it.
    monkeypatch.setenv("SCALETRAIN_FAULT", "slow-rank rank=1 step=13 seconds=600")
    first = gangs("first")
    wait_until(lambda: mirrored(first), "a checkpoint is in the mirror")
    first.trained(12)
    first.pods[1].kill()
    code, _ = first.wait()
    assert code != 0
    (attempt,) = read_attempts(first.run())
    assert attempt.decision is not None
    assert attempt.decision.requeue, first.output[0]
    assert [path.name for path in first.run(1).checkpoints.iterdir()] == ["attempt-0001.tmp"], "pod 0 has them"
    shutil.rmtree(first.folder)

    monkeypatch.delenv("SCALETRAIN_FAULT")
    second = gangs("second")
    assert second.wait() == [0, 0], second.output
    drill = Drill(second.run(), LocalBackend())
    assert [begun["step"] for begun in drill.beginnings()] == [0, 10]
    assert_same_run(drill, undisturbed())
    assert mirrored(second)[-1] == STEPS
    assert [node.exit_code for node in read_node_records(second.run(), 2)] == [0, 0]


def test_both_pods_save_before_they_are_evicted(gangs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALETRAIN_FAULT", slowed({1: 12}))
    gang = gangs("evicted")
    gang.trained(12)
    for pod in gang.pods:
        pod.send_signal(signal.SIGTERM)
    assert gang.wait() == [75, 75], gang.output
    drill = Drill(gang.run(), LocalBackend())
    (preempted,) = drill.events("preempted")
    assert mirrored(gang)[-1] == preempted["step"] >= 12
    assert {event["node"] for event in drill.events("signal")} == {"gpu-0", "gpu-1"}


def test_a_rank_that_crashes_is_followed_by_an_attempt_in_the_same_pods(
    gangs: Any, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALETRAIN_FAULT", "sigkill rank=1 step=15 attempt=1")
    gang = gangs("crashing")
    assert gang.wait() == [0, 0], gang.output
    drill = Drill(gang.run(), LocalBackend())
    assert [begun["step"] for begun in drill.beginnings()] == [0, 10]
    assert_same_run(drill, undisturbed())
