"""The state of a run while controllers handle a disruption; each step has the objects that real controllers leave."""

from typing import Any, NamedTuple

import pytest

from scaletrain_cli.launch.backends.kubernetes.conditions import job_of
from scaletrain_cli.launch.backends.kubernetes.observation import Observation
from tests.launch.backends.kubernetes.conftest import condition, ended, pod
from tests.launch.backends.kubernetes.test_conditions import NAME, NOW, jobset, node, volcano, workload

IN_TIME, OVERDUE = "2026-11-21T12:03:00Z", "2026-11-21T11:50:00Z"


class Step(NamedTuple):
    """The objects at one time, and the state and text that status must show."""

    workload: dict[str, Any]
    pods: tuple[dict[str, Any], ...]
    state: str
    words: str
    more: dict[str, Any] | None = None


def leaving(index: int, *, until: str = IN_TIME, name: str = "n1") -> dict[str, Any]:
    return pod(NAME, index, node=name, metadata={"deletionTimestamp": until})


RUNNING = (pod(NAME, 0, node="n0"), pod(NAME, 1, node="n1"))
PREEMPTED = (
    condition("Evicted", "True", "Preempted", "Preempted to accommodate a workload"),
    condition("Preempted", "True", "InClusterQueue", "Preempted to accommodate a workload due to prioritization"),
)
WAITS = condition("QuotaReserved", "False", "Pending", "insufficient unused quota for nvidia.com/gpu in flavor h100")
GATED = pod(NAME, 0, phase="Pending", node=None)
GATED["status"]["conditions"] = [condition("PodScheduled", "False", "SchedulingGated", "non-empty scheduling gates")]
REFUSED = condition("FailureTarget", reason="PodFailurePolicy", message="failed with exit code 75 matching FailJob")
CHILD = {"metadata": {"name": f"{NAME}-node-0"}, "status": {"conditions": [REFUSED]}}
HELD = {"queue": "q", "suspend": True}
UNWELL = pod(NAME, 1, node="n1", conditions=[condition("Ready", "False", "NodeNotReady")])

DRILLS = {
    # Kueue suspends; the pods end with 75, at which the Job fails and the JobSet, still suspended, makes it anew.
    "preempted by Kueue": (
        Step(jobset(queue="q"), RUNNING, "running", "all 2 pods running"),
        Step(
            jobset(**HELD),
            (leaving(0), leaving(1)),
            "queued",
            "preempted by Kueue (Preempted to accommodate a workload due to prioritization); waits in queue q; 2 pods "
            "still saving and exiting",
            {"queued": workload(*PREEMPTED)},
        ),
        Step(
            jobset(**HELD),
            (ended(NAME, 0, 75), ended(NAME, 1, 75)),
            "queued",
            "preempted by Kueue",
            {"queued": workload(*PREEMPTED), "jobs": (CHILD,)},
        ),
        Step(
            jobset(**HELD, restarts=1),
            (),
            "queued",
            "preempted by Kueue (Preempted to accommodate a workload due to prioritization); waits in queue q: "
            "insufficient unused quota for nvidia.com/gpu in flavor h100",
            {"queued": workload(*PREEMPTED, WAITS)},
        ),
        Step(jobset(queue="q", restarts=1), (GATED,), "queued", "is held by a scheduling gate"),
        Step(jobset(queue="q", restarts=1), RUNNING, "running", "all 2 pods running; restart 1"),
    ),
    # A pod is evicted: its Job fails for DisruptionTarget, and the JobSet waits for the last pod (BlockingRecreate).
    "a pod evicted": (
        Step(jobset(), (ended(NAME, 0, 75), RUNNING[1]), "running", "1 of 2 pods running, the others have ended"),
        Step(jobset(), (ended(NAME, 0, 75), leaving(1)), "queued", "1 pod of the previous gang exiting"),
        Step(jobset(restarts=1), (), "queued", "the pods are being created; restart 1"),
        Step(jobset(restarts=1), RUNNING, "running", "all 2 pods running; restart 1"),
    ),
    # The Node object goes with the node: the garbage collector fails the pod after about a minute.
    "a node deleted": (
        Step(jobset(), (RUNNING[0], UNWELL), "running", "node n1 does not report, 1 pod on it may be lost"),
        Step(jobset(), (RUNNING[0], leaving(1, until=OVERDUE)), "queued", "1 pod of the previous gang exiting"),
        Step(jobset(restarts=1), (leaving(0),), "queued", "1 pod of the previous gang exiting; restart 1"),
        Step(jobset(restarts=1), RUNNING, "running", "all 2 pods running; restart 1"),
    ),
    # The Node object stays: nobody confirms the pod's end, whatever Kueue does about the rest of the gang.
    "a node dead": (
        Step(jobset(queue="q"), (RUNNING[0], UNWELL), "running", "node n1 does not report, 1 pod on it may be lost"),
        Step(
            jobset(queue="q"),
            (RUNNING[0], leaving(1, until=OVERDUE)),
            "running",
            "node n1 is unreachable",
            {"nodes": (node("n1", "Unknown"),)},
        ),
        Step(
            jobset(**HELD),
            (leaving(1, until=OVERDUE),),
            "running",
            "kubectl delete node n1",
            {
                "nodes": (node("n1", "Unknown"),),
                "queued": workload(condition("Evicted", "True", "PodsReadyTimeout", "Exceeded the PodsReady timeout")),
            },
        ),
    ),
    # Volcano restarts at the first pod that leaves, and counts it.
    "a pod of Volcano's evicted": (
        Step(volcano("Running"), RUNNING, "running", "all 2 pods running"),
        Step(volcano("Restarting"), (leaving(0), leaving(1)), "queued", "2 pods of the previous gang exiting"),
        Step(volcano("Pending"), (), "queued", "the pods are being created"),
        Step(volcano("Running"), RUNNING, "running", "all 2 pods running"),
    ),
}


@pytest.mark.parametrize("drill", DRILLS)
def test_a_disrupted_run_has_the_right_state_at_every_step(drill: str) -> None:
    for step in DRILLS[drill]:
        job = job_of(Observation(step.workload, step.pods, **(step.more or {})), f"jobset/{NAME}", NOW)
        assert (job.state, step.words in job.detail) == (step.state, True), job.detail
