"""A run of one node whose run directory is on a volume of its pod: what is refused, rendered and done by the pod."""

import signal
import sys
import threading
from pathlib import Path

import pytest

from scaletrain_cli.errors import ExitCode, PreemptedError, SpecError, UsageError
from scaletrain_cli.launch import engine_process, preparation
from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.backends.kubernetes.backend import KubernetesBackend
from scaletrain_cli.launch.backends.kubernetes.manifest import documents_for, manifest, require_submittable
from scaletrain_cli.launch.backends.kubernetes.pod_agent import prepare_own_data
from scaletrain_cli.rundir.paths import RunDir
from tests.launch.backends.kubernetes.conftest import IMAGE
from tests.launch.backends.kubernetes.fake_api import FakeApi
from tests.launch.backends.kubernetes.pods import put_documents
from tests.launch.backends.kubernetes.rendering import container_of, template_of
from tests.launch.backends.kubernetes.test_rendered_pods import start_pod
from tests.launch.conftest import MadeRun, MakeRun, make_spec
from tests.ports import OF_A_GANG, reserved_port
from tests.waiting import wait_until

ALONE = (
    *("cluster.scheduler=kubernetes", "cluster.nodes=1", "cluster.kubernetes.namespace=ml"),
    *(f"cluster.kubernetes.image={IMAGE}", "cluster.kubernetes.runs={per_pod: true, path: /volume}"),
)
DISK = "cluster.kubernetes.volumes=[{claim: disk, path: /disk}]"
KEPT = (*ALONE, DISK, "checkpoint.dir=/disk/checkpoints")


@pytest.mark.parametrize(
    ("settings", "codes"),
    [
        (ALONE, ["checkpoints-lost-no-volume"]),
        ((*ALONE, DISK), ["checkpoints-lost"]),
        ((*ALONE, DISK, "checkpoint.dir=/elsewhere"), ["checkpoints-lost"]),
        ((*ALONE, DISK, "checkpoint.dir=/disks"), ["checkpoints-lost"]),
        (
            (
                *ALONE,
                "cluster.kubernetes.volumes=[{claim: disk, path: /disk, read_only: true}]",
                "checkpoint.dir=/disk",
            ),
            ["checkpoints-lost-no-volume"],
        ),
        ((*KEPT, "cluster.nodes=2"), ["per-pod-gang"]),
        ((*ALONE, "cluster.nodes=2"), ["per-pod-gang", "checkpoints-lost-no-volume"]),
    ],
)
def test_a_run_that_would_lose_its_checkpoints_is_refused(settings: tuple[str, ...], codes: list[str]) -> None:
    with pytest.raises(SpecError) as refused:
        require_submittable(make_spec(*settings))
    found = [problem.reason.code for problem in refused.value.problems if problem.reason is not None]
    assert found == [f"kubernetes.{code}" for code in codes]


@pytest.mark.parametrize(
    "settings", [KEPT, (*ALONE, DISK, "checkpoint.dir=/disk"), (*ALONE, "env={SCALETRAIN_ONLY: preflight}")]
)
def test_a_run_that_keeps_or_needs_no_checkpoints_is_accepted(settings: tuple[str, ...]) -> None:
    spec = make_spec(*settings)
    given = {"SCALETRAIN_ONLY": "preflight"} if "env=" in settings[-1] else {}
    require_submittable(spec.model_copy(update={"env": given}))


@pytest.mark.parametrize(
    ("runs", "key"),
    [("{per_pod: true, claim: runs}", r"runs\.per_pod"), ("{per_pod: true, sub_path: a}", r"runs\.sub_path")],
)
def test_settings_that_contradict_each_other_are_refused(runs: str, key: str) -> None:
    with pytest.raises(SpecError, match=key):
        make_spec(*ALONE[:-1], f"cluster.kubernetes.runs={runs}")


def test_the_runs_are_on_a_volume_of_the_pod_and_the_checkpoints_on_the_claim(make_run: MakeRun) -> None:
    made = make_run(*KEPT)
    rendered = manifest(made.record, documents_for(made.run, made.record))
    volumes = {volume["name"]: volume for volume in template_of(rendered)["spec"]["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container_of(rendered)["volumeMounts"]}
    assert volumes[mounts["/volume"]] == {"name": "runs", "emptyDir": {}}
    assert volumes[mounts["/disk"]]["persistentVolumeClaim"] == {"claimName": "disk"}


def test_the_checks_before_a_submission_need_no_claim_of_the_runs(api: FakeApi, make_run: MakeRun) -> None:
    api.put("namespaces", {"metadata": {"name": "ml"}}, namespace="")
    claim = {"metadata": {"name": "disk"}, "spec": {"accessModes": ["ReadWriteOnce"]}, "status": {"phase": "Bound"}}
    api.put("persistentvolumeclaims", claim)
    api.put("nodes", {"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": 99, "memory": "9Ti"}}}, namespace="")
    made = make_run(*KEPT)
    result = KubernetesBackend().preflight(made.record.spec, made.record.plan)
    assert [warning.code for warning in result.warnings if "claim" in warning.code] == []


def run_pod(made: MadeRun, folder: Path) -> RunDir:
    """Run the pod once, with a new volume; return its run directory."""
    documents = documents_for(made.run, made.record)
    put_documents(documents, folder / "documents")
    pod = start_pod(manifest(made.record, documents), "jobset", 0, folder, reserved_port(OF_A_GANG))
    output = pod.communicate()
    assert pod.wait() == 0, output
    return RunDir(folder / "volume" / made.run.run_id)


@pytest.mark.long
def test_the_attempts_of_later_pods_continue_the_numbers_of_earlier_ones(make_run: MakeRun, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of a text that the pod prepares\n" for number in range(2000)))
    settings = (*ALONE, f"cluster.kubernetes.volumes=[{{claim: disk, path: {disk}}}]", f"checkpoint.dir={disk}")
    settings = (*settings, f"data.source={text}")
    made = make_run(*settings, checkpoint_every=5)
    first = run_pod(made, tmp_path / "first")
    assert (first.path.parent / "datasets").is_dir(), "the pod has prepared its data there"
    assert [attempt.number for attempt in read_attempts(first)] == [1]
    second = run_pod(made, tmp_path / "second")
    (attempt,) = read_attempts(second)
    assert (attempt.number, attempt.reason) == (2, "done")
    assert attempt.checkpoint_at_start == read_attempts(first)[0].last_checkpoint_step


def test_no_job_prepares_the_data_of_such_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("scaletrain_cli.launch.preparation.reads_prepared_data", lambda *_: True)
    spec = make_spec(*KEPT)
    plan = preparation.plan_preparation(spec, tmp_path)
    assert (plan.where, plan.tasks, plan.why.code) == ("nothing", 0, "preparation.by-the-job")
    with pytest.raises(UsageError) as refused:
        preparation.plan_preparation(spec, tmp_path, "job")
    assert refused.value.reason.code == "preparation.by-the-job-alone"


def test_the_pod_prepares_the_data_on_its_own_volume(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Path] = []
    monkeypatch.setattr(preparation, "reads_prepared_data", lambda *_: True)
    monkeypatch.setattr(preparation, "prepare_here", lambda spec, root, **more: prepared.append(root))
    made = make_run(*KEPT)
    prepare_own_data(made.run, made.record)
    assert prepared == [made.run.path.parent]
    shared = make_run(*ALONE[:-1], "cluster.kubernetes.runs.claim=runs", run_id="shared")
    prepare_own_data(shared.run, shared.record)
    assert len(prepared) == 1


def test_a_pod_that_prepares_is_preempted(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The preparation is a process that does not end by itself; the signal comes once it has started."""
    started = tmp_path / "pid"
    program = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(100_000)"
    command = [sys.executable, "-c", program, str(started)]
    monkeypatch.setattr(engine_process, "python_command", lambda *_: command)
    monkeypatch.setattr(preparation, "reads_prepared_data", lambda *_: True)
    made = make_run(*KEPT)

    def terminate() -> None:
        wait_until(lambda: started.exists() and started.read_text(), "the preparation runs")
        # At this thread, so that no system call of the main thread ends: as if it came just before the call.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as the agent has it
    handler = signal.getsignal(signal.SIGTERM)
    try:
        thread = threading.Thread(target=terminate)
        thread.start()
        with pytest.raises(PreemptedError, match="prepared the data") as ended:
            prepare_own_data(made.run, made.record)
        thread.join()
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "blocked again"
        assert signal.getsignal(signal.SIGTERM) == handler
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert ended.value.exit_code == ExitCode.PREEMPTED
    assert not Path("/proc", started.read_text()).exists()
