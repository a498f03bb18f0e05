"""The view of this machine: its GPUs, or its cores where it has none, and the local runs that use or wait for them."""

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.backends.cluster_view import ClusterView, GpuRow, NodesRow, QueueRow
from scaletrain_cli.launch.job import Job
from scaletrain_cli.launch.node.inspection import count_gpus
from scaletrain_cli.own_processes import usable_cores
from scaletrain_cli.rundir.paths import RunDir, list_runs
from scaletrain_cli.rundir.record import RunRecord, read_record

_MODEL = re.compile(r"^Model:\s*(.+)$", re.MULTILINE)


def local_view(
    job_of: Callable[[RunDir, RunRecord], Job | None], drivers: Path = Path("/proc/driver/nvidia/gpus")
) -> ClusterView:
    """Return the devices of this machine and the runs under the runs root that use them.

    ``job_of`` returns the job of a run, None for a run of another back end. Other processes are not considered.
    """
    rows = tuple(row for run in list_runs() if (row := _row(run, job_of)) is not None)
    count, _ = count_gpus(os.environ)
    total, kind = (count, _type(drivers)) if count else (usable_cores(), "CPU core")
    used = min(total, sum(row.gpus or 0 for row in rows if row.state == "running"))
    return ClusterView(
        scheduler="local",
        cluster=socket.gethostname(),
        gpus=(GpuRow(kind, total, used, total - used, 0, 1, int(used == 0)),),
        nodes=(NodesRow("mix" if used else "idle", 1),),
        has_other_users=False,
        queue=tuple(sorted(rows, key=lambda row: (row.state != "running", row.start or 0.0))),
    )


def _row(run: RunDir, job_of: Callable[[RunDir, RunRecord], Job | None]) -> QueueRow | None:
    """Return the row of an active run on this machine; None for any other run, and for a damaged one."""
    try:
        record = read_record(run)
        job = job_of(run, record)
        if job is None or not job.is_active:
            return None
        attempts = read_attempts(run)
    except (UsageError, OSError):
        return None
    return QueueRow(
        job_id=job.id,
        name=record.run_id,
        state=job.state,
        queue="",
        nodes=1,
        gpus=record.spec.world_size,
        ahead=None,
        reason=job.detail if job.state == "queued" else "",
        start=attempts[-1].started if attempts else None,
    )


def _type(drivers: Path) -> str:
    """Return the name of the GPUs as the driver reports it."""
    for information in sorted(drivers.glob("*/information")):
        if match := _MODEL.search(information.read_text(encoding="utf-8", errors="replace")):
            return match[1].strip()
    return "gpu"
