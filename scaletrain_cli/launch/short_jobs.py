"""Short jobs with the spec and nodes of a run: `rehearse` tries what it will do, `preflight` measures devices, links.

Schedulers see an ordinary run; its ranks do the items of ``scaletrain_cli.engine.rehearsal``, or measure and end. The
run directory of a preflight is hidden in the runs root, and deleted at the end.
"""

import json
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.diagnosis.rehearsal import (
    ITEMS,
    LOG_PREFIX,
    VARIABLE,
    Item,
    Options,
    Rehearsal,
    read_rehearsal,
    rehearsal_from,
    write_rehearsal,
)
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.launch.backends.base import Backend
from scaletrain_cli.launch.calibration import keep_measurement, measure_rehearsal
from scaletrain_cli.launch.cancel import wait_for_end
from scaletrain_cli.launch.drill import make_jobs_folder
from scaletrain_cli.launch.job import undone_if_refused
from scaletrain_cli.launch.preparation import prepare_data
from scaletrain_cli.launch.run_status import RunStatus
from scaletrain_cli.launch.status import exit_code_of
from scaletrain_cli.launch.submit import create_run, submit_run
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.record import read_spec_lines, write_spec_lines
from scaletrain_cli.safe_files import make_folder
from scaletrain_cli.spec import RunSpec, override_spec
from scaletrain_cli.text import did_you_mean

_OF_BOTH = ("cluster.spare_nodes=0", "checkpoint.keep_best=null", "checkpoint.mirror={to: null}", "tracking=[]")
_SETTINGS = (
    *_OF_BOTH,
    "env.SCALETRAIN_ONLY=rehearsal",
    "evaluation={every: 0}",
    "training.early_stopping={patience: 0}",
    "restarts={preemption: 3, node: 0, crash: 0, oom: 0}",
    "telemetry={enabled: false}",
    "notify=[]",
)
# Of the planned layout, which a job on fewer nodes keeps; the other degrees follow from the number of devices.
_KEPT = (
    *("tensor_parallel", "pipeline_parallel", "sequence_parallel", "context_parallel"),
    *("zero_stage", "activation_checkpointing"),
)


def chosen_items(items: Sequence[str], skipped: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the items to rehearse, in order; all if none are named. Raises UsageError."""
    for name in (*items, *skipped):
        if name not in ITEMS:
            known = list(ITEMS)
            raise UsageError(f"unknown item: {name}. {did_you_mean(name, known)}Available items: {', '.join(known)}.")
    chosen = tuple(name for name in ITEMS if (not items or name in items) and name not in skipped)
    if not chosen:
        raise UsageError("no item is left to rehearse.")
    return chosen


def rehearsal_spec(spec: RunSpec, options: Options, nodes: int | None = None) -> RunSpec:
    """Return the spec of the job: that of the run, without evaluations and trackers.

    ``nodes``: fewer nodes than the run has. The layout within a replica, the micro-batch and the accumulation stay
    as planned for the whole run, so that a step of the job is one of a rank of the run; the global batch shrinks with
    the replicas. Raises SpecError, and UsageError if whole replicas do not fill these nodes.
    """
    settings = [*_SETTINGS, f"env.{VARIABLE}={json.dumps(options.to_text())}"]
    if nodes is not None and nodes != spec.cluster.nodes:
        settings += _on_nodes(spec, nodes)
    return override_spec(spec, settings, file="the rehearsal's spec")


def fewest_nodes(spec: RunSpec) -> int:
    """Return the fewest nodes that hold one replica of the planned layout. Raises InfeasibleError, as the planner."""
    from scaletrain_cli.plan import make_plan

    if spec.cluster.nodes == 1:
        return 1
    layout = make_plan(spec).layout
    replica = layout.world_size // layout.data_parallel
    return min(spec.cluster.nodes, max(1, -(-replica // spec.cluster.gpus_per_node)))


def _on_nodes(spec: RunSpec, nodes: int) -> list[str]:
    from scaletrain_cli.plan import make_plan
    from scaletrain_cli.plan.frameworks.registry import framework_of

    layout = make_plan(spec).layout
    replica = layout.world_size // layout.data_parallel
    devices = nodes * spec.cluster.gpus_per_node
    if devices % replica:
        params = {"nodes": nodes, "devices": devices, "replica": replica}
        raise UsageError(Reason("rehearsal.replica-does-not-fit", params))
    batch = layout.micro_batch_size * layout.gradient_accumulation_steps * (devices // replica)
    changed = {
        **{f"layout.{name}": getattr(layout, name) for name in _KEPT},
        "layout.data_parallel": "auto",
        "cluster.nodes": nodes,
        "training.global_batch_size": batch,
        "training.micro_batch_size": layout.micro_batch_size,
        "training.tokens": "null",
        "training.steps": spec.total_steps,
    }
    if layout.pipeline_parallel > 1 and layout.virtual_pipeline == 1:
        # memory may divide that of fewer nodes in another way
        blocks = layout.pipeline_split or framework_of(spec).blocks_by_stage(spec.transformer, layout.pipeline_parallel)
        changed |= {"layout.virtual_pipeline": 1, "layout.pipeline_split": list(blocks)}
    return [f"{key}={value}" for key, value in changed.items()]


@dataclass(frozen=True)
class RehearsalResult:
    """The end of a rehearsal. ``complete``: the job did all items and ended by itself.

    ``kept``: the file of its step time for later plans (plan/calibration.py); None if no steps were timed.
    """

    run: RunDir
    rehearsal: Rehearsal
    complete: bool
    seconds: float
    kept: Path | None = None

    @property
    def exit_code(self) -> ExitCode:
        """Return DONE if every item passed or does not apply, else INFEASIBLE."""
        return ExitCode.DONE if self.complete and self.rehearsal.passed else ExitCode.INFEASIBLE

    def to_json(self) -> dict[str, Any]:
        """Return the stable JSON object (docs/json.md)."""
        document = {**self.rehearsal.to_json(), "passed": self.exit_code == ExitCode.DONE}
        return {
            **document,
            "schema": "scaletrain.rehearse/v1",
            "complete": self.complete,
            "run_dir": str(self.run.path),
            "calibration": None if self.kept is None else str(self.kept),
            "seconds": round(self.seconds, 3),
        }


def run_rehearsal(
    spec: RunSpec,
    small: RunSpec,
    plan: RunPlan,
    scheduler: Backend,
    options: Options,
    timeout_seconds: float,
    on_status: Callable[[RunStatus], None],
) -> RehearsalResult:
    """Submit the job, wait for its end, and return the verdicts; a late job is cancelled.

    ``spec``: as the user wrote it, whose lines are named; ``small``: of the job (``rehearsal_spec``); ``plan``: of the
    job.
    """
    began, folder = time.monotonic(), make_jobs_folder("rehearsals")
    data = prepare_data(small, root=folder)
    name = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in spec.name)[:64] or "run"
    made = create_run(small, plan, f"rehearsal-{name}", root=folder)
    write_spec_lines(made.run, spec)  # what the rehearsal sets is not from --set
    data.record(made.run)
    submit_run(made.run, made.record, scheduler, preparation_tasks=data.tasks)
    rehearsal, complete = result_of(made.run, wait_for_end(made.run, scheduler, timeout_seconds, on_status), options)
    measured = measure_rehearsal(made.run, rehearsal)
    kept = None if measured is None else keep_measurement(measured)
    return RehearsalResult(made.run, rehearsal, complete, time.monotonic() - began, kept)


def result_of(run: RunDir, status: RunStatus, options: Options) -> tuple[Rehearsal, bool]:
    """Return the verdicts of a job that has ended, with the lines of the spec, and whether it did all items.

    The item in which a job failed has failed; those after it were not reached.
    """
    trial = read_rehearsal(run) or _from_logs(run) or Rehearsal(run.run_id, time.time(), ())
    complete = status.state == "finished"
    if not complete:
        late = status.state == "cancelled"
        why = Reason("rehearsal.timed-out") if late else Reason("rehearsal.ended", {"why": status.reason})
        # before the first item: the data, the layout or the nodes were refused
        broken = trial.running or next((name for name in options.items if trial.item(name) is None), options.items[-1])
        left = [name for name in options.items if name != broken and trial.item(name) is None]
        skipped = [Item(name, "skipped", Reason("rehearsal.not-reached")) for name in left]
        trial = trial.with_items([Item(broken, "failed", why), *skipped])
    lines = read_spec_lines(run)
    located = Rehearsal(trial.run_id, trial.created, tuple(item.located(lines) for item in trial.items), trial.measured)
    if read_rehearsal(run) is None or not complete:
        write_rehearsal(run, located)
    return located, complete


def _from_logs(run: RunDir) -> Rehearsal | None:
    """Return the document in the newest log of rank 0 that has one: of a run directory that pods do not share."""
    for path in sorted(run.path.glob("attempts/*/logs/*-00000.log"), reverse=True):
        for text in reversed(path.read_text(encoding="utf-8", errors="replace").splitlines()):
            if text.startswith(LOG_PREFIX):
                try:
                    return rehearsal_from(json.loads(text.removeprefix(LOG_PREFIX)))
                except (ValueError, KeyError, TypeError):
                    return None
    return None


_PREFLIGHT_SETTINGS = (
    *_OF_BOTH,
    "name=preflight",
    "guard.preflight=always",
    "env.SCALETRAIN_ONLY=preflight",
    "restarts={preemption: 0, node: 0, crash: 0, oom: 0}",
    "evaluation.tasks=[]",
)


@dataclass(frozen=True)
class Preflight:
    """The result: exit code and reason of the run, and the JSON documents of its only attempt."""

    exit_code: int
    why: str
    ranks: tuple[dict[str, Any], ...]
    findings: tuple[dict[str, Any], ...]
    nodes: tuple[dict[str, Any], ...]
    all_reduce_seconds: float | None
    all_reduce_planned_seconds: float | None
    folder: Path | None  # kept for inspection after a failure, else None

    def to_json(self) -> dict[str, Any]:
        """Return the stable JSON object."""
        document = {**vars(self), "folder": None if self.folder is None else str(self.folder)}
        return {"schema": "scaletrain.preflight-report/v1", **document}


def run_preflight(
    spec: RunSpec, plan: RunPlan, scheduler: Backend, timeout_seconds: float, on_status: Callable[[RunStatus], None]
) -> Preflight:
    """Submit the job, wait for its end, and return the result.

    Raises SchedulerError if the job is refused, UsageError for an unwritable runs root.
    """
    name = f"preflight-{secrets.token_hex(4)}"
    # The dot hides it from `list`. Nodes without a shared run directory find the run by the runs root and its name.
    folder = runs_root() / f".{name}" if spec.cluster.traits.shared_run_directory else runs_root()
    try:
        make_folder(runs_root(), mode=0o777)
        make_folder(folder)
    except OSError as error:
        raise UsageError(Reason("runs.root-not-writable", {"folder": str(runs_root()), "said": str(error)})) from error

    def remove() -> None:
        shutil.rmtree(folder / name if folder == runs_root() else folder, ignore_errors=True)

    # Without an answer the scheduler may have the job, and only this folder identifies it.
    with undone_if_refused(remove, BaseException):
        settings = [*_PREFLIGHT_SETTINGS, *scheduler.preflight_settings()]
        made = create_run(override_spec(spec, settings, file="the preflight's spec"), plan, name, root=folder)
        submit_run(made.run, made.record, scheduler)
    with undone_if_refused(remove, KeyboardInterrupt):  # has cancelled the job; after an error it may still run
        status = wait_for_end(made.run, scheduler, timeout_seconds, on_status)
    code = exit_code_of(made.run, status)
    attempt = made.run.attempt(max(made.run.attempts(), default=1))
    together = read_document(attempt / "preflight.json") or {}
    inspected = (read_document(path) for path in sorted((attempt / "preflight").glob("[!.]*.json")))
    report = Preflight(
        exit_code=code,
        why=status.why if code else "",
        ranks=tuple(together.get("ranks", ())),
        findings=tuple(together.get("findings", ())),
        nodes=tuple(node for node in inspected if node is not None),
        all_reduce_seconds=together.get("all_reduce_seconds"),
        all_reduce_planned_seconds=together.get("all_reduce_planned_seconds"),
        folder=made.run.path if code else None,
    )
    if code == ExitCode.DONE:
        remove()
    return report
