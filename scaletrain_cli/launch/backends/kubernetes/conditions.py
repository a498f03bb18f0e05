"""Determine the state of a run's job and its reason from conditions, pods and events.

Pure: an Observation in, a Job out. Of two reasons, the one closer to the root cause is used. In two cases Kubernetes
never ends a job by itself: a refused child object and a dead node.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scaletrain_cli.launch.backends.kubernetes import messages
from scaletrain_cli.launch.backends.kubernetes.api_kinds import Object
from scaletrain_cli.launch.backends.kubernetes.messages import reason
from scaletrain_cli.launch.backends.kubernetes.names import PRIORITY_LABEL, QUEUE_LABEL
from scaletrain_cli.launch.backends.kubernetes.observation import (
    Observation,
    condition,
    has_ended,
    is_ready,
    own_container,
    reports,
    unix_time,
)
from scaletrain_cli.launch.backends.kubernetes.pod_output import read_termination_message
from scaletrain_cli.launch.job import Job, JobState
from scaletrain_cli.reasons import Reason

CANCELLED = "scaletrain.dev/cancelled"  # an annotation: when, by `scaletrain cancel`
# Waiting states of a container that do not resolve by themselves.
_STUCK = {
    "ErrImagePull": "image-not-pulled",
    "ImagePullBackOff": "image-not-pulled",
    "InvalidImageName": "image-name-invalid",
    "ErrImageNeverPull": "image-not-on-node",
    "CreateContainerConfigError": "container-config-missing",
    "CreateContainerError": "container-not-created",
    "RunContainerError": "container-not-started",
}
_MOST_MESSAGE_CHARACTERS = 400
_BETTER_IN_PODS = ("kubernetes.image-event", "kubernetes.pod-unschedulable")  # a pod's status has the details
# Events about a child that JobSet or Trainer could not create. Both retry indefinitely.
CHILD_REFUSED = {"JobCreationFailed": "Job", "TrainJobResourcesCreationFailed": "JobSet"}
_CAUSES_OF_PODS = ("kubernetes.pod-ended", "kubernetes.pod-ended-at")
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
    return [*_refused_child(seen), *dead_nodes(seen, now)]


def _refused_child(seen: Observation) -> Iterator[StuckJob]:
    """Yield a finding for a child that the API server refuses: JobSet retries indefinitely, and only events show it."""
    if seen.workload is None or seen.jobs or seen.pods:
        return
    for event in reversed(seen.events):
        if event.get("reason") not in CHILD_REFUSED:
            continue
        said = messages.one_line(event.get("message"))
        if messages.is_final_refusal(said):
            yield StuckJob("child-refused", reason("child-refused", kind=CHILD_REFUSED[event["reason"]], said=said))
        return


def dead_nodes(seen: Observation, now: float) -> Iterator[StuckJob]:
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


@dataclass(frozen=True)
class Explanation:
    """The cause of a job's state, and further reasons that are reported before and after it."""

    cause: Reason
    after: tuple[Reason, ...] = ()
    before: tuple[Reason, ...] = ()
    stuck: tuple[StuckJob, ...] = ()

    def __str__(self) -> str:
        return "; ".join((*map(str, (*self.before, self.cause, *self.after)), *(one.text for one in self.stuck)))

    def job(self, job_id: str, state: JobState, nodes: tuple[str, ...] = (), **more: Any) -> Job:
        """Return the job with this explanation as its detail, and the cause as its reason."""
        return Job(job_id, state, str(self), nodes, reason=self.cause, **more)


def job_of(seen: Observation, job_id: str, now: float, *, cancelled: bool = False) -> Job:
    """Return the run's job. ``now`` is Unix time; ``cancelled``: the run directory records that it was cancelled."""
    workload = seen.workload
    nodes = tuple(dict.fromkeys(pod["spec"]["nodeName"] for pod in seen.pods if pod.get("spec", {}).get("nodeName")))
    stuck = tuple(stuck_jobs(seen, now))
    left = [pod for pod in seen.pods if not has_ended(pod)]

    def ending(cause: Reason) -> Job:
        """Return the job in state ``ending``: it has not ended before its last pod, so two gangs never run at once."""
        after = () if stuck else _terminating(left, seen, "pods-saving")
        return Explanation(cause, after, stuck=stuck).job(job_id, "ending", nodes)

    if workload is None:
        cause = reason("cancelled" if cancelled else "workload-gone")
        if seen.pods:
            return ending(cause)
        if seen.jobset is not None:
            return Explanation(cause, (reason("jobset-deleting"),)).job(job_id, "ending")
        return Explanation(reason("end-unknown")).job(job_id, "ended", forgotten=True)
    if workload["metadata"].get("deletionTimestamp"):
        marked = CANCELLED in workload["metadata"].get("annotations", {})
        return ending(reason("cancelled" if marked else "deleting"))
    if (end := _end(workload, seen)) is not None:
        code, explanation = end
        if left:
            after = () if stuck else _terminating(left, seen, "pods-ending")
            explained = Explanation(explanation.cause, (*explanation.after, *after), stuck=stuck)
            return explained.job(job_id, "ending", nodes)
        return explanation.job(job_id, "ended", nodes, exit_code=code)
    if stuck:
        text = "; ".join(one.text for one in stuck)
        return Job(job_id, "running" if seen.pods else "queued", text, nodes, reason=stuck[0].reason)
    suspended = workload.get("spec", {}).get("suspend") or condition(workload, "Suspended") is not None
    if suspended and not _is_volcano(workload):  # by Kueue; the pods have their grace period
        why = _why_suspended(workload, seen)
        saving = _terminating(left, seen, "pods-suspending") if left else ()
        return Explanation(why.cause, (*why.after, *saving)).job(job_id, "queued", nodes)
    return _of_pods(seen, job_id, nodes)


def _end(workload: Object, seen: Observation) -> tuple[int | None, Explanation] | None:
    """Return the exit code, None if unknown, and why the workload ended; None for a workload that has not ended."""
    status = workload.get("status", {})
    if _is_volcano(workload):
        state = status.get("state", {})
        phase, said = state.get("phase", ""), ": ".join(filter(None, (state.get("reason"), state.get("message"))))
        if phase == "Completed":
            return 0, Explanation(reason("completed"))
        if phase in ("Failed", "Aborting", "Aborted", "Terminating", "Terminated"):
            ended = reason("phase-said" if said else "phase", phase=phase.lower(), said=said)
            return _exit_code(seen.pods, said), _with_pods((ended,), seen.pods)
        return None
    if condition(workload, "Completed") or condition(workload, "Complete"):
        return 0, Explanation(reason("completed"))
    if (failed := condition(workload, "Failed")) is None:
        return None
    below = [*([seen.jobset] if seen.jobset is not None else []), *seen.jobs]  # nearer to the cause
    children = [_reason_words(failure) for item in below if (failure := condition(item, "Failed")) is not None]
    own = _reason_words(failed)
    more = [words for words in dict.fromkeys(children) if words and words not in own]
    reported = (
        reason("failed-said", said=own) if own else reason("failed"),
        *(reason("child-failed", said=words) for words in more),
    )
    return _exit_code(seen.pods, " ".join((_message(failed), *children))), _with_pods(reported, seen.pods)


def _with_pods(said: tuple[Reason, ...], pods: Sequence[Object]) -> Explanation:
    """Return what the workload says of its end, and how a pod ended, which is the cause if the pod itself says why."""
    pod = failed_pod(pods)
    if pod and pod[0].code in _CAUSES_OF_PODS:
        return Explanation(pod[0], pod[1:], before=said)
    return Explanation(said[0], (*said[1:], *pod))


def _exit_code(pods: Sequence[Object], said: str) -> int | None:
    """Return the exit code of a pod, else the one that a condition names; None if neither is known."""
    codes = [code for pod in pods if (code := exit_code_of_pod(pod)) is not None]
    bad = [code for code in codes if code]
    # All pods exit with the code of pod 0's decision, except those that were killed before.
    reported = [code for code in bad if code < 128] or bad
    return reported[0] if reported else messages.exit_code_in(said)


def exit_code_of_pod(pod: Object) -> int | None:
    """Return the exit code of the pod's training container; None while it runs."""
    ended = own_container(pod).get("state", {}).get("terminated")
    return int(ended["exitCode"]) if ended is not None else None


def failed_pod(pods: Sequence[Object]) -> tuple[Reason, ...]:
    """Return how the first pod that failed ended: its exit code, and its own reason or the last line of its log."""
    for pod in pods:
        name, ended = pod["metadata"]["name"], own_container(pod).get("state", {}).get("terminated") or {}
        if ended.get("exitCode") and (message := read_termination_message(str(ended.get("message", "")))) is not None:
            params = {"pod": name, "node": message.node, "exit_code": int(ended["exitCode"])}
            params |= {"cause": message.end.reason, "cause_code": message.code}
            step = message.end.step
            return (reason("pod-ended", **params) if step is None else reason("pod-ended-at", **params, step=step),)
        status = pod.get("status", {})
        if status.get("reason"):  # such as Evicted: 137 of the container, if it has a state, does not say why
            said = str(status.get("message", ""))
            return (reason("pod-removed", pod=name, event=status["reason"], said=said),)
        if ended.get("exitCode"):
            lines = [messages.one_line(line) for line in str(ended.get("message", "")).splitlines() if line.strip()]
            # A program reports in the last line why it ended.
            why, said = ended.get("reason", ""), lines[-1][-_MOST_MESSAGE_CHARACTERS:] if lines else ""
            summary = str(ended["exitCode"]) + (f", {why}" if why not in ("", "Error") else "")
            summary += f": {said}" if said else ""
            code = int(ended["exitCode"])
            return (reason("pod-failed", pod=name, exit_code=code, event=why, said=said, summary=summary),)
    return ()


def steps_reported(pods: Sequence[Object]) -> dict[str, float]:
    """Return ``{"step": N}`` of the newest attempt that a pod reported at its end; empty if none did."""
    steps = [
        (message.end.attempt or 0, message.end.step)
        for pod in pods
        if (ended := own_container(pod).get("state", {}).get("terminated")) is not None
        and (message := read_termination_message(str(ended.get("message", "")))) is not None
        and message.end.step is not None
    ]
    return {"step": max(steps)[1]} if steps else {}


def _terminating(pods: Sequence[Object], seen: Observation, doing: str) -> tuple[Reason, ...]:
    """Return the state of the terminating pods, as far as their nodes report it."""
    if not pods:
        return (reason("no-pods-left"),)
    silent = _silent_nodes(pods, seen)
    reporting = [pod for pod in pods if pod.get("spec", {}).get("nodeName") not in silent]
    return (*((reason(doing, pods=len(reporting)),) if reporting else ()), *_silence(silent))


def _silent_nodes(pods: Sequence[Object], seen: Observation) -> dict[str, int]:
    """Return the nodes that do not report, with the number of the pods on each."""
    known = {node["metadata"]["name"]: is_ready(node) for node in seen.nodes}
    counts: dict[str, int] = {}
    for pod in pods:
        name = pod.get("spec", {}).get("nodeName")
        if name and not known.get(name, reports(pod)):
            counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))


def _silence(nodes: Mapping[str, int]) -> tuple[Reason, ...]:
    return tuple(reason("node-silent", node=name, pods=count) for name, count in nodes.items())


def _is_volcano(workload: Object) -> bool:
    return bool(workload["apiVersion"].startswith("batch.volcano.sh/"))


def _why_suspended(workload: Object, seen: Observation) -> Explanation:
    """Return why a suspended workload waits: in a queue of Kueue, or in none."""
    queued, labels = seen.queued, workload["metadata"].get("labels", {})
    if not (queue := labels.get(QUEUE_LABEL)):
        return Explanation(reason("no-queue"))
    if not seen.queue_known:
        return Explanation(reason("queue-unreadable", queue=queue))
    if queued is None:
        priority, kind = labels.get(PRIORITY_LABEL), workload["kind"]
        code = "no-workload-for-priority" if priority else "no-workload"
        return Explanation(reason(code, kind=kind, **({"priority": priority} if priority else {})))
    evicted = condition(queued, "Evicted")
    if queued.get("spec", {}).get("active") is False:
        event, said = (str(evicted.get("reason", "")), _reason_words(evicted)) if evicted is not None else ("", "")
        return Explanation(messages.deactivation(queued["metadata"]["name"], event, said))
    waits = condition(queued, "QuotaReserved", status="False") or condition(queued, "Admitted", status="False")
    wait = messages.queue_wait(queue, _message(waits) if waits else "")
    if evicted is not None:
        again = queued.get("status", {}).get("requeueState", {}).get("requeueAt")
        later = (reason("requeued", time=again),) if again else ()
        lost = _why_pods_were_lost(seen) if evicted.get("reason") == "PodsReadyTimeout" else None
        why = messages.eviction(str(evicted.get("reason", "")), _message(evicted), lost)
        if evicted.get("reason") == "Preempted":
            by = condition(queued, "Preempted") or evicted
            why = messages.preemption(_message(by) or str(by.get("reason", "")))
        return Explanation(why, (*((lost,) if lost else ()), *later, wait))
    checks = [check for check in queued.get("status", {}).get("admissionChecks", ()) if check.get("state") != "Ready"]
    if condition(queued, "QuotaReserved") is not None and checks:
        check = checks[0]
        said = check.get("message") or "wait"
        return Explanation(reason("admission-check", queue=queue, check=check["name"], said=said))
    return Explanation(wait)


def _why_pods_were_lost(seen: Observation) -> Reason | None:
    """Return why pods that Kueue removed did not become ready, from their events: an image before other reasons."""
    of_pods = [event for event in seen.events if event.get("involvedObject", {}).get("kind") == "Pod"]
    reasons = [why for event in reversed(of_pods) if (why := messages.event_reason(event)) is not None]
    return next(iter((*[why for why in reasons if why.code == "kubernetes.image-event"], *reasons)), None)


def _of_pods(seen: Observation, job_id: str, nodes: tuple[str, ...]) -> Job:
    """Return the job of a workload that may run, from the state of its pods."""
    assert seen.workload is not None
    expected = size_of(seen.workload)
    counts = (seen.jobset or seen.workload).get("status", {})  # a TrainJob counts none
    restarts = int(counts.get("restarts", counts.get("retryCount", 0)))
    current = [pod for pod in seen.pods if not pod["metadata"].get("deletionTimestamp") and not has_ended(pod)]
    running = [pod for pod in current if pod.get("status", {}).get("phase") == "Running"]
    again = (reason("restarted", count=restarts),) if restarts else ()
    statuses = (one for pod in running for one in pod["status"].get("containerStatuses", ()))
    names = sorted({one["name"] for one in statuses if "running" in one.get("state", {})})
    if names and all(exit_code_of_pod(pod) is not None for pod in running):
        return Explanation(reason("held-by-containers", pods=len(running), names=names)).job(job_id, "ending", nodes)
    if running and len(running) >= expected:
        silent = _silence(_silent_nodes(running, seen))
        return Explanation(reason("running", pods=len(running)), (*again, *silent)).job(job_id, "running", nodes)
    ended = [pod for pod in seen.pods if has_ended(pod)]
    if running and len(running) + len(ended) >= expected:
        cause = reason("running-others-ended", running=len(running), expected=expected)
        return Explanation(cause, again).job(job_id, "running", nodes)
    leaving = [pod for pod in seen.pods if pod["metadata"].get("deletionTimestamp")]
    waits = why_pods_wait(current, seen)
    if leaving and not waits:
        cause, *more = _terminating(leaving, seen, "last-gang-ending")
        return Explanation(cause, (*more, *again)).job(job_id, "queued", nodes)
    before = (reason("some-running", running=len(running), expected=expected),) if running else ()
    cause, *more = waits or (reason("pods-pending"),)
    return Explanation(cause, (*more, *again), before).job(job_id, "queued", nodes)


def why_pods_wait(pods: Sequence[Object], seen: Observation) -> tuple[Reason, ...]:
    """Return what keeps a pod from starting, or from being created at all; empty if nothing is known."""
    for pod in pods:
        status = pod.get("status", {})
        for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
            waiting = container.get("state", {}).get("waiting") or {}
            if waiting.get("reason") in _STUCK:
                said = waiting.get("message") or container.get("image")
                code, name = _STUCK[waiting["reason"]], pod["metadata"]["name"]
                return (reason(code, pod=name, state=waiting["reason"], said=said),)
    for pod in pods:
        if (scheduled := condition(pod, "PodScheduled", status="False")) is not None:
            if scheduled.get("reason") == "SchedulingGated":
                return (reason("scheduling-gate", pod=pod["metadata"]["name"], said=_message(scheduled)),)
            return (messages.unschedulable(_message(scheduled)), *_group_wait(seen.group))
    for event in reversed(seen.events):
        why = messages.event_reason(event) if event.get("type") == "Warning" else None
        if why is not None and why.code not in _BETTER_IN_PODS:
            return (why,)
    if pods:
        starting = [pod for pod in pods if pod.get("status", {}).get("phase") != "Running"]
        silent = _silent_nodes(starting, seen)
        reporting = [pod for pod in starting if pod.get("spec", {}).get("nodeName") not in silent]
        return (*((reason("pods-starting", pods=len(reporting)),) if reporting else ()), *_silence(silent))
    return _group_wait(seen.group)


def _group_wait(group: Object | None) -> tuple[Reason, ...]:
    """Return why Volcano does not place the gang."""
    waits = None if group is None else condition(group, "Unschedulable")
    return (reason("gang-unschedulable", said=_message(waits)),) if waits else ()


def size_of(workload: Object) -> int:
    """Return the number of pods of the gang."""
    spec = workload.get("spec", {})
    if "tasks" in spec:
        return sum(int(task.get("replicas", 1)) for task in spec["tasks"])
    if "replicatedJobs" in spec:
        jobs = spec["replicatedJobs"]
        return sum(int(job.get("replicas", 1)) * int(job["template"]["spec"].get("parallelism", 1)) for job in jobs)
    return int(spec.get("trainer", {}).get("numNodes", 1))


def _message(condition: Object) -> str:
    return messages.one_line(condition.get("message"))


def _reason_words(condition: Object) -> str:
    return ": ".join(part for part in (str(condition.get("reason", "")), _message(condition)) if part)
