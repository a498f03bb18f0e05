"""What would keep a job from starting, asked before anything is made: all problems at once, and nothing left behind.

Many of these the API server would accept in silence, and the job would wait for ever. Where the user may not look, that
is told and passed over: the server judges in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from scaletrain_cli.errors import Problem, SchedulerError
from scaletrain_cli.launch.kubernetes.api import Cluster
from scaletrain_cli.launch.kubernetes.capacity import namespace_room, node_room, queue_room
from scaletrain_cli.launch.kubernetes.children import children
from scaletrain_cli.launch.kubernetes.existence import claims, pod_priority, priority, secrets, service_account
from scaletrain_cli.launch.kubernetes.kinds import LOCAL_QUEUE, NAMESPACE, VOLCANO_QUEUE, Kind, Object, kind_of
from scaletrain_cli.launch.kubernetes.manifest import Manifest
from scaletrain_cli.launch.kubernetes.obstacles import Found, problem
from scaletrain_cli.launch.kubernetes.refusals import NotServedError, RefusedError
from scaletrain_cli.launch.kubernetes.trainjob import misses_runtime
from scaletrain_cli.launch.kubernetes.volume_rights import volume_rights
from scaletrain_cli.launch.outlook import Outlook, Start
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec import RunSpec


def check(cluster: Cluster, spec: RunSpec, rendered: Manifest, run: RunDir | None = None) -> Outlook:
    """Return what is worth telling. ``run``: one that is to go on, on the volume that is seen here as its pods see it.

    Raises SchedulerError that lists every problem, or that says why the server cannot be asked."""
    version = cluster.version()
    namespace = spec.cluster.kubernetes.namespace
    _require_namespace(cluster, namespace, spec)
    pod = pod_spec(rendered.objects)
    checks: list[Callable[[], Iterator[Found]]] = [
        lambda: _served(cluster, spec, kind_of(rendered.workload_object)),
        lambda: queue_room(cluster, spec, pod),
        lambda: priority(cluster, spec),
        lambda: pod_priority(cluster, spec),
        lambda: claims(cluster, spec),
        lambda: volume_rights(cluster, spec, run),
        lambda: service_account(cluster, spec),
        lambda: secrets(cluster, spec),
        lambda: namespace_room(cluster, spec, pod),
        lambda: node_room(cluster, spec, pod),
        *(lambda body=body: _dry_run(cluster, spec, body) for body in rendered.objects),
        *(lambda child=child: _dry_run_child(cluster, spec, child) for child in children(rendered.objects)),
    ]
    found = [finding for one in checks for finding in _asked(one, spec)]
    problems = tuple(dict.fromkeys(finding for finding in found if isinstance(finding, Problem)))
    if problems:
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise SchedulerError(f"{cluster.where}, {version}: {count} would keep the job from starting", problems)
    notes = tuple(dict.fromkeys((*rendered.notes, *(finding for finding in found if isinstance(finding, str)))))
    starts = [finding for finding in found if isinstance(finding, Start)]
    unknown = [start for start in starts if start.at is None]  # one thing in the way is enough
    return Outlook((unknown or starts or [_unplanned(spec)])[0], notes)


def pod_spec(objects: Iterable[Object]) -> Object:
    """The spec of the pods, wherever a backend has put it."""
    for body in objects:
        spec = body.get("spec", {})
        inner = spec.get("template", {}).get("spec", spec)  # a TrainJob's runtime has a JobSet's spec in it
        for job in inner.get("replicatedJobs", ()):
            return dict(job["template"]["spec"]["template"]["spec"])
        for task in spec.get("tasks", ()):
            return dict(task["template"]["spec"])
    return {}


def _unplanned(spec: RunSpec) -> Start:
    """Of a job that no quota admits, or whose quota may not be looked at."""
    if spec.cluster.kubernetes.kueue:
        return Start(None, f"the quota of queue {spec.cluster.kubernetes.queue} cannot be looked at")
    if spec.cluster.kubernetes.queue is not None:
        room = f"queue {spec.cluster.kubernetes.queue} and the nodes have room for all of it"
        return Start(None, f"Volcano tells no time: the gang is placed once {room}")
    pods = "its pod is" if spec.cluster.nodes == 1 else f"its {spec.cluster.nodes} pods are"
    return Start(None, f"no quota plans ahead: {pods} placed once nodes have room (`scaletrain status --cluster`)")


def _asked(one: Callable[[], Iterator[Found]], spec: RunSpec) -> Iterator[Found]:
    """A check whose question is refused: for want of a right it is passed over, for want of the kind it has failed."""
    try:
        yield from one()
    except NotServedError as error:
        of_queues = error.kind.group == LOCAL_QUEUE.group or error.kind is VOLCANO_QUEUE
        yield problem(spec, "queue" if of_queues else "backend", error.message)
    except RefusedError as error:
        if not error.is_rights:
            raise
        yield f"not checked: {error.message}"


def _require_namespace(cluster: Cluster, namespace: str, spec: RunSpec) -> None:
    """Every other question would be answered with this one's answer."""
    try:
        found = cluster.get(NAMESPACE, "", namespace)
    except RefusedError as error:
        if not error.is_rights:
            raise
        return  # a dry run will tell
    if found is None:
        absent = problem(spec, "namespace", "there is no such namespace.", namespace)
        raise SchedulerError(f"{cluster.where}: the namespace is missing", (absent,))


def _served(cluster: Cluster, spec: RunSpec, kind: Kind) -> Iterator[Found]:
    if not cluster.serves(kind):
        yield problem(
            spec, "backend", f"the cluster has no {kind.name} of {kind.api_version}. Install it: {kind.install}"
        )


def _dry_run(cluster: Cluster, spec: RunSpec, body: Object) -> Iterator[Found]:
    """The server's own judgement, admission webhooks included, of an object that is then not made."""
    try:
        cluster.apply(body, dry_run=True)
    except NotServedError:
        return  # is told where the kind itself is looked for
    except RefusedError as error:
        if error.status == 0 or error.status >= 500:
            raise
        if body["kind"] == "TrainJob" and misses_runtime(error.said):
            return  # a dry run makes none; what becomes of the two is judged below
        what = f"{body['kind']} as it would be sent"
        if not error.problems:
            yield problem(spec, "", f"{what}: {error.message}")
        for cause in error.problems:
            yield problem(spec, "", f"{what}: {cause.key}: {cause.message}")


def _dry_run_child(cluster: Cluster, spec: RunSpec, child: Object) -> Iterator[Found]:
    """A JobSet with a template that no Job may have is accepted, and then nothing ever happens."""
    try:
        cluster.apply(child, dry_run=True)
    except NotServedError:
        return
    except RefusedError as error:
        if error.is_rights:
            yield f"not checked whether the {child['kind']} that is made of it is valid: {error.message}"
            return
        if error.status == 0 or error.status >= 500:
            raise
        if child["kind"] == "Pod" and (note := _may_pass(error.said)):
            yield note
            return
        for cause in error.problems or (Problem("", "", error.said),):
            words = f"the {child['kind']} that would be made of it is refused: {cause.key} {cause.message}"
            yield problem(spec, "", " ".join(words.split()))


def _may_pass(said: str) -> str:
    """What refuses a pod now and may not refuse those of the job, in words; empty for a refusal that is certain."""
    if "exceeded quota" in said:
        return f"the namespace has no room for a pod of the job now, and the job waits for it: {said}"
    if "admission webhook" in said or "ValidatingAdmissionPolicy" in said:
        return f"an admission policy refuses such a pod, perhaps only because no Job owns it: {said}"
    return ""
