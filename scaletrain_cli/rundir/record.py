"""run.json: the one file that crosses from the launcher into the engine. Written once, never changed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec import RunSpec

SCHEMA = "scaletrain.run/v1"


@dataclass(frozen=True)
class RunRecord:
    """What was asked (spec), what was decided (plan) and with what it was made."""

    run_id: str
    created: float
    spec: RunSpec
    plan: RunPlan
    versions: dict[str, str]
    code_hash: str
    wandb_run_id: str
    working_folder: str = ""  # of the submitter: relative paths in the spec mean the same in every attempt


def checkpoint_folder(run: RunDir, spec: RunSpec) -> Path:
    """Where this run's checkpoints are: in the run directory, or under ``checkpoint.dir`` by run id."""
    return run.checkpoints if spec.checkpoint.dir == "auto" else Path(spec.checkpoint.dir).expanduser() / run.run_id


def write_record(run: RunDir, record: RunRecord) -> None:
    """Create run.json; FileExistsError if another submitter was first, so two can never both win."""
    data = {
        "schema": SCHEMA,
        "run_id": record.run_id,
        "created": record.created,
        "spec": record.spec.model_dump(mode="json", by_alias=True),
        "plan": record.plan.to_json(),
        "versions": record.versions,
        "code_hash": record.code_hash,
        "wandb_run_id": record.wandb_run_id,
        "working_folder": record.working_folder,
    }
    with run.record.open("x", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_record(run: RunDir) -> RunRecord:
    """Load run.json. Raises UsageError when it is missing, damaged or of another schema."""
    from pydantic import TypeAdapter, ValidationError

    try:
        data: dict[str, Any] = json.loads(run.record.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise UsageError(f"{run.record} has schema {data['schema']!r}; this version reads {SCHEMA}.")
        plan = data["plan"] | {"alternatives": []}  # told to people; nothing downstream reads them back
        return RunRecord(
            run_id=data["run_id"],
            created=data["created"],
            spec=RunSpec.model_validate(data["spec"]),
            plan=TypeAdapter(RunPlan).validate_python(plan),
            versions=data["versions"],
            code_hash=data["code_hash"],
            wandb_run_id=data["wandb_run_id"],
            working_folder=data["working_folder"],
        )
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise UsageError(f"{run.record} cannot be read: {error}") from error
