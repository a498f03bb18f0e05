"""Plan a run again for other nodes, another layout, more steps or newer code, without a change of what was trained.

All checks are made here, before anything is queued. Reads the record and writes nothing. Of another length or
learning-rate schedule, the steps that a run has trained keep their learning rates.
"""

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from scaletrain_cli.data.stages import batch_number, keeps_batches, merged_skip_ranges, sources_before
from scaletrain_cli.errors import InfeasibleError, Problem, UsageError
from scaletrain_cli.launch.attempts import newest_checkpoint_step
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.code import Snapshot, take_snapshot
from scaletrain_cli.launch.job import read_submission
from scaletrain_cli.launch.submit import plan_for_engine, plan_run
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.journal import has_committed, last_logged_step, read_events, read_rollbacks
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_record, revision_path
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import DataSpec, RunSpec, changed_keys, override_spec
from scaletrain_cli.spec.losses import LOSSES_OF
from scaletrain_cli.spec.preparation import DuplicatesSpec
from scaletrain_cli.spec.sources import SourceSpec
from scaletrain_cli.spec.training import averaged_from, learning_rate

LENGTH_KEYS = ("training.steps", "training.tokens", "training.samples")
SCHEDULE_EVENT = "schedule-changed"
# Keys that have an effect on later steps only: the learning rate is a function of the step, and no state.
SCHEDULE_KEYS = (
    *(*LENGTH_KEYS, "training.optimizer.lr", "training.schedule.name", "training.schedule.warmup_steps"),
    *("training.schedule.min_lr", "training.schedule.step_size", "training.schedule.gamma"),
    *("training.schedule.cooldown_steps", "training.early_stopping.patience"),
)
_MOST_RATES = 1000  # of the past that are compared
# Keys or sections that may change between attempts. A change of any other key (data, model, seed) would make it
# another run. Of the sources of a mixture, the shares may change, and sources may be added. While a run has trained
# nothing, all of ``data`` may change.
MAY_CHANGE = (
    *("cluster", "layout", "checkpoint", "guard", "restarts", "tracking", "notify", "telemetry", "code"),
    *("env", "training.micro_batch_size", "data.loader", "data.cache", "data.stages", "data.skip"),
    *("training.optimizer.weight_decay", "training.optimizer.betas", "training.gradient_clipping"),
    *SCHEDULE_KEYS,
)
# Paths that may change in a run that was moved to another cluster, beside those of ``data.sources``.
_PATHS = (
    *("data.source", "data.validation_source", "data.tokenizer.path", "model.weights", "data.cache.path"),
    "evaluation.zero_shot.source",
)
# Fields that the planner sets where they are `auto`; a user may have pinned them. One context rank is the default.
_PINS = (
    *("layout.data_parallel", "layout.tensor_parallel", "layout.pipeline_parallel", "layout.sequence_parallel"),
    *("layout.context_parallel", "layout.expert_parallel", "layout.zero_stage"),
    *("layout.activation_checkpointing", "training.micro_batch_size"),
)
# The fields that decide how states are sharded over the ranks.
_SHARDING = (
    *("data_parallel", "tensor_parallel", "pipeline_parallel", "virtual_pipeline", "sequence_parallel"),
    *("context_parallel", "expert_parallel", "zero_stage", "pipeline_split"),
)


@dataclass(frozen=True)
class Resize:
    """The current record (``before``), the spec and plan with the overrides, and the new code snapshot, if any.

    ``step``: that of the newest checkpoint, which the run continues from; None if it is not visible here.
    """

    before: RunRecord
    spec: RunSpec
    plan: RunPlan
    overrides: tuple[str, ...]
    step: int | None = 0
    snapshot: Snapshot | None = None
    size_plans: Mapping[int, RunPlan] | None = None  # None: those of the record

    @property
    def changes(self) -> dict[str, tuple[str, str]]:
        """Return the changed keys of the spec, and ``code``, each with its old and new value; empty if none changed."""
        changed = changed_keys(self.before.spec, self.spec)
        old, new = self.before.code, self.snapshot.record if self.snapshot is not None else None
        if new is not None and (old is None or old.sha256 != new.sha256):
            changed["code"] = (json.dumps(None if old is None else old.shown), json.dumps(new.shown))
        return changed

    @property
    def schedule(self) -> "NewSchedule | None":
        """Return what another length or learning-rate schedule means; None if both stay."""
        if self.changes.keys().isdisjoint(SCHEDULE_KEYS):
            return None
        return new_schedule(self.before.spec, self.spec, self.step)

    @property
    def after(self) -> RunRecord:
        """Return the record as the next attempt would read it."""
        number = self.before.revision + bool(self.changes)
        code = self.before.code if self.snapshot is None else self.snapshot.record
        sizes = self.before.sizes if self.size_plans is None else tuple(self.size_plans)
        return dataclasses.replace(self.before, spec=self.spec, plan=self.plan, revision=number, code=code, sizes=sizes)

    @property
    def reshards_states(self) -> bool:
        """Return whether the weights or the optimizer states would be sharded differently."""
        old, new = self.before.plan.layout, self.plan.layout
        return any(getattr(old, field) != getattr(new, field) for field in _SHARDING)


def replan(
    run: RunDir, overrides: Sequence[str], *, new_code: bool = False, moving: bool = False, branch_at: int | None = None
) -> Resize:
    """Plan the run again with ``overrides`` (``cluster.nodes=2``), with the same global batch size.

    ``new_code`` takes a new snapshot of the user's code, as does an override of ``code``. ``moving``: the run is about
    to be moved to another cluster, as runs with the event ``moved`` were: its files have other paths there.
    ``branch_at``: the step from which a new run is to continue, which may have another name. Raises UsageError for an
    override that would change what was trained, InfeasibleError for a run that does not fit.
    """
    before = read_record(run)
    newest = newest_checkpoint_step(run, before.spec) if branch_at is None else branch_at
    file = str(revision_path(run, before.revision) if before.revision else run.record)
    spec = override_spec(before.spec, overrides, file=file)
    spec = backend_for(spec.cluster.scheduler).with_local_defaults(spec)
    changes = changed_keys(before.spec, spec)
    visible = before.spec.cluster.traits.shared_run_directory
    trained = bool(changes) and (
        (not visible and read_submission(run) is not None)  # it may have, where that is not seen from here
        or bool(last_logged_step(run))
        or has_committed(run)
        or newest_checkpoint_step(run, before.spec) is not None
    )
    step = newest or 0
    moved = moving or any(event["event"] == "moved" for event in read_events(run))
    judged = {key: values for key, values in changes.items() if trained or key.split(".")[0] != "data"}
    if moved:  # the ranks compare the data and the weights, which have other paths, with those of the checkpoint
        of_sources = [key for key in judged if key.startswith("data.sources.")]
        paths = {*_PATHS, *(key for key in of_sources if key.endswith((".path", ".validation_path")))}
        judged = {key: values for key, values in judged.items() if key not in paths}
    if branch_at is not None:
        judged.pop("name", None)
    if visible and newest_checkpoint_step(run, spec) == newest_checkpoint_step(run, before.spec):
        judged.pop("checkpoint.dir", None)  # the checkpoints were copied there, or there are none
    problems = [problem for key, values in judged.items() if (problem := _objection(key, *values)) is not None]
    if trained:
        problems += length_objections(before.spec, spec, newest)
    if any(_is_of_sources(key) for key in judged):
        problems += _source_objections(
            before.spec.data,
            spec.data,
            before.working_folder,
            _trained_sources(run, before, step),
            objective=spec.training.objective,
            moved=moved,
        )
    rolled_back = [rollback.skip for rollback in read_rollbacks(run)]
    skipped = [*before.spec.data.skip, *rolled_back]
    # If the checkpoint is not here, the ranks compare the batches.
    if "data.skip" in judged and not keeps_batches(step, skipped, [*spec.data.skip, *rolled_back]):
        last = batch_number(step, merged_skip_ranges(skipped))
        problems.append(_problem("data.skip", "data.skips-trained-batches", json.dumps(spec.data.skip), batch=last))
    if problems:
        raise UsageError(Reason("launch.resume-another-run", {"run": run.run_id}), tuple(problems))
    snapshot = None
    if new_code or any(key.startswith("code.") for key in changes):
        snapshot = take_snapshot(spec, before.working_folder, run.path.parent)
    if snapshot is None and new_code:
        raise UsageError(Reason("launch.resume-no-code", {"run": run.run_id}))
    if not changes:
        return Resize(before, before.spec, before.plan, tuple(overrides), newest if trained else 0, snapshot)
    try:
        planned = plan_run(spec, run.run_id)
    except InfeasibleError as error:
        error.problems = (*map(_for_a_resume, error.problems), *_pins_to_release(spec))
        raise
    return Resize(
        before, planned.spec, planned.plan, tuple(overrides), newest if trained else 0, snapshot, planned.size_plans
    )


def _objection(key: str, was: str, given: str) -> Problem | None:
    if key == "code.path" and given == "null":
        return _problem(key, "launch.resume-keeps-code", given, before=was)
    if key == "checkpoint.dir":
        return _problem(key, "launch.resume-keeps-checkpoints", given, before=was)
    return None if _is_of_sources(key) or may_change(key) else _fixed(key, was, given)


def may_change(key: str) -> bool:
    """Return whether a resume may change a key at any step."""
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in MAY_CHANGE)


def _is_of_sources(key: str) -> bool:
    """Return True for a key that _source_objections() judges."""
    return key in ("data.source", "data.sources", "data.validation_source") or key.startswith("data.sources.")


def _fixed(key: str, was: str, given: str) -> Problem:
    allowed = ", ".join((*MAY_CHANGE, "the weights of data.sources"))
    return _problem(key, "launch.resume-fixed-key", given, before=was, allowed=allowed)


def _trained_sources(run: RunDir, record: RunRecord, steps: int) -> set[str]:
    """Return the names of the sources that have given samples in the first ``steps`` steps, or may have."""
    sources = record.spec.data.all_sources
    if not record.spec.cluster.traits.shared_run_directory:  # checkpoints are on a volume that is not visible here
        return {source.name for source in sources}
    return sources_before(read_events(run), steps * record.spec.training.global_batch_size, sources[0].name)


def _source_objections(
    before: DataSpec, after: DataSpec, working_folder: str, trained: Collection[str], *, objective: str, moved: bool
) -> Iterator[Problem]:
    """Yield what a changed list of sources changes of the samples that the run was trained on.

    Sources keep their places, because the order of samples counts them. ``trained``: names of those that have given
    samples; the others may be removed. ``moved``: to another cluster, where files have other paths.
    """
    keys = [key.removesuffix(".path") for key, _ in after.paths()]
    reads_words = objective not in LOSSES_OF  # sources are prepared with a tokenizer
    for number, was in enumerate(before.all_sources):
        if number >= len(after.all_sources):
            if was.name not in trained and (not reads_words or _is_independent(was, before, working_folder)):
                continue
            yield _problem("data.sources", "launch.resume-source-removed", source=was.name)
            continue
        old, new = was.model_dump(mode="json"), after.all_sources[number].model_dump(mode="json")
        for name in ("name", "path", "validation_path", "format", "field", "fields"):
            if old[name] != new[name] and not (moved and name.endswith("path")):
                key = f"{keys[number]}.{name}"
                if after.source is not None:
                    key = "data.validation_source" if name == "validation_path" else keys[number]
                yield _fixed(key, json.dumps(old[name]), json.dumps(new[name]))
    for number, added in enumerate(after.all_sources):
        if number < len(before.all_sources):
            continue
        if objective == "dpo":
            yield _problem(keys[number], "launch.resume-source-and-reference", source=added.name)
        if _is_dataset(added.path, working_folder):
            continue
        if reads_words and after.tokenizer.path is None:
            yield _problem(keys[number], "launch.resume-source-and-tokenizer", source=added.name)
        for place, step in enumerate(after.prepare):
            applies = isinstance(step, DuplicatesSpec) and (step.only is None or added.name in step.only)
            if isinstance(step, DuplicatesSpec) and applies and step.across_sources:
                yield _problem(keys[number], "launch.resume-source-and-duplicates", source=added.name, step=place)


def _is_independent(source: SourceSpec, data: DataSpec, working_folder: str) -> bool:
    """Return True if the data of the other sources are the same without this one."""
    across = (step for step in data.prepare if isinstance(step, DuplicatesSpec) and step.across_sources)
    compared = any(step.only is None or source.name in step.only for step in across)
    return _is_dataset(source.path, working_folder) or (data.tokenizer.path is not None and not compared)


def _is_dataset(path: str, working_folder: str) -> bool:
    return (Path(working_folder) / expand_home(path) / "dataset.json").is_file()


def _for_a_resume(problem: Problem) -> Problem:
    """Return the planner's problem, with another remedy where a resumed run cannot follow the planner's."""
    if problem.key != "training.global_batch_size":
        return problem
    cause = problem.reason or recorded(problem.message.rstrip("."))
    why = Reason("launch.resume-fixed-batch", {"problem": cause})
    return Problem.because(problem.where, problem.key, why, problem.given)


def _pins_to_release(spec: RunSpec) -> Iterator[Problem]:
    """Yield the pinned fields to set to `auto` so that a plan exists: one field if that suffices, else all of them."""
    pins = {key: value for key in _PINS if (value := str(attrgetter(key)(spec))) != "auto"}
    if spec.layout.context_parallel == 1:
        del pins["layout.context_parallel"]
    alone = [key for key in pins if _can_be_planned(spec, [key])]
    together = list(pins) if not alone and len(pins) > 1 and _can_be_planned(spec, list(pins)) else []
    code = "launch.resume-pinned-together" if together else "launch.resume-pinned"
    for key in alone or together:
        yield Problem.because(spec.where(key), key, Reason(code, {"key": key, "keys": together}), pins[key])


def _can_be_planned(spec: RunSpec, released: Sequence[str]) -> bool:
    try:
        plan_for_engine(override_spec(spec, [f"{key}=auto" for key in released], file="a trial"), "a trial")
    except (InfeasibleError, UsageError):
        return False
    return True


@dataclass(frozen=True)
class WasNow:
    """A value before and after a change; None where there is none."""

    was: float | None
    now: float | None


@dataclass(frozen=True)
class NewSchedule:
    """The effect of another length or schedule on a run that has trained ``step`` steps.

    ``learning_rate``: of the next step. ``same_past``: the learning rates up to ``step`` are those of a run with the
    new schedule from the start. Both are None for a program of the user's, which has a schedule of its own, and where
    ``step`` is None: the checkpoints are on a volume that is not visible here.
    """

    step: int | None
    total_steps: WasNow
    learning_rate: WasNow | None
    same_past: bool | None

    def to_json(self) -> dict[str, Any]:
        """Return the values for an event and for `resume --json`."""
        return asdict(self)


def new_schedule(before: RunSpec, after: RunSpec, step: int | None) -> NewSchedule:
    """Return what the schedule of ``after`` changes for a run of ``before`` with ``step`` trained steps."""
    totals = WasNow(before.total_steps, after.total_steps)
    if after.code.own_program or step is None:
        return NewSchedule(step, totals, None, None)

    def rates(number: int) -> tuple[float | None, float | None]:
        return _rate(before, number), _rate(after, number)

    compared = map(rates, range(step, 0, -max(1, step // _MOST_RATES)))
    return NewSchedule(step, totals, WasNow(*rates(step + 1)), all(was == now for was, now in compared))


def _rate(spec: RunSpec, step: int) -> float | None:
    """Return the learning rate of a step; None after the last one."""
    return learning_rate(step, spec.total_steps, spec.training) if step <= spec.total_steps else None


def length_objections(before: RunSpec, after: RunSpec, step: int | None) -> Iterator[Problem]:
    """Yield why a run that has trained ``step`` steps cannot continue with the length of ``after``, if it is another.

    With None, the ranks compare the length with their checkpoint.

    Beside too few steps these are settings whose past depends on the length: stages and shares of the data, and the
    mean of the weights of the last quarter.
    """
    total = after.total_steps
    if total == before.total_steps:
        return
    lengths = {key: getattr(after.training, key.removeprefix("training.")) for key in LENGTH_KEYS}
    key, given = next((key, value) for key, value in lengths.items() if value is not None)
    if step is not None and total <= step:
        yield _problem(key, "launch.resume-too-few-steps", given, steps=total, step=step)
    for number, stage in enumerate(after.data.stages):
        first, now = stage.first_step(before.total_steps), stage.first_step(total)
        if first != now:
            moves = {"stage": number, "was": first, "now": now, "steps": total}
            yield _problem(f"data.stages.{number}.start", "launch.resume-stage-moves", stage.start, **moves)
    sources = after.data.all_sources
    if any(source.weight for source in sources):  # else the ratio of the epochs decides, whatever the length
        for number, source in enumerate(sources):
            if source.epochs is not None:
                moves = {"source": number, "was": before.total_steps, "now": total}
                yield _problem(f"data.sources.{number}.epochs", "launch.resume-epochs-move", source.epochs, **moves)
    if after.training.averaging.name == "checkpoints":
        first = min(averaged_from(length) for length in (before.total_steps, total))
        if step is None or step >= first:
            yield _problem(key, "launch.resume-mean-has-begun", given, first=first)


def _problem(key: str, code: str, given: object = None, **params: object) -> Problem:
    return Problem.because("--set", key, Reason(code, params), given)


def continues_after_early_stop(before: RunSpec, after: RunSpec) -> bool:
    """Return whether a run that has stopped early trains further with ``after``: its patience is no longer used up."""
    was, now = before.training.early_stopping.patience, after.training.early_stopping.patience
    return now == 0 or now > was
