"""Prepare the data of a run before its gang is queued: on this machine, or by a job that the gang waits for."""

import contextlib
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.dataset_checks import require_usable
from scaletrain_cli.launch.engine_process import run_engine_command, spec_document, spec_file
from scaletrain_cli.launch.hub_fetch import DATA, MEASURES_ONLY, ONLY, fetched_spec
from scaletrain_cli.launch.resource_checks.view import View
from scaletrain_cli.launch.restart import forget_secrets
from scaletrain_cli.plan.data_size import DataSize, prepared_size
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.journal import read_events, record_event
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.preparation import PreparationJob, forget_job
from scaletrain_cli.rundir.shared_datasets import DATASET, Entry, datasets_file, make_datasets_folder, record_datasets
from scaletrain_cli.safe_files import create_file, expand_home, make_folder, replace_file
from scaletrain_cli.spec import LlavaSpec, RunSpec
from scaletrain_cli.spec.corpus_files import EMBEDDED_SOURCES, SKLEARN_DIGITS, TABLE_SUFFIX
from scaletrain_cli.spec.losses import LOSSES_OF
from scaletrain_cli.spec.shared_paths import parent_of_glob

Choice = Literal["auto", "now", "job"]
CHOICES: tuple[str, ...] = get_args(Choice)
NEEDS = ("tokenizers",)
ENGINE_COMMAND = "prepare-job"
_LONGEST_HERE_SECONDS = 300.0
_MOST_WORKERS_HERE = 4  # of a machine that other users share, as login nodes are
_MOST_LOOKED_AT = 1000  # files of a folder
_SECONDS_PER_TASK, _MOST_TASKS = 1800.0, 64
# A stand-in for the engine, whose data are its own.
_OTHER_ENGINE = "SCALETRAIN_ENGINE"
_COUNTED = "epochs-counted"


@dataclass(frozen=True)
class PreparationPlan:
    """The place where the data of a run are prepared: ``here`` in the foreground, a ``job``, or ``nothing`` to do.

    ``datasets``: those that are there, as a run records them.
    """

    where: Literal["nothing", "here", "job"]
    why: Reason
    tasks: int = 0
    datasets: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class PreparedData:
    """``tasks``: of a job that must prepare the data, 0 if they are prepared; ``datasets``: what a run records.

    ``epochs``: how ``training.epochs`` was counted in steps; None if the spec has none.
    """

    tasks: int = 0
    datasets: tuple[Entry, ...] = ()
    epochs: Reason | None = None

    def record(self, run: RunDir) -> None:
        """Record the datasets in a run, whose attempts then do not look at the sources again, and how epochs were
        counted. Raises OSError.
        """
        record_datasets(datasets_file(run), self.datasets)
        if self.epochs is not None and not any(event["event"] == _COUNTED for event in read_events(run)):
            record_event(run, _COUNTED, text=str(self.epochs), **self.epochs.to_document())


def reads_prepared_data(spec: RunSpec, choice: Choice = "auto") -> bool:
    """Return whether the ranks read data that are prepared before; those of a stand-in engine if that is asked for."""
    if spec.code.own_program or spec.env.get(ONLY) == MEASURES_ONLY:
        return False
    return choice != "auto" or (_OTHER_ENGINE not in spec.env and _OTHER_ENGINE not in os.environ)


def plan_preparation(
    spec: RunSpec, runs_root: Path, choice: Choice = "auto", folder: Path | None = None, run: RunDir | None = None
) -> PreparationPlan:
    """Return how the data of a run are prepared. Reads no corpus; changes nothing.

    ``run``: a run to resume, which keeps its datasets. Raises UsageError where the choice is not possible, and for
    sources that cannot be read.
    """
    if not reads_prepared_data(spec, choice):
        return PreparationPlan("nothing", Reason("preparation.is-prepared"))
    backend, cluster = backend_for(spec.cluster.scheduler), spec.cluster
    if choice == "job" and not backend.prepares_in_jobs:
        raise UsageError(Reason("preparation.no-job", {"scheduler": backend.traits.display_name}))
    if backend.prepares_itself(cluster):
        if choice != "auto":
            raise UsageError(Reason("preparation.by-the-job-alone"))
        return PreparationPlan("nothing", Reason("preparation.by-the-job"))
    if not cluster.traits.shared_run_directory:  # what is prepared below the runs root of the nodes is not known here
        if choice == "now":
            raise UsageError(Reason("preparation.not-here", {"scheduler": backend.traits.display_name}))
        if not backend.prepares_in_jobs:
            return PreparationPlan("nothing", Reason("preparation.by-user"))
        count = backend.preparation_tasks(cluster) or 1
        return PreparationPlan("job", Reason("preparation.job-before", {"tasks": count}), count)
    if (unseen := _unseen(spec, folder or Path.cwd())) is not None:
        if choice == "now":
            raise UsageError(Reason("preparation.unseen-here", {"cause": unseen}))
        if not backend.prepares_in_jobs:
            return PreparationPlan("nothing", Reason("preparation.by-user"))
        unknown = backend.preparation_tasks(cluster) or 1
        return PreparationPlan("job", Reason("preparation.job-unseen", {"cause": unseen, "tasks": unknown}), unknown)
    answer = _checked(spec, runs_root, folder, run)
    datasets = tuple(answer.get("datasets", ()))
    if answer["prepared"]:
        return PreparationPlan("nothing", Reason("preparation.is-prepared"), datasets=datasets)
    if not backend.prepares_in_jobs:
        return PreparationPlan("here", Reason("preparation.only-here"), datasets=datasets)
    one_worker, workers = answer["seconds"], workers_here(spec)
    seconds = one_worker / workers
    if (tasks := backend.preparation_tasks(cluster)) is None:
        per_task = _SECONDS_PER_TASK * backend.preparation_cores(cluster)
        tasks = min(_MOST_TASKS, max(1, math.ceil(one_worker / per_task)))
    if spec.training.objective in ("sft", "dpo"):
        tasks = 1  # rows are prepared by one process
    params = {"seconds": max(1.0, seconds), "workers": workers, "tasks": tasks}
    if choice == "now":
        return PreparationPlan("here", Reason("preparation.here-as-chosen"), datasets=datasets)
    if choice == "job":
        return PreparationPlan("job", Reason("preparation.job-as-chosen", params), tasks, datasets)
    if seconds <= _LONGEST_HERE_SECONDS:
        return PreparationPlan("here", Reason("preparation.here", params), datasets=datasets)
    return PreparationPlan("job", Reason("preparation.job", params), tasks, datasets)


def find_prepared_data(spec: RunSpec, runs_root: Path) -> tuple[Entry, ...]:
    """Return the datasets of a run as it would record them; none if they are not prepared, or not visible here.

    Sends no request to the hub. Raises nothing.
    """
    if not spec.cluster.traits.shared_run_directory or _unseen(spec, Path.cwd()) is not None:
        return ()
    try:
        answer = _checked(spec, runs_root, offline=True)
    except (ScaletrainError, OSError):  # the checks before a run state what is wrong
        return ()
    return tuple(answer["datasets"]) if answer["prepared"] else ()


def _checked(
    spec: RunSpec, runs_root: Path, folder: Path | None = None, run: RunDir | None = None, *, offline: bool = False
) -> dict[str, Any]:
    """Return whether the data are prepared, their size and the datasets that are there, as the engine's command."""
    with spec_file(fetched_spec(spec, DATA, offline=offline)) as file:
        words = ("--check", *_run_words(run))
        return run_engine_command(ENGINE_COMMAND, str(file), str(runs_root), *words, needs=NEEDS, cwd=folder)


def prepare_data(
    spec: RunSpec,
    choice: Choice = "auto",
    say: Callable[[str], None] = lambda line: None,
    folder: str = "",
    root: Path | None = None,
    run: RunDir | None = None,
) -> PreparedData:
    """Prepare the data of a run here, or return the number of tasks of a job that must do it; 0 if they are prepared.

    ``say`` gets a sentence on how and why they are prepared, then lines of progress. ``folder``: the base of relative
    paths, ``root``: the runs root; ``run``: a run to resume, which keeps its datasets. Raises as plan_preparation(),
    the error of the preparation, and UsageError or InfeasibleError for data that the run cannot use.
    """
    base = Path(folder) if folder and Path(folder).is_dir() else None
    root = root or runs_root()
    plan = plan_preparation(spec, root, choice, base, run)
    if plan.where != "nothing":
        say(str(plan.why))
    datasets = prepare_here(spec, root, base, say=say, run=run) if plan.where == "here" else plan.datasets
    require_usable(spec, root, datasets)
    return PreparedData(plan.tasks, datasets)


def sizes_of_datasets(spec: RunSpec, runs_root: Path, datasets: Iterable[Entry]) -> dict[str, DataSize]:
    """Return the sizes of the sources among ``datasets`` by their names, but not of one that cannot be read."""
    sizes = {}
    names = {source.name for source in spec.data.all_sources}
    for entry in datasets:
        if entry["source"] in names:
            with contextlib.suppress(OSError, KeyError, ValueError):
                document = read_document(runs_root / "datasets" / str(entry["folder"]) / DATASET) or {}
                sizes[str(entry["source"])] = prepared_size(document, spec.training.objective, spec.units_per_sample)
    return sizes


def queue_preparation(spec: RunSpec, workers: int | None) -> tuple[PreparationJob, Path] | None:
    """Queue a job that prepares the data of a spec for later runs; return it with the folder of its logs.

    ``workers``: worker processes of all tasks together. Returns None if the data are prepared. Raises as
    plan_preparation(), and SchedulerError.
    """
    root, backend = runs_root(), backend_for(spec.cluster.scheduler)
    if not backend.prepares_in_jobs:
        raise UsageError(Reason("preparation.nothing-to-queue", {"scheduler": backend.traits.display_name}))
    plan = plan_preparation(spec, root, "job")
    if plan.where == "nothing":
        return None
    tasks = plan.tasks
    if workers is not None and spec.training.objective not in ("sft", "dpo"):
        tasks = math.ceil(workers / backend.preparation_cores(spec.cluster))
    name = f"prepare-{re.sub(r'[^a-z0-9]+', '-', spec.name.lower())[:40].strip('-')}-{secrets.token_hex(4)}"
    folder = make_datasets_folder(root) / f".{name}"
    # A job of its own has no run directory; the job that completes the preparation removes them.
    values = {key: os.environ[key] for key in spec.secret_env if key in os.environ}
    if values and spec.cluster.traits.secrets_from_submitter:
        make_folder(folder, parents=True)
        create_file(RunDir(folder).secrets, json.dumps(values), private=True)
    try:
        return backend.queue_preparation(spec, name, folder, tasks), folder
    except ScaletrainError:
        forget_secrets(RunDir(folder))  # the job that would remove them was not queued
        raise


def _unseen(spec: RunSpec, folder: Path) -> Reason | None:
    """Return why this machine cannot read the data; None if it can. A run on this machine needs its packages anyway."""
    if spec.cluster.traits.runs_here:
        return None
    view = View(spec, folder, os.environ)
    folder_of_images = spec.data.images.folder
    for path in (*(path for _, path in spec.data_paths()), *(() if folder_of_images is None else (folder_of_images,))):
        if path not in EMBEDDED_SOURCES and "://" not in path and (place := view.unseen(parent_of_glob(path))):
            return Reason("preparation.unseen-path", {"path": path, "place": place})
    missing = [package for module, package in _needs(spec, folder).items() if find_spec(module) is None]
    return Reason("preparation.no-packages", {"names": missing}) if missing else None


def _needs(spec: RunSpec, folder: Path) -> dict[str, str]:
    """Return the modules that the preparation of a spec imports, each with the name of its package."""
    modules = {name: name for name in NEEDS}
    if spec.training.objective in LOSSES_OF or isinstance(spec.model, LlavaSpec):
        modules["PIL"] = "pillow"
    paths = [path for _, path in spec.data_paths()]
    if SKLEARN_DIGITS in paths:
        modules["sklearn"] = "scikit-learn"
    if any("://" in path and not is_reference(path) for path in paths):
        modules["obstore"] = "obstore"
    formats = {spec.data.format, *(section.format for section in spec.data.all_sources)}
    if "parquet" in formats or any(_names_tables(path, folder) for path in paths):
        modules["pyarrow"] = "pyarrow"
    if any(step.step == "language" for step in spec.data.prepare):
        modules["py3langid"] = "py3langid"
    if any(step.step == "duplicates" and step.near for step in spec.data.prepare):
        modules["rensa"] = "rensa"
    return modules


def _names_tables(path: str, folder: Path) -> bool:
    """Return whether a path names parquet files: by its suffix, or as a folder here that begins with some."""
    if path.endswith(f".{TABLE_SUFFIX}"):
        return True
    if "://" in path or not (place := folder / expand_home(path)).is_dir():
        return False
    return any(entry.suffix == f".{TABLE_SUFFIX}" for entry in islice(place.rglob("*"), _MOST_LOOKED_AT))


def workers_here(spec: RunSpec) -> int:
    """Return the number of worker processes for a preparation on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if spec.cluster.traits.runs_here else min(_MOST_WORKERS_HERE, cores)


def prepare_here(
    spec: RunSpec,
    runs_root: Path,
    folder: Path | None = None,
    workers: int | None = None,
    say: Callable[[str], None] | None = None,
    failure: Path | None = None,
    known: Mapping[str, str] | None = None,
    run: RunDir | None = None,
) -> tuple[Entry, ...]:
    """Prepare the data on this machine; return the datasets as a run records them. Raises the error of the preparation.

    ``say`` gets lines of progress; by default they go to stderr. ``failure``: a file in which the reason of the error
    is recorded. ``known``: commits of the hub that a run has recorded.
    """
    with spec_file(fetched_spec(spec, DATA, known=known)) as file:
        words = ["--workers", str(workers or workers_here(spec)), *_run_words(run)]
        words += [] if failure is None else ["--failure", str(failure)]
        answer = run_engine_command(
            ENGINE_COMMAND, str(file), str(runs_root), *words, needs=NEEDS, cwd=folder, on_line=say
        )
    return tuple(answer.get("datasets", ()))


def _run_words(run: RunDir | None) -> tuple[str, ...]:
    return () if run is None else ("--run", str(run.path.absolute()))


def begin_job_folder(folder: Path, spec: RunSpec) -> None:
    """Write what the tasks read, and remove what an earlier job has recorded."""
    make_folder(folder, parents=True)
    forget_job(folder)
    replace_file(folder / "spec.json", spec_document(fetched_spec(spec, DATA)))
