"""The state of a cluster, the same for every back end: GPUs by type, nodes by state, quotas, the queue. Types only."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.reasons import Reason

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
    free_nodes: int  # with all their GPUs free, hence available to a gang of whole nodes


@dataclass(frozen=True)
class NodesRow:
    """The nodes in one state, under the scheduler's name for it."""

    state: str
    count: int


@dataclass(frozen=True)
class QuotaRow:
    """One limit: for all jobs together, or for a single job if ``used`` is None."""

    owner: str
    limit: str  # the scheduler's name for it
    resource: str
    allowed: float
    used: float | None


@dataclass(frozen=True)
class QueueRow:
    """One job of this user. ``ahead``: number of jobs that are scheduled before it; None if it runs, or if unknown.

    On Kubernetes these are all runs of the namespace.
    """

    job_id: str
    name: str
    state: str  # queued, running, suspended, ending
    queue: str
    nodes: int
    gpus: int | None
    ahead: int | None
    reason: str
    start: float | None  # actual, or the scheduler's estimate; seconds since the epoch


@dataclass(frozen=True)
class ClusterView:
    """The state of a cluster; ``others_*`` count jobs of other users."""

    scheduler: str
    cluster: str
    gpus: tuple[GpuRow, ...] = ()
    nodes: tuple[NodesRow, ...] = ()
    quotas: tuple[QuotaRow, ...] = ()
    queue: tuple[QueueRow, ...] = ()
    others_running: int = 0
    others_queued: int = 0
    has_other_users: bool = True  # False: jobs of other users are not shown
    warnings: tuple[Reason, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """The texts of ``warnings``."""
        return tuple(map(str, self.warnings))

    def to_json(self) -> dict[str, Any]:
        """Return the stable JSON object (docs/json.md)."""
        rows = dataclasses.asdict(dataclasses.replace(self, warnings=()))
        del rows["warnings"]
        reasons = [warning.to_document() for warning in self.warnings]
        return {"schema": SCHEMA, **rows, "notes": list(self.notes), "note_reasons": reasons}
