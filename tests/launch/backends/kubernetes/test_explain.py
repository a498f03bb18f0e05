"""`scaletrain explain` on Kubernetes: a cause and remedies, with the cluster's own messages as evidence."""

import dataclasses
from typing import Any

import pytest

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.backends.kubernetes.backend import KubernetesBackend
from scaletrain_cli.launch.backends.kubernetes.explain import why_it_waits
from scaletrain_cli.launch.backends.kubernetes.messages import (
    deactivation,
    event_reason,
    eviction,
    preemption,
    queue_wait,
    unschedulable,
)
from scaletrain_cli.launch.explain import explain
from scaletrain_cli.launch.finding import Finding
from scaletrain_cli.launch.status import run_status
from scaletrain_cli.launch.submit import submit_run
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.worker.progress import progress_line
from tests.launch.backends.kubernetes.conftest import condition, ended, pod, put_pods
from tests.launch.backends.kubernetes.fake_api import FakeApi
from tests.launch.conftest import MadeRun

GROUP = "jobset.x-k8s.io"
PULL = {"reason": "Failed", "message": "Failed to pull image"}
MOUNT = {"reason": "FailedMount", "message": "x"}


@pytest.fixture
def whole(made: MadeRun, api: FakeApi) -> dict[str, Any]:
    """Submit a run and return its workload."""
    name = submit_run(made.run, made.record, KubernetesBackend()).job_id.partition("/")[2]
    return api.objects[(GROUP, "jobsets", "ml", name)]


def explained(made: MadeRun) -> Finding:
    (finding,) = explain(made.run).findings
    return finding


def test_a_job_without_a_kueue_workload_waits_indefinitely(made: MadeRun, whole: dict[str, Any]) -> None:
    whole["metadata"]["labels"] |= {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/priority-class": "urgent"}
    whole["spec"]["suspend"] = True
    found = explained(made)
    assert (found.cause, found.needs_action) == ("never-satisfiable", True)
    assert "created no Workload" in found.evidence[0].text
    assert "priority class urgent is unknown" in found.evidence[0].text
    assert f"scaletrain cancel {made.run.run_id}" in found.actions[0]


def test_a_refused_child_and_a_dead_node_are_reported_first(made: MadeRun, api: FakeApi, whole: dict[str, Any]) -> None:
    name = whole["metadata"]["name"]
    about = {"kind": "JobSet", "name": name}
    event = {"metadata": {"name": "e"}, "reason": "JobCreationFailed", "message": "invalid", "involvedObject": about}
    api.put("events", event)
    assert explained(made).cause == "child-refused"
    put_pods(api, pod(name, 0, node="n", metadata={"deletionTimestamp": "2026-11-21T10:00:00Z"}))
    api.put("nodes", {"metadata": {"name": "n"}, "status": {}}, namespace="")
    found = explained(made)
    assert (found.cause, found.needs_action) == ("dead-node", True)
    assert "kubectl delete node n" in found.actions[0]


def test_a_running_run_has_progress_and_an_ended_one_why(made: MadeRun, api: FakeApi, whole: dict[str, Any]) -> None:
    name = whole["metadata"]["name"]
    put_pods(api, pod(name, 0), pod(name, 1))
    api.logs[f"{name}-node-0-0-abcde"] = [f"2026-11-21T10:00:00Z rank 0: {progress_line(11, 20, 2.5)}"]
    found = explained(made)
    assert (found.cause, [each.text for each in found.evidence]) == ("running", ["all 2 pods running", "step 11 of 20"])
    put_pods(api, ended(name, 0, 137, "OOMKilled"), ended(name, 1, 137, "OOMKilled"))
    whole["status"] = {"conditions": [condition("Failed", reason="ReachedMaxRestarts")]}
    found = explained(made)
    assert found.cause == "failed"
    assert "OOMKilled" in found.evidence[0].text


@pytest.mark.parametrize(
    ("code", "headline", "action"),
    [
        (0, "has finished", ""),
        (2, "cannot run with this spec", "--set KEY=VALUE"),
        (3, "cannot run with this spec", "--set KEY=VALUE"),
        (93, "another attempt would not help", "Remove the cause before"),
        (5, "is not what was planned", "Correct what the message names"),
        (1, "has ended: failed", "continues it"),
    ],
)
def test_the_remedies_after_an_end_depend_on_the_exit_code(
    made: MadeRun, api: FakeApi, whole: dict[str, Any], code: int, headline: str, action: str
) -> None:
    put_pods(api, ended(whole["metadata"]["name"], 0, code))
    whole["status"] = {"conditions": [condition("Completed" if not code else "Failed")]}
    found = explained(made)
    assert headline in found.headline
    assert action in " ".join(found.actions)
    assert bool(found.actions) == bool(code)


def test_a_deleted_job_with_an_unknown_end_has_not_failed(made: MadeRun, api: FakeApi, whole: dict[str, Any]) -> None:
    api.objects.clear()
    found = explained(made)
    assert (found.cause, "how it ended is not known" in found.headline) == ("unknown", True)


def test_an_unanswered_submission_is_not_ended_while_the_server_is_down(made: MadeRun, api: FakeApi) -> None:
    api.refusals[("patch", "jobsets")] = (503, {})
    with pytest.raises(SchedulerError):
        submit_run(made.run, made.record, KubernetesBackend())
    api.refusals[("list", "jobsets")] = (503, {})
    found = explained(made)
    assert (found.cause, "is not known" in found.headline) == ("unknown", True)


def test_a_forbidden_request_is_evidence_with_a_remedy(made: MadeRun, api: FakeApi, whole: dict[str, Any]) -> None:
    api.forbid("list", "jobsets", GROUP)
    found = explained(made)
    assert "forbids the request" in found.evidence[0].text
    assert any("the right to list jobsets" in action for action in found.actions)


@pytest.mark.parametrize(
    ("reason", "cause", "needs_action"),
    [
        (queue_wait("q", "insufficient unused quota"), "quota", False),
        (queue_wait("q", "LocalQueue q doesn't exist"), "never-satisfiable", True),
        (queue_wait("q", "LocalQueue q is inactive"), "held", False),
        (queue_wait("q", "resource memory unavailable in ClusterQueue"), "never-satisfiable", True),
        (queue_wait("q", "insufficient quota for x in flavor f, request (64) > maximum capacity (32)"), "quota", False),
        (preemption("Preempted to accommodate a workload"), "priority", False),
        (preemption("... due to reclamation within the cohort; preemptor path: /b"), "quota", False),
        (preemption("... due to Fair Sharing within the cohort"), "quota", False),
        (eviction("PodsReadyTimeout", "x", None), "resources", False),
        (eviction("PodsReadyTimeout", "x", event_reason(PULL)), "image", False),
        (eviction("PodsReadyTimeout", "x", event_reason(MOUNT)), "volume", False),
        (eviction("NodeFailures", "no replacement", None), "resources", False),
        (eviction("ClusterQueueStopped", "x", None), "held", False),
        (deactivation("w", "DeactivatedDueToAdmissionCheck", "x"), "held", True),
        (deactivation("w", "", ""), "held", True),
        (event_reason({"reason": "JobCreationFailed", "message": "failed calling webhook"}), "starting", False),
        (event_reason({"reason": "FailedCreate", "message": "exceeded quota"}), "quota", False),
        (event_reason(MOUNT), "volume", False),
        (unschedulable("0/4 nodes are available"), "resources", False),
        (unschedulable("4 node(s) didn't match Pod's node affinity/selector"), "placement", False),
        (unschedulable("4 node(s) had untolerated taint {spot: true}"), "placement", False),
        (unschedulable("4 node(s) were unschedulable."), "placement", False),
        (Reason("kubernetes.image-not-pulled", {"pod": "p", "state": "ErrImagePull", "said": "x"}), "image", False),
        (Reason("kubernetes.scheduling-gate", {"pod": "p", "said": "x"}), "admission", False),
        (Reason("kubernetes.pods-starting", {"pods": 2}), "starting", False),
        (Reason("kubernetes.something-new"), "unknown", False),
        (None, "unknown", False),
    ],
)
def test_every_wait_has_a_cause(
    made: MadeRun, whole: dict[str, Any], reason: Reason | None, cause: str, needs_action: bool
) -> None:
    status = run_status(made.run)
    job = dataclasses.replace(status.job, reason=reason)
    status = dataclasses.replace(status, job=job, reason=reason or recorded("unknown"))
    found = why_it_waits(made.run, made.record, status)
    assert (found.cause, found.needs_action) == (cause, needs_action)
    assert found.evidence[0].text == str(reason or "unknown")
    assert "{" not in "".join(found.actions)
