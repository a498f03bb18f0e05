"""Detect the two cases in which Kubernetes never ends a job by itself: a refused child object and a dead node.

Pure functions except force_delete(), which runs only on request.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from scaletrain_cli.launch.backends.kubernetes.api_kinds import POD, Object
from scaletrain_cli.launch.backends.kubernetes.messages import is_final_refusal, one_line, reason
from scaletrain_cli.reasons import Reason

if TYPE_CHECKING:
    from scaletrain_cli.launch.backends.kubernetes.api import Cluster
    from scaletrain_cli.launch.backends.kubernetes.observation import Observation

# Events about a child that JobSet or Trainer could not create. Both retry indefinitely.
CHILD_REFUSED = {"JobCreationFailed": "Job", "TrainJobResourcesCreationFailed": "JobSet"}
_OVERDUE_SECONDS = 30.0  # after the pod's deadline: a kubelet needs time to remove the container and its volumes


@dataclass(frozen=True)
class StuckJob:
    """One reason why the job is stuck. ``pods``: those whose forced deletion would help."""

    kind: Literal["child-refused", "dead-node"]
    reason: Reason
    pods: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Return the reason and the remedy as text."""
        return ". ".join((str(self.reason), *self.reason.remedies))


def stuck_jobs(seen: Observation, now: float) -> list[StuckJob]:
    """Return the reasons why the job is stuck; ``now`` is Unix time."""
    return [*_refused_child(seen), *_dead_nodes(seen, now)]


def force_delete(cluster: Cluster, namespace: str, seen: Observation, now: float) -> list[str]:
    """Delete the pods of dead nodes from the API, so that a deleted job ends; return their names.

    This applies to overdue pods and, once their workload is deleted, to all pods on nodes that do not report: no
    kubelet would use their grace period.

    A pod of a Job that is not deleted stays, without its grace period: podReplacementPolicy Failed keeps the Job's
    finalizer on it until the pod is marked as failed, as a deleted node or the out-of-service taint does.

    Only safe where the node is off or cut from storage: a pod that still runs would write beside its successor.
    """
    by_name = {pod["metadata"]["name"]: pod["metadata"].get("uid", "") for pod in seen.pods}
    names = [name for stuck in _dead_nodes(seen, now) for name in stuck.pods]
    if seen.workload is None or seen.workload["metadata"].get("deletionTimestamp"):
        dead = {node["metadata"]["name"] for node in seen.nodes if not is_ready(node)}
        active = [pod for pod in seen.pods if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")]
        names += [pod["metadata"]["name"] for pod in active if pod.get("spec", {}).get("nodeName") in dead]
    found = dict.fromkeys(names)
    return [name for name in found if cluster.delete(POD, namespace, name, uid=by_name[name], at_once=True)]


def _refused_child(seen: Observation) -> Iterator[StuckJob]:
    """Yield a finding for a child that the API server refuses: JobSet retries indefinitely, and only events show it."""
    if seen.workload is None or seen.jobs or seen.pods:
        return
    for event in reversed(seen.events):
        if event.get("reason") not in CHILD_REFUSED:
            continue
        said = one_line(event.get("message"))
        if is_final_refusal(said):
            yield StuckJob("child-refused", reason("child-refused", kind=CHILD_REFUSED[event["reason"]], said=said))
        return


def _dead_nodes(seen: Observation, now: float) -> Iterator[StuckJob]:
    """Yield one finding for each node that does not report and has pods past their deadline."""
    nodes = {node["metadata"]["name"]: node for node in seen.nodes}
    overdue: dict[str, list[str]] = {}
    for pod in seen.pods:
        deadline = pod["metadata"].get("deletionTimestamp")  # the end of the grace period, not its beginning
        if deadline and now > unix_time(deadline) + _OVERDUE_SECONDS:
            overdue.setdefault(pod.get("spec", {}).get("nodeName", ""), []).append(pod["metadata"]["name"])
    for name, pods in overdue.items():
        node = nodes.get(name)
        if node is None and seen.nodes_known:
            continue  # the Node object is deleted: the garbage collector removes the pods
        if node is not None and is_ready(node):
            continue  # slow termination, which the kubelet will report
        code = "dead-node" if node is not None else "dead-node-unconfirmed"
        yield StuckJob("dead-node", reason(code, node=name, pods=pods), tuple(pods))


def is_ready(node: Object) -> bool:
    """Return whether the node is Ready: its kubelet reports, and reports no problem."""
    conditions = node.get("status", {}).get("conditions", ())
    return any(condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions)


def unix_time(stamp: str) -> float:
    """Return the Unix time of an RFC 3339 time stamp of the API server."""
    return datetime.datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
