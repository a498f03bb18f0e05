"""The texts of the Kubernetes back end."""

from __future__ import annotations

from scaletrain_cli.reasons import Text

_RESUBMIT = "scaletrain cancel {run}, fix the spec and submit it again"
_DESCRIBE = "kubectl -n {namespace} describe {workload}"
_FEWER_NODES = "Request fewer nodes, or wait"
_ASK_ADMIN = "Ask the administrator of the queue; kubectl -n {namespace} describe localqueues,clusterqueues shows why"
_FIX_IMAGE = "Fix the image, the pull secret or the Secret that it names; the pods retry by themselves"
_FIX_NODE = (
    "Once the node is off: delete it (kubectl delete node {node}), or taint it "
    "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute; or end the run: `scaletrain cancel --force`"
)
_RESUME = "scaletrain resume {run} continues from the latest valid checkpoint"
_LOGS = "scaletrain logs {run} shows what the pods printed, while they exist or where it was fetched"
_IN_QUEUE = "waits in queue {queue}: {said}"
_CONTAINER = "({state}: {said})"
_EVENT = "{object}: {event}: {said}"
_EVICTED = "evicted by Kueue ({event}: {said})"
_HELD = "held by Kueue: spec.active of Workload {workload} is false"
_HELD_SAID = f"{_HELD} ({{said}})"

TEXTS: dict[str, Text] = {
    # Notes of a preflight: nothing here keeps the job from being submitted.
    "note-image-tag": Text(
        "cluster.kubernetes.image = {image}: a tag can come to mean another image between two attempts of one run, or "
        "between its pods. Name it by digest"
    ),
    "note-ipc-lock": Text(
        "cluster.kubernetes.ipc_lock: Linux grants IPC_LOCK to root only, and these pods are not root. RDMA needs "
        "LimitMEMLOCK=infinity in containerd's unit on the nodes; without it NCCL falls back to TCP, and only its log "
        "shows it. A namespace with the restricted pod security refuses it: set ipc_lock: false there"
    ),
    "note-rdma": Text(
        "cluster.kubernetes.rdma_resource: needs LimitMEMLOCK=infinity in containerd's unit on the nodes; without it "
        "NCCL falls back to TCP, and only its log shows it"
    ),
    "note-host-network": Text(
        "cluster.kubernetes.host_network: the pods use ports of their nodes, so no other run may share a node; a "
        "namespace with the baseline pod security refuses them"
    ),
    "note-relative-path": Text(
        "{key} = {path}: pods look for it in the working folder of the image, not in this one. Give an absolute path "
        "on a volume: {mounted:list}"
    ),
    "note-unmounted-path": Text(
        "{key} = {path}: no volume is mounted there, so it must be in the image. The volumes are mounted at: "
        "{mounted:list} (cluster.kubernetes.runs and volumes)"
    ),
    "note-native-gang": Text(
        "cluster.kubernetes.native_gang: needs Kubernetes 1.36 with the feature gates GenericWorkload and "
        "GangScheduling and --runtime-config=scheduling.k8s.io/v1alpha2=true; later versions have another API"
    ),
    "note-no-gang": Text(
        "cluster.kubernetes.queue: without one nothing schedules {pods} pods together. Two runs can each hold a part "
        "of their nodes and wait for the other's indefinitely. Name a queue of Kueue, or use backend: volcano"
    ),
    "note-trainjob-ttl": Text(
        "cluster.kubernetes.ttl_seconds_after_finished: the JobSet and its pods are deleted; Trainer keeps the TrainJob"
    ),
    "note-gke-spot": Text(
        "cluster.grace_seconds = {grace:g}: a spot node of GKE gives a pod at most about {given} s. A checkpoint that "
        "takes longer is lost there; save more often instead"
    ),
    "note-volcano-unlimited": Text(
        "cluster.kubernetes.backend: Volcano counts evictions as retries and cannot exclude them. Because "
        "restarts.preemption = unlimited, its maxRetry is set out of reach; the run itself keeps the budgets for nodes "
        "and crashes"
    ),
    "note-volcano-retries": Text(
        "cluster.kubernetes.backend: Volcano counts evictions as retries. Its maxRetry is the sum of all budgets of "
        "restarts; the run itself decides which of them a restart is charged to"
    ),
    "note-own-variables": Text("env: {names:list}: set by the launcher and ignored here"),
    "queue-busy": Text("queue {queue} is busy: {why}; the job will wait"),
    "quota-used": Text("{used} of {total} {resource} are used"),
    "queue-stopped": Text("{queue} is held (stopPolicy {policy}): the job waits until it is resumed"),
    "resource-without-quota": Text(
        "no quota of queue {queue} covers {resource}: the job waits indefinitely unless Kueue is configured to exclude "
        "it"
    ),
    "namespace-quota-used": Text(
        "ResourceQuota {quota} of the namespace allows {total} {resource}, of which {used} are used: the job waits for "
        "the rest"
    ),
    "nodes-cordoned": Text("{nodes} suitable nodes are cordoned: the job waits until they are uncordoned"),
    "too-few-nodes": Text("the {nodes} nodes can run at most {fit} of its pods, and {needed} are needed ({lacks})"),
    "nodes-until-pools-grow": Text(
        "the {nodes} nodes can run at most {fit} of its pods, and {needed} are needed ({lacks}); the job waits until "
        "the node pools have grown"
    ),
    "nodes-until-admission-check": Text(
        "the {nodes} nodes can run at most {fit} of its pods, and {needed} are needed ({lacks}); the job waits until "
        "an admission check of its queue provides more"
    ),
    "claim-unbound": Text("claim {claim} is not bound yet; its volume is created for the first pod that uses it"),
    "secrets-unreadable": Text(
        "you may not read Secrets, so it is not known whether {names:list} exist and have their keys"
    ),
    "volume-owner": Text("{text} This is not needed if the volume applies fs_group {fs_group} ({why})"),
    "fs-group-ignored": Text(
        "fs_group {fs_group} has no effect on claim {claim} ({why}): its folder {folder} must be writable by uid {uid}"
    ),
    "not-checked": Text("not checked: {said}"),
    "child-not-checked": Text("not checked whether the {kind} that is created from it is valid: {said}"),
    "pod-over-quota": Text("the namespace has no quota for a pod of the job now, and the job waits for it: {said}"),
    "pod-policy": Text("an admission policy refuses such a pod, perhaps only because no Job owns it: {said}"),
    # Why a queue of Kueue cannot hold the job, now or ever.
    "no-flavor": Text("no flavor has any {resource}"),
    "flavor-missing": Text("flavor {flavor}: there is no such ResourceFlavor"),
    "flavor-taint": Text(
        "flavor {flavor}: the pods do not tolerate its taint {taint} (cluster.spot, or cluster.kubernetes.tolerations)"
    ),
    "flavor-label": Text("flavor {flavor}: its nodes have {label}={has}, and the pods ask for {wanted}"),
    "flavor-needs-topology": Text(
        "flavor {flavor}: it admits only pods that ask for a topology (cluster.kubernetes.topology)"
    ),
    "flavor-without-topology": Text(
        "flavor {flavor}: it has no Topology, for which the job asks (cluster.kubernetes.topology)"
    ),
    "flavor-without-level": Text("flavor {flavor}: its Topology {topology} has no level {level}; it has {levels:list}"),
    "flavor-too-small": Text("flavor {flavor}: the job needs {needed} {resource}, and there are at most {total}"),
    "flavor-busy": Text("flavor {flavor}: {used} of {total} {resource} are used, and the job needs {needed}"),
    "queue-never": Text("ClusterQueue {queue} can never admit it: {why}"),
    "object-missing": Text("there is no such {kind}. There are: {names}"),
    # When a job could start.
    "start-quota-free": Text(
        "queue {queue} has quota free and no job waits for it (Kueue); scheduling pods and pulling the image take more"
    ),
    "start-quota-used": Text(
        "queue {queue} must get quota back first, with at most {waiting:of job} before it; Kueue gives no time"
    ),
    "start-behind-others": Text(
        "queue {queue} has quota free, with at most {waiting:of job} before it; Kueue gives no time"
    ),
    "start-queue-stopped": Text("{queue} is held"),
    "start-nodes-cordoned": Text("nodes that it needs are cordoned"),
    "start-too-few-nodes": Text("there are not yet enough nodes for it"),
    "start-quota-unreadable": Text("the quota of queue {queue} cannot be read"),
    "start-volcano": Text(
        "Volcano gives no time: the gang is placed once queue {queue} and the nodes have room for all of it"
    ),
    "start-no-queue": Text(
        "there is no queue: the gang of {pods:of pod} starts once nodes have room (`scaletrain status --cluster`)"
    ),
    # The request that creates the job.
    "never-submitted": Text("never submitted"),
    "request-pending": Text(
        "the API server was asked at {asked}, has not answered and has nothing of {job} so far; the outcome is known "
        "in {seconds} s"
    ),
    "request-lost": Text("never submitted: the API server did not answer, and has nothing of {job}"),
    "other-job-active": Text("{job}, another job of this run, is active"),
    # A job that ends or has ended.
    "cancelled": Text("cancelled"),
    "workload-gone": Text("the workload is gone"),
    "deleting": Text("being deleted"),
    "jobset-deleting": Text("its JobSet is being deleted"),
    "end-unknown": Text("it is no longer in the cluster, which does not report how it ended"),
    "completed": Text("completed"),
    "failed": Text("failed"),
    "failed-said": Text("failed: {said}"),
    "child-failed": Text("{said}"),
    "phase": Text("{phase}"),
    "phase-said": Text("{phase}: {said}"),
    "pod-failed": Text("pod {pod} ended with exit code {summary}"),
    "pod-removed": Text("pod {pod}: {event}: {said}"),
    "pods-saving": Text("{pods:of pod} saving and leaving"),
    "pods-ending": Text("{pods:of pod} still ending"),
    "no-pods-left": Text("no pod is left"),
    "node-silent": Text("node {node} does not report, {pods:of pod} on it may be lost"),
    # A job that never ends by itself.
    "child-refused": Text(
        "it will never start: the API server refuses the {kind} made of it ({said})",
        ("Cancel the run, fix the spec and submit it again",),
    ),
    "dead-node": Text(
        "node {node} is unreachable and {pods:list} on it cannot end, so the gang waits indefinitely", (_FIX_NODE,)
    ),
    "dead-node-unconfirmed": Text(
        "node {node} may be dead (you may not list nodes) and {pods:list} on it cannot end, so the gang waits "
        "indefinitely",
        (_FIX_NODE,),
    ),
    # A job that Kueue holds or has not admitted.
    "no-queue": Text(
        "suspended, and in no queue that would resume it: where Kueue manages all jobs, name one "
        "(cluster.kubernetes.queue); elsewhere set spec.suspend to false"
    ),
    "queue-unreadable": Text(
        "waits in queue {queue}; why is unknown: you need the right to list workloads.kueue.x-k8s.io"
    ),
    "no-workload": Text(
        "suspended, and Kueue has created no Workload for it: Kueue is not running or does not manage {kind}s. It "
        "waits indefinitely"
    ),
    "no-workload-for-priority": Text(
        "suspended, and Kueue has created no Workload for it: priority class {priority} is unknown, or Kueue is not "
        "running or does not manage {kind}s. It waits indefinitely; `kubectl get workloadpriorityclasses` shows the "
        "classes"
    ),
    "held": Text(_HELD),
    "held-after-eviction": Text(_HELD_SAID),
    "given-up": Text(_HELD_SAID),
    "queued": Text("waits in queue {queue}"),
    "queued-for-quota": Text(_IN_QUEUE),
    "queue-missing": Text(_IN_QUEUE),
    "queue-inactive": Text(_IN_QUEUE),
    "queue-without-quota": Text(_IN_QUEUE),
    "queue-over-capacity": Text(_IN_QUEUE),
    "admission-check": Text("has its quota in queue {queue}; admission check {check} reports: {said}"),
    "preempted": Text("preempted by Kueue ({said})"),
    "preempted-in-cohort": Text("preempted by Kueue ({said})"),
    "evicted": Text(_EVICTED),
    "evicted-queue-stopped": Text(_EVICTED),
    "evicted-node-failure": Text(_EVICTED),
    "evicted-image": Text(_EVICTED),
    "evicted-volume": Text(_EVICTED),
    "requeued": Text("it is queued again at {time}"),
    "pods-suspending": Text("{pods:of pod} still saving and leaving"),
    # Pods that wait or start.
    "pods-pending": Text("the pods are being created"),
    "pods-starting": Text("{pods:of pod} starting: pulling the image or mounting volumes"),
    "last-gang-ending": Text("{pods:of pod} of the last gang leaving"),
    "some-running": Text("{running} of {wanted} pods running"),
    "image-not-pulled": Text(f"pod {{pod}}: the image cannot be pulled {_CONTAINER}"),
    "image-name-invalid": Text(f"pod {{pod}}: the name of the image is not valid {_CONTAINER}"),
    "image-not-on-node": Text(f"pod {{pod}}: the image is not on the node and must not be pulled {_CONTAINER}"),
    "container-config-missing": Text(
        f"pod {{pod}}: a Secret or ConfigMap that the container needs does not exist {_CONTAINER}"
    ),
    "container-not-created": Text(f"pod {{pod}}: the container cannot be created {_CONTAINER}"),
    "container-not-started": Text(f"pod {{pod}}: the container cannot be started {_CONTAINER}"),
    "scheduling-gate": Text("pod {pod} is held by a scheduling gate: {said}"),
    "unschedulable": Text("unschedulable: {said}"),
    "unschedulable-placement": Text("unschedulable: {said}"),
    "unschedulable-taint": Text("unschedulable: {said}"),
    "unschedulable-cordoned": Text("unschedulable: {said}"),
    "gang-unschedulable": Text("Volcano: {said}"),
    "image-event": Text(_EVENT),
    "volume-not-mounted": Text(_EVENT),
    "sandbox-failed": Text(_EVENT),
    "creation-refused": Text(_EVENT),
    "child-not-created": Text(_EVENT),
    "pod-unschedulable": Text(_EVENT),
    # Pods that run.
    "running": Text("all {pods:of pod} running"),
    "running-others-ended": Text("{running} of {wanted} pods running, the others have ended"),
    "restarted": Text("restart {count}"),
    # What explain says of a wait, and what to do about it.
    "explain-unmanaged": Text("Kueue does not manage it", (_RESUBMIT,)),
    "explain-given-up": Text("Kueue has deactivated it", (_DESCRIBE, _RESUBMIT)),
    "explain-held": Text("it is held", ("Ask who set spec.active: false on its Workload",)),
    "explain-suspended": Text("it is suspended, and no queue resumes it", (_RESUBMIT,)),
    "explain-no-queue": Text("its queue does not exist", (_RESUBMIT,)),
    "explain-reclaimed": Text("another team reclaimed quota that it had lent"),
    "explain-preempted": Text("a job of higher priority preempted it"),
    "explain-queue-stopped": Text("its queue was stopped", (_ASK_ADMIN,)),
    "explain-node-failed": Text("no node replaces one that failed", (_FEWER_NODES,)),
    "explain-image-unavailable": Text("its image cannot be pulled", (_FIX_IMAGE,)),
    "explain-container": Text("a container cannot start", (_FIX_IMAGE, _RESUBMIT)),
    "explain-volume": Text("a volume cannot be mounted", (_DESCRIBE,)),
    "explain-evicted": Text("its pods did not become ready in time, or it lost its quota", (_DESCRIBE,)),
    "explain-queue-inactive": Text("its queue admits no jobs now", (_ASK_ADMIN,)),
    "explain-no-quota-defined": Text("its queue has no quota for it", (_RESUBMIT,)),
    "explain-over-capacity": Text(
        "it is too large for a flavor of its queue",
        ("Compare with `scaletrain status --cluster`: a flavor that it fits may only be busy", _FEWER_NODES),
    ),
    "explain-quota": Text("Kueue does not admit it now", (_FEWER_NODES,)),
    "explain-child": Text("what is created from it is refused for now", (_DESCRIBE,)),
    "explain-namespace-quota": Text("the namespace refuses its pods", (_RESUBMIT, "Request a larger ResourceQuota")),
    "explain-gate": Text(
        "its pods wait until they may be scheduled",
        (
            "Kueue removes its gate once it has admitted the job and chosen nodes: kubectl -n {namespace} describe "
            "workloads. Other gates belong to the controller that they are named after",
        ),
    ),
    "explain-placement": Text(
        "no free node has what the pods ask for",
        (
            "Compare cluster.kubernetes.node_selector, topology and the queue's flavor with `kubectl get nodes "
            "--show-labels`",
        ),
    ),
    "explain-taint": Text(
        "the free nodes have taints that the pods do not tolerate",
        ("Tolerate the taint (cluster.kubernetes.tolerations; cluster.spot for spot nodes), or free other nodes",),
    ),
    "explain-cordoned": Text(
        "the nodes are cordoned", ("Wait until they are uncordoned (kubectl get nodes), or ask the administrator",)
    ),
    "explain-unschedulable": Text("no node has enough free resources for a pod", (_FEWER_NODES,)),
    "explain-starting": Text("its pods are starting"),
    "explain-unknown": Text("the cluster does not report more", (_DESCRIBE,)),
    "explain-child-refused": Text("no Job can be created from it", (_RESUBMIT,)),
    "explain-dead-node": Text("a node is dead, and Kubernetes waits for it", (_FIX_NODE,)),
    # What explain says of an end.
    "last-step": Text("step {step} of {total_steps} was the last that they printed"),
    "ended-never-submitted": Text("its job was never submitted", ("scaletrain resume {run} submits it",)),
    "ended-unknown": Text(
        "its job is gone, and how it ended is not known",
        (_LOGS, "scaletrain resume {run} continues it; pods that find the run finished end at once"),
    ),
    "ended-finished": Text("its job has finished"),
    "ended-cancelled": Text("its job was cancelled", (_RESUME,)),
    "ended-refused-spec": Text(
        "its job ended with exit code {exit_code}: it cannot run as the spec asks",
        (_LOGS, "Fix what the message names: `scaletrain resume {run} --set KEY=VALUE`, or submit a corrected spec"),
    ),
    "ended-final": Text(
        "its job ended with exit code {exit_code}: another attempt would not help",
        (_LOGS, "Remove the cause before `scaletrain resume {run}`: a restart alone ends in the same way"),
    ),
    "ended-wrong-nodes": Text(
        "its job ended with exit code {exit_code}: a node or a volume is not what was planned",
        (_LOGS, "Correct what the message names (the volume, the GPUs, the spec); then `scaletrain resume {run}`"),
    ),
    "ended": Text("its job has ended: {state}", (_LOGS, _RESUME)),
}
