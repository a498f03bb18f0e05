"""A process in a pod that mounts the volume of a run, for views from a machine that does not (Backend.view_command).

A running pod of the run serves them. Once it is over, a Job with one small pod is made for a view: the image, claims
and security settings of the run, all volumes read-only, no device, no Secret. It also serves the views of the next
90 seconds, so that a loop around `status` makes one Job and not one per round. The pod ends by itself when no view has
been open for two minutes, and its time to live then removes the Job. A view that has made a Job and cannot begin, or
loses its connection, deletes it.

The kubectl command that starts a process in a pod: `scaletrain exec`, `shell`, `port-forward`, and views.

kubectl, and not the stream of the Python client: kubectl speaks WebSocket and SPDY, whichever the server and a proxy
between them support, keeps an idle connection alive, and reads the same kubeconfig or service account. It needs the
rights to get pods and to get and create pods/exec: WebSocket begins with a GET, SPDY with a POST.
"""

import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath

from scaletrain_cli.errors import SchedulerError, UsageError
from scaletrain_cli.launch.backends.base import VIEW_MODULE, JobNode, session_words, view_words
from scaletrain_cli.launch.backends.kubernetes import names
from scaletrain_cli.launch.backends.kubernetes.api import Cluster
from scaletrain_cli.launch.backends.kubernetes.api_kinds import JOB, POD, Object
from scaletrain_cli.launch.backends.kubernetes.conditions import failed_pod, why_pods_wait
from scaletrain_cli.launch.backends.kubernetes.job_ref import JobRef
from scaletrain_cli.launch.backends.kubernetes.messages import reason
from scaletrain_cli.launch.backends.kubernetes.observation import (
    Observation,
    index_of,
    own_container,
    reports,
    unix_time,
)
from scaletrain_cli.launch.backends.kubernetes.pod import view_template
from scaletrain_cli.launch.node.view import IDLE_SECONDS
from scaletrain_cli.own_processes import python_words
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.safe_files import user_name


def session_command(
    ref: JobRef, pods: Sequence[Object], record: RunRecord, node: JobNode, where: str
) -> tuple[str, ...]:
    """Return the words of kubectl. Raises UsageError if no pod of that node runs."""
    running = [pod for pod in pods if index_of(pod) == node.number and is_running(pod)]
    if not running:
        raise UsageError(reason("no-running-pod", where=where, node=node.number, run=record.run_id))
    newest = max(running, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))
    run_folder = PurePosixPath(record.spec.cluster.kubernetes.runs.path) / record.run_id
    return kubectl_exec(ref, str(newest["metadata"]["name"]), session_words(str(run_folder), node))


def kubectl_exec(ref: JobRef, pod: str, words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of kubectl that run the Python of a pod with ``words``."""
    context = [] if ref.context is None else [f"--context={ref.context}"]
    return (
        *("kubectl", *context, f"--namespace={ref.namespace}", "exec", "--stdin", "--quiet"),
        *(pod, f"--container={names.NODE}", "--", "python", *words),
    )


def is_running(pod: Object) -> bool:
    """Return whether the pod's container runs, and the pod is not being deleted."""
    return "running" in own_container(pod).get("state", {}) and not pod["metadata"].get("deletionTimestamp")


LONGEST_SECONDS = 3600  # of a pod; a view that follows a run gets another one
# The age of a pod that serves another view. The rest of its time without a view is for what passes until that view
# begins, and for clocks that differ.
SHARED_SECONDS = IDLE_SECONDS - 30.0
_REMOVED_AFTER_SECONDS = 30
_START_SECONDS = 120.0  # until the pod runs: its image may have to be pulled
_SUSPENDED_SECONDS = 15.0  # of a Job that Kueue holds back
_LOOK_EVERY_SECONDS = 1.0
# Why a pod waits: these do not end by themselves soon.
_FINAL = tuple(
    f"kubernetes.{code}"
    for code in (
        *("image-not-pulled", "image-name-invalid", "image-not-on-node"),
        *("container-config-missing", "container-not-created", "container-not-started"),
    )
)


def serving_pod(record: RunRecord, pods: Sequence[Object]) -> Object | None:
    """Return a running pod of the run whose node reports, pod 0 if possible; None if there is none.

    Without a shared volume only pod 0 has what a view shows.
    """
    serving = [pod for pod in pods if is_running(pod) and reports(pod)]
    if record.spec.cluster.kubernetes.runs.per_pod:
        serving = [pod for pod in serving if index_of(pod) == 0]
    return min(serving, key=index_of, default=None)


def view_in_pod(ref: JobRef, pod: str, record: RunRecord) -> tuple[str, ...]:
    """Return the words of kubectl that start the far end of a view in a pod."""
    return kubectl_exec(ref, pod, view_words(record.spec.cluster.kubernetes.runs.path, record.run_id))


@contextlib.contextmanager
def pod_for_view(
    cluster: Cluster, ref: JobRef, record: RunRecord, pods: Sequence[Object], say: Callable[[str], None]
) -> Iterator[str]:
    """Yield the name of a pod that mounts the volumes of the run: one of an earlier view, or one that is made.

    One that is made stays for the next views, but is deleted if the block raises. ``pods``: those of the run that still
    exist, whose nodes have the image. Raises SchedulerError, also if the volume of the runs is deleted with each pod of
    the run: there is nothing left to wait for.
    """
    if record.spec.cluster.kubernetes.runs.per_pod:
        raise SchedulerError(reason("view-per-pod", run=record.run_id))
    if (shared := _pod_of_earlier_view(cluster, ref, record)) is not None:
        yield shared
        return
    nodes = [str(pod["spec"]["nodeName"]) for pod in pods if pod.get("spec", {}).get("nodeName")]
    body = view_job(ref, record, list(dict.fromkeys(nodes)))
    name = str(body["metadata"]["name"])
    say(str(reason("view-starts", run=record.run_id, namespace=ref.namespace, job=name)))
    try:
        cluster.apply(body)
        yield _await_pod(cluster, ref, name)
    except BaseException:
        with _uninterrupted(), contextlib.suppress(SchedulerError):  # its time to live removes it then
            cluster.delete(JOB, ref.namespace, name, background=True)
        raise


def _pod_of_earlier_view(cluster: Cluster, ref: JobRef, record: RunRecord) -> str | None:
    """Return the name of a pod that runs for views of the run and will not end before another one begins, or None."""
    oldest = time.time() - SHARED_SECONDS
    for pod in cluster.find(POD, ref.namespace, labels=f"{names.VIEW_LABEL}={names.run_label(record.run_id)}"):
        is_young = unix_time(pod["metadata"]["creationTimestamp"]) > oldest
        if is_young and names.belongs_to(pod, record) and is_running(pod) and reports(pod):
            return str(pod["metadata"]["name"])
    return None


def view_job(ref: JobRef, record: RunRecord, nodes: Sequence[str]) -> Object:
    """Return the Job of a view. ``nodes``: names of those that it is best placed on."""
    spec = record.spec
    name = f"{ref.name}-view-{secrets.token_hex(3)}"
    labels = names.own_labels(name, names.VIEW_LABEL, record.run_id)
    marks = {
        names.RUN_ID_ANNOTATION: record.run_id,
        names.RECORD_ANNOTATION: names.record_mark(record),
        names.VIEWER_ANNOTATION: f"{user_name(os.getuid())}@{socket.gethostname()}",
    }
    queue = spec.cluster.kubernetes.preparation.queue
    words = ("python", *python_words(VIEW_MODULE), "--hold")
    metadata = {
        "name": name,
        "namespace": ref.namespace,
        "labels": labels | ({} if queue is None else {names.QUEUE_LABEL: queue}),
        "annotations": marks,
    }
    job = {
        "backoffLimit": 0,
        "activeDeadlineSeconds": LONGEST_SECONDS,
        "ttlSecondsAfterFinished": _REMOVED_AFTER_SECONDS,
        "template": view_template(spec, words, labels, marks, nodes),
    }
    return JOB.object(metadata, job)


def _await_pod(cluster: Cluster, ref: JobRef, name: str) -> str:
    """Return the name of the pod once it runs. Raises SchedulerError with what keeps it from running."""
    began = time.monotonic()
    while True:
        pods = cluster.find(POD, ref.namespace, labels=f"{names.INSTANCE_LABEL}={name}")
        for pod in pods:
            if is_running(pod):
                return str(pod["metadata"]["name"])
        if ended := failed_pod([pod for pod in pods if "terminated" in own_container(pod).get("state", {})]):
            raise SchedulerError(reason("view-pod-failed", cause=ended[0]))
        waits = _why_it_waits(cluster, ref, name, pods, time.monotonic() - began)
        if waits is not None:
            raise SchedulerError(waits)
        time.sleep(_LOOK_EVERY_SECONDS)


def _why_it_waits(cluster: Cluster, ref: JobRef, name: str, pods: Sequence[Object], passed: float) -> Reason | None:
    """Return why it is of no use to wait any longer; None while it may be."""
    if not pods and passed > _SUSPENDED_SECONDS:
        if (job := cluster.get(JOB, ref.namespace, name)) is None:
            return reason("view-job-gone", job=name)
        if job.get("spec", {}).get("suspend"):
            return reason("view-suspended", job=name)
    stuck = why_pods_wait(pods, Observation(None, tuple(pods)))
    if stuck and stuck[0].code in _FINAL:
        return reason("view-pod-waits", cause=stuck[0], seconds=round(passed))
    if passed < _START_SECONDS:
        return None
    names = [pod["metadata"]["name"] for pod in pods[:1]] or [name]
    events = tuple(event for subject in names for event in cluster.events(ref.namespace, subject))
    causes = why_pods_wait(pods, Observation(None, tuple(pods), events=events))
    return reason("view-pod-waits", cause=causes[0] if causes else reason("view-no-cause"), seconds=round(passed))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Return a context in which signals of the user wait: the pod is deleted first."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
