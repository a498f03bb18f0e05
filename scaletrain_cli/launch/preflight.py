"""`scaletrain preflight`: a job whose ranks measure their devices and links, and end.

Schedulers see an ordinary run. Its run directory is hidden in the runs root, and deleted at the end.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import SchedulerSilentError, UsageError
from scaletrain_cli.launch.backends.base import Backend
from scaletrain_cli.launch.cancel import wait_for_end
from scaletrain_cli.launch.status import RunStatus, exit_code_of
from scaletrain_cli.launch.submit import create_run, submit_run
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.safe_files import make_folder
from scaletrain_cli.spec import RunSpec, override_spec

_SETTINGS = (
    "name=preflight",
    "guard.preflight=always",
    "env.SCALETRAIN_ONLY=preflight",
    "restarts={preemption: 0, node: 0, crash: 0, oom: 0}",
    "tracking=[]",
    "evaluation.tasks=[]",
    "checkpoint.keep_best=null",
    "checkpoint.mirror={to: null}",
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
        params = {"folder": str(runs_root()), "said": str(error)}
        raise UsageError(Reason("runs.root-not-writable", params)) from error
    kept = False
    try:
        settings = [*_SETTINGS, *scheduler.preflight_settings()]
        alone = override_spec(spec, settings, file="the preflight's spec")
        made = create_run(alone, plan, name, root=folder)
        try:
            submit_run(made.run, made.record, scheduler)
        except SchedulerSilentError:
            kept = True  # the scheduler may have the job, and only this folder identifies it
            raise
        status = wait_for_end(made.run, scheduler, timeout_seconds, on_status)
        code = exit_code_of(made.run, status)
        kept = code != 0
        return _report(made.run, status, code, made.run.path if kept else None)
    finally:
        if not kept:
            shutil.rmtree(folder / name, ignore_errors=True)
            if folder != runs_root():
                shutil.rmtree(folder, ignore_errors=True)


def _report(run: RunDir, status: RunStatus, code: int, folder: Path | None) -> Preflight:
    attempt = run.attempt(max(run.attempts(), default=1))
    together = read_document(attempt / "preflight.json") or {}
    inspected = (read_document(path) for path in sorted((attempt / "preflight").glob("[!.]*.json")))
    return Preflight(
        exit_code=code,
        why="" if code == 0 else status.why,
        ranks=tuple(together.get("ranks", ())),
        findings=tuple(together.get("findings", ())),
        nodes=tuple(node for node in inspected if node is not None),
        all_reduce_seconds=together.get("all_reduce_seconds"),
        all_reduce_planned_seconds=together.get("all_reduce_planned_seconds"),
        folder=folder,
    )
