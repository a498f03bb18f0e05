"""The texts of the Slurm back end."""

from __future__ import annotations

from scaletrain_cli.reasons import Text

_SMALLER = "Request less: `scaletrain cancel {run}`, then `scaletrain resume {run} --nodes N`"
_ELSEWHERE = "`scaletrain cancel {run}`, then `scaletrain resume {run} --set cluster.slurm.partition=...`"

TEXTS: dict[str, Text] = {
    # ---- Slurm's commands ------------------------------------------------------------------------------------------
    "no-command": Text("{command} is not on this machine", ("Submit from a login node, or use scheduler: local",)),
    "no-answer": Text("{command} did not answer within {seconds:.0f} s"),
    "answer-lost": Text("{command} got no answer from Slurm: {said}"),
    "command-failed": Text("{command} failed: {said}"),
    # ---- submit and cancel -----------------------------------------------------------------------------------------
    "nothing-queued": Text("{failure}. Nothing was queued"),
    "older-job": Text("job {job} of {run} still exists with an older layout", ("Run scancel {job} first",)),
    "earlier-submission-open": Text(
        "the last sbatch for {run} gave no answer, and Slurm may still accept its job. Nothing was queued",
        ("Submit again in {minutes} min, if `scaletrain status {run}` shows no job until then",),
    ),
    "submission-unknown": Text(
        "{failure}. Whether Slurm accepted the job of {run} is not known",
        (
            "`scaletrain status {run}` finds it if it did, `scaletrain cancel {run}` ends it, and the same submit with "
            "--run-id {run} makes no second one",
        ),
    ),
    "job-of-other-user": Text(
        "job {job} of {run} belongs to {user}, and may not be cancelled from here: {failure}. Nothing was changed"
    ),
    "cannot-resume-suspended": Text(
        "job {job} of {run} is suspended, so its ranks cannot save, and it cannot be resumed from here: {failure}. "
        "Nothing was changed",
        (
            "Ask an operator for `scontrol resume {job}`, then cancel again; or end it with `scancel {job}`, which "
            "loses what was trained since its latest checkpoint",
        ),
    ),
    "path-with-patterns": Text(
        "{path}: Slurm interprets % and \\ in the path of a job's log", ("Move the runs root: $SCALETRAIN_RUNS",)
    ),
    "cancel-unanswered": Text(
        "{failure}. The stop file of the run is set all the same: its nodes read it within seconds and stop the run"
    ),
    # ---- the job of a run ------------------------------------------------------------------------------------------
    "never-submitted": Text("never submitted"),
    "job-state": Text("{state}"),
    "job-state-because": Text("{state} ({reason})"),
    "job-accounted": Text("{state} (from the accounting)"),
    "job-not-listed": Text("Slurm no longer lists the job"),
    "request-pending": Text(
        "sbatch was called at {asked} and did not answer; Slurm lists no job of this run yet, but may still accept it"
    ),
    "request-lost": Text("sbatch was called at {asked} and did not answer; Slurm lists no job of this run"),
    # ---- the estimated start ---------------------------------------------------------------------------------------
    "estimate": Text("Slurm's estimate (sbatch --test-only)"),
    "estimate-on": Text("Slurm's estimate (sbatch --test-only) on {nodes} of {partition}"),
    "estimate-with-hidden": Text("{estimate}, which includes reservations that are hidden from you"),
    "estimate-may-slip": Text("{estimate}; jobs of higher priority may start before it"),
    "no-estimate": Text("sbatch --test-only gave no start time"),
    "start-on-hold": Text("the job is submitted on hold (cluster.slurm.extra); `scontrol release` lets it start"),
    # ---- restart decisions -----------------------------------------------------------------------------------------
    "job-being-ended": Text("Slurm is ending the job, and it alone decides whether the job is queued again"),
    "job-not-requeued": Text(
        "Slurm did not requeue the job (the log of the job shows why); `scaletrain resume` continues the run"
    ),
    # ---- why a job is pending --------------------------------------------------------------------------------------
    "wait-not-considered": Text("job {job} is pending: Slurm has not considered it yet", ("Check again in a minute",)),
    "wait-resources": Text("job {job} is pending: it is next, and too few nodes are free now", (_SMALLER,)),
    "wait-priority": Text("job {job} is pending: jobs of higher priority, or older ones, are ahead of it"),
    "wait-begin-time": Text(
        "job {job} is pending: its start time is in the future; Slurm delays requeued jobs for a while"
    ),
    "wait-dependency-never": Text(
        "job {job} is pending: it depends on a job that did not end as required",
        ("scontrol update JobId={job} Dependency= removes the dependency", "Or `scaletrain cancel {run}` and resume"),
    ),
    "wait-dependency": Text("job {job} is pending: it depends on the end of another job"),
    "wait-held-by-admin": Text(
        "job {job} is pending: an administrator holds it", ("Ask the administrator: only they can release it",)
    ),
    "wait-held": Text(
        "job {job} is pending: it is held, by its owner or after a failed launch", ("scontrol release {job}",)
    ),
    "wait-beyond-partition": Text(
        "job {job} is pending: it requests more nodes, time or memory than its partition allows",
        ("scontrol show partition shows the limits", _SMALLER, _ELSEWHERE),
    ),
    "wait-no-such-resources": Text(
        "job {job} is pending: no node, account or QOS matches its request",
        ("Correct cluster.slurm in the spec: `scaletrain resume {run} --set ...` after `scaletrain cancel {run}`",),
    ),
    "wait-beyond-limit-per-job": Text(
        "job {job} is pending: it requests more than its account or QOS allows one job",
        ("sacctmgr show assoc,qos shows the limits", _SMALLER),
    ),
    "wait-quota": Text(
        "job {job} is pending: the quota of its account, user or QOS is in use by other jobs, or smaller than this job",
        (
            "squeue --account=... shows who uses it; the job starts when they end",
            "If the job alone is larger than the limit, it never starts: sacctmgr show assoc,qos",
            _SMALLER,
        ),
    ),
    "wait-licenses": Text(
        "job {job} is pending: the licenses that it requests are in use", ("scontrol show licenses",)
    ),
    "wait-partition-down": Text(
        "job {job} is pending: its partition accepts no jobs now", ("Ask the administrator", _ELSEWHERE)
    ),
    "wait-reservation": Text("job {job} is pending: its reservation has not started", ("scontrol show reservation",)),
    "wait-maintenance": Text(
        "job {job} is pending: its time limit reaches into a maintenance",
        ("scontrol show reservation shows when", "A shorter cluster.slurm.time may fit before it"),
    ),
    "wait-nodes-unavailable": Text(
        "job {job} is pending: nodes that it needs are down, drained or reserved",
        (
            "sinfo --list-reasons shows why",
            "If cluster.slurm.nodelist or exclude leaves no other nodes, it waits until these are back",
        ),
    ),
    "wait-nodes-not-ready": Text("job {job} is pending: its nodes are being prepared, or cleaned up after it"),
    "wait-unknown": Text("job {job} is pending: Slurm reports {word}, which this version does not know"),
    "wait-no-answer": Text("Slurm does not report why the job is pending", ("scaletrain doctor",)),
    "job-forgotten": Text(
        "Slurm no longer knows job {job}: it is not pending any more",
        ("scaletrain status {run} shows what is known of its end", "scaletrain resume {run}"),
    ),
    "expected-start": Text("start expected at {start}, if nothing changes"),
    "nodes-by-state": Text("{counts}; {usable} usable"),
    "jobs-ahead": Text("{ahead} of {pending} pending jobs are ahead of it"),
    "no-accounting": Text("Slurm no longer knows job {job}, and its accounting has no record of it"),
    "resume-suspended": Text("scontrol resume {job} (for operators of the cluster)"),
    # ---- preflight: what can never run -----------------------------------------------------------------------------
    "never-runs": Text("Slurm can never run this job as requested. Nothing was queued"),
    "refused": Text("Slurm refuses this job. Nothing was queued"),
    "refused-value": Text("{said}", ("Correct it, or leave it out",)),
    "no-default-partition": Text("this cluster has no default partition", ("Set it to one of {partitions:list}",)),
    "unknown-partition": Text("this cluster has the partitions {partitions:list}", ("Use one of these",)),
    "misspelled-partition": Text("this cluster has the partitions {partitions:list}", ("Did you mean {near}?",)),
    "account-not-yours": Text("{user} may charge {accounts:list}", ("Use one of these, or ask to be added",)),
    "qos-not-yours": Text("{user} may use {qos:list} in account {account}", ("Use one of these, or another account",)),
    "partition-closed": Text("is {state} and takes no jobs", ("Use another, or wait",)),
    "partition-admits-only": Text(
        "partition {partition} admits only {allowed:list}", ("Set cluster.slurm.{what} or cluster.slurm.partition",)
    ),
    "partition-denies": Text(
        "partition {partition} does not admit {mine}", ("Set cluster.slurm.{what} or cluster.slurm.partition",)
    ),
    "beyond-max-time": Text(
        "jobs of {partition} may last {most} (MaxTime)",
        ("Set it to {most} or less: a requeued run continues from its latest checkpoint",),
    ),
    "beyond-max-nodes": Text(
        "a job of {partition} may have {most} nodes (MaxNodes)", ("Request fewer, or use another partition",)
    ),
    "below-min-nodes": Text(
        "a job of {partition} must have {least} nodes (MinNodes)", ("Request more, or use another partition",)
    ),
    "nodes-of-other-partition": Text("{nodes:list} not in partition {partition}", ("Name nodes of that partition",)),
    "too-few-nodes": Text("partition {partition} has {count:of node}", ("Request {most} at most",)),
    "too-few-fitting-nodes": Text(
        "partition {partition} has {count:of node} with enough resources for the job", ("Request {most} at most",)
    ),
    "too-few-nodes-without-excluded": Text(
        "partition {partition} has {count:of node} for the job, without those in exclude ({excluded})",
        ("Request {most} at most",),
    ),
    "gpu-type-elsewhere": Text(
        "no node of partition {partition} has GPUs of this type; there are {types:list}",
        ("Use one of these, or another partition",),
    ),
    "no-gpus": Text("no node of partition {partition} has GPUs", ("Use another partition",)),
    "too-many-gpus": Text(
        "nodes of partition {partition} have {most:of GPU}", ("Request {most} per node and more nodes",)
    ),
    "too-many-cpus": Text(
        "nodes of {partition} have {most} CPUs; the job requests {asked} on each", ("Set it to {enough}",)
    ),
    "too-many-cpus-for-one": Text(
        "nodes of {partition} have {most} CPUs; the job requests {asked} on each",
        ("Leave it out, or request fewer ranks per node",),
    ),
    "too-much-memory": Text("nodes of partition {partition} have {most} MiB", ("Set it to {most}MiB or less",)),
    "below-least-request": Text(
        "a job of {owner} must request at least {allowed:g} {resource} ({kind})",
        ("Request more, or use another account or QOS",),
    ),
    "beyond-wall-time": Text(
        "{owner} allows jobs of {most} ({kind})", ("Set it to {most} or less, or use another account or QOS",)
    ),
    "beyond-quota-per-node": Text(
        "{owner} may hold {allowed:g} {resource} on each node ({kind})",
        ("Request less, or use another account or QOS",),
    ),
    "beyond-quota-per-job": Text(
        "{owner} may hold {allowed:g} {resource} in a job ({kind})", ("Request less, or use another account or QOS",)
    ),
    "beyond-quota-at-once": Text(
        "{owner} may hold {allowed:g} {resource} at once ({kind})", ("Request less, or use another account or QOS",)
    ),
    "qos-needs-reservation": Text(
        "QOS {qos} is only for jobs in a reservation (RequiresReservation)", ("Name one, or use another QOS",)
    ),
    "unknown-reservation": Text("this cluster has {reservations:list}", ("Use one of these, or none",)),
    "no-reservations": Text("this cluster has no reservations now", ("Use none",)),
    # ---- preflight: what only waits, or should be known ------------------------------------------------------------
    "note-plugin-may-change": Text("{subject}: {problem}. A plugin of the site may change that"),
    "note-no-reserve": Text(
        "QOS {qos} reserves no nodes for a pending job (NoReserve): smaller jobs may take every node that becomes free "
        "until {nodes} are free at once"
    ),
    "note-partition-not-up": Text("partition {partition} is {state}: jobs wait until it is UP again"),
    "note-nodes-down": Text(
        "{usable} of {fitting} nodes of {partition} that fit the job are usable ({down:list}): it waits for {nodes}"
    ),
    "note-quota-in-use": Text(
        "{owner} has {used:g} of its {allowed:g} {resource} in use ({kind}): the job waits for {asked:g}"
    ),
    "note-budget-used-up": Text("{owner} has used up its {allowed:g} minutes of {resource} ({kind})"),
    "note-qos-needs-reservation": Text(
        "QOS {qos} is only for jobs in a reservation (RequiresReservation). A plugin of the site may name one"
    ),
    "note-reservations-unknown": Text(
        "whether reservation {reservation} exists, or maintenance is ahead, is not known: scontrol show reservation "
        "did not answer"
    ),
    "note-maintenance-unknown": Text(
        "whether maintenance is ahead is not known: scontrol show reservation did not answer"
    ),
    "note-reservation-hidden": Text(
        "whether reservation {reservation} exists is not known: Slurm shows only those that you may use (PrivateData)"
    ),
    "note-reserved": Text(
        "{what} {name} takes {count} nodes of {partition} from {began} to {until}: the job waits until it is over"
    ),
    "note-reserved-later": Text(
        "{what} {name} takes {count} nodes of {partition} from {began} to {until}: the job waits until it is over, "
        "unless cluster.slurm.time lets it end before that (at most {before})"
    ),
    "note-preemption-cancels": Text(
        "{where} cancels the jobs that it preempts (PreemptMode={mode}): `scaletrain resume` continues the run"
    ),
    "note-preemption-suspends": Text(
        "{where} suspends the jobs that it preempts (PreemptMode={mode}): the job keeps its memory and waits"
    ),
    "note-grace-too-short": Text(
        "cluster.grace_seconds = {asked:g}, but {where} gives a preempted job {given:g} s ({source}): set it to "
        "{given:g}, or what is not saved by then is lost"
    ),
}
