"""The Kubernetes scheduler: what is rendered is applied, looked at, and deleted, by the API server alone.

The objects are manifest's, the checks preflight's, the meaning of what is seen conditions'. This is the order of calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError, UsageError
from scaletrain_cli.launch.code_snapshot import take_snapshot
from scaletrain_cli.launch.exclusion import Exclusion
from scaletrain_cli.launch.kubernetes.api import Cluster, connect
from scaletrain_cli.launch.kubernetes.conditions import CANCELLED, job_of
from scaletrain_cli.launch.kubernetes.documents import documents_for
from scaletrain_cli.launch.kubernetes.kinds import BACKENDS, CONFIG_MAP, Object, kind_of
from scaletrain_cli.launch.kubernetes.manifest import Manifest, manifest
from scaletrain_cli.launch.kubernetes.names import (
    DOCUMENTS_ANNOTATION,
    NODE,
    REVISION_ANNOTATION,
    RUN_ID_ANNOTATION,
    parse_id,
    run_label,
)
from scaletrain_cli.launch.kubernetes.nodes import exclusion_for
from scaletrain_cli.launch.kubernetes.observation import Observation, index_of, is_heard_of, observe
from scaletrain_cli.launch.kubernetes.pod_lines import progress_in
from scaletrain_cli.launch.kubernetes.pod_logs import PodLogs
from scaletrain_cli.launch.kubernetes.refusals import RefusedError
from scaletrain_cli.launch.kubernetes.trainjob import misses_runtime
from scaletrain_cli.launch.kubernetes.watchdog import Finding, force_delete, never_ends_by_itself
from scaletrain_cli.launch.kubernetes.whereabouts import (
    Whereabouts,
    heading_for,
    remember_end,
    shares_volume,
    whereabouts_of,
)
from scaletrain_cli.launch.kubernetes.yaml_text import to_yaml
from scaletrain_cli.launch.outlook import Outlook
from scaletrain_cli.launch.scheduler import Job
from scaletrain_cli.launch.submission import make_record, read_submission
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.rundir.code import CodeRecord
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.record import RunRecord, read_record
from scaletrain_cli.safe_files import touch
from scaletrain_cli.spec import RunSpec

_NUMBER = re.compile(r"-s(\d+)$")
_LINES_LOOKED_AT = 200  # of pod 0, for the newest step
_RUNTIME_SECONDS = 15.0  # until webhooks, which read from caches, have seen a runtime that was just made
_RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class KubernetesScheduler:
    """Jobs of the clusters that the kubeconfig names. ``connect`` is how one is reached; tests put their own there."""

    connect: Callable[[str | None, str], Cluster] = connect

    def preflight(
        self, spec: RunSpec, plan: RunPlan, run: RunDir | None = None, code: CodeRecord | None = None
    ) -> Outlook:
        """Look for everything that would keep the job from starting, and let the server judge each object.

        Raises SchedulerError with all problems at once.
        """
        from scaletrain_cli.launch.kubernetes.preflight import check

        # A name that nobody has: the server judges the objects as if they were to be made now.
        name = f"preflight-{secrets.token_hex(4)}"
        if run is None:
            record = make_record(spec, plan, name, take_snapshot(spec))
            documents = documents_for(RunDir(runs_root() / name), record)
        else:  # the code is that which is kept with it, whatever has become of the tree
            record = dataclasses.replace(read_record(run), run_id=name, spec=spec, plan=plan, code=code)
            documents = documents_for(run, record)
        rendered = manifest(record, documents)
        return check(self._cluster(spec), spec, rendered)

    def render(self, run: RunDir, record: RunRecord) -> str:
        return to_yaml(self._manifest(run, record, lambda: self._cluster(record.spec))[0].objects)

    def submit(self, run: RunDir, record: RunRecord) -> str:
        """Apply the objects, unless they are there: a submitter may have died after that."""
        cluster = self._cluster(record.spec)
        rendered, excluded = self._manifest(run, record, lambda: cluster)
        spec, workload = record.spec.cluster.kubernetes, rendered.workload
        found = cluster.get(kind_of(rendered.workload_object), spec.namespace, workload.name)
        if found is not None:
            _refuse_anothers(cluster, found, rendered)
        with heading_for(run, Whereabouts(workload.id, spec.namespace, spec.context)):
            _apply(cluster, rendered, found)
        if excluded.nodes or excluded.spared:
            record_event(run, "nodes-excluded", nodes=excluded.nodes, spared=excluded.spared, why=excluded.why)
        return workload.id

    def job(self, run: RunDir, record: RunRecord) -> Job:
        place = whereabouts_of(run, record)
        if place is None:
            return Job("", "unknown", "never submitted")
        if place.ended:  # nothing brings it back, and its object may be gone
            return Job(place.job_id, "ended", place.detail, exit_code=place.exit_code)
        try:
            cluster, seen = self._look(place, record)
        except UsageError as error:  # no client here: the run directory may still tell most of it
            raise SchedulerError(error.message) from error
        job = job_of(seen, place.job_id, time.time())
        if job.state == "ended" and (seen.workload is not None or run.is_told_to_stop):
            remember_end(run, place, job)
        if job.state == "running" and seen.workload is not None and not shares_volume(run):
            return dataclasses.replace(job, progress=_progress(cluster, place, seen))
        return job

    def cancel(self, run: RunDir, record: RunRecord) -> None:
        """Delete the workload, its pods before it: each gets SIGTERM and its whole grace period to save.

        The object stays until the last pod is gone, so that nobody can mistake a gang that saves for one that is over.
        """
        touch(run.stop_file)
        place = whereabouts_of(run, record)
        if place is None:
            record_event(run, "cancelled")
            return
        cluster, seen = self._look(place, record)
        workload = seen.workload
        if workload is not None and not workload["metadata"].get("deletionTimestamp"):
            kind, uid = BACKENDS[parse_id(place.job_id)[0]], workload["metadata"]["uid"]
            _refuse_another_run(cluster, workload, record)
            # The pods may not see the stop file; whoever looks at the object sees that it was no preemption.
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            cluster.annotate(kind, place.namespace, place.name, {CANCELLED: stamp})
            cluster.delete(kind, place.namespace, place.name, uid=uid)
            with contextlib.suppress(SchedulerError):  # the pods take their output along when they go
                self._logs(run, record, place, cluster).bring()
        if not (seen.pods and shares_volume(run)):  # else the first pod records it, once all have saved
            record_event(run, "cancelled", job_id=place.job_id)

    def logs(self, run: RunDir, record: RunRecord) -> PodLogs | None:
        """What brings the pods' output here; None where it is here already, or there is no job."""
        place = whereabouts_of(run, record)
        if place is None or shares_volume(run):
            return None  # of a job that has ended, the pods may still be there
        return self._logs(run, record, place, self.connect(place.context, place.namespace))

    def findings(self, run: RunDir, record: RunRecord) -> list[Finding]:
        """What the job would wait for in vain; empty in the good case."""
        place = whereabouts_of(run, record)
        return [] if place is None else never_ends_by_itself(self._look(place, record)[1], time.time())

    def force(self, run: RunDir, record: RunRecord) -> list[str]:
        """Remove pods of dead nodes; returns their names. Only for who knows that the nodes are off."""
        place = whereabouts_of(run, record)
        if place is None:
            return []
        cluster, seen = self._look(place, record)
        removed = force_delete(cluster, place.namespace, seen, time.time())
        if removed:
            record_event(run, "pods-force-deleted", pods=removed)
        return removed

    def _cluster(self, spec: RunSpec) -> Cluster:
        return self.connect(spec.cluster.kubernetes.context, spec.cluster.kubernetes.namespace)

    def _look(self, place: Whereabouts, record: RunRecord) -> tuple[Cluster, Observation]:
        cluster = self.connect(place.context, place.namespace)
        return cluster, observe(cluster, place.namespace, place.job_id, run_label(record.run_id))

    def _logs(self, run: RunDir, record: RunRecord, place: Whereabouts, cluster: Cluster) -> PodLogs:
        return PodLogs(run, cluster, place, record.spec.cluster.gpus_per_node)

    def _manifest(self, run: RunDir, record: RunRecord, reach: Callable[[], Cluster]) -> tuple[Manifest, Exclusion]:
        excluded = exclusion_for(run, record.spec, reach)
        number = _next_number(run)
        return manifest(record, documents_for(run, record), number, excluded.nodes), excluded


def _next_number(run: RunDir) -> int:
    """Of this submission: one that was applied without being recorded is found again under the same number."""
    submission = read_submission(run)
    match = _NUMBER.search(submission.job_id) if submission is not None else None
    return int(match[1]) + 1 if match else 1


def _apply(cluster: Cluster, rendered: Manifest, found: Object | None) -> None:
    """The workload last, and then the owner of the rest. A refusal takes back what was made for it."""
    *others, workload = rendered.objects
    made: list[Object] = []
    try:
        for body in others:
            cluster.apply(body)
            made.append(body)
        whole = found if found is not None else _apply_workload(cluster, workload)
    except SchedulerSilentError:
        raise  # the server may have it all; the next submit finds out
    except SchedulerError:
        for body in made if found is None else ():
            with contextlib.suppress(SchedulerError):
                metadata = body["metadata"]
                cluster.delete(kind_of(body), metadata["namespace"], metadata["name"])
        raise
    owner = {key: whole[key] for key in ("apiVersion", "kind")}
    owner |= {key: whole["metadata"][key] for key in ("name", "uid")}
    for body in others:
        with contextlib.suppress(SchedulerError):  # the job is there; without an owner they only stay behind it
            cluster.apply({**body, "metadata": {**body["metadata"], "ownerReferences": [owner]}})


def _apply_workload(cluster: Cluster, workload: Object) -> Object:
    """Make it; a TrainJob once its runtime is known to all who are asked for their consent."""
    deadline = time.monotonic() + _RUNTIME_SECONDS
    while True:
        try:
            return cluster.apply(workload)
        except RefusedError as error:
            if not misses_runtime(error.said) or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_SECONDS)


def _refuse_anothers(cluster: Cluster, found: Object, rendered: Manifest) -> None:
    """Raise SchedulerError unless the object that is there is this very submission's."""
    workload, metadata = rendered.workload, found["metadata"]
    name, marks = f"{found['kind']} {metadata['name']}", metadata.get("annotations", {})
    documents = cluster.get(CONFIG_MAP, metadata["namespace"], workload.config_map)
    theirs = (documents or {}).get("metadata", {}).get("annotations", {}).get(DOCUMENTS_ANNOTATION)
    ours = rendered.objects[0]["metadata"]["annotations"][DOCUMENTS_ANNOTATION]
    if marks.get(RUN_ID_ANNOTATION) != workload.run_id:
        owner = marks.get(RUN_ID_ANNOTATION, "something else")
        raise SchedulerError(f"{cluster.where}: {name} is there and belongs to {owner}. Submit under another --run-id.")
    if metadata.get("deletionTimestamp"):
        raise SchedulerError(f"{cluster.where}: {name} is still being deleted. Wait for its pods to end.")
    if marks.get(REVISION_ANNOTATION) != str(workload.revision) or (theirs is not None and theirs != ours):
        raise SchedulerError(
            f"{cluster.where}: {name} is there with another spec or layout of {workload.run_id}. "
            f"Delete it (kubectl -n {metadata['namespace']} delete {workload.backend} {metadata['name']}), or submit "
            "under another --run-id."
        )


def _refuse_another_run(cluster: Cluster, workload: Object, record: RunRecord) -> None:
    owner = workload["metadata"].get("annotations", {}).get(RUN_ID_ANNOTATION)
    if owner != record.run_id:
        name = f"{workload['kind']} {workload['metadata']['name']}"
        raise SchedulerError(f"{cluster.where}: {name} belongs to {owner or 'something else'}; it is left alone.")


def _progress(cluster: Cluster, place: Whereabouts, seen: Observation) -> dict[str, float]:
    """How far the run is, by what pod 0 printed last; nothing where that cannot be read."""
    running = [pod for pod in seen.pods if index_of(pod) == 0 and pod.get("status", {}).get("phase") == "Running"]
    first = [pod for pod in running if is_heard_of(pod)]  # a dead node would be waited for
    if not first:
        return {}
    with contextlib.suppress(SchedulerError):
        lines = cluster.log(place.namespace, first[0]["metadata"]["name"], NODE, last_lines=_LINES_LOOKED_AT)
        return progress_in(line.partition(" ")[2] for line in lines)
    return {}
