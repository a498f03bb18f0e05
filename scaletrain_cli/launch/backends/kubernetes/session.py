"""The kubectl command that starts a process in a pod: `scaletrain exec`, `shell`, `port-forward`, and views.

kubectl, and not the stream of the Python client: kubectl speaks WebSocket and SPDY, whichever the server and a proxy
between them support, keeps an idle connection alive, and reads the same kubeconfig or service account. It needs the
rights to get pods and to get and create pods/exec: WebSocket begins with a GET, SPDY with a POST.
"""

import shutil
from collections.abc import Sequence
from pathlib import PurePosixPath

from scaletrain_cli.errors import SchedulerError, UsageError
from scaletrain_cli.launch.backends.base import JobNode, session_words
from scaletrain_cli.launch.backends.kubernetes.api_kinds import Object
from scaletrain_cli.launch.backends.kubernetes.job_ref import JobRef
from scaletrain_cli.launch.backends.kubernetes.messages import reason
from scaletrain_cli.launch.backends.kubernetes.names import NODE
from scaletrain_cli.launch.backends.kubernetes.observation import index_of, own_container
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.record import RunRecord


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
        *(pod, f"--container={NODE}", "--", "python", *words),
    )


def require_kubectl() -> None:
    """Raise SchedulerError if kubectl is not installed here: nothing is created in the cluster for it then."""
    if shutil.which("kubectl") is None:
        raise SchedulerError(Reason("launch.session-no-command", {"command": "kubectl"}))


def is_running(pod: Object) -> bool:
    """Return whether the pod's container runs, and the pod is not being deleted."""
    return "running" in own_container(pod).get("state", {}) and not pod["metadata"].get("deletionTimestamp")
