"""What conditions, pods and events of a run mean: queued, running or ended, and why, in the words a user needs.

Pure: an Observation in, a Job out. Of two explanations it gives the one nearer to the cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from scaletrain_cli.launch.backends.base import Job
from scaletrain_cli.launch.backends.kubernetes.api_kinds import Object
from scaletrain_cli.launch.backends.kubernetes.observation import QUEUE_LABEL, Observation, own_container, reports
from scaletrain_cli.launch.backends.kubernetes.watchdog import CHILD_REFUSED, is_ready, stuck_jobs

CANCELLED = "scaletrain.dev/cancelled"  # an annotation: when, by `scaletrain cancel`
_EXIT_CODE = re.compile(r"exit code (\d+)")
# A container in one of these will not start as long as nobody mends something.
_STUCK = {
    "ErrImagePull": "the image cannot be pulled",
    "ImagePullBackOff": "the image cannot be pulled",
    "InvalidImageName": "the name of the image is not valid",
    "ErrImageNeverPull": "the image is not on the node and must not be pulled",
    "CreateContainerConfigError": "a secret or ConfigMap that the container needs is not there",
    "CreateContainerError": "the container cannot be made",
    "RunContainerError": "the container cannot be started",
}
# Events of pods that cannot start, and of controllers that cannot make them.
_MOST_LAST_WORDS = 400  # characters
_TROUBLE = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", "FailedCreate", *CHILD_REFUSED)


def job_of(seen: Observation, job_id: str, now: float, *, cancelled: bool = False) -> Job:
    """The run's job; ``now`` is Unix time, ``cancelled`` what the run directory says of a workload that is gone."""
    workload = seen.workload
    nodes = tuple(dict.fromkeys(pod["spec"]["nodeName"] for pod in seen.pods if pod.get("spec", {}).get("nodeName")))
    stuck = [finding.text for finding in stuck_jobs(seen, now)]
    left = [pod for pod in seen.pods if not _has_ended(pod)]
    if workload is None:
        cause = "cancelled" if cancelled else "the workload is gone"
        if seen.pods:
            return Job(job_id, "ending", f"{cause}; {'; '.join(stuck) or _leaving(left, seen)}", nodes)
        if seen.jobset is not None:
            return Job(job_id, "ending", f"{cause}; its JobSet is being deleted")
        words = "it is no longer in the cluster, which does not say how it ended"
        return Job(job_id, "ended", words, forgotten=True)
    if workload["metadata"].get("deletionTimestamp"):
        cause = "cancelled" if CANCELLED in workload["metadata"].get("annotations", {}) else "being deleted"
        text = "; ".join(stuck) or (_leaving(left, seen) if left else "about to go")
        return Job(job_id, "ending", f"{cause}; {text}", nodes)
    end = _end(workload, seen)
    if end is not None:
        code, why = end
        if left:  # two gangs must never meet, so it is not over before its last pod is
            text = "; ".join(stuck) or _leaving(left, seen, doing="still ending")
            return Job(job_id, "ending", f"{why}; {text}", nodes)
        return Job(job_id, "ended", why, nodes, exit_code=code)
    if stuck:
        return Job(job_id, "running" if seen.pods else "queued", "; ".join(stuck), nodes)
    if _is_suspended(workload):  # Kueue suspends; the pods have their grace period
        saving = f"; {_leaving(left, seen, doing='still saving and leaving')}" if left else ""
        return Job(job_id, "queued", f"{_why_suspended(workload, seen)}{saving}", nodes)
    return _of_pods(seen, job_id, nodes)


def _end(workload: Object, seen: Observation) -> tuple[int | None, str] | None:
    """The exit code, where it is known, and the words, of a workload that is over."""
    status = workload.get("status", {})
    if workload["apiVersion"].startswith("batch.volcano.sh/"):
        phase, message = status.get("state", {}).get("phase", ""), _state_words(status.get("state", {}))
        if phase == "Completed":
            return 0, "completed"
        if phase in ("Failed", "Aborting", "Aborted", "Terminating", "Terminated"):
            return _code(seen.pods, message), _with_pod(f"{phase.lower()}{message}", seen.pods)
        return None
    done = _condition(workload, "Completed") or _condition(workload, "Complete")
    if done is not None:
        return 0, "completed"
    failed = _condition(workload, "Failed")
    if failed is None:
        return None
    words = f"failed: {_reason_words(failed)}"
    below = [*([seen.jobset] if seen.jobset is not None else []), *seen.jobs]  # nearer to the cause
    said = [_reason_words(condition) for item in below for condition in _conditions(item, "Failed")]
    for more in said:
        words += f"; {more}" if more and more not in words else ""
    return _code(seen.pods, " ".join((_message(failed), *said))), _with_pod(words, seen.pods)


def _code(pods: Sequence[Object], said: str) -> int | None:
    """What the gang ended with: what a pod ended with, else what a message says of one."""
    codes = [code for pod in pods if (code := exit_code_of_pod(pod)) is not None]
    bad = [code for code in codes if code]
    # All pods end with the verdict of the first; a pod that was killed meanwhile says nothing of the run.
    told = [code for code in bad if code < 128] or bad
    if told:
        return told[0]
    match = _EXIT_CODE.search(said)
    return int(match[1]) if match else None


def exit_code_of_pod(pod: Object) -> int | None:
    """What the pod's container ended with, None while it has not."""
    ended = own_container(pod).get("state", {}).get("terminated")
    return int(ended["exitCode"]) if ended is not None else None


def _with_pod(words: str, pods: Sequence[Object]) -> str:
    """The words with what the first pod that failed says of itself: its code, and the last that it printed."""
    for pod in pods:
        ended = own_container(pod).get("state", {}).get("terminated") or {}
        if ended.get("exitCode"):
            reason, said = ended.get("reason", ""), _last_words(str(ended.get("message", "")))
            more = f", {reason}" if reason not in ("", "Error") else ""
            told = f"{words}; pod {pod['metadata']['name']} ended with exit code {ended['exitCode']}{more}"
            return f"{told}: {said}" if said else told
        status = pod.get("status", {})
        if status.get("reason"):  # Evicted, for one; the container has no state then
            return f"{words}; pod {pod['metadata']['name']}: {status['reason']}: {status.get('message', '')}"
    return words


def _last_words(message: str) -> str:
    """The last line of a termination message, in which a program says why it ended."""
    lines = [" ".join(line.split()) for line in message.splitlines() if line.strip()]
    return lines[-1][-_MOST_LAST_WORDS:] if lines else ""


def _leaving(pods: Sequence[Object], seen: Observation, doing: str = "saving and leaving") -> str:
    """Return in words what pods that are asked to end do, as far as their nodes report."""
    silent = _silent_nodes(pods, seen)
    well = [pod for pod in pods if pod.get("spec", {}).get("nodeName") not in silent]
    parts = [f"{_pods(len(well))} {doing}"] if well else []
    return "; ".join([*parts, *_silence(silent)])


def _silent_nodes(pods: Sequence[Object], seen: Observation) -> dict[str, int]:
    """Return the nodes that do not report, with the number of the pods on each."""
    known = {node["metadata"]["name"]: is_ready(node) for node in seen.nodes}
    found: dict[str, int] = {}
    for pod in pods:
        name = pod.get("spec", {}).get("nodeName")
        if name and not known.get(name, reports(pod)):
            found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items()))


def _silence(nodes: Mapping[str, int]) -> list[str]:
    return [f"node {name} does not report, {_pods(count)} on it may be lost" for name, count in nodes.items()]


def _is_suspended(workload: Object) -> bool:
    if workload["apiVersion"].startswith("batch.volcano.sh/"):
        return False
    return bool(workload.get("spec", {}).get("suspend")) or _condition(workload, "Suspended") is not None


def _why_suspended(workload: Object, seen: Observation) -> str:
    """Kueue's own words where it has any."""
    queued = seen.queued
    queue = workload["metadata"].get("labels", {}).get(QUEUE_LABEL)
    if not queue:
        return (
            "suspended, and in no queue that would let it go on: where Kueue holds all jobs, name one "
            "(cluster.kubernetes.queue); elsewhere set spec.suspend to false"
        )
    if not seen.queue_known:
        return f"waits in queue {queue}; why, you may not see: it takes the right to list workloads.kueue.x-k8s.io"
    if queued is None:
        priority = workload["metadata"].get("labels", {}).get("kueue.x-k8s.io/priority-class")
        cause = f"priority class {priority} is unknown to it, or " if priority else ""
        return (
            f"suspended, and Kueue has made no Workload for it: {cause}Kueue is not running or does not manage "
            f"{workload['kind']}s. It will wait for ever; `kubectl get workloadpriorityclasses` shows the classes"
        )
    if queued.get("spec", {}).get("active") is False:
        evicted = _condition(queued, "Evicted")
        why = f" ({_reason_words(evicted)})" if evicted is not None else ""
        return f"held by Kueue: spec.active of Workload {queued['metadata']['name']} is false{why}"
    waits = _condition(queued, "QuotaReserved", "False") or _condition(queued, "Admitted", "False")
    words = f"waits in queue {queue}: {_message(waits)}" if waits and _message(waits) else f"waits in queue {queue}"
    evicted = _condition(queued, "Evicted")
    if evicted is not None:
        again = queued.get("status", {}).get("requeueState", {}).get("requeueAt")
        later = f"; it is queued again at {again}" if again else ""
        trouble = _trouble_of_lost_pods(seen) if evicted.get("reason") == "PodsReadyTimeout" else ""
        return f"{_evicted_words(queued, evicted)}{trouble}{later}; {words}"
    checks = [check for check in queued.get("status", {}).get("admissionChecks", ()) if check.get("state") != "Ready"]
    if _condition(queued, "QuotaReserved") is not None and checks:
        check = checks[0]
        return f"has its quota in queue {queue}; admission check {check['name']} says {check.get('message') or 'wait'}"
    return words


def _evicted_words(queued: Object, evicted: Object) -> str:
    if evicted.get("reason") == "Preempted":
        why = _condition(queued, "Preempted") or evicted
        return f"preempted by Kueue ({_message(why) or why.get('reason')})"
    return f"evicted by Kueue ({evicted.get('reason')}: {_message(evicted)})"


def _trouble_of_lost_pods(seen: Observation) -> str:
    """Return why pods that Kueue has removed did not come up, by the events that outlive them."""
    told = [event for event in seen.events if event.get("involvedObject", {}).get("kind") == "Pod"]
    for is_it in (_tells_of_image, lambda event: event.get("reason") in (*_TROUBLE, "FailedScheduling")):
        for event in reversed(told):
            if is_it(event):
                return f"; {_event_words(event)}"
    return ""


def _tells_of_image(event: Object) -> bool:
    return event.get("reason") in ("Failed", "InspectFailed", "ErrImageNeverPull") and "image" in str(
        event.get("message", "")
    )


def _event_words(event: Object) -> str:
    about = event.get("involvedObject", {})
    what = f"{about.get('kind', 'object').lower()} {about.get('name', '')}"
    return f"{what}: {event['reason']}: {' '.join(str(event.get('message', '')).split())}"


def _of_pods(seen: Observation, job_id: str, nodes: tuple[str, ...]) -> Job:
    """A workload that may run: how far its pods are."""
    assert seen.workload is not None
    wanted, restarts = size_of(seen.workload), _restarts(seen)
    current = [pod for pod in seen.pods if not pod["metadata"].get("deletionTimestamp") and not _has_ended(pod)]
    running = [pod for pod in current if pod.get("status", {}).get("phase") == "Running"]
    again = f" (restart {restarts})" if restarts else ""
    if running and len(running) >= wanted:
        silence = "".join(f"; {words}" for words in _silence(_silent_nodes(running, seen)))
        return Job(job_id, "running", f"all {_pods(len(running))} running{again}{silence}", nodes)
    ended = [pod for pod in seen.pods if _has_ended(pod)]
    if running and len(running) + len(ended) >= wanted:
        return Job(job_id, "running", f"{len(running)} of {wanted} pods run, the others have ended{again}", nodes)
    leaving = [pod for pod in seen.pods if pod["metadata"].get("deletionTimestamp")]
    waits = _why_pods_wait(current, seen)
    if leaving and not waits:
        text = _leaving(leaving, seen, doing="of the last gang leaving")
        return Job(job_id, "queued", f"{text}{again}", nodes)
    have = f"{len(running)} of {wanted} pods run; " if running else ""
    return Job(job_id, "queued", f"{have}{waits or 'the pods are being made'}{again}", nodes)


def _why_pods_wait(pods: Sequence[Object], seen: Observation) -> str:
    """Why no gang stands: what keeps a pod from starting, or from being made at all."""
    for pod in pods:
        name = pod["metadata"]["name"]
        for container in _containers(pod):
            waiting = container.get("state", {}).get("waiting") or {}
            if waiting.get("reason") in _STUCK:
                text = _STUCK[waiting["reason"]]
                return f"pod {name}: {text} ({waiting['reason']}: {waiting.get('message') or container.get('image')})"
    for pod in pods:
        scheduled = _condition(pod, "PodScheduled", "False")
        if scheduled is not None:
            if scheduled.get("reason") == "SchedulingGated":
                return f"pod {pod['metadata']['name']} is held by a scheduling gate: {_message(scheduled)}"
            group = _group_words(seen.group)
            return f"no room: {_message(scheduled) or 'unschedulable'}{f'; {group}' if group else ''}"
    for event in reversed(seen.events):
        if event.get("type") == "Warning" and event.get("reason") in _TROUBLE:
            return _event_words(event)
    if pods:
        starting = [pod for pod in pods if pod.get("status", {}).get("phase") != "Running"]
        silent = _silent_nodes(starting, seen)
        well = [pod for pod in starting if pod.get("spec", {}).get("nodeName") not in silent]
        parts = [f"{_pods(len(well))} starting: pulling the image or mounting volumes"] if well else []
        return "; ".join([*parts, *_silence(silent)])
    return _group_words(seen.group)


def _group_words(group: Object | None) -> str:
    """What Volcano's scheduler says of the gang."""
    if group is None:
        return ""
    waits = _condition(group, "Unschedulable")
    return f"Volcano: {_message(waits)}" if waits else ""


def size_of(workload: Object) -> int:
    """How many pods make the gang."""
    spec = workload.get("spec", {})
    if "tasks" in spec:
        return sum(int(task.get("replicas", 1)) for task in spec["tasks"])
    if "replicatedJobs" in spec:
        jobs = spec["replicatedJobs"]
        return sum(int(job.get("replicas", 1)) * int(job["template"]["spec"].get("parallelism", 1)) for job in jobs)
    return int(spec.get("trainer", {}).get("numNodes", 1))


def _restarts(seen: Observation) -> int:
    assert seen.workload is not None
    status = (seen.jobset or seen.workload).get("status", {})  # a TrainJob counts none
    return int(status.get("restarts", status.get("retryCount", 0)))


def _has_ended(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _containers(pod: Object) -> Iterable[Object]:
    status = pod.get("status", {})
    return (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))


def _conditions(item: Object, kind: str, status: str = "True") -> list[Object]:
    found = item.get("status", {}).get("conditions", ())
    return [condition for condition in found if condition.get("type") == kind and condition.get("status") == status]


def _condition(item: Object, kind: str, status: str = "True") -> Object | None:
    found = _conditions(item, kind, status)
    return found[0] if found else None


def _message(condition: Object) -> str:
    return " ".join(str(condition.get("message", "")).split())


def _reason_words(condition: Object) -> str:
    return ": ".join(part for part in (str(condition.get("reason", "")), _message(condition)) if part)


def _state_words(state: Object) -> str:
    words = ": ".join(str(part) for part in (state.get("reason"), state.get("message")) if part)
    return f": {words}" if words else ""


def _pods(count: int) -> str:
    return f"{count} pod" if count == 1 else f"{count} pods"
