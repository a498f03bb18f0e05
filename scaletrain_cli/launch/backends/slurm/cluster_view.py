"""The view of a Slurm cluster: sinfo, squeue and the quotas of this user, as rows that all back ends share."""

import re
from collections import Counter
from collections.abc import Sequence

from scaletrain_cli.launch.backends.cluster_view import ClusterView, GpuRow, NodesRow, QueueRow, QuotaRow
from scaletrain_cli.launch.backends.slurm.queue import job_state
from scaletrain_cli.launch.backends.slurm.site import Site
from scaletrain_cli.launch.backends.slurm.tables import AT_LEAST, Node, gpus, moment, resource_in_words
from scaletrain_cli.reasons import Reason

# Answers to `squeue --format=QUEUE`: job, user, state, reason, priority, nodes, GPUs per node, start, partition, name.
QUEUE = "%A|%u|%T|%r|%Q|%D|%b|%S|%P|%j"
_RUNNING = ("RUNNING", "COMPLETING", "CONFIGURING")


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
        others_running=sum(row[2] in _RUNNING for row in others),
        others_queued=sum(row[2] == "PENDING" for row in others),
        warnings=(Reason("slurm.nodes-out-of-order", {"nodes": down}),) if down else (),
    )


def _gpu_rows(nodes: Sequence[Node]) -> tuple[GpuRow, ...]:
    kinds = list(dict.fromkeys(kind for node in nodes for kind in node.gpus))
    found = []
    for kind in kinds:
        having = [node for node in nodes if node.gpus.get(kind)]
        usable = [node for node in having if node.is_usable]
        total = sum(node.gpus[kind] for node in having)
        in_order = sum(node.gpus[kind] for node in usable)
        used = sum(min(node.gpus[kind], node.gpus_used.get(kind, 0)) for node in usable)
        found.append(
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
    return tuple(found)


def _mine(rows: Sequence[Sequence[str]], user: str) -> tuple[QueueRow, ...]:
    waiting = sorted((row for row in rows if row[2] == "PENDING"), key=_order)
    found = []
    for row in [row for row in rows if row[1] == user and row[2] in (*_RUNNING, "SUSPENDED")] + [
        row for row in waiting if row[1] == user
    ]:
        job_id, _, state, reason, _, nodes, per_node, start, partition, name = row
        queued = state == "PENDING"
        ahead = [other for other in waiting if other[8] == partition and _order(other) < _order(row)]
        # gres:gpu:h100:8; none if the job requested none that way
        counts = gpus(per_node.replace("gres:", "").replace("gres/", ""))
        found.append(
            QueueRow(
                job_id=job_id,
                name=name,
                state="queued" if queued else job_state(state),
                queue=partition,
                nodes=int(nodes) if nodes.isdigit() else 0,
                gpus=sum(counts.values()) * int(nodes) if counts and nodes.isdigit() else None,
                ahead=len(ahead) if queued else None,
                reason="" if reason == "None" else reason,
                start=moment(start),
            )
        )
    return tuple(found)


def _order(row: Sequence[str]) -> tuple[int, int]:
    """Return the scheduler's sort key: priority, highest first, then age."""
    return -int(row[4]) if row[4].isdigit() else 0, int(re.sub(r"\D.*", "", row[0]) or 0)
