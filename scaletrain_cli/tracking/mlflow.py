"""MLflow: one run over all attempts, identified by a tag; metrics have the optimizer step as their step."""

import importlib
import logging
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import Field

from scaletrain_cli.tracking.base import OptionText, Outcome, TrackedRun, Tracker, TrackerOptions

_TAG = "scaletrain.tracking_id"
_VALUE_CHARACTERS = 500  # the minimum over server versions of the maximum length of a parameter
_PARAMETERS = 100  # per request
# SCHEDULED: a later attempt continues the run.
_STATUS = {"finished": "FINISHED", "preempted": "SCHEDULED", "failed": "FAILED"}


class MlflowOptions(TrackerOptions):
    """MLflow options. Without ``uri`` the variable MLFLOW_TRACKING_URI is used, else a file in the run directory."""

    experiment: OptionText = "scaletrain"
    uri: OptionText | None = Field(default=None, description="a server (https://...) or a database (sqlite:////path)")


class MlflowTracker(Tracker[MlflowOptions]):
    """Metrics and artifacts; the run spec as parameters; events as tags ``event.<name>`` that hold the last details.

    MLflow cannot remove a logged value, so a step that is trained again keeps the values that were logged first.
    """

    options_model = MlflowOptions

    def start(self, run: TrackedRun) -> Mapping[str, int] | None:
        """Find the run by its tag, or create it. Return the last step of each of its metrics."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._entities: Any = importlib.import_module("mlflow.entities")
        library = importlib.import_module("mlflow")
        given = self.options.uri or os.environ.get("MLFLOW_TRACKING_URI")
        database = run.folder.absolute() / "mlflow.db"
        if given is None and not _holds_a_run(database):
            _create_database(library, database)
        self._client: Any = library.MlflowClient(tracking_uri=given or f"sqlite:///{database}")
        experiment = self._experiment(None if given else (run.folder.absolute() / "mlflow-artifacts").as_uri())
        runs = self._client.search_runs([experiment], filter_string=f"tags.`{_TAG}` = '{run.tracking_id}'")
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            names = runs[0].data.metrics
            return {name: max(one.step for one in self._client.get_metric_history(self._id, name)) for name in names}
        self._id = self._client.create_run(experiment, run_name=run.run_id, tags={_TAG: run.tracking_id}).info.run_id
        leaves = [(key, str(value)[:_VALUE_CHARACTERS]) for key, value in _leaves(run.config)]
        for first in range(0, len(leaves), _PARAMETERS):
            some = [self._entities.Param(key, value) for key, value in leaves[first : first + _PARAMETERS]]
            self._client.log_batch(self._id, params=some)
        return {}

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        metrics = [self._entities.Metric(name, value, int(seconds * 1e3), step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def event(self, name: str, details: Mapping[str, Any], seconds: float) -> None:
        self._client.set_tag(self._id, f"event.{name}", ", ".join(f"{k}={v}" for k, v in details.items())[:5000])

    def artifact(self, path: Path) -> None:
        self._client.log_artifact(self._id, str(path))

    def finish(self, outcome: Outcome) -> None:
        if outcome == "preempted":
            self._client.update_run(self._id, status=_STATUS[outcome])
        else:
            self._client.set_terminated(self._id, status=_STATUS[outcome])

    def _experiment(self, artifacts: str | None) -> str:
        experiment = self._client.get_experiment_by_name(self.options.experiment)
        if experiment is None:
            try:
                return str(self._client.create_experiment(self.options.experiment, artifact_location=artifacts))
            except Exception:  # of MLflow: another run, such as one of a sweep, may have created it meanwhile
                if (experiment := self._client.get_experiment_by_name(self.options.experiment)) is None:
                    raise
        return str(experiment.experiment_id)


def _holds_a_run(database: Path) -> bool:
    """Return whether the file is a database with at least one run; one whose creation was interrupted has none."""
    if not database.is_file():
        return False
    try:
        with closing(sqlite3.connect(database)) as connection:
            return bool(connection.execute("SELECT EXISTS (SELECT 1 FROM runs)").fetchone()[0])
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            return False
        raise


def _create_database(library: Any, database: Path) -> None:
    """Create an empty database of MLflow, or replace one without runs, by one rename of a complete file.

    MLflow creates its tables in many migrations. It cannot continue them after the process was killed in between.
    """
    for left in database.parent.glob(f"{database.name}.*.new"):  # of a process that was killed
        left.unlink(missing_ok=True)
    new = database.with_name(f"{database.name}.{os.getpid()}.new")
    with tempfile.TemporaryDirectory(prefix="scaletrain-mlflow-") as folder:
        draft = Path(folder, database.name)
        library.MlflowClient(tracking_uri=f"sqlite:///{draft}").search_experiments(max_results=1)
        with closing(sqlite3.connect(draft)) as source, closing(sqlite3.connect(new)) as target:
            source.backup(target)
    for suffix in ("-journal", "-wal", "-shm"):  # SQLite would apply those of the replaced file to the new one
        database.with_name(f"{database.name}{suffix}").unlink(missing_ok=True)
    new.replace(database)


def _leaves(data: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested mappings with its dotted key."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    elif key:
        yield key, data
