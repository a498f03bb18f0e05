"""The texts of the Slurm back end."""

from scaletrain_cli.reasons import Texts

_SMALLER = "Request less: `scaletrain cancel {run}`, then `scaletrain resume {run} --nodes N`"
_SHARED_FOLDER = "Put the runs root ($SCALETRAIN_RUNS) and the installation on a file system that the nodes share"
_OTHER_PARTITION = "`scaletrain cancel {run}`, then `scaletrain resume {run} --set cluster.slurm.partition=...`"

TEXTS: Texts = {
    # ---- Slurm's commands ------------------------------------------------------------------------------------------
    "no-command": ("{command} is not installed here", "Submit from a login node, or use scheduler: local"),
    "no-answer": "{command} did not answer within {seconds:.0f} s",
    "answer-lost": "{command} got no answer from Slurm: {said}",
    "no-job-id": "sbatch printed no id of a job: {said}",
    "command-failed": "{command} failed: {said}",
    "session-node-unknown": (
        "job {job} holds another number of nodes than its run uses, and no record names node {number} of the run",
        "`scaletrain status` shows when the attempt has begun; then repeat the command",
    ),
    # ---- submit and cancel -----------------------------------------------------------------------------------------
    "nothing-queued": "{failure}. Nothing was queued",
    "older-job": ("job {job} of {run}, which has an earlier layout, has not ended", "Run `scancel {job}` first"),
    "earlier-submission-open": (
        "the last sbatch for {run} got no answer, and Slurm may still accept its job. Nothing was queued",
        "Submit again in {minutes} min if `scaletrain status {run}` shows no job until then",
    ),
    "submission-unknown": (
        "{failure}. Slurm may have accepted the job of {run}",
        "`scaletrain status {run}` finds the job if Slurm accepted it, `scaletrain cancel {run}` cancels it, and the "
        "same submit with --run-id {run} creates no second job",
    ),
    "job-of-other-user": "job {job} of {run} belongs to {user}, and you are not permitted to cancel it: {failure}. "
    "Nothing was changed",
    "cannot-resume-suspended": (
        "job {job} of {run} is suspended, so its ranks cannot save a checkpoint, and you are not permitted to resume "
        "it: {failure}. Nothing was changed",
        "Ask an operator to run `scontrol resume {job}`, then cancel again; or end the job with `scancel {job}`, "
        "which loses all steps since its latest checkpoint",
    ),
    "cancel-unanswered": "{failure}. The stop file of the run is written: the nodes of the job read it within seconds "
    "and stop the run",
    "path-with-patterns": (
        "{path}: Slurm replaces % and \\ in the path of a job's log",
        "Move the runs root: $SCALETRAIN_RUNS",
    ),
    "unmountable-runs-root": (
        "{root}: a list of container mounts cannot contain a path with a comma, a colon or a line break",
        "Move the runs root: $SCALETRAIN_RUNS",
    ),
    # ---- the job of a run ------------------------------------------------------------------------------------------
    "never-submitted": "never submitted",
    "job-state": "{state}",
    "job-state-because": "{state} ({reason})",
    "job-accounted": "{state} (from the accounting)",
    "job-accounted-failed": "{state} with exit code {exit_code} (from the accounting)",
    "job-not-listed": "Slurm no longer lists the job",
    "request-pending": "sbatch was called at {time} and got no answer; Slurm lists no job of this run yet, but may "
    "still accept it",
    "request-not-accepted": "sbatch was called at {time} and got no answer; Slurm lists no job of this run",
    # ---- restart decisions -----------------------------------------------------------------------------------------
    "array-of-different-jobs": (
        "--array: the runs of the sweep do not request the same from Slurm: {options:list}",
        "Leave out --array: each run then has a job of its own.",
    ),
    "array-of-node-ranges": ("--array: cluster.nodes is a range", "Give one number of nodes, or leave out --array."),
    "array-partly-queued": (
        "some runs of the sweep {sweep} are queued in an array, and others are not",
        "Cancel them with `scaletrain cancel {sweep}`, and submit the sweep again.",
    ),
    "job-being-ended": "Slurm is ending the job, and decides whether to requeue it",
    "node-silent": "the node does not answer: it has lost its power or its network",
    "job-not-requeued": "Slurm did not requeue the job (the job's log contains the error); `scaletrain resume` "
    "continues the run",
    # ---- why a job is pending --------------------------------------------------------------------------------------
    "wait-not-considered": ("job {job} is pending: Slurm has not considered it yet", "Check again in a minute"),
    "wait-resources": ("job {job} is pending: it is first in the queue, and too few nodes are free", _SMALLER),
    "wait-priority": "job {job} is pending: jobs of higher priority are ahead of it",
    "wait-begin-time": "job {job} is pending: its start time is in the future; Slurm delays requeued jobs by a few "
    "minutes",
    "wait-dependency-never": (
        "job {job} is pending: it depends on a job that did not end as required",
        "scontrol update JobId={job} Dependency= removes the dependency",
        "Or `scaletrain cancel {run}` and resume",
    ),
    "wait-dependency": "job {job} is pending: it depends on another job that has not ended",
    "wait-held-by-admin": (
        "job {job} is pending: an administrator holds it",
        "Ask the administrator: only they can release it",
    ),
    "wait-held": (
        "job {job} is pending: its owner holds it, or Slurm does after a failed launch",
        "scontrol release {job}",
    ),
    "wait-beyond-partition": (
        "job {job} is pending: it requests more nodes, time or memory than its partition allows",
        "scontrol show partition shows the limits",
        _SMALLER,
        _OTHER_PARTITION,
    ),
    "wait-no-such-resources": (
        "job {job} is pending: no node, account or QOS matches its request",
        "Correct cluster.slurm in the spec: `scaletrain resume {run} --set ...` after `scaletrain cancel {run}`",
    ),
    "wait-beyond-limit-per-job": (
        "job {job} is pending: it requests more than its account or QOS allows per job or per node",
        "sacctmgr show assoc,qos shows the limits",
        _SMALLER,
    ),
    "wait-quota": (
        "job {job} is pending: the quota of its account, user or QOS is in use by other jobs, or smaller than this job",
        "squeue --account=... shows the jobs that use it; this job starts when they end",
        "If the job alone exceeds the limit, it never starts: sacctmgr show assoc,qos",
        _SMALLER,
    ),
    "wait-licenses": ("job {job} is pending: the licenses that it requests are in use", "scontrol show licenses"),
    "wait-shared-resources": "job {job} is pending: nodes or shared resources that it needs are not available now "
    "({word})",
    "wait-partition-down": (
        "job {job} is pending: its partition accepts no jobs now",
        "Ask the administrator",
        _OTHER_PARTITION,
    ),
    "wait-reservation": (
        "job {job} is pending: its reservation has not begun, or has ended",
        "scontrol show reservation",
        "None: `scaletrain cancel {run}`, then `scaletrain resume {run} --set cluster.slurm.reservation=null`",
    ),
    "wait-maintenance": (
        "job {job} is pending: with its time limit it would still run when maintenance starts",
        "scontrol show reservation shows when",
        "With a shorter cluster.slurm.time it may start before that",
    ),
    "wait-nodes-unavailable": (
        "job {job} is pending: nodes that it needs are down, drained or reserved",
        "sinfo --list-reasons shows why",
        "If cluster.slurm.nodelist or exclude leaves no other nodes, the job waits until they are available again",
    ),
    "wait-nodes-not-ready": "job {job} is pending: its nodes run a prolog, or clean up after an earlier attempt",
    "wait-unknown": "job {job} is pending: Slurm reports {word}, which this version does not recognize",
    "wait-no-answer": ("Slurm does not report why the job is pending", "scaletrain doctor"),
    "job-forgotten": (
        "Slurm no longer lists job {job}: it is not pending any more",
        "scaletrain status {run} shows how it ended, as far as it was recorded",
        "scaletrain resume {run}",
    ),
    "expected-start": "start expected at {start}, if nothing changes",
    "nodes-by-state": "{counts}; {usable} usable",
    "jobs-ahead": "{ahead} of {pending} pending jobs are ahead of it",
    "no-accounting": "Slurm no longer lists job {job}, and its accounting has no record of it",
    "resume-suspended": "scontrol resume {job} (for operators); if it is STOPPED, scancel --signal=CONT {job}",
    # ---- preflight: the estimated start ----------------------------------------------------------------------------
    "estimate": "Slurm's estimate (sbatch --test-only)",
    "estimate-on": "Slurm's estimate (sbatch --test-only) on {nodes} of {partition}",
    "estimate-with-hidden": "{estimate}, which includes reservations that are hidden from you",
    "estimate-may-slip": "{estimate}; jobs of higher priority may start before it",
    "no-estimate": "sbatch --test-only gave no start time",
    "start-on-hold": "the job is submitted on hold (cluster.slurm.extra); `scontrol release` lets it start",
    # ---- preflight: what can never run -----------------------------------------------------------------------------
    "never-runs": "Slurm can never run this job as requested. Nothing was queued",
    "refused": "Slurm refuses this job. Nothing was queued",
    "refused-value": ("{said}", "Correct it, or leave it out"),
    "no-default-partition": ("this cluster has no default partition", "Set it to one of {partitions:list}"),
    "unknown-partition": ("this cluster has the partitions {partitions:list}", "Use one of these"),
    "misspelled-partition": ("this cluster has the partitions {partitions:list}", "Did you mean {near}?"),
    "account-not-yours": (
        "{user} may use the accounts {accounts:list}",
        "Use one of these, or ask an administrator to add you",
    ),
    "qos-not-yours": ("{user} may use the QOS {qos:list} in account {account}", "Use one of these, or another account"),
    "partition-closed": ("the partition is {state} and accepts no jobs", "Use another partition, or wait"),
    "partition-admits-only": (
        "partition {partition} accepts only {allowed:list}",
        "Set cluster.slurm.{what} or cluster.slurm.partition",
    ),
    "partition-denies": (
        "partition {partition} does not accept {mine}",
        "Set cluster.slurm.{what} or cluster.slurm.partition",
    ),
    "beyond-max-time": (
        "jobs of partition {partition} may run for {most} (MaxTime)",
        "Set it to {most} or less: a requeued run continues from its latest checkpoint",
    ),
    "beyond-max-nodes": (
        "a job of partition {partition} may have at most {most:of node} (MaxNodes)",
        "Request fewer, or use another partition",
    ),
    "below-min-nodes": (
        "a job of partition {partition} must have at least {least:of node} (MinNodes)",
        "Request more, or use another partition",
    ),
    "nodes-of-other-partition": ("{nodes:list} not in partition {partition}", "Name nodes of that partition"),
    "too-few-nodes": ("partition {partition} has {count:of node}", "Request at most {most}"),
    "too-few-fitting-nodes": (
        "partition {partition} has {count:of node} with enough resources for the job",
        "Request at most {most}",
    ),
    "too-few-nodes-without-excluded": (
        "partition {partition} has {count:of node} for the job, without those in exclude ({excluded})",
        "Request at most {most}",
    ),
    "gpu-type-elsewhere": (
        "no node of partition {partition} has GPUs of this type; it has {types:list}",
        "Use one of these, or another partition",
    ),
    "no-gpus": (
        "no node of partition {partition} has GPUs that Slurm manages",
        "Use another partition, or set cluster.slurm.gpu_request: none if jobs get whole nodes with their GPUs",
    ),
    "too-little-gres": (
        "nodes of partition {partition} do not have it; their generic resources: {gres:list}",
        "Request less, or use another partition",
    ),
    "too-many-gpus": (
        "nodes of partition {partition} have at most {most:of GPU}",
        "Request {most} per node and more nodes",
    ),
    "too-many-gpus-of-type": (
        "nodes of partition {partition} have at most {most:of GPU} of type {type}",
        "Request {most} per node and more nodes, or another type",
    ),
    "several-gpu-types": (
        "nodes that fit the job have GPUs of different types, {types:list}: without a type, Slurm may give it several",
        "Set it to the type of {gpu}",
        "Or name a partition, constraint or nodelist with GPUs of one type",
    ),
    "several-gpu-types-with-own": (
        "nodes that fit the job have GPUs of different types, {types:list}: without a type, Slurm may give it several",
        "Set it to {type} for {gpu}",
        "Or name a partition, constraint or nodelist with GPUs of one type",
    ),
    "too-many-cpus": (
        "nodes of partition {partition} have at most {most} CPUs; the job requests {requested} on each",
        "Set it to {enough}",
    ),
    "too-many-cpus-for-one": (
        "nodes of partition {partition} have at most {most} CPUs; the job requests {requested} on each",
        "Leave it out, or request fewer ranks per node",
    ),
    "too-much-memory": ("nodes of partition {partition} have at most {most} MiB", "Set it to {most}MiB or less"),
    "below-least-request": (
        "a job of {owner} must request at least {allowed:g} {resource} ({kind})",
        "Request more, or use another account or QOS",
    ),
    "beyond-wall-time": (
        "{owner} allows jobs of at most {most} ({kind})",
        "Set it to {most} or less, or use another account or QOS",
    ),
    "beyond-quota-per-node": (
        "{owner} may use {allowed:g} {resource} on each node ({kind})",
        "Request less, or use another account or QOS",
    ),
    "beyond-quota-per-job": (
        "{owner} may use {allowed:g} {resource} in one job ({kind})",
        "Request less, or use another account or QOS",
    ),
    "beyond-quota-at-once": (
        "{owner} may use {allowed:g} {resource} at the same time ({kind})",
        "Request less, or use another account or QOS",
    ),
    "qos-needs-reservation": (
        "QOS {qos} accepts only jobs in a reservation (RequiresReservation)",
        "Name one, or use another QOS",
    ),
    "unknown-reservation": ("this cluster has the reservations {reservations:list}", "Use one of them, or none"),
    "no-reservations": ("this cluster has no reservations now", "Remove the key"),
    "no-activate-script": (
        "there is no such file",
        "Name the script that sets up Python on the nodes; its arguments are slurm.activate_arguments",
    ),
    "no-image": ("there is no such file", "Name an image"),
    "no-mount-source": ("{source} does not exist", "Name a folder of the nodes"),
    # ---- preflight: what only waits, or should be known ------------------------------------------------------------
    "note-plugin-may-change": "{subject}: {problem}. A job_submit plugin of the cluster may change the value",
    "note-several-gpu-types": "cluster.slurm.gres_type is not set, and nodes that fit the job have GPUs of different "
    "types, {types:list}: Slurm may give it several, unless a job_submit plugin of the cluster sets a type",
    "note-proxy-with-password": (
        "the job does not get {names:list}: its URL has a password, which Slurm would store",
        "Name it in secret_env",
    ),
    "note-options-in-environment": (
        "sbatch gets no options from {names:list} here",
        "Set the keys of cluster.slurm instead, and SLURM_CONF for another cluster",
    ),
    "note-no-reserve": "QOS {qos} reserves no nodes for a pending job (NoReserve): smaller jobs may take every node "
    "that becomes free until {nodes} are free at the same time",
    "note-partition-not-up": "partition {partition} is {state}: jobs wait until it is UP again",
    "note-nodes-down": "{usable} of {fitting} nodes of {partition} that fit the job are usable ({down:list}): it "
    "waits for {nodes}",
    "note-quota-in-use": "{owner} has {used:g} of its {allowed:g} {resource} in use ({kind}): the job waits for "
    "{requested:g}",
    "note-budget-used-up": "{owner} has used up its {allowed:g} minutes of {resource} ({kind}): the job waits until "
    "the usage is reset",
    "note-qos-needs-reservation": "QOS {qos} accepts only jobs in a reservation (RequiresReservation). A job_submit "
    "plugin of the cluster may set one",
    "note-reservations-unknown": "scontrol show reservation did not answer: it is not known whether reservation "
    "{reservation} exists, or whether maintenance is planned",
    "note-maintenance-unknown": "scontrol show reservation did not answer: it is not known whether maintenance is "
    "planned",
    "note-reservation-hidden": "it is not known whether reservation {reservation} exists: Slurm shows only those that "
    "you may use (PrivateData)",
    "note-reservation-ends": "reservation {reservation} ends at {until}, before the time limit of the job: the run "
    "then saves its state, and its job waits until the reservation has begun again or has been extended",
    "note-reservation-small": "reservation {reservation} has {count:of node} that fit the job",
    "note-test-refused": "sbatch --test-only answers `{said}`, as it does for some jobs that start; the nodes that "
    "Slurm lists fit this job",
    "note-reserved": "{what} {name} takes {count} nodes of {partition} from {began} to {until}: the job waits until "
    "it is over",
    "note-reserved-later": "{what} {name} takes {count} nodes of {partition} from {began} to {until}: the job waits "
    "until it is over, unless cluster.slurm.time is at most {before}",
    "note-preemption-cancels": "jobs of {where} are cancelled when they are preempted (PreemptMode={mode}): "
    "`scaletrain resume` continues the run",
    "note-preemption-suspends": "jobs of {where} are suspended when they are preempted (PreemptMode={mode}): the job "
    "keeps its memory and waits",
    "note-grace-too-short": "cluster.grace_seconds = {requested:g}, but {where} gives a preempted job {granted:g} s "
    "({source}). Set it to {granted:g}: a checkpoint that is not complete by then is lost",
    # ---- status --cluster ------------------------------------------------------------------------------------------
    "nodes-out-of-order": "out of order: {nodes:list}",
    # ---- submit --probe --------------------------------------------------------------------------------------------
    "runs-root-unwritable": "the runs root {root} cannot be written here: {error}",
    "probe-refused": "Slurm refused the probe: {error}",
    "probe-not-started": (
        "Slurm did not start the probe on {nodes:of node} within {minutes:.0f} min",
        "Submit without --probe",
    ),
    "wrong-nodes": "the nodes do not match the plan. Nothing was queued",
    "probe-no-answer": (
        "no answer: the runs root {root}, or Python and this package, are not at the same path there as here",
        _SHARED_FOLDER,
    ),
    "probe-no-answer-because": (
        "no answer: the runs root {root}, or Python and this package, are not at the same path there as here. Slurm "
        "reports: {said}",
        _SHARED_FOLDER,
    ),
}
