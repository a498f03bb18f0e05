"""`scaletrain explain` on Kubernetes: a cause and what to do, with the cluster's own words for evidence."""

from __future__ import annotations

from typing import Any

import pytest

from scaletrain_cli.launch.explaining.explain import explain
from scaletrain_cli.launch.explaining.finding import Finding
from scaletrain_cli.launch.explaining.kubernetes_jobs import why_it_waits
from scaletrain_cli.launch.kubernetes.scheduler import KubernetesScheduler
from scaletrain_cli.launch.status import run_status
from scaletrain_cli.launch.submission import submit_run
from tests.launch.conftest import MadeRun
from tests.launch.kubernetes.conftest import condition, ended, pod
from tests.launch.kubernetes.fake_api import FakeApi

GROUP = "jobset.x-k8s.io"


@pytest.fixture
def whole(made: MadeRun, api: FakeApi) -> dict[str, Any]:
    """The workload of a run that was submitted."""
    name = submit_run(made.run, made.record, KubernetesScheduler()).job_id.partition("/")[2]
    return api.objects[(GROUP, "jobsets", "ml", name)]


def explained(made: MadeRun) -> Finding:
    (finding,) = explain(made.run).findings
    return finding


def put_pod(api: FakeApi, made: MadeRun, one: dict[str, Any]) -> None:
    one["metadata"]["labels"]["scaletrain.dev/run"] = made.run.run_id
    api.put("pods", one)


def test_a_job_that_kueue_does_not_know_waits_for_ever(made: MadeRun, whole: dict[str, Any]) -> None:
    whole["metadata"]["labels"] |= {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/priority-class": "urgent"}
    whole["spec"]["suspend"] = True
    found = explained(made)
    assert (found.cause, found.waits_for_ever) == ("never-satisfiable", True)
    assert "priority class urgent is unknown" in found.evidence[0].text
    assert f"scaletrain cancel {made.run.run_id}" in found.actions[0]


def test_a_child_that_is_refused_and_a_dead_node_are_told_first(
    made: MadeRun, api: FakeApi, whole: dict[str, Any]
) -> None:
    name = whole["metadata"]["name"]
    about = {"kind": "JobSet", "name": name}
    event = {"metadata": {"name": "e"}, "reason": "JobCreationFailed", "message": "invalid", "involvedObject": about}
    api.put("events", event)
    assert explained(made).cause == "child-refused"
    put_pod(api, made, pod(name, 0, node="n", metadata={"deletionTimestamp": "2026-11-21T10:00:00Z"}))
    api.put("nodes", {"metadata": {"name": "n"}, "status": {}}, namespace="")
    found = explained(made)
    assert (found.cause, found.waits_for_ever) == ("dead-node", True)
    assert "kubectl delete node n" in found.actions[0]


def test_a_run_that_runs_well_needs_no_explanation_and_one_that_ended_has_the_clusters(
    made: MadeRun, api: FakeApi, whole: dict[str, Any]
) -> None:
    name = whole["metadata"]["name"]
    put_pod(api, made, pod(name, 0))
    put_pod(api, made, pod(name, 1))
    assert not explain(made.run).findings
    for index in (0, 1):
        put_pod(api, made, ended(name, index, 137, "OOMKilled"))
    whole["status"] = {"conditions": [condition("Failed", reason="ReachedMaxRestarts")]}
    found = explained(made)
    assert found.cause == "failed"
    assert "OOMKilled" in found.evidence[0].text


def test_a_cluster_that_is_silent_is_told(made: MadeRun, api: FakeApi, whole: dict[str, Any]) -> None:
    api.forbid("list", "jobsets", GROUP)
    assert "forbids it" in explained(made).evidence[0].text


@pytest.mark.parametrize(
    ("why", "cause", "for_ever"),
    [
        ("waits in queue q: insufficient unused quota", "quota", False),
        ("waits in queue q: LocalQueue q doesn't exist", "never-satisfiable", True),
        ("preempted by Kueue (by x); waits in queue q: no quota", "priority", False),
        ("preempted by Kueue (... due to reclamation within the cohort; preemptor path: /b)", "quota", False),
        ("preempted by Kueue (... due to Fair Sharing within the cohort); waits in queue q", "quota", False),
        ("evicted by Kueue (PodsReadyTimeout: x); waits in queue q", "resources", False),
        ("evicted by Kueue (NodeFailures: no replacement); waits in queue q", "resources", False),
        ("evicted by Kueue (ClusterQueueStopped: x); waits in queue q: ClusterQueue c is inactive", "held", False),
        ("waits in queue q: LocalQueue q is inactive", "held", False),
        ("waits in queue q: resource memory unavailable in ClusterQueue", "never-satisfiable", True),
        (
            "waits in queue q: insufficient quota for x in flavor f, request (64) > maximum capacity (32)",
            "quota",
            False,
        ),
        ("held by Kueue: spec.active of Workload w is false (DeactivatedDueToAdmissionCheck: x)", "held", True),
        ("jobset j: JobCreationFailed: failed calling webhook", "starting", False),
        ("held by Kueue: spec.active of Workload w is false", "held", True),
        ("pod p: the image cannot be pulled (ErrImagePull: x)", "image", False),
        ("pod p: FailedMount: x", "volume", False),
        ("job j: FailedCreate: exceeded quota", "quota", False),
        ("1 of 2 pods run; no room: 0/4 nodes are available", "resources", False),
        ("2 pods starting: pulling the image or mounting volumes", "starting", False),
        ("something new", "unknown", False),
    ],
)
def test_every_wait_has_a_cause(made: MadeRun, whole: dict[str, Any], why: str, cause: str, for_ever: bool) -> None:
    status = run_status(made.run)
    object.__setattr__(status, "why", why)
    found = why_it_waits(made.run, made.record, status)
    assert (found.cause, found.waits_for_ever) == (cause, for_ever)
    assert found.evidence[0].text == why
    assert "{" not in "".join(found.actions)
