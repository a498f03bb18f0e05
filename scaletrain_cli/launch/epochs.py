"""``training.epochs`` as steps: counted in the prepared data, or estimated from files that are not prepared.

A run is planned, recorded and resumed with plain ``training.steps``. An epoch of several sources has as many samples as
they have together, which their weights share out; a source with ``epochs`` counts that many times.
"""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path

from scaletrain_cli.data.stages import samples_by_source
from scaletrain_cli.errors import InfeasibleError, Problem, ScaletrainError, SpecError, UsageError
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.preparation import (
    Choice,
    find_prepared_data,
    plan_preparation,
    prepare_data,
    queue_preparation,
    sizes_of_datasets,
)
from scaletrain_cli.launch.resource_checks.checks import require_external
from scaletrain_cli.launch.submit import plan_run
from scaletrain_cli.plan.data_size import DataSize, data_size, is_seen, validation_from_training
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.spec import RunSpec, set_steps
from scaletrain_cli.spec.corpus_files import EMBEDDED
from scaletrain_cli.spec.loading import count_in_steps
from scaletrain_cli.spec.quantities import LARGEST_WHOLE

_PROVISIONAL_STEPS = 1000


def in_steps(
    spec: RunSpec, file: Path | str, prepare: Choice | None = None, say: Callable[[str], None] = lambda line: None
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
    """Return the spec with an arbitrary number of steps in place of epochs, for what does not depend on it.

    Sources have equal shares in place of epochs, which that number could not hold.
    """
    if spec.training.epochs is None:
        return spec
    sources = tuple(source.model_copy(update={"epochs": None, "weight": 1.0}) for source in spec.data.sources)
    spec = spec.with_changes("data", sources=sources)
    schedule = spec.training.schedule
    named = [schedule.warmup_steps + schedule.cooldown_steps]
    named += [max(group.start_step, group.end_step or 1) for group in spec.training.trainable]
    return count_in_steps(spec, max(_PROVISIONAL_STEPS, *named))


def size_to_count(
    spec: RunSpec, file: Path | str, prepare: Choice | None, say: Callable[[str], None] = lambda line: None
) -> dict[str, DataSize]:
    """Return the size of each source of a run with epochs by its name: that of prepared data, or an estimate.

    ``prepare``: data that are not prepared are prepared first, on this machine or, where it does not see their place,
    by a job that this command waits for, with ``say``, as by prepare_data(); before that the run is planned, and its
    files are checked. None: nothing is prepared and no request is sent to the hub; the size of data that are not
    prepared is estimated. Raises UsageError where the size is not known here, InfeasibleError, and the error of the
    preparation.
    """
    trial, root = provisional(spec), runs_root()
    if prepare is None:
        sizes = sizes_of_datasets(spec, root, find_prepared_data(trial, root))
        if len(sizes) < len(spec.data.all_sources):
            sizes = _estimates(trial, root)
    else:
        try:
            plan = plan_preparation(trial, root, prepare)
        except ScaletrainError:
            require_external(trial, None)  # which names the line of a source that cannot be read
            raise
        if plan.where == "job" and spec.cluster.traits.shared_run_directory:
            raise _uncounted(spec, "epochs-not-prepared", file, why=plan.why)
        if plan.where != "nothing":
            plan_run(trial, file)
            require_external(trial, None)
        if plan.where == "job":  # which is queued for the count alone; the run's own one finds the data prepared
            queued = queue_preparation(trial, None)
            assert queued is not None  # this machine sees no data that could be prepared already
            say(str(Reason("preparation.job-to-count", {"job": queued[0].job_id})))
            sizes = backend_for(spec.cluster.scheduler).sizes_of_preparation(queued[0], say)
        else:
            here = plan.where == "here"
            sizes = sizes_of_datasets(spec, root, prepare_data(trial, prepare, say).datasets if here else plan.datasets)
    if len(sizes) < len(spec.data.all_sources):
        raise _uncounted(spec, "epochs-not-estimated", file)
    return sizes


def in_counted_steps(spec: RunSpec, sizes: Mapping[str, DataSize], file: Path | str) -> tuple[RunSpec, Reason]:
    """Return the spec of a run with epochs with as many steps as they are, rounded up, and how they were counted.

    Sequences that the run will hold back from training for its validation are no part of an epoch. ``epochs`` of a
    source become those in the whole run. Raises SpecError where other settings do not fit the number of steps, and
    UsageError where that number is an estimate.
    """
    assert spec.training.epochs is not None
    train = {name: size.train for name, size in sizes.items()}
    batch, exact, held_back = spec.training.global_batch_size, all(size.exact for size in sizes.values()), 0
    if exact and spec.evaluation.every and any(size.validation < batch for size in sizes.values()):
        try:
            left = _without_held_back(count_in_steps(spec, _steps(spec, train)), sizes, file)
            train, held_back = left, sum(train.values()) - sum(left.values())
        except InfeasibleError:  # the caller plans, too, and shows what does not fit
            exact = False
    steps = _steps(spec, train)
    if steps > LARGEST_WHOLE:
        raise _uncounted(spec, "epochs-too-many", file, steps=steps, most=LARGEST_WHOLE)
    code = "counted-less-validation" if held_back else "counted" if exact else "estimated"
    epochs = spec.training.epochs
    params = {
        "epochs": int(epochs) if epochs.is_integer() else epochs,
        "samples": math.ceil(_per_epoch(spec, train)),
        "unit": spec.samples,
        "steps": steps,
        "batch": batch,
        "held_back": held_back,
    }
    how = Reason(f"preparation.epochs-{code}", params)
    try:
        new = set_steps(spec, steps, file=str(file))
    except SpecError as error:
        if all(size.exact for size in sizes.values()):
            raise
        cause = recorded("; ".join(map(str, error.problems)).rstrip("."))
        raise _uncounted(spec, "epochs-estimate-misfit", file, steps=steps, cause=cause) from error
    if spec.data.mixes:
        read = samples_by_source(new.data, train, steps, batch)
        passes = [f"{name} {count / train[name]:.3g} times" for name, count in read.items() if train[name]]
        return new, Reason("preparation.epochs-of-sources", {"counted": how, "passes": passes})
    (size,) = sizes.values()
    if size.exact and spec.unit == "tokens":
        new.set_counted_data(size._replace(train=size.train - held_back, validation=size.validation + held_back))
    return new, how


def note_prepared_size(spec: RunSpec) -> None:
    """Store the size of rows that are prepared below the runs root in the spec of a run with steps, for its plan."""
    root = runs_root()
    of_rows = spec.training.objective in ("sft", "dpo") and not spec.data.mixes and not spec.code.own_program
    if of_rows and any((root / "datasets").glob("*/dataset.json")):
        for size in sizes_of_datasets(spec, root, find_prepared_data(spec, root)).values():
            spec.set_counted_data(size)


def _per_epoch(spec: RunSpec, train: Mapping[str, int]) -> Fraction:
    """Return the samples of an epoch. ``train``: those of each source, by its name."""
    if not spec.data.mixes:
        return Fraction(sum(train.values()))
    used = {
        name for weights in (stage.weights for stage in spec.data.stages) for name, weight in weights.items() if weight
    }
    return sum(
        (
            Fraction(repr(source.epochs or 1.0)) * train[source.name]
            for source in spec.data.sources
            if source.weight != 0 or source.name in used
        ),
        Fraction(0),
    )


def _steps(spec: RunSpec, train: Mapping[str, int]) -> int:
    epochs = Fraction(repr(spec.training.epochs))  # 0.1 as it is written, not the nearest float
    return max(1, math.ceil(epochs * _per_epoch(spec, train) / spec.training.global_batch_size))


def _without_held_back(spec: RunSpec, sizes: Mapping[str, DataSize], file: Path | str) -> dict[str, int]:
    """Return the training samples of each source without those that the run validates on.

    These are the fewest of all layouts that may start.
    """
    planned = plan_run(spec, file)
    layouts = {plan.layout for plan in (planned.plan, *planned.size_plans.values())}
    fills_rounds = not spec.data.mixes or spec.training.objective == "dpo"
    left = {}
    for name, size in sizes.items():
        counts = []
        for layout in layouts:
            width = layout.micro_batch_size * layout.data_parallel if fills_rounds else None
            counts.append(validation_from_training(size.train, size.validation, layout.global_batch_size, width))
        left[name] = size.train - max(0, min(counts))  # -1: the ranks refuse the data
    return left


def _estimates(spec: RunSpec, root: Path) -> dict[str, DataSize]:
    """Return the sizes of sources by their files, in whole or in part; only of those that can be read here."""
    sizes = {name: size for name, alone in spec.of_sources().items() if (size := data_size(alone)) is not None}
    read_here = [source for source in spec.data.all_sources if source.path in EMBEDDED or is_seen(spec, source.path)]
    if spec.training.objective == "causal_lm" and read_here:
        from scaletrain_cli.data.estimate import source_sizes

        of_text = source_sizes(spec.data, root, Path.cwd())
        for source in read_here:
            if source.name not in sizes and (text := of_text.get(source.name)) is not None:
                sizes[source.name] = DataSize(text.sequences(spec.units_per_sample), 0, text.tokens, exact=False)
    return sizes


def _uncounted(spec: RunSpec, code: str, file: Path | str, **params: int | Reason) -> UsageError:
    if code != "epochs-too-many" and not spec.cluster.traits.shared_run_directory:
        code = "epochs-out-of-sight"
    reason = Reason(f"preparation.{code}", {"spec": str(file), "scheduler": spec.cluster.scheduler, **params})
    key = "training.epochs"
    problem = Problem.because(spec.where(key), key, reason, f"{spec.training.epochs:g}")
    kind = SpecError if code == "epochs-too-many" else UsageError
    return kind(Reason("preparation.epochs-uncounted"), (problem,))
