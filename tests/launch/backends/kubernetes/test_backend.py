"""The methods of the back end over the life of a run, against a fake server."""

import dataclasses
import json
import sys
from typing import Any

import pytest

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.attempts import begin_attempt
from scaletrain_cli.launch.backends.kubernetes.backend import KubernetesBackend
from scaletrain_cli.launch.backends.kubernetes.conditions import CANCELLED
from scaletrain_cli.launch.job import read_submission
from scaletrain_cli.launch.resume import inspect_resume, resume
from scaletrain_cli.launch.status import exit_code_of, is_over, run_status
from scaletrain_cli.launch.submit import submit_run
from scaletrain_cli.rundir.bad_nodes import BadNode, remember_bad_nodes
from scaletrain_cli.worker.progress import progress_line
from tests.launch.backends.kubernetes.conftest import SETTINGS, condition, ended, pod, put_pods
from tests.launch.backends.kubernetes.fake_api import FakeApi, status
from tests.launch.conftest import MadeRun, MakeRun

GROUP = "jobset.x-k8s.io"


def submit(made: MadeRun) -> str:
    """Submit the run and return the name of its workload."""
    return submit_run(made.run, made.record, KubernetesBackend()).job_id.partition("/")[2]


def workload(api: FakeApi, name: str) -> dict[str, Any]:
    return api.objects[(GROUP, "jobsets", "ml", name)]


def finish(api: FakeApi, name: str, kind: str, **more: str) -> None:
    workload(api, name)["status"] = {"conditions": [condition(kind, **more)]}


def test_rendered_objects_are_those_that_are_submitted_and_rendering_asks_nothing(made: MadeRun, api: FakeApi) -> None:
    from ruamel.yaml import YAML

    text = KubernetesBackend().render(made.run, made.record)
    assert not api.asked
    name = submit(made)
    config_map, jobset = YAML(typ="safe").load_all(text)
    assert jobset["spec"] == workload(api, name)["spec"]
    assert config_map["data"] == api.all("configmaps")[0]["data"]


def test_a_workload_of_another_run_or_layout_is_refused_and_not_changed(made: MadeRun, api: FakeApi) -> None:
    name = submit(made)
    (made.run.path / "submission.json").unlink()
    marks = workload(api, name)["metadata"]["annotations"]
    marks["scaletrain.dev/revision"] = "3"
    with pytest.raises(SchedulerError, match="another spec or layout"):
        submit(made)
    marks["scaletrain.dev/run-id"] = "other"
    with pytest.raises(SchedulerError, match="belongs to other"):
        submit(made)
    marks["scaletrain.dev/run-id"] = made.run.run_id
    workload(api, name)["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
    with pytest.raises(SchedulerError, match="still being deleted"):
        submit(made)


def test_after_a_refused_workload_no_object_remains(made: MadeRun, api: FakeApi) -> None:
    api.refusals[("create", "jobsets")] = (403, status(403, "Forbidden", "the webhook says no"))
    with pytest.raises(SchedulerError, match="the webhook says no") as caught:
        submit(made)
    assert caught.value.exit_code == 4
    assert not api.objects
    assert read_submission(made.run) is None


def test_a_trainjob_waits_for_its_runtime(make_run: MakeRun, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read runtimes from a cache, which does not yet contain a new one."""
    monkeypatch.setattr("scaletrain_cli.launch.backends.kubernetes.objects._RETRY_SECONDS", 0.0)
    trained = make_run(*SETTINGS, "cluster.kubernetes.backend=trainjob")
    api.stale = 3
    submit(trained)
    (runtime,) = api.all("trainingruntimes")
    (whole,) = api.all("trainjobs")
    assert runtime["metadata"]["ownerReferences"][0]["uid"] == whole["metadata"]["uid"]


def test_a_trainjob_that_kueue_would_not_hold_back_is_not_created_at_all(make_run: MakeRun, api: FakeApi) -> None:
    """Before its TrainingRuntime exists, a TrainJob cannot be tried."""
    settings = ("cluster.kubernetes.backend=trainjob", "cluster.kubernetes.queue=q")
    api.in_queues = {"jobsets"}
    with pytest.raises(SchedulerError, match="Kueue does not manage TrainJobs here"):
        submit(make_run(*SETTINGS, *settings))
    assert not [body for plural in ("trainjobs", "trainingruntimes", "configmaps") for body in api.all(plural)]
    api.in_queues = {"jobsets", "trainjobs"}
    submit(make_run(*SETTINGS, *settings))
    assert api.all("trainjobs")


def test_a_refused_trainjob_leaves_no_object(make_run: MakeRun, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaletrain_cli.launch.backends.kubernetes.objects._RUNTIME_SECONDS", 0.0)
    api.stale = 1000
    with pytest.raises(SchedulerError, match="must be created before the TrainJob"):
        submit(make_run(*SETTINGS, "cluster.kubernetes.backend=trainjob"))
    assert not api.objects


def test_bad_nodes_are_excluded(made: MadeRun, api: FakeApi) -> None:
    for name in ("a", "b", "c", "d"):
        api.put("nodes", {"metadata": {"name": name}, "status": {"allocatable": {}}}, namespace="")
    bad = BadNode("b", "hardware", "ECC", "r", 1, 0.0, 9e9)
    remember_bad_nodes(made.run.path.parent, [bad], 1.0)
    name = submit(made)
    affinity = json.dumps(workload(api, name)["spec"])
    assert '"values": ["b"]' in affinity
    assert made.events("nodes-excluded")[0]["nodes"] == ["b"]


def test_the_progress_of_a_finished_run_is_kept_after_its_pods_are_deleted(made: MadeRun, api: FakeApi) -> None:
    name = submit(made)
    put_pods(api, ended(name, 0, 0), ended(name, 1, 0))
    api.logs[f"{name}-node-0-0-abcde"] = [f"2026-11-21T10:00:00Z rank 0: {progress_line(20, 20, 2.5)}"]
    finish(api, name, "Completed")
    assert (run_status(made.run).step, run_status(made.run).loss) == (20, 2.5)
    api.objects.clear()
    assert (run_status(made.run).state, run_status(made.run).step) == ("finished", 20)


def test_the_step_of_a_finished_run_whose_output_was_not_read_is_not_seen(made: MadeRun, api: FakeApi) -> None:
    name = submit(made)
    finish(api, name, "Completed")
    assert (run_status(made.run).state, run_status(made.run).step_seen) == ("finished", False)


def test_the_log_of_a_pod_on_a_dead_node_is_not_requested(made: MadeRun, api: FakeApi) -> None:
    name = submit(made)
    lost = pod(name, 0, conditions=[condition("Ready", "False", "NodeNotReady")])
    put_pods(api, lost, pod(name, 1))
    assert "node node-a does not report" in run_status(made.run).why
    assert not any("/log" in asked for asked in api.asked)


@pytest.mark.parametrize(
    ("kind", "code", "state"), [("Completed", 0, "finished"), ("Failed", 93, "failed"), ("Failed", 75, "preempted")]
)
def test_the_end_of_a_job_outlives_its_object(made: MadeRun, api: FakeApi, kind: str, code: int, state: str) -> None:
    name = submit(made)
    finish(api, name, kind)
    put_pods(api, ended(name, 0, code))
    assert run_status(made.run).state == state
    api.objects.clear()  # ttlSecondsAfterFinished
    api.asked.clear()
    found = run_status(made.run)
    assert found.state == state
    assert not api.asked
    assert is_over(made.run, found)
    assert exit_code_of(made.run, found) == code


def test_a_job_that_was_deleted_before_its_end_was_seen_has_an_unknown_state(made: MadeRun, api: FakeApi) -> None:
    """ttlSecondsAfterFinished passed before any command read its state."""
    submit(made)
    api.objects.clear()
    found = run_status(made.run)
    assert (found.state, "does not report how it ended" in found.why) == ("unknown", True)
    assert is_over(made.run, found), "or status --wait would never return"
    assert exit_code_of(made.run, found) == 4
    assert not inspect_resume(made.run).active


def test_a_queued_run_shows_the_message_of_its_own_kueue_workload(made: MadeRun, api: FakeApi) -> None:
    name = submit(made)
    whole = workload(api, name)
    whole["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "q"
    whole["spec"]["suspend"] = True
    for number, uid in enumerate((whole["metadata"]["uid"], "another")):
        metadata = {"name": f"w{number}", "labels": {"kueue.x-k8s.io/job-uid": uid}, "ownerReferences": [{"uid": uid}]}
        waits = condition("QuotaReserved", "False", "Pending", f"words on {uid}")
        api.put("workloads", {"metadata": metadata, "status": {"conditions": [waits]}}, "kueue.x-k8s.io")
    assert run_status(made.run).why == f"waits in queue q: words on {whole['metadata']['uid']}"


def test_details_that_are_forbidden_are_left_out(made: MadeRun, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    name = submit(made)
    workload(api, name)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "q"
    workload(api, name)["spec"]["suspend"] = True
    for resource, group in (("workloads", "kueue.x-k8s.io"), ("jobs", "batch"), ("events", "")):
        api.forbid("list", resource, group)
    assert "workloads.kueue.x-k8s.io" in run_status(made.run).why
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setenv("KUBECONFIG", "another")  # no cached connection
    assert "'.[k8s]'" in run_status(made.run).why


def test_a_cancelled_run_gets_its_grace_period_and_is_active_while_it_has_pods(made: MadeRun, api: FakeApi) -> None:
    name = submit(made)
    put_pods(api, pod(name, 0), pod(name, 1))
    scheduler = KubernetesBackend()
    scheduler.cancel(made.run, made.record)
    assert [what for what, _ in api.deletions] == [f"jobsets/{name}"]
    assert CANCELLED in workload(api, name)["metadata"]["annotations"]
    assert made.run.is_cancelled
    assert made.events("cancelled")
    job = scheduler.job(made.run, made.record)
    assert (job.state, "cancelled" in job.detail) == ("ending", True)
    assert inspect_resume(made.run).active
    scheduler.cancel(made.run, made.record)  # a second cancel sends no second SIGTERM
    assert len(api.deletions) == 1
    api.objects.clear()
    assert run_status(made.run).state == "cancelled"


def test_a_run_on_a_shared_volume_records_its_end_itself(made: MadeRun, api: FakeApi) -> None:
    name = submit(made)
    begin_attempt(made.run, made.record.spec, scheduler="kubernetes", job_id=f"jobset/{name}", nodes=("n",))
    put_pods(api, pod(name, 0))
    KubernetesBackend().cancel(made.run, made.record)
    assert not made.events("cancelled")


def test_a_refused_resume_keeps_the_end_of_the_last_job(made: MadeRun, api: FakeApi) -> None:
    name = submit(made)
    put_pods(api, ended(name, 0, 75), ended(name, 1, 75))
    finish(api, name, "Failed")
    run_status(made.run)  # records the end
    before = run_status(made.run)
    remembered = (made.run.path / "kubernetes.json").read_bytes()
    api.refusals[("create", "jobsets")] = (403, status(403, "Forbidden", "the webhook says no"))
    with pytest.raises(SchedulerError, match="the webhook says no"):
        resume(made.run)
    assert (made.run.path / "kubernetes.json").read_bytes() == remembered
    assert run_status(made.run) == before


def test_a_second_gang_does_not_start_while_pods_of_a_deleted_workload_exist(made: MadeRun, api: FakeApi) -> None:
    name = submit(made)
    put_pods(api, pod(name, 0))
    del api.objects[(GROUP, "jobsets", "ml", name)]
    assert inspect_resume(made.run).active


def test_a_job_is_looked_up_in_the_namespace_of_its_submission(made: MadeRun, api: FakeApi, make_run: MakeRun) -> None:
    submit(made)
    spec = make_run(*SETTINGS, "cluster.kubernetes.namespace=other", run_id="other").record.spec
    assert spec.cluster.kubernetes.namespace == "other"
    assert KubernetesBackend().job(made.run, dataclasses.replace(made.record, spec=spec)).state == "queued"
    assert not any("/namespaces/other/" in asked for asked in api.asked)


def test_force_deletes_a_pod_on_an_unreachable_node_without_its_grace_period(made: MadeRun, api: FakeApi) -> None:
    """Its grace period has not ended, but its node cannot use it. The other pod saves."""
    name = submit(made)
    put_pods(api, pod(name, 0, node="n"), pod(name, 1, node="m"))
    for node, ready in (("n", "Unknown"), ("m", "True")):
        state = {"conditions": [condition("Ready", ready)]}
        api.put("nodes", {"metadata": {"name": node}, "status": state}, namespace="")
    scheduler = KubernetesBackend()
    assert scheduler.force(made.run, made.record) == [], "it is not cancelled"
    scheduler.cancel(made.run, made.record)
    for one in api.all("pods"):
        one["metadata"]["deletionTimestamp"] = "2999-01-01T00:00:00Z"
    assert "node n does not report" in scheduler.job(made.run, made.record).detail
    assert scheduler.force(made.run, made.record) == [f"{name}-node-0-0-abcde"]


def test_events_of_deleted_pods_are_read_after_an_eviction(made: MadeRun, api: FakeApi) -> None:
    name = submit(made)
    whole = workload(api, name)
    whole["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "q"
    whole["spec"]["suspend"] = True
    uid = whole["metadata"]["uid"]
    metadata = {"name": "w", "labels": {"kueue.x-k8s.io/job-uid": uid}, "ownerReferences": [{"uid": uid}]}
    evicted = condition("Evicted", reason="PodsReadyTimeout", message="Exceeded the PodsReady timeout")
    api.put("workloads", {"metadata": metadata, "spec": {}, "status": {"conditions": [evicted]}}, "kueue.x-k8s.io")
    for number, (kind, about) in enumerate((("Pod", f"{name}-node-0-1-abcde"), ("Pod", "another-node-0-0-x"))):
        event = {"metadata": {"name": f"e{number}"}, "involvedObject": {"kind": kind, "name": about}}
        event |= {"type": "Warning", "reason": "Failed", "message": f"Failed to pull image of {about}"}
        api.put("events", event)
    assert f"Failed to pull image of {name}-node-0-1-abcde" in run_status(made.run).why
