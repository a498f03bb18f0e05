"""The runs of a namespace in the order in which Kueue looks at them, and why each waits. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from scaletrain_cli.launch.cluster_view import QueueRow
from scaletrain_cli.launch.kubernetes.conditions import job_of, size_of
from scaletrain_cli.launch.kubernetes.kinds import Object
from scaletrain_cli.launch.kubernetes.names import INSTANCE_LABEL, RUN_ID_ANNOTATION
from scaletrain_cli.launch.kubernetes.observation import QUEUE_LABEL, Observation, index_of, owned_by
from scaletrain_cli.launch.kubernetes.quantities import requested
from scaletrain_cli.launch.kubernetes.watchdog import unix_time
from scaletrain_cli.launch.scheduler import Job


@dataclass(frozen=True)
class Runs:
    """What a namespace holds of runs, and what stands in its queues of Kueue."""

    workloads: tuple[tuple[str, Object], ...] = ()  # each with its back end
    pods: tuple[Object, ...] = ()
    queued: tuple[Object, ...] = ()  # Kueue's Workloads, of anybody
    groups: tuple[Object, ...] = ()  # Volcano's PodGroups
    nodes: tuple[Object, ...] = ()
    queue_known: bool = True
    nodes_known: bool = True

    @cached_property
    def waiting(self) -> int:
        return sum(map(_waits, self.queued))

    def seen(self) -> Iterator[tuple[str, Observation]]:
        """Each run with its back end. Not the JobSets that Trainer makes of TrainJobs, which have our labels too."""
        for backend, workload in self.workloads:
            metadata = workload["metadata"]
            if any(owner.get("kind") == "TrainJob" for owner in metadata.get("ownerReferences", ())):
                continue
            pods = [pod for pod in self.pods if _labels(pod).get(INSTANCE_LABEL) == metadata["name"]]
            yield (
                backend,
                Observation(
                    workload,
                    tuple(sorted(pods, key=index_of)),
                    queued=owned_by(workload, self.queued),
                    group=owned_by(workload, self.groups),
                    nodes=self.nodes,
                    nodes_known=self.nodes_known,
                    queue_known=self.queue_known,
                ),
            )


def queue_rows(runs: Runs, queues: Mapping[str, str], gpu_resource: str, now: float) -> tuple[QueueRow, ...]:
    """Those that run first, then those that wait, in order. ``queues`` maps a LocalQueue to its ClusterQueue."""
    waiting = sorted(filter(_waits, runs.queued), key=_order)
    found: list[tuple[tuple[bool, float, float], QueueRow]] = []
    for backend, seen in runs.seen():
        assert seen.workload is not None
        metadata, queued = seen.workload["metadata"], seen.queued
        job = job_of(seen, f"{backend}/{metadata['name']}", now)
        if not job.is_active:
            continue
        queue = _labels(seen.workload).get(QUEUE_LABEL) or str(seen.workload["spec"].get("queue", ""))
        to = queues.get(queue, queue)
        ahead = None
        if queued is not None and _waits(queued):
            ahead = sum(
                _order(other) < _order(queued)
                for other in waiting
                if queues.get(other["spec"].get("queueName", ""), other["spec"].get("queueName", "")) == to
            )
        row = QueueRow(
            job_id=job.id,
            name=metadata.get("annotations", {}).get(RUN_ID_ANNOTATION, metadata["name"]),
            state=job.state,
            queue=queue,
            nodes=size_of(seen.workload),
            gpus=_gpus(seen, gpu_resource),
            ahead=ahead,
            reason=job.detail if job.state == "queued" else "",
            start=_start(job, seen),
        )
        order = _order(queued) if queued is not None else (0.0, unix_time(metadata["creationTimestamp"]))
        found.append(((job.state != "running", *order), row))
    return tuple(row for _, row in sorted(found, key=lambda item: item[0]))


def others(runs: Runs, pods: Iterable[Object], cluster_queues: Iterable[Object], gpu_resource: str) -> tuple[int, int]:
    """Jobs of others that run, and that wait: those whose pods ask for GPUs, and what waits for the same quota."""
    mine = {pod["metadata"].get("uid") for pod in runs.pods}
    placed: dict[str, bool] = {}
    for pod in pods:
        if pod["metadata"].get("uid") in mine or not requested(pod["spec"], gpu_resource):
            continue
        owners = pod["metadata"].get("ownerReferences") or [pod["metadata"]]
        uid = str(owners[0].get("uid"))
        placed[uid] = placed.get(uid, False) or bool(pod["spec"].get("nodeName"))
    pending = sum(int(queue.get("status", {}).get("pendingWorkloads", 0)) for queue in cluster_queues)
    own = sum(seen.queued is not None and _waits(seen.queued) for _, seen in runs.seen())
    running = sum(placed.values())
    return running, len(placed) - running + max(0, max(pending, runs.waiting) - own)


def _waits(queued: Object) -> bool:
    is_over = _condition(queued, "Finished") is not None or queued["spec"].get("active") is False
    return not is_over and _condition(queued, "QuotaReserved") is None


def _order(queued: Object) -> tuple[float, float]:
    """By priority, then by age; what was sent back because its pods did not come up goes to the end."""
    evicted = _condition(queued, "Evicted")
    since = queued["metadata"]["creationTimestamp"]
    if evicted is not None and evicted.get("reason") == "PodsReadyTimeout":
        since = evicted["lastTransitionTime"]
    return -float(queued["spec"].get("priority") or 0), unix_time(since)


def _gpus(seen: Observation, resource: str) -> int | None:
    """Of the whole gang, whose pods are alike; None where none is described, as of a TrainJob at first."""
    assert seen.workload is not None
    spec, queued = seen.workload["spec"], seen.queued if seen.queued is not None else {"spec": {}}
    described = [
        *(job["template"]["spec"]["template"] for job in spec.get("replicatedJobs", ())),
        *(part["template"] for part in (*spec.get("tasks", ()), *queued["spec"].get("podSets", ()))),
        *seen.pods,
    ]
    return int(size_of(seen.workload) * requested(described[0]["spec"], resource)) if described else None


def _start(job: Job, seen: Observation) -> float | None:
    """When the pods of one that runs began."""
    starts = [pod.get("status", {}).get("startTime") for pod in seen.pods]
    found: Sequence[float] = [unix_time(start) for start in starts if start]
    return min(found) if found and job.state == "running" else None


def _condition(item: Object, kind: str) -> Object | None:
    found = item.get("status", {}).get("conditions", ())
    return next((each for each in found if each["type"] == kind and each["status"] == "True"), None)


def _labels(item: Object) -> Mapping[str, str]:
    return item["metadata"].get("labels", {})  # type: ignore[no-any-return]
