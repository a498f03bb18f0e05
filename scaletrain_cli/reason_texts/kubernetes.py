"""The texts of the Kubernetes back end."""

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
_RESUME = "scaletrain resume {run} continues it"
_LOGS = "scaletrain logs {run} shows what the pods printed, while they exist or where it was fetched"
_IN_QUEUE = "waits in queue {queue}: {said}"
_CONTAINER = "({state}: {said})"
_EVENT = "{object}: {event}: {said}"
_EVICTED = "evicted by Kueue ({event}: {said})"
_HELD = "held by Kueue: spec.active of Workload {workload} is false"
_HELD_SAID = f"{_HELD} ({{said}})"
_CONTEXT = ("Set $KUBECONFIG, or cluster.kubernetes.context to one of `kubectl config get-contexts`",)
_CHECK_SERVER = "Check the VPN, the server and the context"
_ASK_RIGHT = "Ask an administrator for the right to {verb} {resource}: {roles} has all that is needed"
_OTHER_ID = "Submit under another --run-id"
_NOT_WRITABLE = "{folder} cannot be written by the pods (uid {uid}, gid {gid}, groups {groups})"
_GOES_ON = "If no command waits for it any more, run scaletrain resume {run}"
_FOLDER = "the pods run as uid {uid}, which cannot write {folder} (uid {owner}, gid {group}, mode {mode})"
_TOO_FEW_NODES = "the {nodes} nodes can run at most {fit} of the job's pods, and {needed} are needed ({lacks})"
_CHOOSE_OWNER = "Set cluster.kubernetes.run_as_user: {owner}, or change the owner of the folder to {uid}"

TEXTS: dict[str, Text] = {
    # Views of a run whose volume is not mounted here.
    "view-never-ran": Text("no pod of {run} has been created yet"),
    "view-waits": Text("no pod of {run} runs now; its job is {state}"),
    "view-per-pod": Text("the run directory of {run} is on a volume that is deleted with each of its pods"),
    "view-starts": Text(
        "no pod of {run} runs: starting one that reads its files (Job {job} in {namespace}, which ends two minutes "
        "after the last view)"
    ),
    "view-pod-waits": Text("the pod that reads the files does not run after {seconds:seconds}: {cause}"),
    "view-no-cause": Text("the cluster gives no reason"),
    "view-suspended": Text(
        "the pod that reads the files waits in a queue of Kueue, which manages Jobs without a queue here",
        ("Set cluster.kubernetes.preparation.queue in the next run to a queue with a quota of CPUs",),
    ),
    "view-job-gone": Text("Job {job}, whose pod reads the files, was deleted"),
    "view-pod-failed": Text("the pod that reads the files ended: {cause}"),
    # The preparation of data before the workload exists.
    "preparation-runs": Text("the data are prepared by {job}: {running} of {tasks:of pod} run", (_GOES_ON,)),
    "preparation-waits": Text("the data are not prepared: {job} waits: {cause}", (_GOES_ON,)),
    "preparation-suspended": Text("the data are not prepared: {job} waits in a queue of Kueue", (_GOES_ON,)),
    "preparation-done": Text("the data were prepared by {job}; the training job does not exist yet", (_GOES_ON,)),
    "preparation-goes-on": Text(
        "the preparation {job} goes on in the cluster; scaletrain resume {run} waits for it and creates the training "
        "job, scaletrain cancel {run} ends it"
    ),
    "preparation-is-shared": Text(
        "the preparation {job} goes on in the cluster; the same command creates another one, which shares its work"
    ),
    "preparation-unsaid": Text(
        "{job} has prepared the data, but the output of its pods, which has their size, cannot be read",
        ("Set training.steps in place of training.epochs",),
    ),
    "preparation-gone": Text("{job}, which prepared the data, does not exist any more"),
    "preparation-deleted": Text(
        "{job}, which prepared the data, was deleted", ("scaletrain resume {run} prepares the data again",)
    ),
    "preparation-cancelled": Text("cancelled while {job} prepared the data"),
    "preparation-pod-failed": Text("{job}: {cause}"),
    "preparation-failed": Text("{job} has failed: {said}"),
    "explain-preparation": Text("the data are prepared on CPU nodes; no GPU is requested meanwhile"),
    # The connection to the API server, and its refusals.
    "current-context-unusable": Text("the current context of the kubeconfig ({file}) cannot be used: {said}", _CONTEXT),
    "context-unusable": Text("context {context} of the kubeconfig ({file}) cannot be used: {said}", _CONTEXT),
    "no-answer": Text("{where} does not answer: {said}", (_CHECK_SERVER,)),
    "no-answer-before": Text("{where} did not answer a moment ago"),
    "answer-lost": Text("{where} does not answer: {said}. The request may have been applied", (_CHECK_SERVER,)),
    "server-error": Text("{where} server error ({status} {said}). The request may have been applied"),
    "not-kubernetes": Text(
        "{where} did not return a Kubernetes object: {said!r}", ("Check whether the address is that of a proxy",)
    ),
    "node-no-answer": Text("{where}: the node of pod {pod} does not answer: {said}"),
    "untrusted-connection": Text("{where}: no trusted connection: {said}", ("Check the CA of the context",)),
    "not-authenticated": Text(
        "{where}: not authenticated (401)",
        ("Log in again: the credentials of the context are missing, wrong or expired",),
    ),
    "forbidden": Text("{where} forbids the request (403): {said}", (_ASK_RIGHT,)),
    "not-installed": Text("{where} has no {kind} of {api_version}", ("Install it: {install}",)),
    "served-in-other-versions": Text(
        "{where} has no {kind} of {api_version}: it serves {group} as {served:list}, and this version of ScaleTrain "
        "knows {kind} as {known:list}",
        ("Use a version of ScaleTrain for that API, or a release of the controller that serves {api_version}",),
    ),
    "not-served": Text("{where} has no {kind} of {api_version}"),
    "read-refused": Text("{where}: {object} cannot be read ({status}): {said}"),
    "delete-refused": Text("{where}: {object} cannot be deleted ({status}): {said}"),
    "write-refused": Text("{where}: {object} is refused ({status}): {said}"),
    "refused-field": Text("{said}"),
    # A spec that cannot be submitted to Kubernetes.
    "not-submittable": Text("this run can be planned, but not submitted to Kubernetes"),
    "image-missing": Text(
        "is missing",
        (
            "Name the image of the pods by digest, as registry/scaletrain@sha256:...; {guide} describes how to build "
            "one",
        ),
    ),
    "runs-claim-missing": Text(
        "is missing",
        (
            "Name a PersistentVolumeClaim with access mode ReadWriteMany: the pods keep the run directory there. "
            "Without such a volume, a run of one node may set cluster.kubernetes.runs.per_pod",
        ),
    ),
    "per-pod-gang": Text(
        "a run of {nodes:of node} needs a run directory that all its pods see",
        ("Name a claim with ReadWriteMany in cluster.kubernetes.runs.claim, or set cluster.nodes to 1",),
    ),
    "checkpoints-lost": Text(
        "is on the volume of the pod (cluster.kubernetes.runs.per_pod), and lost with it",
        ("Use a folder below a volume that outlives the pod: {volumes:or}",),
    ),
    "checkpoints-lost-no-volume": Text(
        "is on the volume of the pod (cluster.kubernetes.runs.per_pod), and lost with it",
        (
            "Mount a claim, which may be ReadWriteOnce, with cluster.kubernetes.volumes, and use a folder below its "
            "path",
        ),
    ),
    "priority-too-long": Text("must have at most {most} characters: Kueue reads it from a label of the job"),
    "secret-name-taken": Text("is set by the launcher in every pod", ("Choose another name",)),
    "code-missing": Text(
        "{folder} does not hold the code of {run} ({version}), and the tree has changed",
        ("Restore it, or run the tree as it is: scaletrain resume --new-code",),
    ),
    "record-too-large": Text(
        "the run's record takes {bytes:,} bytes; a ConfigMap, by which pods get it, holds at most {most_bytes:,}",
        ("Shorten env or data.skip",),
    ),
    "code-too-large": Text(
        "the run's record and code take {bytes:,} bytes, {code_bytes:,} of them the packed code; a ConfigMap, by which "
        "pods get it, holds at most {most_bytes:,}",
        (
            "List what the run does not need in .scaletrainignore, or name object storage in "
            "cluster.kubernetes.code_store, or put the tree into the image or onto a volume and set code.on_nodes to "
            "its path",
        ),
    ),
    "max-concurrent": Text(
        "--max-concurrent {given}: on Kubernetes the quota of a queue limits how many runs are active at once",
        ("Leave the option out, and name a queue with the quota for that number of runs",),
    ),
    # Submit and cancel.
    "submission-unanswered": Text(
        "{failure}",
        (
            "The run is {run}: `scaletrain status {run}` looks for its job, and `scaletrain cancel {run}` removes it",
            "Submitting or resuming it again creates no second one",
        ),
    ),
    "object-of-other-run": Text("{where}: {object} exists and belongs to {owner}", (_OTHER_ID,)),
    "object-of-no-run": Text("{where}: {object} exists and belongs to no run", (_OTHER_ID,)),
    "object-of-same-id": Text(
        "{where}: {object} exists since {since} and belongs to another run with the id {run}, perhaps of another user. "
        "It was not changed",
        (_OTHER_ID,),
    ),
    "object-deleting": Text("{where}: {object} is still being deleted", ("Wait for its pods to end",)),
    "object-of-other-revision": Text(
        "{where}: {object} exists with another spec or layout of {run}",
        ("Run `scaletrain cancel {run}` first, then resume it",),
    ),
    "cancel-unsettled": Text(
        "{where} has not answered for {job} and may still create it; nothing was changed",
        ("Repeat `scaletrain cancel {run}` in {seconds} s",),
    ),
    # Pods that cannot begin an attempt.
    "pods-not-joined": Text(
        "pods {pods} did not join pod 0 within {seconds:.0f} s",
        ("Their events show why: no free node, an image that cannot be pulled, a volume that cannot be mounted",),
    ),
    "rendezvous-timeout": Text("rendezvous with pod 0 at {address} timed out after {seconds:.0f} s: {said}"),
    "preparation-interrupted": Text("terminated while the pod prepared the data; the next attempt continues with it"),
    "rendezvous-interrupted": Text("terminated before all pods of the gang had joined"),
    "volume-not-shared": Text(
        "{folder} does not appear on {node} although pod 0 has created it",
        ("Check that all pods can mount the claim of cluster.kubernetes.runs at once (ReadWriteMany)",),
    ),
    "volume-full": Text(
        "the volume of cluster.kubernetes.runs is full: {said}", ("Free space on it, then resume the run",)
    ),
    "volume-broken": Text("{folder} cannot be used: {said}", ("Check the file system of the volume",)),
    "volume-write-failed": Text(f"{_NOT_WRITABLE}: {{said}}"),
    "volume-read-only": Text(
        "{folder} is mounted read-only in the pods", ("Give cluster.kubernetes.runs a volume to write to",)
    ),
    "volume-of-other-user": Text(
        f"{_NOT_WRITABLE}: it belongs to uid {{owner}}, gid {{group}}, mode {{mode}}",
        (
            "Set cluster.kubernetes.run_as_user to its owner or fs_group to a group that may write there, or change it "
            "on the volume: chown -R {uid}:{gid} {folder}",
        ),
    ),
    # Problems of a preflight: the job could never start.
    "preflight-problems": Text("{where}, {version}: {count:of problem} would keep the job from starting"),
    "namespace-missing-in": Text("{where}: the namespace is missing"),
    "namespace-missing": Text("there is no such namespace"),
    "object-missing": Text("there is no such {kind}. There are: {names}"),
    "volcano-queue-closed": Text("is {state}, and admits no jobs"),
    "volcano-queue-too-small": Text(
        "can never hold the job: it needs {needed} {resource}, and the capability is {total}"
    ),
    "queue-without-kind": Text(
        "Kueue does not manage {kind}s here: the job would start at once, outside the quota of queue {queue}",
        (
            "Ask the administrator to add it to integrations.frameworks of Kueue (k8s/kueue-values.yaml), or use "
            "another cluster.kubernetes.backend",
        ),
    ),
    "cluster-queue-missing": Text("points to ClusterQueue {queue}, which does not exist"),
    "namespace-not-admitted": Text(
        "ClusterQueue {queue} admits no jobs of namespace {namespace} (its namespaceSelector)"
    ),
    "queue-not-active": Text("{queue} is not active: {said}"),
    "queue-never": Text("ClusterQueue {queue} can never admit the job: {why}"),
    "override-type": Text("must be {type}, as in a pod template of Kubernetes"),
    "override-field": Text("is no field of {type} in the installed package kubernetes, whose newest version has more"),
    "override-field-misspelled": Text(
        "is no field of {type} in the installed package kubernetes", ("Did you mean {near}?",)
    ),
    "amount-unstated": Text(
        "{source} of the namespace refuses pods whose container {container} has no {resource}",
        ("Set it to requested: the cores that a pod requests are its limit then",),
    ),
    "amount-unstated-of-other": Text(
        "{source} of the namespace refuses pods whose container {container} has no {resource}",
        ("Give it to the container in spec.initContainers",),
    ),
    "default-limit-too-small": Text(
        "{source} of the namespace limits pods that set no limit to {limit} CPUs, which is below what they request",
        ("Set it to requested: the cores that a pod requests are its limit then",),
    ),
    "namespace-quota-too-small": Text(
        "ResourceQuota {quota} of the namespace allows {total} {resource}, and the job needs {needed}"
    ),
    "claim-in-phase": Text("the claim is {phase}; the pods cannot start"),
    "claim-not-bound": Text("the claim is not bound to a volume"),
    "claim-not-bound-said": Text("the claim is not bound to a volume: {said}"),
    "claim-not-shared": Text("must be ReadWriteMany for {pods} pods; it is {modes}"),
    "secret-missing": Text("there is no such Secret in namespace {namespace}"),
    "secret-key-missing": Text("Secret {secret} has no key {key}; its keys are: {keys}"),
    "folder-not-writable": Text(_FOLDER, (_CHOOSE_OWNER,)),
    "object-forbidden": Text("{kind}: you need the right to {verb} {resource}; the server says: {said}", (_ASK_RIGHT,)),
    "object-refused": Text("{kind} as it would be created: {refusal}"),
    "object-field-refused": Text("{kind} as it would be created: {field}: {cause}"),
    "derived-object-refused": Text("the {kind} that would be created from it is refused: {said}"),
    "derived-field-refused": Text("the {kind} that would be created from it is refused: {field} {cause}"),
    # Notes of a preflight: nothing here keeps the job from being submitted.
    "note-image-tag": Text(
        "cluster.kubernetes.image = {image}: a tag can later point to another image, so that attempts or "
        "pods of one run differ. Name the image by digest"
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
        "cluster.kubernetes.native_gang: needs the feature gates GenericWorkload and GangScheduling, and the API "
        "(--runtime-config=scheduling.k8s.io/VERSION=true): v1alpha2 in Kubernetes 1.36, v1alpha3 or v1beta1 in 1.37"
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
        "restarts.preemption = unlimited, its maxRetry is set to a number that is never reached; the run itself "
        "counts the restarts after node failures and crashes"
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
    "too-few-nodes": Text(_TOO_FEW_NODES),
    "nodes-until-pools-grow": Text(f"{_TOO_FEW_NODES}; the job waits until the node pools have grown"),
    "nodes-until-admission-check": Text(
        f"{_TOO_FEW_NODES}; the job waits until an admission check of its queue adds nodes"
    ),
    "claim-unbound": Text("claim {claim} is not bound yet; its volume is created for the first pod that uses it"),
    "secrets-unreadable": Text(
        "you may not read Secrets, so it is not known whether {names:list} exist and have their keys"
    ),
    "folder-maybe-not-writable": Text(
        f"{_FOLDER} unless the volume applies fs_group {{fs_group}} ({{why}})", (_CHOOSE_OWNER,)
    ),
    "group-claim-unbound": Text("the claim is not bound yet"),
    "group-volume-unknown": Text("volume {volume} is of a kind that ScaleTrain does not know"),
    "group-volume-kind": Text("{kind}"),
    "group-volume-unreadable": Text("you may not read its volume"),
    "group-driver": Text("driver {driver} has fsGroupPolicy {policy}"),
    "fs-group-ignored": Text(
        "fs_group {fs_group} has no effect on claim {claim} ({why}): its folder {folder} must be writable by uid {uid}"
    ),
    "not-checked": Text("not checked: you need the right to {verb} {resource}", (_ASK_RIGHT,)),
    "child-not-checked": Text(
        "not checked whether the {kind} that is created from it is valid: you need the right to {verb} {resource}",
        (_ASK_RIGHT,),
    ),
    "pod-over-quota": Text("the namespace has no quota for a pod of the job now, and the job waits for it: {said}"),
    "pod-policy": Text("an admission policy refuses such a pod, perhaps only because no Job owns it: {said}"),
    # Why a queue of Kueue cannot hold the job, now or ever.
    "no-flavor": Text("no flavor has any {resource}"),
    "flavor-missing": Text("flavor {flavor}: there is no such ResourceFlavor"),
    "flavor-taint": Text(
        "flavor {flavor}: the pods do not tolerate its taint {taint} (cluster.spot, or cluster.kubernetes.tolerations)"
    ),
    "flavor-label": Text("flavor {flavor}: its nodes have {label}={has}, and the pods need {needed}"),
    "flavor-needs-topology": Text(
        "flavor {flavor}: it admits only pods that request a topology (cluster.kubernetes.topology)"
    ),
    "flavor-without-topology": Text(
        "flavor {flavor}: it has no Topology, which the job requests (cluster.kubernetes.topology)"
    ),
    "flavor-without-level": Text("flavor {flavor}: its Topology {topology} has no level {level}; it has {levels:list}"),
    "flavor-too-small": Text("flavor {flavor}: the job needs {needed} {resource}, and there are at most {total}"),
    "flavor-busy": Text("flavor {flavor}: {used} of {total} {resource} are used, and the job needs {needed}"),
    # When a job could start.
    "start-quota-free": Text(
        "queue {queue} has free quota and no job waits for it (Kueue); scheduling pods and pulling the image take "
        "longer"
    ),
    "start-quota-used": Text(
        "queue {queue} has no free quota, and at most {waiting:of job} ahead of this one; Kueue gives no start time"
    ),
    "start-behind-others": Text(
        "queue {queue} has free quota, and at most {waiting:of job} ahead of this one; Kueue gives no start time"
    ),
    "start-queue-stopped": Text("{queue} is held"),
    "start-nodes-cordoned": Text("nodes that the job needs are cordoned"),
    "start-too-few-nodes": Text("there are not yet enough nodes for the job"),
    "start-quota-unreadable": Text("the quota of queue {queue} cannot be read"),
    "start-volcano": Text(
        "Volcano gives no start time: the gang starts once queue {queue} and the nodes have free resources for all of "
        "it"
    ),
    "start-no-queue": Text(
        "there is no queue: the gang of {pods:of pod} starts once the nodes have free resources for it "
        "(`scaletrain status --cluster` shows them)"
    ),
    # The request that creates the job.
    "never-submitted": Text("never submitted"),
    "request-pending": Text(
        "the request of {asked} was not answered, and the API server has no {job} so far; the outcome is known in "
        "{seconds} s"
    ),
    "request-lost": Text("never submitted: the API server did not answer, and has no {job}"),
    "other-job-active": Text("{job}, another job of this run, is active"),
    # A job that ends or has ended.
    "cancelled": Text("canceled"),
    "workload-gone": Text("the workload no longer exists"),
    "deleting": Text("being deleted"),
    "jobset-deleting": Text("its JobSet is being deleted"),
    "end-unknown": Text("the job is no longer in the cluster, which does not report how it ended"),
    "completed": Text("completed"),
    "failed": Text("failed"),
    "failed-said": Text("failed: {said}"),
    "child-failed": Text("{said}"),
    "phase": Text("{phase}"),
    "phase-said": Text("{phase}: {said}"),
    "pod-failed": Text("pod {pod} ended with exit code {summary}"),
    "pod-ended": Text("pod {pod} on {node} ended with exit code {exit_code}: {cause}"),
    "pod-ended-at": Text("pod {pod} on {node} ended with exit code {exit_code} at step {step}: {cause}"),
    "pod-superseded": Text("another attempt follows attempt {attempt}; the run has not ended"),
    "pod-measured": Text("the measurement of the nodes has ended"),
    "pod-without-decision": Text("pod 0 made no decision on the attempt; this pod ended with exit code {exit_code}"),
    "pod-removed": Text("pod {pod}: {event}: {said}"),
    "pods-saving": Text("{pods:of pod} saving and exiting"),
    "pods-ending": Text("{pods:of pod} still ending"),
    "no-pods-left": Text("no pod is left"),
    "node-silent": Text("node {node} does not report, {pods:of pod} on it may be lost"),
    # A job that never ends by itself.
    "child-refused": Text(
        "the job will never start: the API server refuses the {kind} created from it ({said})",
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
    "pods-suspending": Text("{pods:of pod} still saving and exiting"),
    # Pods that wait or start.
    "pods-pending": Text("the pods are being created"),
    "pods-starting": Text("{pods:of pod} starting: pulling the image or mounting volumes"),
    "last-gang-ending": Text("{pods:of pod} of the previous gang exiting"),
    "some-running": Text("{running} of {expected} pods running"),
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
    "running-others-ended": Text("{running} of {expected} pods running, the others have ended"),
    "restarted": Text("restart {count}"),
    # Headlines and remedies of explain for a job that waits.
    "explain-unmanaged": Text("Kueue does not manage the job", (_RESUBMIT,)),
    "explain-given-up": Text("Kueue has deactivated the job", (_DESCRIBE, _RESUBMIT)),
    "explain-held": Text("the job is held", ("Find out who set spec.active: false on its Workload",)),
    "explain-suspended": Text("the job is suspended, and no queue resumes it", (_RESUBMIT,)),
    "explain-no-queue": Text("the queue of the job does not exist", (_RESUBMIT,)),
    "explain-reclaimed": Text("another team reclaimed the quota that it had lent to the job"),
    "explain-preempted": Text("a job of higher priority preempted this one"),
    "explain-queue-stopped": Text("the queue of the job was stopped", (_ASK_ADMIN,)),
    "explain-node-failed": Text("no free node can replace a failed one", (_FEWER_NODES,)),
    "explain-image-unavailable": Text("the image of the pods cannot be pulled", (_FIX_IMAGE,)),
    "explain-container": Text("a container cannot start", (_FIX_IMAGE, _RESUBMIT)),
    "explain-volume": Text("a volume cannot be mounted", (_DESCRIBE,)),
    "explain-evicted": Text("the pods did not become ready in time, or the job lost its quota", (_DESCRIBE,)),
    "explain-queue-inactive": Text("the queue of the job admits no jobs now", (_ASK_ADMIN,)),
    "explain-no-quota-defined": Text("the queue of the job has no quota for it", (_RESUBMIT,)),
    "explain-over-capacity": Text(
        "the job is too large for a flavor of its queue",
        ("Compare with `scaletrain status --cluster`: another flavor may be large enough and busy", _FEWER_NODES),
    ),
    "explain-quota": Text("Kueue does not admit the job now", (_FEWER_NODES,)),
    "explain-child": Text("the API server refuses the objects of the job for now", (_DESCRIBE,)),
    "explain-namespace-quota": Text("the namespace refuses the pods", (_RESUBMIT, "Request a larger ResourceQuota")),
    "explain-gate": Text(
        "the pods wait until they may be scheduled",
        (
            "Kueue removes its gate once it has admitted the job and chosen nodes: kubectl -n {namespace} describe "
            "workloads. Other gates belong to the controller that they are named after",
        ),
    ),
    "explain-placement": Text(
        "no free node has what the pods require",
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
    "explain-starting": Text("the pods are starting"),
    "explain-unknown": Text("the cluster does not report more", (_DESCRIBE,)),
    "explain-child-refused": Text("the API server refuses the objects that the job consists of", (_RESUBMIT,)),
    "explain-dead-node": Text("a node is dead, and Kubernetes waits for it", (_FIX_NODE,)),
    # Headlines and remedies of explain for a job that has ended.
    "last-step": Text("step {step} of {total_steps} was the last step that the pods printed"),
    "ended-never-submitted": Text("the job was never submitted", ("scaletrain resume {run} submits it",)),
    "ended-unknown": Text(
        "the job no longer exists, and how it ended is not known",
        (_LOGS, "scaletrain resume {run} continues it; pods that find the run finished end at once"),
    ),
    "ended-finished": Text("the job has finished"),
    "ended-cancelled": Text("the job was canceled", (_RESUME,)),
    "ended-refused-spec": Text(
        "the job ended with exit code {exit_code}: it cannot run with this spec",
        (_LOGS, "Fix what the message names: `scaletrain resume {run} --set KEY=VALUE`, or submit a corrected spec"),
    ),
    "ended-final": Text(
        "the job ended with exit code {exit_code}: another attempt would not help",
        (_LOGS, "Remove the cause before `scaletrain resume {run}`: a restart alone ends in the same way"),
    ),
    "ended-wrong-nodes": Text(
        "the job ended with exit code {exit_code}: a node or a volume is not what was planned",
        (_LOGS, "Correct what the message names (the volume, the GPUs, the spec); then `scaletrain resume {run}`"),
    ),
    "ended": Text("the job has ended: {state}", (_LOGS, _RESUME)),
    "no-running-pod": Text("{where}: the container of node {node} of {run} does not run now"),
    # ---- status --cluster ------------------------------------------------------------------------------------------
    "view-not-permitted": Text("not shown: {part}; you need the right to list {right}"),
    "view-not-permitted-in-all-namespaces": Text(
        "not shown: {part}; you need the right to list {right} in all namespaces"
    ),
    "view-nodes-not-ready": Text("not ready: {nodes:list}"),
    "view-queue-not-active": Text("{kind} {queue} is not active: {said}"),
    "view-ahead-in-namespace": Text("ahead counts only namespace {namespace}; {waiting} jobs wait for the same quota"),
    "view-runs-elsewhere": Text(
        "you also have runs in {namespaces:list}: set cluster.kubernetes.namespace in clusters.yaml"
    ),
}
