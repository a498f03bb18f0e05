"""The evaluations of a run's checkpoints: ``evaluations/step-N.json``, and which checkpoint has the best value.

And the validations of the training job: ``evaluations/validation-N.json`` has the figures of each class and sample
answers; those of the whole split are in metrics.jsonl.

An evaluation is requested (its job exists), running (the weights were copied, so that the checkpoint may be deleted),
and done or failed. Its metrics are also in metrics.jsonl, at the step of the checkpoint.
"""

import re
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from scaletrain_cli.rundir.checkpoints import list_checkpoints
from scaletrain_cli.rundir.documents import json_value, read_as, undamaged_in, write_document
from scaletrain_cli.rundir.journal import append_line, read_metrics
from scaletrain_cli.rundir.mirror_state import read_mirror_state
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import make_folder

SCHEMA = "scaletrain.evaluation/v1"
_FILE = re.compile(r"step-(\d{8,})\.json")
MOST_WAITING = 2  # checkpoints that retention keeps for the evaluations of one state, the latest ones
State = Literal["requested", "running", "done", "failed"]


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of the checkpoint of ``step`` by the run ``run_id``.

    ``metrics``: by name, ``TASK/METRIC``. ``lower_is_better``: the names of metrics of which the least is the best.
    ``generations``: task, prompt and text. ``versions``: of lm-evaluation-harness and its tasks. ``errors``: by task.
    """

    step: int
    run_id: str
    state: State
    time: float
    metrics: dict[str, float] = field(default_factory=dict)
    lower_is_better: list[str] = field(default_factory=list)
    generations: list[dict[str, str]] = field(default_factory=list)
    versions: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def finished_tasks(self) -> set[str]:
        """Return the names of tasks with a result, which a restarted job does not run again."""
        return {name.partition("/")[0] for name in self.metrics} | {one["task"] for one in self.generations}


def evaluation_path(run: RunDir, step: int) -> Path:
    """Return the file of the evaluation of a checkpoint."""
    return run.path / "evaluations" / f"step-{step:08d}.json"


def write_evaluation(run: RunDir, evaluation: Evaluation) -> Evaluation:
    """Replace the file of the evaluation; return what was written, with the present time."""
    written = replace(evaluation, time=round(time.time(), 3))
    make_folder(evaluation_path(run, evaluation.step).parent)
    write_document(evaluation_path(run, evaluation.step), {"schema": SCHEMA, **asdict(written)})
    return written


def read_evaluation(run: RunDir, step: int) -> Evaluation | None:
    """Return the evaluation of a checkpoint; None if none was requested. Raises UsageError for a damaged file."""
    return read_as(Evaluation, evaluation_path(run, step))


def read_evaluations(run: RunDir) -> list[Evaluation]:
    """Return all evaluations, by step, without files that are damaged or of a later version: training reads them."""
    return undamaged_in(Evaluation, run.path / "evaluations", _FILE)


def ended_evaluations(run: RunDir) -> list[Evaluation]:
    """Return those of which no further metrics will come, by step."""
    return [one for one in read_evaluations(run) if one.state in ("done", "failed")]


def forget_newer(run: RunDir, step: int) -> None:
    """Remove the evaluations and validations of later steps than ``step``, which were rolled back."""
    for evaluation in read_evaluations(run):
        if evaluation.step > step:
            evaluation_path(run, evaluation.step).unlink(missing_ok=True)
    for validation in read_validations(run):
        if validation.step > step:
            validation_path(run, validation.step).unlink(missing_ok=True)


def log_evaluation(run: RunDir, evaluation: Evaluation) -> None:
    """Append the metrics of an evaluation to metrics.jsonl, at its step."""
    if evaluation.metrics:
        append_line(run.metrics, {"step": evaluation.step, **evaluation.metrics, "time": round(time.time(), 3)})


def awaited_steps(run: RunDir, state: State = "requested") -> list[int]:
    """Return the steps whose checkpoints an evaluation job still has to read: the latest ``MOST_WAITING``.

    With the ``state`` running those that it evaluates at present.
    """
    return [one.step for one in read_evaluations(run) if one.state == state][-MOST_WAITING:]


def steps_to_keep(run: RunDir, folder: Path, *, keep_best: str | None, mirror_to: str | None) -> set[int]:
    """Return the steps of the checkpoints in ``folder`` that an evaluation or the mirror reads, and of the best one.

    With ``keep_best`` also of those that are being evaluated: each may turn out to be the best. The last two are
    settings of the section ``checkpoint``.
    """
    kept = set(awaited_steps(run))
    mirror = None if mirror_to is None else read_mirror_state(run)
    if mirror is not None and mirror.uploading_step is not None:
        kept.add(mirror.uploading_step)
    if keep_best is not None:
        kept |= set(awaited_steps(run, "running"))
        best = best_step(run, keep_best, {checkpoint.step for checkpoint in list_checkpoints(folder)})
        kept |= set() if best is None else {best}
    return kept


def best_step(run: RunDir, metric: str, steps: Collection[int]) -> int | None:
    """Return the step with the best value of a metric among ``steps``; the earlier one of equals, None without values.

    The least value is the best of losses, perplexities, errors, and metrics that an evaluation lists as such.
    """
    values: dict[int, float] = {
        line["step"]: line[metric]
        for line in read_metrics(run)
        if isinstance(line.get(metric), int | float) and line["step"] in steps
    }
    if not values:
        return None
    sign = 1.0 if is_lower_better(run, metric) else -1.0
    return min(sorted(values), key=lambda step: sign * values[step])


def is_lower_better(run: RunDir, metric: str) -> bool:
    """Return True if the least value of the metric is the best."""
    if metric.rpartition("/")[2].endswith(("loss", "perplexity", *ERRORS)):
        return True
    return any(metric in evaluation.lower_is_better for evaluation in read_evaluations(run))


VALIDATION_SCHEMA = "scaletrain.validation/v1"
PREFIX = "validation_"
_VALIDATION_FILE = re.compile(r"validation-(\d{8,})\.json")
_COUNTS = tuple(f"{PREFIX}{samples}" for samples in ("sequences", "images", "pairs"))
# Names of figures of which the least is the best.
ERRORS = ("mae", "rmse")


@dataclass(frozen=True)
class Validation:
    """The figures after ``step`` steps. ``metrics``: of the split, by name. ``details``: such as a list of classes."""

    step: int
    time: float
    metrics: dict[str, float | None] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


def measures_in(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures beside the loss in a line of metrics.jsonl, by their names without ``validation_``."""
    return {
        name.removeprefix(PREFIX): value
        for name, value in line.items()
        if name.startswith(PREFIX) and not name.startswith(f"{PREFIX}loss") and name not in _COUNTS
    }


def validation_path(run: RunDir, step: int) -> Path:
    """Return the file of the validation after ``step`` steps."""
    return run.path / "evaluations" / f"validation-{step:08d}.json"


def write_validation(run: RunDir, step: int, metrics: Mapping[str, float], details: Mapping[str, Any]) -> None:
    """Write the file of a validation; figures that are not finite are null. Raises OSError."""
    validation = Validation(step, round(time.time(), 3), json_value(dict(metrics)), json_value(dict(details)))
    make_folder(validation_path(run, step).parent)
    write_document(validation_path(run, step), {"schema": VALIDATION_SCHEMA, **asdict(validation)})


def read_validations(run: RunDir) -> list[Validation]:
    """Return all validations with a file, by step, without files that are damaged."""
    return undamaged_in(Validation, run.path / "evaluations", _VALIDATION_FILE)
