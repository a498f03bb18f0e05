"""The state and the reason of a job from objects in the form that real controllers write."""

import datetime
from typing import Any

import pytest

from scaletrain_cli.launch.backends.kubernetes.conditions import CANCELLED, job_of, stuck_jobs
from scaletrain_cli.launch.backends.kubernetes.observation import Observation, index_of, unix_time
from scaletrain_cli.launch.job import Job
from tests.launch.backends.kubernetes.conftest import condition, ended, pod

NOW = datetime.datetime(2026, 11, 21, 12, tzinfo=datetime.timezone.utc).timestamp()
NAME = "llama-s1"


def jobset(*conditions: dict[str, str], queue: str | None = None, suspend: bool = False, **more: Any) -> dict[str, Any]:
    labels = {"kueue.x-k8s.io/queue-name": queue} if queue else {}
    job = {"replicas": 1, "name": "node", "template": {"spec": {"parallelism": 2}}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": NAME, "uid": "u", "labels": labels, "annotations": {}} | more.pop("metadata", {}),
        "spec": {"replicatedJobs": [job], "suspend": suspend},
        "status": {"conditions": list(conditions), **more},
    }


def volcano(phase: str, reason: str = "", message: str = "") -> dict[str, Any]:
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": NAME, "uid": "u"},
        "spec": {"tasks": [{"name": "node", "replicas": 2}]},
        "status": {"state": {"phase": phase, "reason": reason, "message": message}},
    }


def workload(*conditions: dict[str, str], **more: Any) -> dict[str, Any]:
    """Return Kueue's Workload."""
    spec = more.pop("spec", {})
    return {"metadata": {"name": "jobset-llama-s1-1a2b3"}, "spec": spec, "status": {"conditions": conditions, **more}}


def event(reason: str, message: str, kind: str = "JobSet", name: str = NAME) -> dict[str, Any]:
    return {
        "type": "Warning",
        "reason": reason,
        "message": message,
        "involvedObject": {"kind": kind, "name": name},
        "lastTimestamp": "2026-11-21T11:00:00Z",
    }


def judged(whole: dict[str, Any] | None, *pods: dict[str, Any], **more: Any) -> Job:
    return job_of(Observation(whole, tuple(pods), **more), "jobset/llama-s1", NOW)


def test_a_gang_that_only_other_containers_keep_from_ending_is_named_with_them() -> None:
    """As with Istio's proxy, which a webhook adds to each pod: neither success nor failure reaches the Job."""
    node = {"name": "node", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
    statuses = [node, {"name": "istio-proxy", "state": {"running": {}}}]
    held = [pod(NAME, index, containerStatuses=statuses) for index in (0, 1)]
    job = judged(jobset(), *held)
    held_by = "the ranks of 2 pods have ended, but not istio-proxy: `scaletrain cancel` ends it"
    assert (job.state, job.detail) == ("ending", held_by)
    assert judged(jobset(), held[0], pod(NAME, 1)).state == "running"
    ended = [pod(NAME, index, containerStatuses=[node]) for index in (0, 1)]  # before the kubelet has set the phase
    assert judged(jobset(), *ended).state == "running"


def test_a_gang_whose_pods_all_run_is_running_with_its_nodes() -> None:
    job = judged(jobset(), pod(NAME, 0, node="n1"), pod(NAME, 1, node="n2"))
    assert (job.state, job.nodes) == ("running", ("n1", "n2"))
    assert "all 2 pods running" in job.detail


def test_a_failed_job_has_its_reason_and_exit_code() -> None:
    message = "applying FailJobSet failure policy action"
    failed = condition("Failed", reason="FailJobSetFailurePolicyAction", message=message)
    job = judged(jobset(failed), ended(NAME, 0, 93), ended(NAME, 1, 137, "OOMKilled"))
    assert (job.state, job.exit_code) == ("ended", 93)
    assert message in job.detail
    assert "exit code 93" in job.detail


def test_the_exit_code_is_taken_from_the_jobs_message_if_its_pods_are_deleted() -> None:
    said = "Container node for pod ml/llama-s1-node-0-0-x failed with exit code 3 matching FailJob rule at index 1"
    job = {"metadata": {"name": "j"}, "status": {"conditions": [condition("Failed", reason="P", message=said)]}}
    found = judged(jobset(condition("Failed", reason="FailJobSetFailurePolicyAction")), jobs=(job,))
    assert (found.state, found.exit_code) == ("ended", 3)
    assert judged(jobset(condition("Failed", reason="ReachedMaxRestarts"))).exit_code is None


def test_the_exit_code_of_another_container_is_ignored() -> None:
    ours = ended(NAME, 0, 93)
    ours["status"]["containerStatuses"].insert(0, {"name": "mesh", "state": {"terminated": {"exitCode": 1}}})
    assert judged(jobset(condition("Failed", reason="X")), ours).exit_code == 93


def test_a_job_has_not_ended_before_its_last_pod() -> None:
    failed = jobset(condition("Failed", reason="FailedJobs"))
    job = judged(failed, ended(NAME, 0, 1), pod(NAME, 1))
    assert (job.state, "1 pod still ending" in job.detail) == ("ending", True)
    assert judged(failed, ended(NAME, 0, 1)).state == "ended"


def test_a_pod_that_its_node_evicted_is_reported_with_the_reason_of_the_node() -> None:
    """Its containers were killed, and 137 alone looks like a lack of memory."""
    gone = ended(NAME, 0, 137)
    said = "Pod ephemeral local storage usage exceeds the total limit of containers 10Gi."
    gone["status"] |= {"reason": "Evicted", "message": said}
    job = judged(jobset(condition("Failed", reason="FailedJobs")), gone)
    assert f"pod {NAME}-node-0-0-abcde: Evicted: {said}" in job.detail


def test_a_job_that_kueue_deactivated_is_reported_with_its_reason() -> None:
    gone = condition("Evicted", "True", "DeactivatedDueToRequeuingLimitExceeded", "exceeding the maximum of requeues")
    held = workload(gone, spec={"active": False})
    detail = judged(jobset(queue="q", suspend=True), queued=held).detail
    assert detail.startswith("held by Kueue")
    assert "(DeactivatedDueToRequeuingLimitExceeded: exceeding the maximum of requeues)" in detail


def test_an_eviction_of_pods_that_were_not_ready_has_the_time_of_the_next_try() -> None:
    waiting = workload(
        condition("Evicted", "True", "PodsReadyTimeout", "Exceeded the PodsReady timeout ml/x"),
        requeueState={"count": 1, "requeueAt": "2026-11-21T12:01:00Z"},
    )
    detail = judged(jobset(queue="q", suspend=True), queued=waiting).detail
    assert "evicted by Kueue (PodsReadyTimeout: Exceeded the PodsReady timeout" in detail
    assert "again at 2026-11-21T12:01:00Z" in detail


def test_a_missing_queue_and_a_held_job_are_reported() -> None:
    nope = workload(condition("QuotaReserved", "False", "Inadmissible", "LocalQueue nope doesn't exist"))
    assert "LocalQueue nope doesn't exist" in judged(jobset(queue="nope", suspend=True), queued=nope).detail
    held = workload(spec={"active": False})
    assert "held by Kueue" in judged(jobset(queue="q", suspend=True), queued=held).detail
    assert "set spec.suspend to false" in judged(jobset(suspend=True)).detail


def test_an_admission_check_that_is_not_ready_is_reported() -> None:
    checks = [{"name": "provision", "state": "Pending", "message": "waiting for capacity"}]
    reserved = workload(condition("QuotaReserved"), admissionChecks=checks)
    assert "provision reports: waiting for capacity" in judged(jobset(queue="q", suspend=True), queued=reserved).detail


def test_unschedulable_pods_show_the_schedulers_message() -> None:
    said = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
    waiting = pod(NAME, 1, phase="Pending", node=None, conditions=[condition("PodScheduled", "False", "X", said)])
    job = judged(jobset(), pod(NAME, 0), waiting)
    assert (job.state, job.detail) == ("queued", f"1 of 2 pods running; unschedulable: {said}")


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "ErrImagePull", "CreateContainerConfigError"])
def test_a_container_that_cannot_start_is_named_with_its_cause(reason: str) -> None:
    container = {"name": "node", "state": {"waiting": {"reason": reason, "message": "no such image"}}}
    stuck = pod(NAME, 0, phase="Pending", containerStatuses=[container])
    job = judged(jobset(), stuck)
    assert job.state == "queued"
    assert f"({reason}: no such image)" in job.detail
    assert stuck["metadata"]["name"] in job.detail


def test_a_volume_that_cannot_be_mounted_and_a_pod_that_is_refused_are_reported() -> None:
    mount = event("FailedMount", "MountVolume.SetUp failed for volume runs: stale handle", "Pod", "llama-s1-node-0-0")
    job = judged(jobset(), pod(NAME, 0, phase="Pending"), events=(mount,))
    assert "pod llama-s1-node-0-0: FailedMount: MountVolume.SetUp failed" in job.detail
    said = 'pods "x" is forbidden: violates PodSecurity "restricted"'
    refused = event("FailedCreate", said, "Job", "llama-s1-node-0")
    assert 'violates PodSecurity "restricted"' in judged(jobset(), events=(refused,)).detail


def test_pods_that_pull_their_image_are_starting() -> None:
    job = judged(jobset(), pod(NAME, 0, phase="Pending"), pod(NAME, 1, phase="Pending"))
    assert (job.state, "2 pods starting" in job.detail) == ("queued", True)
    assert "being created" in judged(jobset()).detail


def test_a_job_in_deletion_has_not_ended_until_its_pods_are_deleted() -> None:
    mark = {"deletionTimestamp": "2026-11-21T11:59:00Z", "annotations": {CANCELLED: "2026-11-21T11:59:00Z"}}
    saving = pod(NAME, 0, metadata={"deletionTimestamp": "2026-11-21T12:10:00Z"})
    assert judged(jobset(metadata=mark), saving).state == "ending"
    assert judged(jobset(metadata=mark), saving).detail == "cancelled; 1 pod saving and exiting"
    mark = {"deletionTimestamp": "2026-11-21T11:59:00Z"}
    assert judged(jobset(metadata=mark), saving).detail.startswith("being deleted")
    assert judged(None, saving).state == "ending"  # two gangs must never run at once
    assert judged(None).state == "ended"


@pytest.mark.parametrize(
    ("phase", "state", "code"),
    [("Completed", "ended", 0), ("Failed", "ended", None), ("Aborted", "ended", None), ("Terminated", "ended", None)],
)
def test_a_volcano_job_has_ended_by_its_phase(phase: str, state: str, code: int | None) -> None:
    job = judged(volcano(phase, "Ended", "max retry reached"))
    assert (job.state, job.exit_code) == (state, code)


def test_a_volcano_job_in_termination_is_not_queued() -> None:
    """After a final exit code Volcano is Terminating until the last pod is deleted, then Terminated."""
    leaving = pod(NAME, 1, metadata={"deletionTimestamp": "2026-11-21T12:10:00Z"})
    job = judged(volcano("Terminating"), ended(NAME, 0, 93), leaving)
    assert (job.state, "1 pod still ending" in job.detail) == ("ending", True)


def test_a_volcano_gang_that_waits_shows_its_schedulers_message() -> None:
    said = "4/4 tasks in gang unschedulable: pod group is not ready, 4 Pending, 4 minAvailable"
    group = {"status": {"phase": "Pending", "conditions": [condition("Unschedulable", message=said)]}}
    waiting = pod(NAME, 0, phase="Pending", node=None, conditions=[condition("PodScheduled", "False", "X", "")])
    assert said in judged(volcano("Pending"), waiting, group=group).detail
    assert said in judged(volcano("Pending"), group=group).detail
    assert judged(volcano("Running"), pod(NAME, 0), pod(NAME, 1)).state == "running"


def trainjob(*conditions: dict[str, str]) -> dict[str, Any]:
    whole = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": NAME, "uid": "u"}}
    return {**whole, "spec": {"trainer": {"numNodes": 2}}, "status": {"conditions": list(conditions)}}


def test_a_trainjob_has_ended_by_its_conditions() -> None:
    assert judged(trainjob(condition("Complete"))).exit_code == 0
    assert judged(trainjob(condition("Failed", reason="JobSetFailed"))).state == "ended"
    assert judged(trainjob(), pod(NAME, 0), pod(NAME, 1)).state == "running"


def test_a_job_whose_child_object_is_refused_never_starts() -> None:
    said = 'Job.batch "llama-s1-node-0" is invalid: spec.template.spec.containers[0].volumeMounts[0].name: Not found'
    refused = event("JobCreationFailed", said)
    job = judged(jobset(), events=(refused,))
    assert job.state == "queued"
    assert "will never start" in job.detail
    assert said in job.detail
    (finding,) = stuck_jobs(Observation(jobset(), events=(refused,)), NOW)
    assert finding.kind == "child-refused"
    assert judged(jobset(), pod(NAME, 0), pod(NAME, 1), events=(refused,)).state == "running", "its cause was removed"


@pytest.mark.parametrize(
    "said",
    [
        'object is being deleted: jobs.batch "llama-s1-node-0" already exists',
        'Internal error occurred: failed calling webhook "mjob.kb.io": connection refused',
        'jobs.batch "llama-s1-node-0" is forbidden: exceeded quota: q, requested: count/jobs.batch=1',
    ],
)
def test_a_job_whose_child_object_is_refused_temporarily_may_still_start(said: str) -> None:
    """JobSet writes the same event for every attempt, and retries."""
    refused = event("JobCreationFailed", said)
    assert not stuck_jobs(Observation(jobset(), events=(refused,)), NOW)
    assert said in judged(jobset(), events=(refused,)).detail


def test_a_trainjob_whose_jobset_is_refused_never_starts() -> None:
    said = 'TrainJob resources reconciliation failed: admission webhook "vjobset.kb.io" denied the request: name'
    refused = event("TrainJobResourcesCreationFailed", said, "TrainJob")
    (finding,) = stuck_jobs(Observation(jobset(), events=(refused,)), NOW)
    assert "refuses the JobSet created from it" in finding.text


def node(name: str, ready: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"conditions": [condition("Ready", ready, "NodeStatusUnknown")]}}


def test_a_dead_node_whose_object_remains_is_named_with_the_remedy() -> None:
    overdue = pod(NAME, 1, node="n2", metadata={"deletionTimestamp": "2026-11-21T11:50:00Z"})
    seen = Observation(jobset(), (pod(NAME, 0), overdue), nodes=(node("n2", "Unknown"),))
    (finding,) = stuck_jobs(seen, NOW)
    assert finding.pods == (overdue["metadata"]["name"],)
    assert "kubectl delete node n2" in finding.text
    assert "out-of-service" in finding.text
    assert "delete pod" not in finding.text, "the Job's finalizer would keep it"
    assert "node n2 is unreachable" in job_of(seen, "jobset/llama-s1", NOW).detail


def test_a_pod_that_may_still_end_does_not_make_the_job_stuck() -> None:
    in_time = pod(NAME, 0, node="n", metadata={"deletionTimestamp": "2026-11-21T12:00:10Z"})
    overdue = pod(NAME, 0, node="n", metadata={"deletionTimestamp": "2026-11-21T11:00:00Z"})
    assert not stuck_jobs(Observation(jobset(), (in_time,), nodes=(node("n", "Unknown"),)), NOW)
    assert not stuck_jobs(Observation(jobset(), (overdue,), nodes=(node("n", "True"),)), NOW)
    assert not stuck_jobs(Observation(jobset(), (overdue,)), NOW)  # without the Node object the pod will be deleted
    assert stuck_jobs(Observation(jobset(), (overdue,), nodes_known=False), NOW)


def test_the_index_of_a_pod_is_that_of_its_controller() -> None:
    assert index_of(pod(NAME, 7)) == 7
    assert index_of({"metadata": {"labels": {"volcano.sh/task-index": "3"}}}) == 3
    assert index_of({"metadata": {}}) == 0


def test_time_stamps_of_the_server_are_parsed() -> None:
    assert unix_time("2026-11-21T12:00:00Z") == NOW
    assert unix_time("2026-11-21T12:00:00.000000Z") == NOW


def test_the_end_has_the_messages_of_the_jobset_and_the_job_and_the_last_line_of_the_pod() -> None:
    failed = condition("Failed", reason="FailJobSetFailurePolicyAction", message="applying FailJobSet")
    late = condition("Failed", reason="DeadlineExceeded", message="Job was active longer than specified deadline")
    job = {"metadata": {"name": "j"}, "status": {"conditions": [late]}}
    assert "DeadlineExceeded: Job was active longer" in judged(jobset(failed), jobs=(job,)).detail
    crashed = ended(NAME, 0, 5)
    said = "Traceback\n  x\nWrongNodesError: the volume cannot be written\n\n"
    crashed["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = said
    detail = judged(jobset(failed), crashed, jobs=(job,)).detail
    assert detail.endswith("ended with exit code 5: WrongNodesError: the volume cannot be written")


def test_a_trainjob_has_the_reason_and_the_restarts_of_its_jobset() -> None:
    whole = trainjob(condition("Failed", reason="JobSetFailed"))
    below = jobset(condition("Failed", reason="ReachedMaxRestarts", message="restarted 13 times"), restarts=13)
    assert "ReachedMaxRestarts: restarted 13 times" in judged(whole, jobset=below).detail
    running = judged(trainjob(), pod(NAME, 0), pod(NAME, 1), jobset=jobset(restarts=4))
    assert running.detail == "all 2 pods running; restart 4"


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("Failed", 'Failed to pull image "x": not found'),
        ("FailedMount", "MountVolume.SetUp failed"),
        ("FailedScheduling", "0/4 nodes are available"),
    ],
)
def test_the_events_of_pods_that_kueue_removed_show_why_they_were_not_ready(reason: str, message: str) -> None:
    waiting = workload(
        condition("Evicted", "True", "PodsReadyTimeout", "Exceeded the PodsReady timeout ml/x"),
        condition("QuotaReserved", "False", "Pending", "no quota"),
    )
    of_pod = event(reason, message, "Pod", f"{NAME}-node-0-0-abcde")
    job = judged(jobset(queue="q", suspend=True), queued=waiting, events=(event("Other", "x"), of_pod))
    assert f"; pod {NAME}-node-0-0-abcde: {reason}: {message}" in job.detail


def test_pods_on_an_unreachable_node_are_not_reported_as_saving_or_pulling() -> None:
    nodes = (node("n1", "True"), node("n2", "Unknown"))
    mark = {"deletionTimestamp": "2026-11-21T11:59:00Z", "annotations": {CANCELLED: "2026-11-21T11:59:00Z"}}
    late = {"deletionTimestamp": "2026-11-21T12:10:00Z"}
    gang = (pod(NAME, 0, node="n1", metadata=dict(late)), pod(NAME, 1, node="n2", metadata=dict(late)))
    silence = "node n2 does not report, 1 pod on it may be lost"
    assert judged(jobset(metadata=mark), *gang, nodes=nodes).detail == f"cancelled; 1 pod saving and exiting; {silence}"
    assert judged(jobset(restarts=1), *gang, nodes=nodes).detail == (
        f"1 pod of the previous gang exiting; {silence}; restart 1"
    )
    starting = (pod(NAME, 0, phase="Pending", node="n1"), pod(NAME, 1, phase="Pending", node="n2"))
    assert judged(jobset(), *starting, nodes=nodes).detail == (
        f"1 pod starting: pulling the image or mounting volumes; {silence}"
    )
