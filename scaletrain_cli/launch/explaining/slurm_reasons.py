"""What Slurm's reasons for not starting a job mean, and what to do about each. Pure: Slurm's word in, ours out.

The words are those of squeue's NODELIST(REASON) (schedmd/slurm, src/common/slurm_protocol_defs.c, job_state_reason).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class QueueReason:
    """``meaning`` is a sentence without its full stop; ``actions`` hold ``{job}`` and ``{run}``."""

    cause: str
    meaning: str
    actions: tuple[str, ...] = ()
    for_ever: bool = False


_SMALLER = "Ask for less: `scaletrain cancel {run}`, then `scaletrain resume {run} --nodes N`"
_ELSEWHERE = "`scaletrain cancel {run}`, then `scaletrain resume {run} --set cluster.slurm.partition=...`"

# The first that matches the whole word counts.
_REASONS: tuple[tuple[str, QueueReason], ...] = (
    (r"None|", QueueReason("resources", "Slurm has not looked at it yet", ("Look again in a minute",))),
    ("Resources", QueueReason("resources", "it is next, and too few nodes are free now", (_SMALLER,))),
    ("Priority", QueueReason("priority", "jobs of higher priority, or older ones, are ahead of it")),
    ("BeginTime", QueueReason("begin-time", "it may not start yet; Slurm holds requeued jobs back for a while")),
    (
        "DependencyNeverSatisfied",
        QueueReason(
            "dependency",
            "it waits for a job that did not end as it had to",
            ("scontrol update JobId={job} Dependency= lets it go", "Or `scaletrain cancel {run}` and resume"),
            for_ever=True,
        ),
    ),
    ("Dependency|JobArrayTaskLimit", QueueReason("dependency", "it waits for another job to end")),
    (
        "JobHeldAdmin",
        QueueReason("held", "an administrator holds it", ("Ask the administrator: only they can release it",), True),
    ),
    (
        "JobHeldUser|SystemHold|.*[Hh]eld.*|SPECIAL_EXIT|TooManyRequeues.*|.*requeue limit.*",
        QueueReason("held", "it is held: by its owner, or after a failed launch", ("scontrol release {job}",), True),
    ),
    (
        "PartitionNodeLimit|PartitionTimeLimit|PartitionConfig",
        QueueReason(
            "never",
            "it asks for more than its partition ever gives: nodes, time or memory",
            ("scontrol show partition says what that is", _SMALLER, _ELSEWHERE),
            for_ever=True,
        ),
    ),
    (
        "BadConstraints|FrontEndDown|InvalidAccount|InvalidQOS|InvalidPartition.*|NodeFeature.*|AccountNotAllowed"
        "|QOSNotAllowed|AccountingPolicy.*|Association.*Invalid.*|QOSMinGRES|.*MinCpuLimit.*",
        QueueReason(
            "never",
            "no node, account or QOS is as it asks",
            ("Correct cluster.slurm in the spec: `scaletrain resume {run} --set ...` after `scaletrain cancel {run}`",),
            for_ever=True,
        ),
    ),
    (
        r"(Assoc|QOS)Max\w*(PerJob|Per_?Job)\w*|AssocMaxJobsLimit_never|QOSMax(GRES|Cpu|Node|Memory|WallDuration)PerJob"
        r"|AssocMaxWallDuration\w*|QOSMaxWallDuration\w*",
        QueueReason(
            "never",
            "it asks for more than its account or QOS lets one job have",
            ("sacctmgr show assoc,qos says how much that is", _SMALLER),
            for_ever=True,
        ),
    ),
    (
        r"(Assoc|QOS)(Grp|Max)\w*|MaxJobs\w*|ReachedMax\w*|.*Limit",
        QueueReason(
            "quota",
            "the share of its account, user or QOS is in use by other jobs, or smaller than this job",
            (
                "squeue --account=... shows who uses it; it goes on when they end",
                "Where the job alone is larger than the limit it waits for ever: sacctmgr show assoc,qos",
                _SMALLER,
            ),
        ),
    ),
    (
        "Licenses",
        QueueReason("resources", "the licences that it asks for are in use", ("scontrol show licenses",)),
    ),
    (
        "PartitionDown|PartitionInactive|Partition.*",
        QueueReason("maintenance", "its partition takes no jobs now", ("Ask the administrator", _ELSEWHERE)),
    ),
    (
        "Reservation|ReservationDeleted",
        QueueReason("maintenance", "it waits for its reservation", ("scontrol show reservation",)),
    ),
    (
        r"ReqNodeNotAvail.*[Mm]aint.*|.*reserved for maintenance.*",
        QueueReason(
            "maintenance",
            "its time limit reaches into a maintenance",
            ("scontrol show reservation says when", "A shorter cluster.slurm.time may fit in before it"),
        ),
    ),
    (
        r"ReqNodeNotAvail.*|Nodes.required.for.job.are.DOWN.*|NodeDown.*|.*UnavailableNodes.*",
        QueueReason(
            "node",
            "nodes that it needs are down, drained or reserved",
            (
                "sinfo --list-reasons says why",
                "Where cluster.slurm.nodelist or exclude leaves no others, it waits until these are back",
            ),
        ),
    ),
    ("Prolog|Cleaning", QueueReason("resources", "its nodes are being made ready, or cleaned up after it")),
)


def queue_reason(word: str) -> QueueReason:
    """The meaning of Slurm's word; of one that is not known, the word itself."""
    word = word.strip().strip("()")
    for pattern, reason in _REASONS:
        if re.fullmatch(pattern, word):
            return reason
    return QueueReason("unknown", f"Slurm says {word}, which this version does not know")
