"""Parse messages of Kubernetes, Kueue, Volcano, JobSet, Trainer and etcd into reason codes and parameters.

The only module of this back end that matches their wording; all others use codes and structured fields.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from scaletrain_cli.errors import Problem
from scaletrain_cli.launch.backends.kubernetes.api_kinds import Object
from scaletrain_cli.reasons import Reason

if TYPE_CHECKING:
    from scaletrain_cli.spec import RunSpec

# The API server.
_RBAC = re.compile(r'cannot (\S+) resource "([^"]+)" in API group "([^"]*)"')
_REQUEST_TIMED_OUT = "request timed out"  # by etcd, which may have committed the change or not
_UNSTATED = re.compile(r"failed quota: ([^\s:]+): must specify (.+)", re.DOTALL)
# JobSet and Trainer retry indefinitely; only these refusals of child objects are final. A used-up quota, an unavailable
# webhook and a name that is still in use are temporary.
_FINAL_REFUSAL = re.compile(r"\binvalid\b|denied the request|\bforbidden\b(?!.*exceeded quota)", re.DOTALL)
# The webhooks of Trainer and of Kueue.
_NO_RUNTIME = re.compile(r"must be created before the TrainJob|runtime '[^']*' not found")
# The Job controller, in the condition of a Job whose pod failure policy matched.
_EXIT_CODE = re.compile(r"exit code (\d+)")
# Kueue, of a workload without quota.
_QUEUE_MESSAGES = (
    ("doesn't exist", "queue-missing"),
    ("is inactive", "queue-inactive"),
    ("unavailable in ClusterQueue", "queue-without-quota"),
    ("> maximum capacity", "queue-over-capacity"),
)
# kube-scheduler, of a pod.
_SCHEDULER_MESSAGES = (
    ("didn't match", "unschedulable-placement"),
    ("didn't satisfy", "unschedulable-placement"),
    ("untolerated taint", "unschedulable-taint"),
    ("were unschedulable", "unschedulable-cordoned"),
)
_IMAGE_EVENTS = ("Failed", "InspectFailed", "ErrImageNeverPull")
_EVENT_CODES = {
    "FailedMount": "volume-not-mounted",
    "FailedAttachVolume": "volume-not-mounted",
    "FailedCreatePodSandBox": "sandbox-failed",
    "FailedCreate": "creation-refused",
    "JobCreationFailed": "child-not-created",
    "TrainJobResourcesCreationFailed": "child-not-created",
    "FailedScheduling": "pod-unschedulable",
}
_EVICTION_CODES = {
    "NodeFailures": "evicted-node-failure",
    "LocalQueueStopped": "evicted-queue-stopped",
    "ClusterQueueStopped": "evicted-queue-stopped",
}


class MissingRight(NamedTuple):
    """The verb, resource and API group that a user may not use."""

    verb: str
    resource: str
    group: str


def reason(code: str, **params: object) -> Reason:
    """Return the reason ``kubernetes.<code>``."""
    return Reason(f"kubernetes.{code}", params)


def problem(spec: RunSpec, key: str, why: Reason, given: str | None = None) -> Problem:
    """Return a problem of a key below cluster.kubernetes, or of the whole section."""
    dotted = f"cluster.kubernetes.{key}" if key else "cluster.kubernetes"
    return Problem.because(spec.where(dotted), dotted, why, given)


def one_line(text: object) -> str:
    """Return a message without line breaks and repeated blanks."""
    return " ".join(str(text or "").split())


def missing_right(said: str) -> MissingRight | None:
    """Return the right that is missing, according to the API server's message; None for any other refusal."""
    return MissingRight(*match.groups()) if (match := _RBAC.search(said)) else None


def may_be_applied(body: str) -> bool:
    """Return whether the change may have been made despite the server's error."""
    return _REQUEST_TIMED_OUT in body


def is_final_refusal(said: str) -> bool:
    """Return whether a child of a workload was refused because of its contents, not of the cluster's state."""
    return _FINAL_REFUSAL.search(said) is not None


def is_runtime_missing(said: str) -> bool:
    """Return whether a TrainJob is refused because its runtime does not exist, or is not yet in a webhook's cache."""
    return _NO_RUNTIME.search(said) is not None


def pod_refusal_note(said: str) -> Reason | None:
    """Return why the refusal of a pod in a dry run does not apply to the pods of the job; None if it does."""
    if "exceeded quota" in said:
        return reason("pod-over-quota", said=said)
    if "admission webhook" in said or "ValidatingAdmissionPolicy" in said:
        return reason("pod-policy", said=said)
    return None


def unstated_in_quota(said: str, container: str) -> list[tuple[str, str, str]]:
    """Return the quota, resource and container of each amount that a pod had to state.

    ``container``: of messages that name none (Kubernetes before 1.24).
    """
    if (match := _UNSTATED.search(said)) is None:
        return []
    parts = [part.partition(" for: ") for part in match[2].split(";")]
    return [
        (f"ResourceQuota {match[1]}", name.strip(), named.split(",")[0].strip() or container)
        for names, _, named in parts
        for name in names.split(",")
    ]


def exit_code_in(said: str) -> int | None:
    """Return the exit code that a Job's condition names."""
    return int(match[1]) if (match := _EXIT_CODE.search(said)) else None


def queue_wait(queue: str, said: str) -> Reason:
    """Return why Kueue does not admit a workload, from the message of its condition."""
    if not said:
        return reason("queued", queue=queue)
    code = next((code for words, code in _QUEUE_MESSAGES if words in said), "queued-for-quota")
    return reason(code, queue=queue, said=said)


def preemption(said: str) -> Reason:
    """Return why Kueue preempted a workload: for a higher priority, or to reclaim quota for its cohort."""
    in_cohort = "within the cohort" in said.lower()
    return reason("preempted-in-cohort" if in_cohort else "preempted", said=said)


def eviction(event: str, said: str, pod_event: Reason | None) -> Reason:
    """Return why Kueue evicted a workload; ``pod_event`` says why its pods did not become ready."""
    code = _EVICTION_CODES.get(event, "evicted")
    if pod_event is not None and pod_event.code in ("kubernetes.image-event", "kubernetes.volume-not-mounted"):
        code = "evicted-image" if pod_event.code == "kubernetes.image-event" else "evicted-volume"
    return reason(code, event=event, said=said)


def deactivation(workload: str, event: str, said: str) -> Reason:
    """Return why a workload is inactive; ``event`` and ``said`` are of its last eviction, empty without one."""
    if not event and not said:
        return reason("held", workload=workload)
    code = "given-up" if event.startswith("DeactivatedDueTo") else "held-after-eviction"
    return reason(code, workload=workload, event=event, said=said)


def unschedulable(said: str) -> Reason:
    """Return why the scheduler finds no node for a pod."""
    code = next((code for words, code in _SCHEDULER_MESSAGES if words in said), "unschedulable")
    return reason(code, said=said or "the scheduler gives no reason")


def event_reason(event: Object) -> Reason | None:
    """Return the reason of an event that explains why pods do not start; None for other events."""
    name, said = event.get("reason", ""), one_line(event.get("message"))
    code = "image-event" if name in _IMAGE_EVENTS and "image" in said else _EVENT_CODES.get(name)
    if code is None:
        return None
    about = event.get("involvedObject", {})
    return reason(
        code, object=f"{str(about.get('kind', 'object')).lower()} {about.get('name', '')}", event=name, said=said
    )
