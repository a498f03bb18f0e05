"""Checks before a submission: all problems that would keep the job from starting, reported at once. Creates nothing.

The API server accepts many of these without a message, and the job would wait indefinitely. Checks of objects that the
user may not read are skipped with a note.
"""

import operator
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import Problem, SchedulerError
from scaletrain_cli.launch.backends.base import PreflightResult, Start
from scaletrain_cli.launch.backends.kubernetes import api_kinds as kinds
from scaletrain_cli.launch.backends.kubernetes.api import Cluster, ForbiddenError, NotServedError, RefusedError
from scaletrain_cli.launch.backends.kubernetes.api_kinds import Kind, Object
from scaletrain_cli.launch.backends.kubernetes.capacity import (
    NAMES_SHOWN,
    Found,
    missing,
    namespace_quota,
    node_capacity,
    queue_capacity,
    unstated,
)
from scaletrain_cli.launch.backends.kubernetes.manifest import Manifest
from scaletrain_cli.launch.backends.kubernetes.messages import (
    is_runtime_missing,
    one_line,
    pod_refusal_note,
    problem,
    reason,
    unstated_in_quota,
)
from scaletrain_cli.launch.backends.kubernetes.names import NODE, QUEUE_LABEL
from scaletrain_cli.launch.backends.kubernetes.objects import is_unmanaged
from scaletrain_cli.launch.backends.kubernetes.pod import preparation_template
from scaletrain_cli.launch.backends.kubernetes.workloads import children
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.safe_files import FOLDER_MODE
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.text import listed


def named_object(cluster: Cluster, spec: RunSpec, key: str, kind: Kind, effect: str = "") -> Iterator[Found]:
    """Yield a problem if the object that the key names does not exist. ``effect``: of that, for the message."""
    name = operator.attrgetter(key)(spec.cluster.kubernetes)
    namespace = spec.cluster.kubernetes.used_namespace if kind.namespaced else ""
    if name is not None and cluster.get(kind, namespace, name) is None:
        what = f"{kind.name}{f' in namespace {namespace}' if namespace else ''}{effect}"
        yield missing(spec, key, name, what, cluster.find(kind, namespace))


def claims(cluster: Cluster, spec: RunSpec) -> Iterator[Found]:
    """Yield claims that do not exist, are not bound, or cannot be mounted by all pods."""
    kubernetes = spec.cluster.kubernetes
    needed = {volume.claim: f"volumes.{index}.claim" for index, volume in enumerate(kubernetes.volumes)}
    if kubernetes.runs.claim is not None:
        needed = {kubernetes.runs.claim: "runs.claim", **needed}
    for name, key in needed.items():
        if (claim := cluster.get(kinds.CLAIM, kubernetes.used_namespace, name)) is None:
            there = cluster.find(kinds.CLAIM, kubernetes.used_namespace)
            yield missing(spec, key, name, f"PersistentVolumeClaim in namespace {kubernetes.used_namespace}", there)
            continue
        phase = claim.get("status", {}).get("phase")
        if phase == "Pending":
            yield _pending_claim(cluster, spec, key, name)
        elif phase != "Bound":
            yield problem(spec, key, reason("claim-in-phase", phase=phase), name)
        modes = claim["spec"].get("accessModes", ())
        if spec.cluster.nodes > 1 and "ReadWriteMany" not in modes:
            params = {"pods": spec.cluster.nodes, "modes": ", ".join(modes) or "none"}
            if key == "runs.claim":
                yield problem(spec, key, reason("claim-not-shared", **params), name)
            elif "ReadOnlyMany" not in modes:  # a driver that attaches nothing, such as NFS, does not enforce it
                yield reason("claim-of-one-node", claim=name, **params)


def _pending_claim(cluster: Cluster, spec: RunSpec, key: str, name: str) -> Found:
    events = cluster.events(spec.cluster.kubernetes.used_namespace, name)
    if any(event.get("reason") == "WaitForFirstConsumer" for event in events):
        return reason("claim-unbound", claim=name)
    if not events:
        return problem(spec, key, reason("claim-not-bound"), name)
    return problem(spec, key, reason("claim-not-bound-said", said=one_line(events[-1].get("message"))), name)


def secrets(cluster: Cluster, spec: RunSpec) -> Iterator[Found]:
    """Yield Secrets and keys that do not exist. Values are not kept. Most users may not read Secrets."""
    kubernetes = spec.cluster.kubernetes
    needed: list[tuple[str, str, str | None]] = [
        (f"pull_secrets.{index}", name, None) for index, name in enumerate(kubernetes.pull_secrets)
    ]
    needed += [(f"secrets.{name}", secret.secret, secret.key) for name, secret in kubernetes.secrets.items()]
    for key, name, entry in needed:
        try:
            secret = cluster.get(kinds.SECRET, kubernetes.used_namespace, name)
        except ForbiddenError:
            yield reason("secrets-unreadable", names=sorted({name for _, name, _ in needed}))
            return
        if secret is None:
            yield problem(spec, key, reason("secret-missing", namespace=kubernetes.used_namespace), name)
        elif entry is not None and entry not in secret.get("data", {}):
            there = listed(sorted(secret.get("data", {})), NAMES_SHOWN) or "none"
            yield problem(spec, key, reason("secret-key-missing", secret=name, key=entry, keys=there), entry)


# Volumes of Kubernetes itself to which the kubelet applies no fsGroup.
_WITHOUT_GROUPS = ("nfs", "hostPath", "glusterfs", "cephfs", "azureFile")


def volume_rights(cluster: Cluster, spec: RunSpec, run: RunDir | None, security: Mapping[str, Any]) -> Iterator[Found]:
    """Yield why the pods could not write their run directory; ``run``: one that pods have written to.

    ``security``: of a pod; without a user the cluster chooses one, which may have any rights.
    """
    kubernetes, user, fs_group = spec.cluster.kubernetes, security.get("runAsUser"), security.get("fsGroup")
    claim = kubernetes.runs.claim and cluster.get(kinds.CLAIM, kubernetes.used_namespace, kubernetes.runs.claim)
    if not claim or user is None:
        return
    applied, why = _applies_group(cluster, claim) if fs_group is not None else (False, None)
    if applied:
        return
    if (seen := _folder_seen_here(spec, run)) is not None:
        folder, uid, gid, mode = seen
        if _may_write(user, fs_group, uid, gid, mode):
            return
        owner = {"folder": str(folder), "owner": uid, "group": gid, "mode": f"{mode:04o}"}
        if applied is None and fs_group is not None:  # the kubelet may apply it nevertheless
            yield reason("folder-maybe-not-writable", uid=user, **owner, fs_group=fs_group, why=why)
        else:
            yield problem(spec, "run_as_user", reason("folder-not-writable", uid=user, **owner), str(user))
    elif applied is False and why is not None:
        yield reason(
            "fs-group-ignored",
            fs_group=fs_group,
            claim=kubernetes.runs.claim,
            why=why,
            folder=kubernetes.runs.sub_path or "/",
            uid=user,
        )


def _folder_seen_here(spec: RunSpec, run: RunDir | None) -> tuple[Path, int, int, int] | None:
    """Return the folder that pods will write to, its uid, gid and mode; None unless this machine mounts the volume."""
    if run is not None:
        status = run.path.stat()
        return run.path, status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)
    root = runs_root()
    if str(root) != spec.cluster.kubernetes.runs.path or not root.is_dir():
        return None
    return root, os.geteuid(), os.getegid(), FOLDER_MODE  # this user will create the run directory


def _may_write(user: int, fs_group: int | None, uid: int, gid: int, mode: int) -> bool:
    if user == uid:
        return mode & (stat.S_IWUSR | stat.S_IXUSR) == stat.S_IWUSR | stat.S_IXUSR
    if gid in (user, fs_group):  # runAsGroup is the user's number, too
        return mode & (stat.S_IWGRP | stat.S_IXGRP) == stat.S_IWGRP | stat.S_IXGRP
    return mode & (stat.S_IWOTH | stat.S_IXOTH) == stat.S_IWOTH | stat.S_IXOTH


def _applies_group(cluster: Cluster, claim: Object) -> tuple[bool | None, Reason]:
    """Return whether the kubelet applies fs_group to the volume, None if unknown, and why."""
    if not (name := claim.get("spec", {}).get("volumeName")):
        return None, reason("group-claim-unbound")
    try:
        volume = (cluster.get(kinds.PERSISTENT_VOLUME, "", name) or {}).get("spec", {})
        if (driver := volume.get("csi", {}).get("driver")) is None:
            kind = next((source for source in _WITHOUT_GROUPS if source in volume), None)
            unknown = reason("group-volume-unknown", volume=name)
            return (None, unknown) if kind is None else (False, reason("group-volume-kind", kind=kind))
        policy = (cluster.get(kinds.CSI_DRIVER, "", driver) or {}).get("spec", {}).get("fsGroupPolicy")
    except ForbiddenError:
        return None, reason("group-volume-unreadable")
    why = reason("group-driver", driver=driver, policy=policy)
    if policy == "ReadWriteOnceWithFSType":  # the default of a driver
        modes = claim.get("spec", {}).get("accessModes", ())
        return "ReadWriteOnce" in modes and len(modes) == 1 and "fsType" in volume["csi"], why
    return {"File": True, "None": False}.get(str(policy)), why


def check(cluster: Cluster, spec: RunSpec, rendered: Manifest, run: RunDir | None = None) -> PreflightResult:
    """Return the notes and the start. ``run``: a run to resume whose directory this machine and its pods share.

    Raises SchedulerError with every problem, or with the reason why the server does not answer.
    """
    version = cluster.version()
    _require_namespace(cluster, spec.cluster.kubernetes.used_namespace, spec)
    pod = pod_spec(rendered.objects)
    of_queue = kinds.WORKLOAD_PRIORITY if spec.cluster.kubernetes.kueue else kinds.PRIORITY_CLASS
    checks: list[Callable[[], Iterator[Found]]] = [
        lambda: _kinds_served(cluster, spec, rendered.objects),
        lambda: queue_capacity(cluster, spec, pod),
        lambda: named_object(cluster, spec, "priority", of_queue, ", and the job would wait without a message"),
        lambda: named_object(cluster, spec, "pod_priority", kinds.PRIORITY_CLASS),
        lambda: named_object(cluster, spec, "preparation.queue", kinds.LOCAL_QUEUE),
        lambda: claims(cluster, spec),
        lambda: volume_rights(cluster, spec, run, pod.get("securityContext", {})),
        lambda: named_object(cluster, spec, "service_account", kinds.SERVICE_ACCOUNT),
        lambda: secrets(cluster, spec),
        lambda: namespace_quota(cluster, spec, pod),
        lambda: node_capacity(cluster, spec, pod),
        *(lambda body=body: _dry_run(cluster, spec, body) for body in rendered.objects),
        *(
            lambda child=child: _dry_run(cluster, spec, child, derived=True)
            for child in (*children(rendered.objects), *_preparation_pods(spec, rendered))
        ),
    ]
    findings = [finding for one in checks for finding in _run_check(one, spec)]
    problems = tuple(dict.fromkeys(finding for finding in findings if isinstance(finding, Problem)))
    if problems:
        params = {"where": cluster.where, "version": version, "count": len(problems)}
        raise SchedulerError(reason("preflight-problems", **params), problems)
    reasons = (*rendered.notes, *(finding for finding in findings if isinstance(finding, Reason)))
    warnings = {str(note): note for note in reasons}
    starts = [finding for finding in findings if isinstance(finding, Start)]
    unknown = [start for start in starts if start.at is None]  # one unknown makes the start unknown
    return PreflightResult((unknown or starts or [_start_without_quota(spec)])[0], tuple(warnings.values()))


def pod_spec(objects: Iterable[Object]) -> Object:
    """Return the spec of the pods of any kind of workload."""
    for body in objects:
        spec = body.get("spec", {})
        inner = spec.get("template", {}).get("spec", spec)  # a TrainJob's runtime has a JobSet's spec in it
        for job in inner.get("replicatedJobs", ()):
            return dict(job["template"]["spec"]["template"]["spec"])
        for task in spec.get("tasks", ()):
            return dict(task["template"]["spec"])
    return {}


def _preparation_pods(spec: RunSpec, rendered: Manifest) -> Iterator[Object]:
    """Yield a pod as the preparation of the data creates them, before the run exists."""
    if spec.cluster.kubernetes.runs.per_pod:
        return
    name, workload = f"{rendered.workload.name}-data-0-xxxxx", rendered.workload
    template = preparation_template(spec, f"{workload.name}-data-spec", {}, workload.annotations)
    metadata = {**template["metadata"], "name": name, "namespace": spec.cluster.kubernetes.used_namespace}
    yield kinds.POD.object(metadata, template["spec"])


def _start_without_quota(spec: RunSpec) -> Start:
    """Return the start of a job that no quota admits, or whose quota the user may not read."""
    queue = spec.cluster.kubernetes.queue
    if spec.cluster.kubernetes.kueue:
        return Start(None, reason("start-quota-unreadable", queue=queue))
    if queue is not None:
        return Start(None, reason("start-volcano", queue=queue))
    return Start(None, reason("start-no-queue", pods=spec.cluster.nodes))


def _run_check(one: Callable[[], Iterator[Found]], spec: RunSpec) -> Iterator[Found]:
    """Run a check. A missing permission becomes a note, a missing kind a problem."""
    try:
        yield from one()
    except NotServedError as error:
        of_queues = error.kind.group == kinds.LOCAL_QUEUE.group or error.kind is kinds.VOLCANO_QUEUE
        yield problem(spec, "queue" if of_queues else "backend", error.reason)
    except ForbiddenError as error:
        yield reason("not-checked", **error.reason.params)


def _require_namespace(cluster: Cluster, namespace: str, spec: RunSpec) -> None:
    """Raise SchedulerError if the namespace does not exist: every other request would fail for that reason."""
    try:
        existing = cluster.get(kinds.NAMESPACE, "", namespace)
    except ForbiddenError:
        return  # the dry run shows it
    if existing is None:
        absent = problem(spec, "namespace", reason("namespace-missing"), namespace)
        raise SchedulerError(reason("namespace-missing-in", where=cluster.where), (absent,))


def _kinds_served(cluster: Cluster, spec: RunSpec, objects: Iterable[Object]) -> Iterator[Found]:
    """Yield the kinds that no controller of the cluster defines."""
    for kind in dict.fromkeys(map(kinds.kind_of, objects)):
        if kind.group and (error := cluster.missing(kind)) is not None:
            yield problem(spec, "native_gang" if kind is kinds.NATIVE_POD_GROUP else "backend", error.reason)


def _dry_run(cluster: Cluster, spec: RunSpec, body: Object, *, derived: bool = False) -> Iterator[Found]:
    """Yield the refusals of an object by the server and its admission webhooks, from a dry run.

    ``derived``: a controller would create it, such as a JobSet's pods, which the user may not be allowed to.
    """
    kind = body["kind"]
    try:
        answer = cluster.apply(body, dry_run=True)
        if not derived and is_unmanaged(body, answer):
            queue = body["metadata"]["labels"][QUEUE_LABEL]
            yield problem(spec, "queue", reason("queue-without-kind", kind=kind, queue=queue), queue)
        given, actual = (
            {container["name"] for container in one.get("spec", {}).get("containers", ())} for one in (body, answer)
        )
        if actual - given:
            yield reason("note-added-containers", names=sorted(actual - given))
    except NotServedError:
        return  # reported by the check of the kind
    except ForbiddenError as error:
        if derived:
            yield reason("child-not-checked", **error.reason.params, kind=kind)
        else:
            yield problem(spec, "", reason("object-forbidden", **error.reason.params, kind=kind))
    except RefusedError as error:
        if error.status == 0 or error.status >= 500:
            raise
        elif kind == "TrainJob" and is_runtime_missing(error.said):
            return  # a dry run creates none; the objects of the two are checked below
        elif unset := unstated_in_quota(error.said, NODE):
            yield from (unstated(spec, *amount) for amount in unset)
        elif kind == "Pod" and (note := pod_refusal_note(error.said)) is not None:
            yield note
        elif error.problems:
            code = "derived-field-refused" if derived else "object-field-refused"
            for cause in error.problems:
                yield problem(spec, "", reason(code, kind=kind, field=cause.key, cause=cause.reason))
        elif derived:
            yield problem(spec, "", reason("derived-object-refused", kind=kind, said=one_line(error.said)))
        else:
            yield problem(spec, "", reason("object-refused", kind=kind, refusal=error.reason))
