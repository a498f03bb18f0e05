"""The state of a cluster, the same for every back end: GPUs by type, nodes by state, quotas, the queue. Types only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

SCHEMA = "scaletrain.cluster/v1"


@dataclass(frozen=True)
class GpuRow:
    """GPUs of one type; ``out_of_order`` are on nodes that run nothing now and count as neither free nor used."""

    type: str
    total: int
    used: int
    free: int
    out_of_order: int
    nodes: int
    free_nodes: int  # with all their GPUs free: what a gang of whole nodes can have


@dataclass(frozen=True)
class NodesRow:
    """Nodes in one state, in the scheduler's own word."""

    state: str
    count: int


@dataclass(frozen=True)
class QuotaRow:
    """What may be held at once, or in one job where ``used`` is None."""

    owner: str
    limit: str  # the scheduler's own name of it
    resource: str
    allowed: float
    used: float | None


@dataclass(frozen=True)
class QueueRow:
    """One of my jobs. ``ahead``: jobs that the scheduler looks at before it; None for one that runs or where none says.

    On Kubernetes, where a job is its namespace's, mine are the runs in it.
    """

    job_id: str
    name: str
    state: str  # as a job's: queued, running, suspended, ending
    queue: str
    nodes: int
    gpus: int | None
    ahead: int | None
    reason: str
    start: float | None  # when it began, or the scheduler's estimate; seconds since the epoch


@dataclass(frozen=True)
class ClusterView:
    """``others_*``: jobs of other people."""

    scheduler: str
    cluster: str
    gpus: tuple[GpuRow, ...] = ()
    nodes: tuple[NodesRow, ...] = ()
    quotas: tuple[QuotaRow, ...] = ()
    queue: tuple[QueueRow, ...] = ()
    others_running: int = 0
    others_queued: int = 0
    has_other_users: bool = True  # False: the jobs of other users are not known
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The stable JSON object."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}
