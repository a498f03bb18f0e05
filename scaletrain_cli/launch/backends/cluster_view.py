"""The state of a cluster, the same for every back end: GPUs by type, nodes by state, quotas, the queue. Types only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

SCHEMA = "scaletrain.cluster/v1"


@dataclass(frozen=True)
class GpuRow:
    """GPUs of one type; ``out_of_order`` are on nodes that accept no job, and are neither free nor used."""

    type: str
    total: int
    used: int
    free: int
    out_of_order: int
    nodes: int
    free_nodes: int  # with all their GPUs free: what a gang of whole nodes can have


@dataclass(frozen=True)
class NodesRow:
    """Nodes in one state, as the scheduler calls it."""

    state: str
    count: int


@dataclass(frozen=True)
class QuotaRow:
    """The limit for all jobs together, or for one job where ``used`` is None."""

    owner: str
    limit: str  # as the scheduler calls it
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
    """The whole view; ``others_*`` count jobs of other users."""

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
        """Return the stable JSON object."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}
