"""Explain why a job is pending, or how it ended, from squeue, scontrol, sinfo and sacct; and the view of a cluster.

Any answer may be missing: the controller forgets a job after minutes (MinJobAge), and many sites have no accounting.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.backends.cluster_view import ClusterView, GpuRow, NodesRow, QueueRow, QuotaRow
from scaletrain_cli.launch.backends.slurm.commands import call_slurm
from scaletrain_cli.launch.backends.slurm.queue import job_state
from scaletrain_cli.launch.backends.slurm.site import Site
from scaletrain_cli.launch.backends.slurm.tables import (
    AT_LEAST,
    Node,
    gpus,
    is_usable,
    moment,
    records,
    resource_in_words,
)
from scaletrain_cli.launch.finding import Evidence, Finding
from scaletrain_cli.launch.logs import last_error
from scaletrain_cli.reasons import Reason, recorded

# Slurm's reasons of pending jobs, as regular expressions over the whole reason; the first match applies. Each has a
# cause, the code ``slurm.wait-<key>`` of its text and remedies, and whether waiting does not help.
_QUEUE_REASONS: tuple[tuple[str, str, str, bool], ...] = (
    (r"None|SchedDefer|FedJobLock|", "resources", "not-considered", False),
    ("Resources", "resources", "resources", False),
    ("Priority", "priority", "priority", False),
    ("BeginTime", "begin-time", "begin-time", False),
    ("DependencyNeverSatisfied", "dependency", "dependency-never", True),
    ("Dependency|JobArrayTaskLimit", "dependency", "dependency", False),
    ("JobHeldAdmin", "held", "held-by-admin", True),
    (
        "JobHeldUser|SystemHold|.*[Hh]eld.*|SPECIAL_EXIT|TooManyRequeues.*|JobHoldMaxRequeue|.*requeue limit.*",
        *("held", "held", True),
    ),
    ("PartitionNodeLimit|PartitionTimeLimit|PartitionConfig|MaxMemPerLimit", "never", "beyond-partition", True),
    (
        "BadConstraints|FrontEndDown|InvalidAccount|InvalidQOS|InvalidPartition.*|NodeFeature.*|AccountNotAllowed"
        "|QOSNotAllowed|AccountingPolicy.*|Association.*Invalid.*|QOSMin\\w*|.*MinCpuLimit.*|ReservationInvalid|DeadLine",
        *("never", "no-such-resources", True),
    ),
    (r"(Assoc|QOS)Max(\w*Per(Job|Node)|WallDuration)\w*", "never", "beyond-limit-per-job", True),
    (
        r"(Assoc|QOS)(Grp|Max)\w*|QOSUsageThreshold|Max\w+Per(Account|User)|ReachedMax\w*|.*Limit",
        *("quota", "quota", False),
    ),
    ("Licenses", "resources", "licenses", False),
    ("PartitionDown|PartitionInactive|Partition.*", "maintenance", "partition-down", False),
    ("Reservation|ReservationDeleted", "maintenance", "reservation", False),
    (r"ReqNodeNotAvail.*[Mm]aint.*|.*reserved for maintenance.*", "maintenance", "maintenance", False),
    (
        r"ReqNodeNotAvail.*|Nodes.required.for.job.are.DOWN.*|NodeDown.*|.*UnavailableNodes.*",
        *("node", "nodes-unavailable", False),
    ),
    ("Prolog|Cleaning|BurstBuffer\\w+", "resources", "nodes-not-ready", False),
    # Since Slurm 24.05, the last one since 25.11. Constraints: no usable node satisfies them at present.
    ("Constraints|MaxPoweredUpNodes|MpiPortsBusy|NvidiaImexChannels", "resources", "shared-resources", False),
)


@dataclass(frozen=True)
class QueueReason:
    """The meaning of one of Slurm's pending reasons. ``needs_action``: waiting does not help."""

    cause: str
    code: str
    needs_action: bool = False


def queue_reason(word: str) -> QueueReason:
    """Return the meaning of Slurm's reason; ``slurm.wait-unknown`` for one that is not in the table."""
    word = word.strip().strip("()")
    for pattern, cause, key, needs_action in _QUEUE_REASONS:
        if re.fullmatch(pattern, word):
            return QueueReason(cause, f"slurm.wait-{key}", needs_action)
    return QueueReason("unknown", "slurm.wait-unknown")


_NO_TIME = ("Unknown", "N/A", "")
_TRES = ("ReqTRES", "TRES")  # the second one before Slurm 23.02


def why_it_waits(job_id: str, run_id: str) -> Finding:
    """Return why a pending job waits. Raises SchedulerError when Slurm does not answer."""
    fields = job_fields(job_id)
    params = {"job": job_id, "run": run_id}
    if not fields:
        return Finding.because("not-known", Reason("slurm.job-forgotten", params))
    word = fields.get("Reason", "None")
    meaning = queue_reason(word)
    why = Reason(meaning.code, params | {"word": word.strip().strip("()")})
    evidence = tuple(_queue_evidence(job_id, word, fields))
    return Finding.because(meaning.cause, why, evidence, needs_action=meaning.needs_action)


def how_it_ended(job_id: str, log: Path) -> Iterator[Evidence]:
    """Yield the evidence about a job that is over, from the controller or the accounting, and from the job's log."""
    try:
        if fields := job_fields(job_id):
            names = ("JobState", "Reason", "ExitCode", "RunTime", "EndTime", "NodeList")
            yield Evidence(f"scontrol show job {job_id}", _listed(fields, names))
        else:
            command = ["sacct", "-n", "-P", "-X", "-D", "-j", job_id, "-o", "State,ExitCode,NodeList,Start,End"]
            rows: list[str] = []
            with contextlib.suppress(SchedulerError):
                rows = call_slurm(command).stdout.splitlines()
            if not rows:
                yield Evidence.because("Slurm", Reason("slurm.no-accounting", {"job": job_id}))
            for row in rows[-3:]:
                yield Evidence(f"sacct -j {job_id}", row.replace("|", ", "))
    except SchedulerError as error:
        yield Evidence.because("Slurm", error.reason or recorded(error.message))
    if text := last_error(log):
        yield Evidence(log.name, text)


def job_fields(job_id: str) -> dict[str, str]:
    """Return the fields of ``scontrol show job``; empty if Slurm no longer lists the job."""
    answer = call_slurm(["scontrol", "-o", "show", "job", job_id], accept=("Invalid job id",))
    return next(records(answer.stdout), {})


def _queue_evidence(job_id: str, word: str, fields: dict[str, str]) -> Iterator[Evidence]:
    yield Evidence(f"scontrol show job {job_id}", f"Reason={word}")
    requested = ("Partition", "Account", "QOS", "NumNodes", "TresPerNode", *_TRES, "TimeLimit", "Dependency")
    yield Evidence("requested", _listed(fields, requested))
    if partition := fields.get("Partition", ""):
        yield from _nodes_of(partition)
        # squeue lists pending jobs in the order in which Slurm considers them.
        order = ["--states=pending", f"--partition={partition}", "--sort=-p,i", "--array", "--format=%i"]
        waiting = call_slurm(["squeue", "--noheader", *order]).stdout.split()
        if job_id in waiting:
            why = Reason("slurm.jobs-ahead", {"ahead": waiting.index(job_id), "pending": len(waiting)})
            yield Evidence.because(f"squeue, partition {partition}", why)
    if (start := fields.get("StartTime", "")) not in _NO_TIME:
        yield Evidence.because("Slurm", Reason("slurm.expected-start", {"start": start}))


def _nodes_of(partition: str) -> Iterator[Evidence]:
    answer = call_slurm(["sinfo", "--noheader", f"--partition={partition}", "--format=%D|%t"])
    rows = [line.strip().split("|") for line in answer.stdout.splitlines() if line.count("|") == 1]
    if rows:
        counts = ", ".join(f"{count} {state}" for count, state in rows)
        usable = sum(int(count) for count, state in rows if is_usable(state))
        why = Reason("slurm.nodes-by-state", {"counts": counts, "usable": usable})
        yield Evidence.because(f"sinfo, partition {partition}", why)


def _listed(fields: dict[str, str], names: tuple[str, ...]) -> str:
    return ", ".join(f"{name}={fields[name]}" for name in names if fields.get(name, "") not in ("", "(null)", "None"))


# Answers to `squeue --format=QUEUE`: job, user, state, reason, priority, nodes, GPUs per node, start, partition, name.
QUEUE = "%A|%u|%T|%r|%Q|%D|%b|%S|%P|%j"


def make_view(site: Site, queue: str) -> ClusterView:
    rows = [line.split("|", 9) for line in queue.splitlines() if line.count("|") >= 9]
    others = [row for row in rows if row[1] != site.user]
    down = [f"{node.name} {node.state}" for node in site.nodes if not node.is_usable]
    return ClusterView(
        scheduler="slurm",
        cluster=site.config.get("ClusterName", ""),
        gpus=_gpu_rows(site.nodes),
        nodes=tuple(NodesRow(state, count) for state, count in Counter(node.state for node in site.nodes).items()),
        quotas=tuple(
            QuotaRow(
                limit.owner,
                limit.kind,
                "time of a job, seconds" if limit.resource == "seconds" else resource_in_words(limit.resource),
                limit.allowed,
                limit.used,
            )
            for limit in site.limits
            if limit.kind != AT_LEAST
        ),
        queue=_mine(rows, site.user),
        others_running=sum(job_state(row[2]) != "queued" for row in others),
        others_queued=sum(job_state(row[2]) == "queued" for row in others),
        warnings=(Reason("slurm.nodes-out-of-order", {"nodes": down}),) if down else (),
    )


def _gpu_rows(nodes: Sequence[Node]) -> tuple[GpuRow, ...]:
    kinds = list(dict.fromkeys(kind for node in nodes for kind in node.gpus))
    rows = []
    for kind in kinds:
        having = [node for node in nodes if node.gpus.get(kind)]
        usable = [node for node in having if node.is_usable]
        total = sum(node.gpus[kind] for node in having)
        in_order = sum(node.gpus[kind] for node in usable)
        used = sum(min(node.gpus[kind], node.gpus_used.get(kind, 0)) for node in usable)
        rows.append(
            GpuRow(
                type=kind or "gpu",
                total=total,
                used=used,
                free=in_order - used,
                out_of_order=total - in_order,
                nodes=len(having),
                free_nodes=sum(not node.gpus_used.get(kind) for node in usable),
            )
        )
    return tuple(rows)


def _mine(rows: Sequence[Sequence[str]], user: str) -> tuple[QueueRow, ...]:
    waiting = sorted((row for row in rows if row[2] == "PENDING"), key=_order)
    queue_rows = []
    for row in (*(row for row in rows if row[2] != "PENDING"), *waiting):
        job_id, owner, state, reason, _, nodes, per_node, start, partition, name = row
        if owner != user:
            continue
        ahead = [other for other in waiting if other[8] == partition and _order(other) < _order(row)]
        # gres:gpu:h100:8; none if the job requested none that way
        counts = gpus(per_node.replace("gres:", "").replace("gres/", ""))
        queue_rows.append(
            QueueRow(
                job_id=job_id,
                name=name,
                state=job_state(state),
                queue=partition,
                nodes=int(nodes) if nodes.isdigit() else 0,
                gpus=sum(counts.values()) * int(nodes) if counts and nodes.isdigit() else None,
                ahead=len(ahead) if state == "PENDING" else None,
                reason="" if reason == "None" else reason,
                start=moment(start),
            )
        )
    return tuple(queue_rows)


def _order(row: Sequence[str]) -> tuple[int, int]:
    """Return the scheduler's sort key: priority, highest first, then age."""
    return -int(row[4]) if row[4].isdigit() else 0, int(re.sub(r"\D.*", "", row[0]) or 0)
