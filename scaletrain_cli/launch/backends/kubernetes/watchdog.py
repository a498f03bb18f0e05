"""The two cases in which Kubernetes never ends a job by itself: a child that cannot be made, and a node that is dead.

Pure but for force_delete(). Says what is wrong and what to do; does nothing unasked.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from scaletrain_cli.launch.backends.kubernetes.api_kinds import POD, Object

if TYPE_CHECKING:
    from scaletrain_cli.launch.backends.kubernetes.api import Cluster
    from scaletrain_cli.launch.backends.kubernetes.observation import Observation

# What JobSet and Trainer tell of a child that they could not make. They try again for ever.
CHILD_REFUSED = ("JobCreationFailed", "TrainJobResourcesCreationFailed")
# The child itself is wrong. A used-up quota, a webhook that is away or a name that is still taken will pass.
_FOR_EVER = re.compile(r"\binvalid\b|denied the request|\bforbidden\b(?!.*exceeded quota)", re.DOTALL)
_PATIENCE_SECONDS = 30.0  # past the pod's deadline: a kubelet that lives needs some for the container and its volumes


@dataclass(frozen=True)
class StuckJob:
    """One reason why nothing more will happen. ``pods`` are those whose forced deletion would help."""

    kind: Literal["child-refused", "dead-node"]
    text: str
    action: str
    pods: tuple[str, ...] = ()


def stuck_jobs(seen: Observation, now: float) -> list[StuckJob]:
    """What the job would wait for in vain; ``now`` is Unix time."""
    return [*_refused_child(seen), *_dead_nodes(seen, now)]


def force_delete(cluster: Cluster, namespace: str, seen: Observation, now: float) -> list[str]:
    """Remove the pods of dead nodes from the API, so that a job that was deleted goes away; return their names.

    These are the pods that are overdue, and, once their workload is deleted, all on nodes that do not report now: the
    grace period of a pod that nobody can tell to end need not be waited for.

    A pod of a Job that is not deleted stays, without its grace period: podReplacementPolicy Failed keeps the Job's
    finalizer on it until somebody says that it failed, as a deleted node or the out-of-service taint does.

    Only for who knows that the node is off or cut from storage: a pod that lives on would write beside its successor.
    """
    by_name = {pod["metadata"]["name"]: pod["metadata"].get("uid", "") for pod in seen.pods}
    names = [name for finding in _dead_nodes(seen, now) for name in finding.pods]
    if seen.workload is None or seen.workload["metadata"].get("deletionTimestamp"):
        dead = {node["metadata"]["name"] for node in seen.nodes if not is_ready(node)}
        living = [pod for pod in seen.pods if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")]
        names += [pod["metadata"]["name"] for pod in living if pod.get("spec", {}).get("nodeName") in dead]
    found = dict.fromkeys(names)
    return [name for name in found if cluster.delete(POD, namespace, name, uid=by_name[name], at_once=True)]


def _refused_child(seen: Observation) -> Iterator[StuckJob]:
    """JobSet takes a template whose Job the API server refuses; then it tries for ever and says so in events alone."""
    if seen.workload is None or seen.jobs or seen.pods:
        return
    for event in reversed(seen.events):
        if event.get("reason") not in CHILD_REFUSED:
            continue
        said = " ".join(str(event.get("message", "")).split())
        if _FOR_EVER.search(said):
            what = "Job" if event["reason"] == "JobCreationFailed" else "JobSet"
            yield StuckJob(
                "child-refused",
                f"it will never start: the API server refuses the {what} made of it ({said}). Cancel the run, mend the "
                "spec and submit again",
                "scaletrain cancel",
            )
        return


def _dead_nodes(seen: Observation, now: float) -> Iterator[StuckJob]:
    """Pods that should long be gone, on nodes of which nothing is heard."""
    nodes = {node["metadata"]["name"]: node for node in seen.nodes}
    overdue: dict[str, list[str]] = {}
    for pod in seen.pods:
        deadline = pod["metadata"].get("deletionTimestamp")  # of the end of the grace period, not of its beginning
        if deadline and now > unix_time(deadline) + _PATIENCE_SECONDS:
            overdue.setdefault(pod.get("spec", {}).get("nodeName", ""), []).append(pod["metadata"]["name"])
    for name, pods in overdue.items():
        node = nodes.get(name)
        if node is None and seen.nodes_known:
            continue  # the node object is gone too: the garbage collector removes the pods
        if node is not None and is_ready(node):
            continue  # a slow end, which the kubelet will report
        state = "is unreachable" if node is not None else "may be dead (you may not look at nodes)"
        yield StuckJob(
            "dead-node",
            f"node {name} {state} and {_list(pods)} on it cannot end, so the gang waits for ever. Once the node is "
            f"surely off: delete it (kubectl delete node {name}), or taint it "
            "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute; or end the run: `scaletrain cancel --force`",
            "force-delete",
            tuple(pods),
        )


def is_ready(node: Object) -> bool:
    """Whether the node's kubelet reports, and well."""
    conditions = node.get("status", {}).get("conditions", ())
    return any(condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions)


def unix_time(stamp: str) -> float:
    """Unix time of an RFC 3339 stamp of the API server."""
    return datetime.datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


def _list(names: Sequence[str]) -> str:
    return f"pod {names[0]}" if len(names) == 1 else f"pods {', '.join(names)}"
