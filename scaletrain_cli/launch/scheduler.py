"""What every scheduler can do, and which one a run uses. Imports each scheduler's module only when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.outlook import Outlook
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.rundir.code import CodeRecord
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.spec import RunSpec

# "suspended" keeps its nodes and does not run; "ending" waits for its last processes. Neither is over.
JobState = Literal["queued", "running", "suspended", "ending", "ended", "unknown"]
# What a scheduler can name as the cause of the end of a whole job.
JobCause = Literal["cancelled", "preempted", "time-limit", "host-oom", "node"]


@dataclass(frozen=True)
class Job:
    """A run's job as its scheduler sees it; ``detail`` is the scheduler's own word for the state.

    ``exit_code`` and ``progress`` (a line of metrics.jsonl) are for a run whose directory is not seen from here.
    ``cause`` is set for an ended job where the scheduler itself names one; ``unsettled``: its scheduler was asked for
    it, gave no answer, and may still take it; ``forgotten``: it ended, and the scheduler no longer knows how.
    """

    id: str
    state: JobState
    detail: str = ""
    nodes: tuple[str, ...] = ()
    exit_code: int | None = None
    cause: JobCause | None = None
    unsettled: bool = False
    progress: Mapping[str, float] = field(default_factory=dict)
    forgotten: bool = False

    @property
    def is_active(self) -> bool:
        """Whether it is not over, as the scheduler says. Unknown counts as not: who asks decides what that means."""
        return self.state in ("queued", "running", "suspended", "ending")

    @property
    def may_be_active(self) -> bool:
        """Also true of one that cannot be asked, as a local one of another host: two gangs must never meet."""
        return self.is_active or (self.state == "unknown" and (self.id != "" or self.unsettled))


class Scheduler(Protocol):
    """Every method raises SchedulerError when the scheduler refuses or cannot be reached."""

    def preflight(
        self, spec: RunSpec, plan: RunPlan, run: RunDir | None = None, code: CodeRecord | None = None
    ) -> Outlook:
        """Ask whether the job could run at all, and when; returns what is worth telling. Leaves nothing behind.

        ``run``: the one that is to go on, with what is kept of it; None for one that is yet to be made.
        """

    def render(self, run: RunDir, record: RunRecord) -> str:
        """The exact text that submit() would hand over. Holds no secret and touches no file."""

    def submit(self, run: RunDir, record: RunRecord) -> str:
        """Hand the job over; returns its id. Call through submission.submit_run, which holds the lock."""

    def job(self, run: RunDir, record: RunRecord) -> Job:
        """The run's latest job."""

    def cancel(self, run: RunDir, record: RunRecord) -> None:
        """End the job with its state saved; no further attempt starts."""


def scheduler_for(name: str) -> Scheduler:
    """The scheduler that ``cluster.scheduler`` names. Raises SchedulerError for one that this version cannot use."""
    if name == "local":
        from scaletrain_cli.launch.local import LocalScheduler

        return LocalScheduler()
    if name == "slurm":
        from scaletrain_cli.launch.slurm import SlurmScheduler

        return SlurmScheduler()
    if name == "kubernetes":
        from scaletrain_cli.launch.kubernetes.scheduler import KubernetesScheduler

        return KubernetesScheduler()
    raise SchedulerError(f"cluster.scheduler = {name} is not in this version. Use local, slurm or kubernetes.")
