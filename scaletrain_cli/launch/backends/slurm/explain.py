"""What Slurm still knows of a job: why it waits, or how it ended. Asks squeue, scontrol, sinfo and, if it is on, sacct.

Every answer may be missing: a controller forgets a job after minutes, and many sites keep no accounting.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.backends.slurm.commands import call_slurm
from scaletrain_cli.launch.finding import Evidence, Finding
from scaletrain_cli.launch.logs import last_error

# What Slurm's reasons for not starting a job mean, and what to do about each.


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


_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=")
_USABLE = ("idle", "mix", "alloc", "comp", "plnd", "resv")
_NO_TIME = ("Unknown", "N/A", "")


def why_it_waits(job_id: str, run_id: str) -> Finding:
    """Of a job in the queue. Raises SchedulerError when Slurm does not answer."""
    told = job_fields(job_id)
    if not told:
        actions = (f"scaletrain status {run_id} shows what is known of its end", f"scaletrain resume {run_id}")
        return Finding("not-known", f"Slurm no longer knows job {job_id}: it is not waiting any more", (), actions)
    word = told.get("Reason", "None")
    reason = queue_reason(word)
    return Finding(
        cause=reason.cause,
        headline=f"job {job_id} waits: {reason.meaning}",
        evidence=tuple(_of_the_queue(job_id, word, told)),
        actions=tuple(action.format(job=job_id, run=run_id) for action in reason.actions),
        waits_for_ever=reason.for_ever,
    )


def how_it_ended(job_id: str, log: Path) -> Iterator[Evidence]:
    """What there is to find of a job that is over: the controller's word or the accounting's, and the job's log."""
    try:
        told = job_fields(job_id)
        names = ("JobState", "Reason", "ExitCode", "RunTime", "EndTime", "NodeList")
        if told:
            yield Evidence(f"scontrol show job {job_id}", _listed(told, names))
        else:
            yield from _of_the_accounting(job_id)
    except SchedulerError as error:
        yield Evidence("Slurm", error.message)
    if words := last_error(log):
        yield Evidence(log.name, words)


def job_fields(job_id: str) -> dict[str, str]:
    """``scontrol show job`` as a dictionary; empty when Slurm no longer knows the job."""
    return parse_fields(call_slurm(["scontrol", "-o", "show", "job", job_id], accept=("Invalid job id",)).stdout)


def parse_fields(text: str) -> dict[str, str]:
    """``A=1 B=two words C=3`` as Slurm prints it on one line: a value may hold blanks, a name may not."""
    text = text.strip()
    starts = [(match.start(1), match.end(), match[1]) for match in _FIELD.finditer(text)]
    ends = [*(start for start, _, _ in starts[1:]), len(text)]
    return {name: text[value:end].strip() for (_, value, name), end in zip(starts, ends, strict=False)}


def _of_the_queue(job_id: str, word: str, told: dict[str, str]) -> Iterator[Evidence]:
    yield Evidence(f"scontrol show job {job_id}", f"Reason={word}")
    if told:
        asked = ("Partition", "Account", "QOS", "NumNodes", "TresPerNode", "TRES", "TimeLimit", "Dependency")
        yield Evidence("it asks for", _listed(told, asked))
    partition = told.get("Partition", "")
    if partition:
        yield from _nodes_of(partition)
        yield from _ahead_of(job_id, partition)
    if (start := told.get("StartTime", "")) not in _NO_TIME:
        yield Evidence("Slurm expects", f"a start at {start}, if nothing changes")


def _nodes_of(partition: str) -> Iterator[Evidence]:
    answer = call_slurm(["sinfo", "--noheader", f"--partition={partition}", "--format=%D|%t"])
    rows = [line.strip().split("|") for line in answer.stdout.splitlines() if line.count("|") == 1]
    if rows:
        counts = ", ".join(f"{count} {state}" for count, state in rows)
        usable = sum(int(count) for count, state in rows if state.rstrip("*~#!%$@^-").startswith(_USABLE))
        yield Evidence(f"sinfo, partition {partition}", f"{counts}; {usable} that could run something")


def _ahead_of(job_id: str, partition: str) -> Iterator[Evidence]:
    """Pending jobs that Slurm looks at first. The list comes in that order."""
    command = ["squeue", "--noheader", "--states=pending", f"--partition={partition}", "--sort=-p,i", "--format=%A"]
    waiting = call_slurm(command).stdout.split()
    if job_id in waiting:
        ahead = waiting.index(job_id)
        yield Evidence(f"squeue, partition {partition}", f"{ahead} of {len(waiting)} waiting jobs are ahead of it")


def _of_the_accounting(job_id: str) -> Iterator[Evidence]:
    command = ["sacct", "-n", "-P", "-X", "-D", "-j", job_id, "-o", "State,ExitCode,NodeList,Start,End"]
    try:
        rows = call_slurm(command).stdout.split()
    except SchedulerError:
        rows = []
    if not rows:
        yield Evidence("Slurm", f"it no longer knows job {job_id} and keeps no accounting of it")
    for row in rows[-3:]:
        yield Evidence(f"sacct -j {job_id}", row.replace("|", ", "))


def _listed(told: dict[str, str], names: tuple[str, ...]) -> str:
    return ", ".join(f"{name}={told[name]}" for name in names if told.get(name, "") not in ("", "(null)", "None"))
