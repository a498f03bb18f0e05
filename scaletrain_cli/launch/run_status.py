"""The status of a run, as the commands show it; status.py makes it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from scaletrain_cli.launch.job import Job
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.goodput import Goodput
from scaletrain_cli.rundir.measured import Measured
from scaletrain_cli.rundir.mirror_state import MirrorState
from scaletrain_cli.rundir.paths import SweepPlace
from scaletrain_cli.rundir.record import BranchPoint

# fmt: off
RunState = Literal[
    "queued", "running", "suspended", "ending", "preempted", "finished", "failed", "cancelled", "ended-idle", "unknown",
]
# fmt: on
OVER: tuple[RunState, ...] = ("finished", "failed", "cancelled", "ended-idle")  # only a resume continues the run
DAMAGED = "damaged"  # the state of a run with a document that cannot be read


@dataclass(frozen=True)
class RunStatus:
    """The status of one run. Steps are optimizer steps; ``agent_pids``: pids of node agents that have not ended.

    ``reason``: why the run is in its state. ``job`` is the scheduler's answer, or state ``unknown`` with its error.
    """

    run_id: str
    name: str
    state: RunState
    scheduler: str
    job_id: str
    attempt: int
    step: int
    total_steps: int
    loss: float | None
    validation_loss: float | None
    tokens_per_second: float | None
    last_checkpoint_step: int | None
    steps_lost_total: int
    restarts: int
    nodes: tuple[str, ...]
    agent_pids: tuple[int, ...]
    run_dir: str
    reason: Reason
    job: Job
    measured: Measured | None  # by the newest attempt that measured anything
    goodput: Goodput | None  # the shares of the time over all attempts
    straggler: Reason | None = None  # the rank that is slower than the others
    idle: Reason | None = None  # that the run does nothing, and when it is ended for that
    starting: Reason | None = None  # what an attempt waits for that has begun no step for long
    sweep: SweepPlace | None = None  # the sweep that the run is a point of
    source_losses: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of several sources, by name
    source_validation_losses: Mapping[str, float] = dataclasses.field(default_factory=dict)
    unit: str = "tokens"  # of the training data: tokens, images or pairs
    samples_per_second: float | None = None  # images or pairs; None for a language model
    validation_measures: Mapping[str, float] = dataclasses.field(default_factory=dict)  # beside the loss, by name
    learning_rate: float | None = None
    grad_norm: float | None = None  # of the whole model, before clipping
    mfu: float | None = None  # model FLOPs utilization, from 0 to 1; None on a CPU
    mirror: MirrorState | None = None  # of a run with checkpoint.mirror, once its process has started
    planned_nodes: int | None = None  # of the current plan
    sizes: tuple[int, ...] = ()  # numbers of nodes on which an attempt may start, if there are several
    step_seen: bool = True  # False: nothing that was read has a step, and ``step`` is 0
    files_seen: bool = True  # False: the run directory is on a volume that this machine does not see
    branch_of: BranchPoint | None = None  # the checkpoint of another run that it began with

    @property
    def why(self) -> str:
        """The text of ``reason``; empty where there is nothing to explain."""
        return str(self.reason)

    def to_json(self) -> dict[str, Any]:
        """Return the stable JSON object (docs/json.md)."""
        measured = None if self.measured is None else self.measured.to_json()
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "reason"}
        plain |= {"why": self.why, **self.reason.to_document()} | ({} if self.step_seen else {"step": None})
        for key in ("straggler", "idle", "starting"):
            plain |= {key: str(plain[key] or ""), f"{key}_reason": plain[key] and plain[key].to_document()}
        plain["job"] = {"state": self.job.state, "detail": self.job.detail, **self.job.why.to_document()}
        goodput = None if self.goodput is None else self.goodput.to_json()
        sweep = None if self.sweep is None else dataclasses.asdict(self.sweep)
        plain["branch_of"] = None if self.branch_of is None else dataclasses.asdict(self.branch_of)
        plain["mirror"] = None if self.mirror is None else self.mirror.to_json()
        return {"schema": "scaletrain.status/v1", **plain, "measured": measured, "goodput": goodput, "sweep": sweep}
