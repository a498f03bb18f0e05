"""``training.epochs`` as steps: counted in the prepared data, or estimated from files that are not prepared.

A run is planned, recorded and resumed with plain ``training.steps``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path

from scaletrain_cli.errors import InfeasibleError, Problem, ScaletrainError, SpecError, UsageError
from scaletrain_cli.launch.node_sizes import plan_run
from scaletrain_cli.launch.preparation import Choice, find_prepared_data, plan_preparation, prepare_data
from scaletrain_cli.launch.resource_checks.checks import require_external
from scaletrain_cli.plan.data_size import DataSize, data_size, is_seen, prepared_size, validation_from_training
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.rundir.shared_datasets import DATASET, Entry
from scaletrain_cli.spec import RunSpec, set_steps
from scaletrain_cli.spec.corpus_files import EMBEDDED
from scaletrain_cli.spec.loading import count_in_steps
from scaletrain_cli.spec.quantities import LARGEST_WHOLE

_PROVISIONAL_STEPS = 1000


def in_steps(
    spec: RunSpec,
    file: Path | str,
    prepare: Choice | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[RunSpec, Reason | None]:
    """Return the spec with ``training.steps`` in place of ``training.epochs``, and how they were counted.

    A spec without epochs is returned as it is, with None. ``file``: the name of the spec in errors. ``prepare``: data
    that are not prepared are prepared first; None: their size is estimated. ``say``: as for size_to_count(). Raises as
    size_to_count() and in_counted_steps().
    """
    if spec.training.epochs is None:
        return spec, None
    return in_counted_steps(spec, size_to_count(spec, file, prepare, say), file)


def provisional(spec: RunSpec) -> RunSpec:
    """Return the spec with an arbitrary number of steps in place of epochs, for what does not depend on it."""
    if spec.training.epochs is None:
        return spec
    schedule = spec.training.schedule
    named = [schedule.warmup_steps + schedule.cooldown_steps]
    named += [max(group.start_step, group.end_step or 1) for group in spec.training.trainable]
    return count_in_steps(spec, max(_PROVISIONAL_STEPS, *named))


def size_to_count(
    spec: RunSpec, file: Path | str, prepare: Choice | None, say: Callable[[str], None] = lambda line: None
) -> DataSize:
    """Return the size of the data of a run with epochs: that of the prepared data, or an estimate.

    ``prepare``: data that are not prepared are prepared first on this machine, with ``say``, as by prepare_data();
    before that the run is planned, and its files are checked. None: nothing is prepared and no request is sent to the
    hub; the size of data that are not prepared is estimated. Raises UsageError where the size is not known here,
    InfeasibleError, and the error of the preparation.
    """
    trial, root = provisional(spec), runs_root()
    if prepare is None:
        size = _size_of(spec, root, find_prepared_data(trial, root)) or data_size(trial) or _size_of_text(trial, root)
        if size is None:
            raise _uncounted(spec, "epochs-not-estimated", file)
        return size
    try:
        plan = plan_preparation(trial, root, prepare)
    except ScaletrainError:
        require_external(trial, None)  # which names the line of a source that cannot be read
        raise
    datasets = plan.datasets
    if plan.where == "here":
        plan_run(trial, file)
        require_external(trial, None)
        datasets = prepare_data(trial, prepare, say).datasets
    if plan.where == "job":
        raise _uncounted(spec, "epochs-not-prepared", file, why=plan.why)
    if (size := _size_of(spec, root, datasets)) is None:
        raise _uncounted(spec, "epochs-not-estimated", file)
    return size


def in_counted_steps(spec: RunSpec, size: DataSize, file: Path | str) -> tuple[RunSpec, Reason]:
    """Return the spec of a run with epochs with as many steps as they are, rounded up, and how they were counted.

    Sequences that the run will hold back from training for its validation are no part of an epoch. Raises SpecError
    where other settings do not fit the number of steps, and UsageError where that number is an estimate.
    """
    assert spec.training.epochs is not None
    held_back, exact = 0, size.exact
    if exact and spec.evaluation.every and size.validation < spec.training.global_batch_size:
        try:
            held_back = _held_back(count_in_steps(spec, _steps(spec, size.train)), size, file)
        except InfeasibleError:  # the caller plans, too, and shows what does not fit
            exact = False
    steps = _steps(spec, size.train - held_back)
    if steps > LARGEST_WHOLE:
        raise _uncounted(spec, "epochs-too-many", file, steps=steps, most=LARGEST_WHOLE)
    code = "counted-less-validation" if held_back else "counted" if exact else "estimated"
    epochs = spec.training.epochs
    params = {
        "epochs": int(epochs) if epochs.is_integer() else epochs,
        "samples": size.train - held_back,
        "unit": spec.samples,
        "steps": steps,
        "batch": spec.training.global_batch_size,
        "held_back": held_back,
    }
    try:
        new = set_steps(spec, steps, file=str(file))
    except SpecError as error:
        if size.exact:
            raise
        cause = recorded("; ".join(map(str, error.problems)).rstrip("."))
        raise _uncounted(spec, "epochs-estimate-misfit", file, steps=steps, cause=cause) from error
    if size.exact and spec.unit == "tokens":
        new.set_counted_data(size.train - held_back, size.validation + held_back, size.tokens)
    return new, Reason(f"preparation.epochs-{code}", params)


def _steps(spec: RunSpec, samples: int) -> int:
    epochs = Fraction(repr(spec.training.epochs))  # 0.1 as it is written, not the nearest float
    return max(1, math.ceil(epochs * samples / spec.training.global_batch_size))


def _held_back(spec: RunSpec, size: DataSize, file: Path | str) -> int:
    """Return how many samples for training the run validates on, the fewest of all layouts that may start."""
    planned = plan_run(spec, file)
    found = []
    for layout in {plan.layout for plan in (planned.plan, *planned.size_plans.values())}:
        width = layout.micro_batch_size * layout.data_parallel
        found.append(validation_from_training(size.train, size.validation, layout.global_batch_size, width))
    return max(0, min(found))  # -1: the ranks refuse the data


def _size_of(spec: RunSpec, root: Path, datasets: Iterable[Entry]) -> DataSize | None:
    """Return the size of the dataset of the one source; None if it is not among them, or cannot be read."""
    name = spec.data.all_sources[0].name
    folder = next((str(entry["folder"]) for entry in datasets if entry["source"] == name), None)
    if folder is None:
        return None
    try:
        document = read_document(root / "datasets" / folder / DATASET) or {}
        return prepared_size(document, spec.training.objective, spec.units_per_sample)
    except (OSError, KeyError, ValueError):
        return None


def _size_of_text(spec: RunSpec, root: Path) -> DataSize | None:
    """Return the size of text by a sample of its files; None for other data, and if they cannot be read here."""
    source = spec.data.only_source
    if spec.training.objective != "causal_lm" or not (source in EMBEDDED or is_seen(spec, source)):
        return None
    from scaletrain_cli.data.estimate import source_sizes

    found = source_sizes(spec.data, root, Path.cwd()).get(spec.data.all_sources[0].name)
    if found is None:
        return None
    return DataSize(found.sequences(spec.units_per_sample), 0, found.tokens, exact=False)


def _uncounted(spec: RunSpec, code: str, file: Path | str, **params: int | Reason) -> UsageError:
    if code != "epochs-too-many" and not spec.cluster.traits.shared_run_directory:
        code = "epochs-out-of-sight"
    reason = Reason(f"preparation.{code}", {"spec": str(file), "scheduler": spec.cluster.scheduler, **params})
    key = "training.epochs"
    problem = Problem.because(spec.where(key), key, reason, f"{spec.training.epochs:g}")
    kind = SpecError if code == "epochs-too-many" else UsageError
    return kind(Reason("preparation.epochs-uncounted"), (problem,))
