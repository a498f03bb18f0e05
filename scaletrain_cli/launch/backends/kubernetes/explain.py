"""Explain why a run on Kubernetes waits, is stuck or has ended, by reason codes only."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.backends.kubernetes.conditions import StuckJob
from scaletrain_cli.launch.backends.kubernetes.job_ref import job_ref_of
from scaletrain_cli.launch.backends.kubernetes.messages import reason
from scaletrain_cli.launch.finding import Evidence, Finding
from scaletrain_cli.launch.run_status import RunStatus
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord


class _Meaning(NamedTuple):
    """The cause that a Finding names, the code of its headline, and whether waiting does not help."""

    cause: str
    headline: str
    needs_action: bool = False


_UNMANAGED = _Meaning("never-satisfiable", "explain-unmanaged", True)
_QUOTA = _Meaning("quota", "explain-quota")
_PREPARING = _Meaning("preparation", "explain-preparation")
_CONTAINER = _Meaning("image", "explain-container")
_VOLUME = _Meaning("volume", "explain-volume")
_STARTING = _Meaning("starting", "explain-starting")
_UNSCHEDULABLE = _Meaning("resources", "explain-unschedulable")
# The meanings by the code of the job's reason.
_MEANINGS = {
    "no-queue": _Meaning("held", "explain-suspended", True),
    "queue-unreadable": _QUOTA,
    "no-workload": _UNMANAGED,
    "no-workload-for-priority": _UNMANAGED,
    "held": _Meaning("held", "explain-held", True),
    "held-after-eviction": _Meaning("held", "explain-held", True),
    "given-up": _Meaning("held", "explain-given-up", True),
    "queued": _QUOTA,
    "queued-for-quota": _QUOTA,
    "queue-missing": _Meaning("never-satisfiable", "explain-no-queue", True),
    "queue-inactive": _Meaning("held", "explain-queue-inactive"),
    "queue-without-quota": _Meaning("never-satisfiable", "explain-no-quota-defined", True),
    "queue-over-capacity": _Meaning("quota", "explain-over-capacity"),  # Kueue may name the last flavors only
    "admission-check": _QUOTA,
    "preempted": _Meaning("priority", "explain-preempted"),
    "preempted-in-cohort": _Meaning("quota", "explain-reclaimed"),
    "evicted": _Meaning("resources", "explain-evicted"),
    "evicted-queue-stopped": _Meaning("held", "explain-queue-stopped"),
    "evicted-node-failure": _Meaning("resources", "explain-node-failed"),
    "evicted-image": _Meaning("image", "explain-image-unavailable"),
    "evicted-volume": _VOLUME,
    "pods-pending": _STARTING,
    "pods-starting": _STARTING,
    "last-gang-ending": _STARTING,
    "image-not-pulled": _CONTAINER,
    "image-name-invalid": _CONTAINER,
    "image-not-on-node": _CONTAINER,
    "container-config-missing": _CONTAINER,
    "container-not-created": _CONTAINER,
    "container-not-started": _CONTAINER,
    "scheduling-gate": _Meaning("admission", "explain-gate"),
    "unschedulable": _UNSCHEDULABLE,
    "unschedulable-placement": _Meaning("placement", "explain-placement"),
    "unschedulable-taint": _Meaning("placement", "explain-taint"),
    "unschedulable-cordoned": _Meaning("placement", "explain-cordoned"),
    "gang-unschedulable": _UNSCHEDULABLE,
    "volume-not-mounted": _VOLUME,
    "creation-refused": _Meaning("quota", "explain-namespace-quota"),
    "preparation-runs": _PREPARING,
    "preparation-waits": _PREPARING,
    "preparation-suspended": _PREPARING,
    "preparation-done": _PREPARING,
    "child-not-created": _Meaning("starting", "explain-child"),
}
_UNKNOWN = _Meaning("unknown", "explain-unknown")
_ENDED_CODES: dict[int | None, str] = {
    ExitCode.USAGE: "ended-refused-spec",
    ExitCode.INFEASIBLE: "ended-refused-spec",
    ExitCode.DO_NOT_REQUEUE: "ended-final",
    ExitCode.WRONG_NODES: "ended-wrong-nodes",
}


def why_it_waits(run: RunDir, record: RunRecord, status: RunStatus) -> Finding:
    """Return the cause of a wait, from the reason in ``status``."""
    code = "" if status.job.reason is None else status.job.reason.code.removeprefix("kubernetes.")
    meaning = _MEANINGS.get(code, _UNKNOWN)
    headline = reason(meaning.headline, **_names(run, record))
    evidence = (Evidence.because("the cluster", status.reason),)
    return Finding.because(meaning.cause, headline, evidence, needs_action=meaning.needs_action)


def what_never_ends(run: RunDir, record: RunRecord, jobs: Sequence[StuckJob]) -> Iterator[Finding]:
    """Yield a finding for each case in which Kubernetes never ends a job by itself."""
    for stuck in jobs:
        headline = reason(f"explain-{stuck.kind}", **stuck.reason.params, **_names(run, record))
        evidence = (Evidence.because("the cluster", stuck.reason),)
        yield Finding.because(stuck.kind, headline, evidence, needs_action=True)


def how_it_ended(run: RunDir, status: RunStatus) -> Finding:
    """Return the finding about an ended job whose attempts are not visible here."""
    evidence = [Evidence.because("the cluster", status.reason)] if status.why else []
    if status.step:
        last_step = reason("last-step", step=status.step, total_steps=status.total_steps)
        evidence.append(Evidence.because("its pods", last_step))
    headline = reason(_ended_code(status), run=run.run_id, state=status.state, exit_code=status.job.exit_code)
    return Finding.because(status.state, headline, tuple(evidence))


def _ended_code(status: RunStatus) -> str:
    if not status.job.id:
        return "ended-never-submitted"
    if status.job.forgotten and status.state == "unknown":
        return "ended-unknown"
    if status.state in ("finished", "cancelled"):
        return f"ended-{status.state}"
    return _ENDED_CODES.get(status.job.exit_code, "ended")


def _names(run: RunDir, record: RunRecord) -> dict[str, str]:
    """Return the parameters of remedies: the run, its namespace, and its workload as a kubectl argument."""
    ref = job_ref_of(run, record)
    namespace = ref.namespace if ref else record.spec.cluster.kubernetes.used_namespace
    workload = ref.job_id.replace("volcano/", "jobs.batch.volcano.sh/") if ref else "pods"
    return {"run": run.run_id, "namespace": namespace, "workload": workload}
