"""The texts of the Kubernetes back end."""

from scaletrain_cli.reasons import Texts

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
_CONTAINER = "({state}: {said})"
_EVENT = "{object}: {event}: {said}"
_HELD = "held by Kueue: spec.active of Workload {workload} is false"
_CONTEXT = ("Set $KUBECONFIG, or cluster.kubernetes.context to one of `kubectl config get-contexts`",)
_CHECK_SERVER = "Check the VPN, the server and the context"
_ASK_RIGHT = "Ask an administrator for the right to {verb} {resource}: {roles} has all that is needed"
_OTHER_ID = "Submit under another --run-id"
_NOT_WRITABLE = "{folder} cannot be written by the pods (uid {uid}, gid {gid}, groups {groups})"
_GOES_ON = "If no command waits for it any more, run scaletrain resume {run}"
_FOLDER = "the pods run as uid {uid}, which cannot write {folder} (uid {owner}, gid {group}, mode {mode})"
_TOO_FEW_NODES = "the {nodes} nodes can run at most {fit} of the job's pods, and {needed} are needed ({lacks})"
_CHOOSE_OWNER = "Set cluster.kubernetes.run_as_user: {owner}, or change the owner of the folder to {uid}"

TEXTS: Texts = {
    # Views of a run whose volume is not mounted here.
    "view-never-ran": "no pod of {run} has been created yet",
    "view-waits": "no pod of {run} runs now; its job is {state}",
    "view-per-pod": "the run directory of {run} is on a volume that is deleted with each of its pods",
    "view-starts": "no pod of {run} runs: starting one that reads its files (Job {job} in {namespace}, which ends two "
    "minutes after the last view)",
    "view-pod-waits": "the pod that reads the files does not run after {seconds:seconds}: {cause}",
    "view-no-cause": "the cluster gives no reason",
    "view-suspended": (
        "the pod that reads the files waits in a queue of Kueue, which manages Jobs without a queue here",
        "Set cluster.kubernetes.preparation.queue in the next run to a queue with a quota of CPUs",
    ),
    "view-job-gone": "Job {job}, whose pod reads the files, was deleted",
    "view-pod-failed": "the pod that reads the files ended: {cause}",
    # The preparation of data before the workload exists.
    "preparation-runs": ("the data are prepared by {job}: {running} of {tasks:of pod} run", _GOES_ON),
    "preparation-waits": ("the data are not prepared: {job} waits: {cause}", _GOES_ON),
    "preparation-suspended": ("the data are not prepared: {job} waits in a queue of Kueue", _GOES_ON),
    "preparation-done": ("the data were prepared by {job}; the training job does not exist yet", _GOES_ON),
    "preparation-goes-on": "the preparation {job} goes on in the cluster; scaletrain resume {run} waits for it and "
    "creates the training job, scaletrain cancel {run} ends it",
    "preparation-is-shared": "the preparation {job} goes on in the cluster; the same command creates another one, "
    "which shares its work",
    "preparation-unsaid": (
        "{job} has prepared the data, but the output of its pods, which has their size, cannot be read",
        "Set training.steps in place of training.epochs",
    ),
    "preparation-gone": "{job}, which prepared the data, does not exist any more",
    "preparation-deleted": (
        "{job}, which prepared the data, was deleted",
        "scaletrain resume {run} prepares the data again",
    ),
    "preparation-cancelled": "cancelled while {job} prepared the data",
    "preparation-pod-failed": "{job}: {cause}",
    "preparation-failed": "{job} has failed: {said}",
    "explain-preparation": "the data are prepared on CPU nodes; no GPU is requested meanwhile",
    # The connection to the API server, and its refusals.
    "current-context-unusable": ("the current context of the kubeconfig ({file}) cannot be used: {said}", *_CONTEXT),
    "context-unusable": ("context {context} of the kubeconfig ({file}) cannot be used: {said}", *_CONTEXT),
    "no-answer": ("{where} does not answer: {said}", _CHECK_SERVER),
    "no-answer-before": "{where} did not answer a moment ago",
    "answer-lost": ("{where} does not answer: {said}. The request may have been applied", _CHECK_SERVER),
    "server-error": "{where} server error ({status} {said}). The request may have been applied",
    "not-kubernetes": (
        "{where} did not return a Kubernetes object: {said!r}",
        "Check whether the address is that of a proxy",
    ),
    "node-no-answer": "{where}: the node of pod {pod} does not answer: {said}",
    "untrusted-connection": ("{where}: no trusted connection: {said}", "Check the CA of the context"),
    "not-authenticated": (
        "{where}: not authenticated (401)",
        "Log in again: the credentials of the context are missing, wrong or expired",
    ),
    "forbidden": ("{where} forbids the request (403): {said}", _ASK_RIGHT),
    "not-installed": ("{where} has no {kind} of {api_version}", "Install it: {install}"),
    "served-in-other-versions": (
        "{where} has no {kind} of {api_version}: it serves {group} as {served:list}, and this version of ScaleTrain "
        "supports {kind} in {known:list}",
        "Use a version of ScaleTrain for that API, or a release of the controller that serves {api_version}",
    ),
    "not-served": "{where} has no {kind} of {api_version}",
    "read-refused": "{where}: {object} cannot be read ({status}): {said}",
    "delete-refused": "{where}: {object} cannot be deleted ({status}): {said}",
    "write-refused": "{where}: {object} is refused ({status}): {said}",
    "refused-field": "{said}",
    # A spec that cannot be submitted to Kubernetes.
    "not-submittable": "this run can be planned, but not submitted to Kubernetes",
    "image-missing": (
        "is missing",
        "Name the image of the pods by digest, as registry/scaletrain@sha256:...; {guide} describes how to build one",
    ),
    "runs-claim-missing": (
        "is missing",
        "Name a PersistentVolumeClaim with access mode ReadWriteMany: the pods keep the run directory there. Without "
        "such a volume, set cluster.kubernetes.runs.per_pod and checkpoint.mirror",
    ),
    "per-pod-gang": (
        "a run of {nodes:of node} keeps its checkpoints in the run directory of pod 0, which is lost with it",
        "Set checkpoint.mirror and leave checkpoint.dir at auto; or name a claim with ReadWriteMany in "
        "cluster.kubernetes.runs.claim; or set cluster.nodes to 1",
    ),
    "per-pod-shared": (
        "a rehearsal, or a program of yours (code.engine, code.command), on {nodes:of node} needs a run directory that "
        "all its pods see",
        "Name a claim with ReadWriteMany in cluster.kubernetes.runs.claim, or set cluster.nodes to 1",
    ),
    "checkpoints-lost": (
        "is on the volume of the pod (cluster.kubernetes.runs.per_pod), and lost with it",
        "Use a folder below a volume that outlives the pod: {volumes:or}",
    ),
    "checkpoints-lost-no-volume": (
        "is on the volume of the pod (cluster.kubernetes.runs.per_pod), and lost with it",
        "Set checkpoint.mirror, from which a later pod continues. Or mount a claim, which may be ReadWriteOnce, with "
        "cluster.kubernetes.volumes, and use a folder below its path",
    ),
    "priority-too-long": "must have at most {most} characters: Kueue reads it from a label of the job",
    "secret-name-taken": ("is set by the launcher in every pod", "Choose another name"),
    "code-missing": (
        "{folder} does not hold the code of {run} ({version}), and the tree has changed",
        "Restore it, or run the tree as it is: scaletrain resume --new-code",
    ),
    "record-too-large": (
        "the run's record takes {bytes:,} bytes; a ConfigMap, by which pods get it, holds at most {most_bytes:,}",
        "Shorten env or data.skip",
    ),
    "code-too-large": (
        "the run's record and code take {bytes:,} bytes, {code_bytes:,} of them the packed code; a ConfigMap, by "
        "which pods get it, holds at most {most_bytes:,}",
        "List what the run does not need in .scaletrainignore, or name object storage in "
        "cluster.kubernetes.code_store, or put the tree into the image or onto a volume and set code.on_nodes to its "
        "path",
    ),
    "max-concurrent": (
        "--max-concurrent {given}: on Kubernetes the quota of a queue limits how many runs are active at once",
        "Leave the option out, and name a queue with the quota for that number of runs",
    ),
    # Submit and cancel.
    "submission-unanswered": (
        "{failure}",
        "The run is {run}: `scaletrain status {run}` looks for its job, and `scaletrain cancel {run}` removes it",
        "Submitting or resuming it again creates no second one",
    ),
    "object-of-other-run": ("{where}: {object} exists and belongs to {owner}", _OTHER_ID),
    "object-of-no-run": ("{where}: {object} exists and belongs to no run", _OTHER_ID),
    "object-of-same-id": (
        "{where}: {object} exists since {since} and belongs to another run with the id {run}, perhaps of another "
        "user. It was not changed",
        _OTHER_ID,
    ),
    "object-deleting": ("{where}: {object} is still being deleted", "Wait for its pods to end"),
    "object-of-other-revision": (
        "{where}: {object} exists with another spec or layout of {run}",
        "Run `scaletrain cancel {run}` first, then resume it",
    ),
    "cancel-unsettled": (
        "{where} has not answered for {job} and may still create it; nothing was changed",
        "Repeat `scaletrain cancel {run}` in {seconds} s",
    ),
    # Pods that cannot begin an attempt.
    "pods-not-joined": (
        "pods {pods} did not join pod 0 within {seconds:.0f} s",
        "Their events show why: no free node, an image that cannot be pulled, a volume that cannot be mounted",
    ),
    "rendezvous-timeout": "rendezvous with pod 0 at {address} timed out after {seconds:.0f} s: {said}",
    "preparation-interrupted": "terminated while the pod prepared the data; the next attempt continues with it",
    "rendezvous-interrupted": "terminated before all pods of the gang had joined",
    "volume-not-shared": (
        "{folder} does not appear on {node} although pod 0 has created it",
        "Check that all pods can mount the claim of cluster.kubernetes.runs at once (ReadWriteMany)",
    ),
    "volume-full": ("the volume of cluster.kubernetes.runs is full: {said}", "Free space on it, then resume the run"),
    "volume-broken": ("{folder} cannot be used: {said}", "Check the file system of the volume"),
    "volume-write-failed": f"{_NOT_WRITABLE}: {{said}}",
    "volume-read-only": (
        "{folder} is mounted read-only in the pods",
        "Give cluster.kubernetes.runs a volume to write to",
    ),
    "volume-of-other-user": (
        f"{_NOT_WRITABLE}: it belongs to uid {{owner}}, gid {{group}}, mode {{mode}}",
        "Set cluster.kubernetes.run_as_user to its owner or fs_group to a group that may write there, or change it on "
        "the volume: chown -R {uid}:{gid} {folder}",
    ),
    # Problems of a preflight: the job could never start.
    "preflight-problems": "{where}, {version}: {count:of problem} would keep the job from starting",
    "namespace-missing-in": "{where}: the namespace is missing",
    "namespace-missing": "there is no such namespace",
    "object-missing": "there is no such {kind}. There are: {names}",
    "volcano-queue-closed": "is {state}, and admits no jobs",
    "volcano-queue-too-small": "can never hold the job: it needs {needed} {resource}, and the capability is {total}",
    "queue-without-kind": (
        "Kueue does not manage {kind}s here: the job would start at once, outside the quota of queue {queue}",
        "Ask the administrator to add it to integrations.frameworks of Kueue (k8s/kueue-values.yaml), or use another "
        "cluster.kubernetes.backend",
    ),
    "queue-without-cluster-queue": "points to no ClusterQueue, so that it admits no job",
    "cluster-queue-missing": "points to ClusterQueue {queue}, which does not exist",
    "queue-of-other-clusters": (
        "leads to ClusterQueue {queue}, whose admission check {check} sends jobs to other clusters (MultiKueue). The "
        "ConfigMap and the Secrets of the run stay here, so that its pods would never start there",
        "Name the context of one cluster, and a queue of it",
    ),
    "namespace-not-admitted": "ClusterQueue {queue} admits no jobs of namespace {namespace} (its namespaceSelector)",
    "queue-not-active": "{queue} is not active: {said}",
    "queue-never": "ClusterQueue {queue} can never admit the job: {why}",
    "override-type": "must be {type}, as in a pod template of Kubernetes",
    "override-field": "is no field of {type} in the installed package kubernetes, whose newest version has more",
    "override-field-misspelled": ("is no field of {type} in the installed package kubernetes", "Did you mean {near}?"),
    "amount-unstated": (
        "{source} of the namespace refuses pods whose container {container} has no {resource}",
        "Set it to requested: the cores that a pod requests are its limit then",
    ),
    "amount-unstated-of-other": (
        "{source} of the namespace refuses pods whose container {container} has no {resource}",
        "Give it to the container in spec.initContainers",
    ),
    "default-limit-too-small": (
        "{source} of the namespace limits pods that set no limit to {limit} CPUs, which is below what they request",
        "Set it to requested: the cores that a pod requests are its limit then",
    ),
    "namespace-quota-too-small": "ResourceQuota {quota} of the namespace allows {total} {resource}, and the job needs "
    "{needed}",
    "claim-in-phase": "the claim is {phase}; the pods cannot start",
    "claim-not-bound": "the claim is not bound to a volume",
    "claim-not-bound-said": "the claim is not bound to a volume: {said}",
    "claim-not-shared": "must be ReadWriteMany for {pods} pods; it is {modes}",
    "secret-missing": "there is no such Secret in namespace {namespace}",
    "secret-key-missing": "Secret {secret} has no key {key}; its keys are: {keys}",
    "folder-not-writable": (_FOLDER, _CHOOSE_OWNER),
    "object-forbidden": ("{kind}: you need the right to {verb} {resource}; the server says: {said}", _ASK_RIGHT),
    "object-refused": "{kind} as it would be created: {refusal}",
    "object-field-refused": "{kind} as it would be created: {field}: {cause}",
    "derived-object-refused": "the {kind} that would be created from it is refused: {said}",
    "derived-field-refused": "the {kind} that would be created from it is refused: {field} {cause}",
    # Notes of a preflight: nothing here keeps the job from being submitted.
    "note-image-tag": "cluster.kubernetes.image = {image}: a tag can later point to another image, so that attempts "
    "or pods of one run differ. Name the image by digest",
    "note-ipc-lock": "cluster.kubernetes.ipc_lock: Linux grants IPC_LOCK to root only, and these pods are not root. "
    "RDMA needs LimitMEMLOCK=infinity in containerd's unit on the nodes; without it NCCL falls back to TCP, and only "
    "its log shows it. A namespace with the restricted pod security refuses it: set ipc_lock: false there",
    "note-rdma": "cluster.kubernetes.rdma_resource: needs LimitMEMLOCK=infinity in containerd's unit on the nodes; "
    "without it NCCL falls back to TCP, and only its log shows it",
    "note-host-network": "cluster.kubernetes.host_network: the pods use ports of their nodes, so no other run may "
    "share a node; a namespace with the baseline pod security refuses them",
    "note-relative-path": "{key} = {path}: pods look for it in the working folder of the image, not in this one. Give "
    "an absolute path on a volume: {mounted:list}",
    "note-unmounted-path": "{key} = {path}: no volume is mounted there, so it must be in the image. The volumes are "
    "mounted at: {mounted:list} (cluster.kubernetes.runs and volumes)",
    "note-native-gang": "cluster.kubernetes.native_gang: needs the feature gates GenericWorkload and GangScheduling, "
    "and the API (--runtime-config=scheduling.k8s.io/VERSION=true): v1alpha2 in Kubernetes 1.36, v1alpha3 or v1beta1 "
    "in 1.37",
    "note-no-gang": "cluster.kubernetes.queue: without one nothing schedules {pods} pods together. Two runs can each "
    "hold a part of their nodes and wait for the other's indefinitely. Name a queue of Kueue, or use backend: volcano",
    "note-trainjob-ttl": "cluster.kubernetes.ttl_seconds_after_finished: the JobSet and its pods are deleted; Trainer "
    "keeps the TrainJob",
    "note-gke-spot": "cluster.grace_seconds = {grace:g}: a spot node of GKE gives a pod at most about {given} s. A "
    "checkpoint that takes longer is lost there; save more often instead",
    "note-volcano-unlimited": "cluster.kubernetes.backend: Volcano counts evictions as retries and cannot exclude "
    "them. Because restarts.preemption = unlimited, its maxRetry is set to a number that is never reached; the run "
    "itself counts the restarts after node failures and crashes",
    "note-volcano-retries": "cluster.kubernetes.backend: Volcano counts evictions as retries. Its maxRetry is the sum "
    "of all budgets of restarts; the run itself decides which of them a restart is charged to",
    "note-own-variables": "env: {names:list}: set by the launcher and ignored here",
    "queue-busy": "queue {queue} is busy: {why}; the job will wait",
    "quota-used": "{used} of {total} {resource} are used",
    "queue-stopped": "{queue} is held (stopPolicy {policy}): the job waits until it is resumed",
    "resource-without-quota": "no quota of queue {queue} covers {resource}: the job waits indefinitely unless Kueue "
    "is configured to exclude it",
    "namespace-quota-used": "ResourceQuota {quota} of the namespace allows {total} {resource}, of which {used} are "
    "used: the job waits for the rest",
    "nodes-cordoned": "{nodes} suitable nodes are cordoned: the job waits until they are uncordoned",
    "too-few-nodes": _TOO_FEW_NODES,
    "nodes-until-pools-grow": f"{_TOO_FEW_NODES}; the job waits until the node pools have grown",
    "nodes-until-admission-check": f"{_TOO_FEW_NODES}; the job waits until an admission check of its queue adds nodes",
    "claim-unbound": "claim {claim} is not bound yet; its volume is created for the first pod that uses it",
    "claim-of-one-node": "claim {claim} is {modes}: where its driver attaches a disk to one node, those of {pods} pods "
    "that run on other nodes wait for it indefinitely",
    "secrets-unreadable": "you may not read Secrets, so it is not known whether {names:list} exist and have their keys",
    "folder-maybe-not-writable": (
        f"{_FOLDER} unless the volume applies fs_group {{fs_group}} ({{why}})",
        _CHOOSE_OWNER,
    ),
    "group-claim-unbound": "the claim is not bound yet",
    "group-volume-unknown": "volume {volume} is of a kind that ScaleTrain does not support",
    "group-volume-kind": "{kind}",
    "group-volume-unreadable": "you may not read its volume",
    "group-driver": "driver {driver} has fsGroupPolicy {policy}",
    "fs-group-ignored": "fs_group {fs_group} has no effect on claim {claim} ({why}): its folder {folder} must be "
    "writable by uid {uid}",
    "not-checked": ("not checked: you need the right to {verb} {resource}", _ASK_RIGHT),
    "child-not-checked": (
        "not checked whether the {kind} that is created from it is valid: you need the right to {verb} {resource}",
        _ASK_RIGHT,
    ),
    "note-added-containers": (
        "the cluster adds {names:list} to each pod of the job: its pods end only when they end, too",
        'Istio adds none to pods with the label sidecar.istio.io/inject: "false" (pod_overrides.metadata.labels)',
    ),
    "pod-over-quota": "the namespace has no quota for a pod of the job now, and the job waits for it: {said}",
    "pod-policy": "an admission policy refuses such a pod, perhaps only because no Job owns it: {said}",
    # Why a queue of Kueue cannot hold the job, now or ever.
    "no-flavor": "no flavor has any {resource}",
    "flavor-missing": "flavor {flavor}: there is no such ResourceFlavor",
    "flavor-taint": "flavor {flavor}: the pods do not tolerate its taint {taint} (cluster.spot, or "
    "cluster.kubernetes.tolerations)",
    "flavor-label": "flavor {flavor}: its nodes have {label}={has}, and the pods need {needed}",
    "flavor-needs-topology": "flavor {flavor}: it admits only pods that request a topology "
    "(cluster.kubernetes.topology)",
    "flavor-without-topology": "flavor {flavor}: it has no Topology, which the job requests "
    "(cluster.kubernetes.topology)",
    "flavor-without-level": "flavor {flavor}: its Topology {topology} has no level {level}; it has {levels:list}",
    "flavor-too-small": "flavor {flavor}: the job needs {needed} {resource}, and there are at most {total}",
    "flavor-busy": "flavor {flavor}: {used} of {total} {resource} are used, and the job needs {needed}",
    # When a job could start.
    "start-quota-free": "queue {queue} has free quota and no job waits for it (Kueue); scheduling pods and pulling "
    "the image take longer",
    "start-quota-used": "queue {queue} has no free quota, and at most {waiting:of job} ahead of this one; Kueue gives "
    "no start time",
    "start-behind-others": "queue {queue} has free quota, and at most {waiting:of job} ahead of this one; Kueue gives "
    "no start time",
    "start-queue-stopped": "{queue} is held",
    "start-nodes-cordoned": "nodes that the job needs are cordoned",
    "start-too-few-nodes": "there are not yet enough nodes for the job",
    "start-quota-unreadable": "the quota of queue {queue} cannot be read",
    "start-volcano": "Volcano gives no start time: the gang starts once queue {queue} and the nodes have free "
    "resources for all of it",
    "start-no-queue": "there is no queue: the gang of {pods:of pod} starts once the nodes have free resources for it "
    "(`scaletrain status --cluster` shows them)",
    # The request that creates the job.
    "never-submitted": "never submitted",
    "request-pending": "the request of {asked} was not answered, and the API server has no {job} so far; the outcome "
    "is known in {seconds} s",
    "request-lost": "never submitted: the API server did not answer, and has no {job}",
    "other-job-active": "{job}, another job of this run, is active",
    # A job that ends or has ended.
    "cancelled": "cancelled",
    "workload-gone": "the workload no longer exists",
    "deleting": "being deleted",
    "jobset-deleting": "its JobSet is being deleted",
    "end-unknown": "the job is no longer in the cluster, which does not report how it ended",
    "completed": "completed",
    "failed": "failed",
    "failed-said": "failed: {said}",
    "child-failed": "{said}",
    "phase": "{phase}",
    "phase-said": "{phase}: {said}",
    "pod-failed": "pod {pod} ended with exit code {summary}",
    "pod-ended": "pod {pod} on {node} ended with exit code {exit_code}: {cause}",
    "pod-ended-at": "pod {pod} on {node} ended with exit code {exit_code} at step {step}: {cause}",
    "pod-superseded": "another attempt follows attempt {attempt}; the run has not ended",
    "pod-measured": "the measurement of the nodes has ended",
    "pod-without-decision": "pod 0 made no decision on the attempt; this pod ended with exit code {exit_code}",
    "pod-removed": "pod {pod}: {event}: {said}",
    "pods-saving": "{pods:of pod} saving and exiting",
    "pods-ending": "{pods:of pod} still ending",
    "no-pods-left": "no pod is left",
    "node-silent": "node {node} does not report, {pods:of pod} on it may be lost",
    # A job that never ends by itself.
    "child-refused": (
        "the job will never start: the API server refuses the {kind} created from it ({said})",
        "Cancel the run, fix the spec and submit it again",
    ),
    "dead-node": (
        "node {node} is unreachable and {pods:list} on it cannot end, so the gang waits indefinitely",
        _FIX_NODE,
    ),
    "dead-node-unconfirmed": (
        "node {node} may be dead (you may not list nodes) and {pods:list} on it cannot end, so the gang waits "
        "indefinitely",
        _FIX_NODE,
    ),
    # A job that Kueue holds or has not admitted.
    "no-queue": "suspended, and in no queue that would resume it: where Kueue manages all jobs, name one "
    "(cluster.kubernetes.queue); elsewhere set spec.suspend to false",
    "queue-unreadable": "waits in queue {queue}; why is unknown: you need the right to list workloads.kueue.x-k8s.io",
    "no-workload": "suspended, and Kueue has created no Workload for it: Kueue is not running or does not manage "
    "{kind}s. It waits indefinitely",
    "no-workload-for-priority": "suspended, and Kueue has created no Workload for it: priority class {priority} is "
    "unknown, or Kueue is not running or does not manage {kind}s. It waits indefinitely; `kubectl get "
    "workloadpriorityclasses` shows the classes",
    "held": _HELD,
    **dict.fromkeys(("held-after-eviction", "given-up"), f"{_HELD} ({{said}})"),
    "queued": "waits in queue {queue}",
    **dict.fromkeys(
        ("queued-for-quota", "queue-missing", "queue-inactive", "queue-without-quota", "queue-over-capacity"),
        "waits in queue {queue}: {said}",
    ),
    "admission-check": "has its quota in queue {queue}; admission check {check} reports: {said}",
    **dict.fromkeys(("preempted", "preempted-in-cohort"), "preempted by Kueue ({said})"),
    **dict.fromkeys(
        ("evicted", "evicted-queue-stopped", "evicted-node-failure", "evicted-image", "evicted-volume"),
        "evicted by Kueue ({event}: {said})",
    ),
    "requeued": "it is queued again at {time}",
    "pods-suspending": "{pods:of pod} still saving and exiting",
    # Pods that wait or start.
    "pods-pending": "the pods are being created",
    "pods-starting": "{pods:of pod} starting: pulling the image or mounting volumes",
    "last-gang-ending": "{pods:of pod} of the previous gang exiting",
    "some-running": "{running} of {expected} pods running",
    "image-not-pulled": f"pod {{pod}}: the image cannot be pulled {_CONTAINER}",
    "image-name-invalid": f"pod {{pod}}: the name of the image is not valid {_CONTAINER}",
    "image-not-on-node": f"pod {{pod}}: the image is not on the node and must not be pulled {_CONTAINER}",
    "container-config-missing": "pod {pod}: a Secret or ConfigMap that the container needs does not exist "
    f"{_CONTAINER}",
    "container-not-created": f"pod {{pod}}: the container cannot be created {_CONTAINER}",
    "container-not-started": f"pod {{pod}}: the container cannot be started {_CONTAINER}",
    "scheduling-gate": "pod {pod} is held by a scheduling gate: {said}",
    **dict.fromkeys(
        ("unschedulable", "unschedulable-placement", "unschedulable-taint", "unschedulable-cordoned"),
        "unschedulable: {said}",
    ),
    "gang-unschedulable": "Volcano: {said}",
    **dict.fromkeys(("image-event", "volume-not-mounted", "sandbox-failed", "pod-unschedulable"), _EVENT),
    **dict.fromkeys(("creation-refused", "child-not-created"), _EVENT),
    # Pods that run.
    "running": "all {pods:of pod} running",
    "held-by-containers": "the ranks of {pods:of pod} have ended, but not {names:list}: `scaletrain cancel` ends it",
    "running-others-ended": "{running} of {expected} pods running, the others have ended",
    "restarted": "restart {count}",
    # Headlines and remedies of explain for a job that waits.
    "explain-unmanaged": ("Kueue does not manage the job", _RESUBMIT),
    "explain-given-up": ("Kueue has deactivated the job", _DESCRIBE, _RESUBMIT),
    "explain-held": ("the job is held", "Find out who set spec.active: false on its Workload"),
    "explain-suspended": ("the job is suspended, and no queue resumes it", _RESUBMIT),
    "explain-no-queue": ("the queue of the job does not exist", _RESUBMIT),
    "explain-reclaimed": "another team reclaimed the quota that it had lent to the job",
    "explain-preempted": "a job of higher priority preempted this one",
    "explain-queue-stopped": ("the queue of the job was stopped", _ASK_ADMIN),
    "explain-node-failed": ("no free node can replace a failed one", _FEWER_NODES),
    "explain-image-unavailable": ("the image of the pods cannot be pulled", _FIX_IMAGE),
    "explain-container": ("a container cannot start", _FIX_IMAGE, _RESUBMIT),
    "explain-volume": ("a volume cannot be mounted", _DESCRIBE),
    "explain-evicted": ("the pods did not become ready in time, or the job lost its quota", _DESCRIBE),
    "explain-queue-inactive": ("the queue of the job admits no jobs now", _ASK_ADMIN),
    "explain-no-quota-defined": ("the queue of the job has no quota for it", _RESUBMIT),
    "explain-over-capacity": (
        "the job is too large for a flavor of its queue",
        "Compare with `scaletrain status --cluster`: another flavor may be large enough and busy",
        _FEWER_NODES,
    ),
    "explain-quota": ("Kueue does not admit the job now", _FEWER_NODES),
    "explain-child": ("the API server refuses the objects of the job for now", _DESCRIBE),
    "explain-namespace-quota": ("the namespace refuses the pods", _RESUBMIT, "Request a larger ResourceQuota"),
    "explain-gate": (
        "the pods wait until they may be scheduled",
        "Kueue removes its gate once it has admitted the job and chosen nodes: kubectl -n {namespace} describe "
        "workloads. Other gates belong to the controller that they are named after",
    ),
    "explain-placement": (
        "no free node has what the pods require",
        "Compare cluster.kubernetes.node_selector, topology and the queue's flavor with `kubectl get nodes "
        "--show-labels`",
    ),
    "explain-taint": (
        "the free nodes have taints that the pods do not tolerate",
        "Tolerate the taint (cluster.kubernetes.tolerations; cluster.spot for spot nodes), or free other nodes",
    ),
    "explain-cordoned": (
        "the nodes are cordoned",
        "Wait until they are uncordoned (kubectl get nodes), or ask the administrator",
    ),
    "explain-unschedulable": ("no node has enough free resources for a pod", _FEWER_NODES),
    "explain-starting": "the pods are starting",
    "explain-unknown": ("the cluster does not report more", _DESCRIBE),
    "explain-child-refused": ("the API server refuses the objects that the job consists of", _RESUBMIT),
    "explain-dead-node": ("a node is dead, and Kubernetes waits for it", _FIX_NODE),
    # Headlines and remedies of explain for a job that has ended.
    "last-step": "step {step} of {total_steps} was the last step that the pods printed",
    "ended-never-submitted": ("the job was never submitted", "scaletrain resume {run} submits it"),
    "ended-unknown": (
        "the job no longer exists, and how it ended is not known",
        _LOGS,
        "scaletrain resume {run} continues it; pods that find the run finished end at once",
    ),
    "ended-finished": "the job has finished",
    "ended-cancelled": ("the job was cancelled", _RESUME),
    "ended-refused-spec": (
        "the job ended with exit code {exit_code}: it cannot run with this spec",
        _LOGS,
        "Fix what the message names: `scaletrain resume {run} --set KEY=VALUE`, or submit a corrected spec",
    ),
    "ended-final": (
        "the job ended with exit code {exit_code}: another attempt would not help",
        _LOGS,
        "Remove the cause before `scaletrain resume {run}`: a restart alone ends in the same way",
    ),
    "ended-wrong-nodes": (
        "the job ended with exit code {exit_code}: a node or a volume is not what was planned",
        _LOGS,
        "Correct what the message names (the volume, the GPUs, the spec); then `scaletrain resume {run}`",
    ),
    "ended": ("the job has ended: {state}", _LOGS, _RESUME),
    "no-running-pod": "{where}: the container of node {node} of {run} does not run now",
    # ---- status --cluster ------------------------------------------------------------------------------------------
    "view-not-permitted": "not shown: {part}; you need the right to list {right}",
    "view-not-permitted-in-all-namespaces": "not shown: {part}; you need the right to list {right} in all namespaces",
    "view-nodes-not-ready": "not ready: {nodes:list}",
    "view-queue-not-active": "{kind} {queue} is not active: {said}",
    "view-ahead-in-namespace": "ahead counts only namespace {namespace}; {waiting} jobs wait for the same quota",
    "view-runs-elsewhere": "you also have runs in {namespaces:list}: set cluster.kubernetes.namespace in clusters.yaml",
}
