"""The environment of a rank (run, attempt, rank numbers), and the resolved spec and plan of its run."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import entries, read_document, reporting_damage
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import expand_home

RUN_DIR_VARIABLE = "SCALETRAIN_RUN_DIR"
RENDEZVOUS_VARIABLE = "SCALETRAIN_RENDEZVOUS"  # a file in which the ranks of one node meet
_REVISION = re.compile(r"\d{4,}\.json")


@dataclass(frozen=True)
class RunEnvironment:
    """The run, attempt and rank of this process, from the environment that the node agent sets."""

    run: RunDir
    attempt: int  # from 1
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int

    @classmethod
    def read(cls, run_dir: str | Path, environment: Mapping[str, str] = os.environ) -> "RunEnvironment":
        """Return the values in ``environment``. Raises UsageError if a variable is missing."""
        names = ("SCALETRAIN_ATTEMPT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
        missing = [name for name in names if name not in environment]
        if missing:
            raise UsageError(Reason("engine.no-node-agent", {"missing": missing}))
        return cls(RunDir(Path(run_dir).absolute()), *(int(environment[name]) for name in names))


@dataclass(frozen=True)
class ResolvedRun:
    """The resolved spec and the plan of a run, as the JSON objects of run.json (or of its latest revision)."""

    spec: dict[str, Any]
    plan: dict[str, Any]
    checkpoint_folder: Path

    @property
    def total_steps(self) -> int:
        """Return the number of optimizer steps: ``training.steps``, or ``training.tokens`` rounded up."""
        training = self.spec["training"]
        if training["steps"] is not None:
            return int(training["steps"])
        tokens_per_step = int(training["global_batch_size"]) * int(self.spec["model"]["seq_len"])
        return -(-int(training["tokens"]) // tokens_per_step)

    @property
    def checkpoint_interval_steps(self) -> int:
        """Return the steps between checkpoints: ``checkpoint.every``, or the plan's value for ``auto``."""
        every = self.spec["checkpoint"]["every"]
        return int(self.plan["durability"]["interval_steps"] if every == "auto" else every)


def read_resolved_run(run: RunDir, attempt: int | None = None) -> ResolvedRun:
    """Return the latest spec and plan, or those that attempt.json of ``attempt`` names, if it names any.

    Raises UsageError if they cannot be read.
    """
    folder = run.path / "revisions"
    named = None if attempt is None else (read_document(run.attempt(attempt) / "attempt.json") or {}).get("revision")
    if named is not None:  # a network file system may list the folder as it was before the revision was written
        path = folder / f"{named:04d}.json" if named else run.record
    else:
        revisions = [path for path in entries(folder) if _REVISION.fullmatch(path.name)]
        path = max(revisions, key=lambda path: int(path.stem), default=run.record)
    record = read_document(path)
    if record is None or not {"spec", "plan"} <= record.keys():
        raise UsageError(Reason("engine.record-unreadable", {"path": str(path)}))
    with reporting_damage(path):
        place = record["spec"]["checkpoint"]["dir"]
        folder = run.checkpoints if place == "auto" else expand_home(place) / run.run_id
    return ResolvedRun(record["spec"], record["plan"], folder)
