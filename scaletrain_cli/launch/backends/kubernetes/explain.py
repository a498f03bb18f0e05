"""Why a run on Kubernetes waits, or cannot end: what the cluster says of it, sorted by what helps.

The words are those of status, which are the cluster's own; here they get a cause and something to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.backends.kubernetes.job_ref import job_ref_of
from scaletrain_cli.launch.backends.kubernetes.watchdog import StuckJob
from scaletrain_cli.launch.finding import Evidence, Finding
from scaletrain_cli.launch.status import RunStatus
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord

_AGAIN = "scaletrain cancel {run}, mend the spec and submit it again"
_DESCRIBE = "kubectl -n {namespace} describe {workload}"
_PATIENCE = "Ask for fewer nodes, or wait"
_QUOTAS = "Compare with `scaletrain status --cluster`: a flavor that it fits may only be busy"
_ASK_ADMIN = "Ask who keeps the queue; kubectl -n {namespace} describe localqueues,clusterqueues says why"
_GATES = (
    "Kueue removes its gate once it has admitted the job and chosen nodes: kubectl -n {namespace} describe workloads. "
    "Other gates are those of the controller that they are named after"
)
_PLACE = (
    "Compare cluster.kubernetes.node_selector, topology and the queue's flavor with `kubectl get nodes --show-labels`"
)
_TAINTS = "Tolerate the taint (cluster.kubernetes.tolerations; cluster.spot for spot nodes), or free other nodes"
_CORDONED = "Wait until they are uncordoned (kubectl get nodes), or ask the administrator"
_MEND_IMAGE = "Mend the image, the pull secret or the Secret that it names; the pods try on by themselves"


class _Reason(NamedTuple):
    """What stands in the detail of a job, and what that means. ``headline`` and ``actions`` as a Finding has them."""

    pattern: str
    cause: str
    headline: str
    actions: tuple[str, ...] = ()
    for_ever: bool = False


_NO_START = "cannot be pulled|name of the image|must not be pulled|is not there \\(|cannot be (made|started) \\("
_REASONS = (  # the first that matches
    _Reason("made no Workload", "never-satisfiable", "Kueue does not know it", (_AGAIN,), True),
    _Reason("^held by Kueue.*DeactivatedDueTo", "held", "Kueue gave it up", (_DESCRIBE, _AGAIN), True),
    _Reason("^held by Kueue", "held", "it is held", ("Ask who set spec.active: false on its Workload",), True),
    _Reason("that would let it go on", "held", "it is suspended, and nobody will let it go on", (_AGAIN,), True),
    _Reason("doesn't exist", "never-satisfiable", "its queue is not there", (_AGAIN,), True),
    _Reason("^preempted by Kueue.*(?i:within the cohort)", "quota", "another team took back quota that it had lent"),
    _Reason("^preempted by Kueue", "priority", "a job of higher priority has its place"),
    _Reason("^evicted by Kueue \\((Local|Cluster)QueueStopped", "held", "its queue was stopped", (_ASK_ADMIN,)),
    _Reason(
        "^evicted by Kueue \\(NodeFailures", "resources", "no node takes the place of one that failed", (_PATIENCE,)
    ),
    _Reason(
        "^evicted by Kueue.*(ErrImage|[Ff]ailed to pull image)", "image", "its image cannot be pulled", (_MEND_IMAGE,)
    ),
    _Reason(
        "^evicted by Kueue.*(FailedMount|FailedAttachVolume)", "volume", "a volume cannot be mounted", (_DESCRIBE,)
    ),
    _Reason("^evicted by Kueue", "resources", "its pods did not come up in time, or it lost its quota", (_DESCRIBE,)),
    _Reason("is inactive", "held", "its queue takes no jobs now", (_ASK_ADMIN,)),
    _Reason("unavailable in ClusterQueue", "never-satisfiable", "its queue has no quota for it", (_AGAIN,), True),
    # Not never: Kueue may name the flavors that it tried last alone.
    _Reason("> maximum capacity", "quota", "it is too large for a flavor of its queue", (_QUOTAS, _PATIENCE)),
    _Reason("^(waits|has its quota) in queue", "quota", "Kueue does not admit it now", (_PATIENCE,)),
    _Reason(_NO_START, "image", "a container cannot start", (_MEND_IMAGE, _AGAIN)),
    _Reason("FailedMount|FailedAttachVolume", "volume", "a volume cannot be mounted", (_DESCRIBE,)),
    _Reason("CreationFailed:", "starting", "what is made of it is refused for now", (_DESCRIBE,)),
    _Reason("FailedCreate", "quota", "the namespace refuses its pods", (_AGAIN, "Ask for a larger ResourceQuota")),
    _Reason("held by a scheduling gate", "admission", "its pods wait until they may be scheduled", (_GATES,)),
    _Reason(
        "no room:.*(didn't match|didn't satisfy)", "placement", "no free node has what the pods ask for", (_PLACE,)
    ),
    _Reason(
        "no room:.*untolerated taint", "placement", "the free nodes have taints that keep the pods off", (_TAINTS,)
    ),
    _Reason("no room:.*were unschedulable", "placement", "nodes take no pods now (cordoned)", (_CORDONED,)),
    _Reason("no room:", "resources", "no node has room for a pod", (_PATIENCE,)),
    _Reason("starting|being made|leaving", "starting", "its pods are being made ready"),
)


def why_it_waits(run: RunDir, record: RunRecord, status: RunStatus) -> Finding:
    """The cause of a wait in the cluster's words. Asks nobody: ``status`` has asked."""
    evidence = (Evidence("the cluster", status.why),)
    for reason in _REASONS:
        if re.search(reason.pattern, status.why):
            actions = _filled(run, record, reason.actions)
            return Finding(reason.cause, reason.headline, evidence, actions, reason.for_ever)
    return Finding("unknown", "the cluster does not say more", evidence, _filled(run, record, (_DESCRIBE,)))


def how_it_ended(run: RunDir, status: RunStatus) -> Finding:
    """Return how a job ended whose attempts are not seen here, with what helps after such an end."""
    evidence = [Evidence("the cluster", status.why)] if status.why else []
    if status.step:
        evidence.append(
            Evidence("its pods", f"step {status.step} of {status.total_steps} was the last that they printed")
        )
    headline, actions = _ended_words(status)
    return Finding(status.state, headline, tuple(evidence), tuple(action.format(run=run.run_id) for action in actions))


_LOGS = "scaletrain logs {run} shows what the pods printed, while they are there or where it was fetched"
_RESUME = "scaletrain resume {run} continues from the newest valid checkpoint"


def _ended_words(status: RunStatus) -> tuple[str, tuple[str, ...]]:
    """The headline and the actions."""
    code = status.job.exit_code
    if not status.job.id:
        return "its job was never submitted", ("scaletrain resume {run} submits it",)
    if status.job.forgotten and status.state == "unknown":
        resume = "scaletrain resume {run} continues it; pods that find the run finished end at once"
        return "its job is gone, and how it ended is not known", (_LOGS, resume)
    if status.state == "finished":
        return "its job has finished", ()
    if status.state == "cancelled":
        return "its job was cancelled", (_RESUME,)
    if code in (ExitCode.USAGE, ExitCode.INFEASIBLE):
        fix = "Fix what the message says: `scaletrain resume {run} --set KEY=VALUE`, or submit a corrected spec"
        return f"its job ended with exit code {code}: it cannot run as the spec asks", (_LOGS, fix)
    if code == ExitCode.DO_NOT_REQUEUE:
        fix = "Remove the cause before `scaletrain resume {run}`: a restart alone ends in the same way"
        return f"its job ended with exit code {code}: another attempt would not help", (_LOGS, fix)
    if code == ExitCode.WRONG_NODES:
        fix = "Correct what the message names (the volume, the GPUs, the spec); then `scaletrain resume {run}`"
        return f"its job ended with exit code {code}: a node or a volume is not what was planned", (_LOGS, fix)
    return f"its job has ended: {status.state}", (_LOGS, _RESUME)


def what_never_ends(stuck: Sequence[StuckJob]) -> Iterator[Finding]:
    """Yield a finding for each case in which Kubernetes never ends a job by itself."""
    meanings = {"child-refused": "no Job can be made of it", "dead-node": "a node is dead, and Kubernetes waits for it"}
    for finding in stuck:
        action, evidence = finding.text.rpartition(". ")[2], (Evidence("the cluster", finding.text),)
        yield Finding(finding.kind, meanings[finding.kind], evidence, (action,), waits_for_ever=True)


def _filled(run: RunDir, record: RunRecord, actions: tuple[str, ...]) -> tuple[str, ...]:
    place = job_ref_of(run, record)
    namespace = place.namespace if place else record.spec.cluster.kubernetes.namespace
    workload = place.job_id.replace("volcano/", "jobs.batch.volcano.sh/") if place else "pods"
    return tuple(action.format(run=run.run_id, namespace=namespace, workload=workload) for action in actions)
