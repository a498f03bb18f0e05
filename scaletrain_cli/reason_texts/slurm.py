"""The texts of the Slurm back end."""

from __future__ import annotations

from scaletrain_cli.reasons import Text

_SMALLER = "Request less: `scaletrain cancel {run}`, then `scaletrain resume {run} --nodes N`"
_ELSEWHERE = "`scaletrain cancel {run}`, then `scaletrain resume {run} --set cluster.slurm.partition=...`"

TEXTS: dict[str, Text] = {
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
}
