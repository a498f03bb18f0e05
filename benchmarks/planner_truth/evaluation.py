"""Run the planner on tables of measurements, and score each set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from planner_truth.architectures import read_dimensions
from planner_truth.mapping import Case, Unmapped
from planner_truth.scores import Errors, Ranking, Run, Verdicts, errors, kendall_tau, ranking, verdicts
from planner_truth.sets import TruthSet
from planner_truth.table import Measured, Row, Table
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.architecture import architecture
from scaletrain_cli.plan.axes import resolve_axes
from scaletrain_cli.plan.catalogue.hardware import Accelerator, find_accelerator
from scaletrain_cli.plan.memory.device_memory import plan_memory
from scaletrain_cli.plan.result import Memory, Time
from scaletrain_cli.plan.search.layout_search import evaluate
from scaletrain_cli.plan.search.layouts import division_problems
from scaletrain_cli.plan.speed.offload import host_update_seconds
from scaletrain_cli.plan.stages import zero_shards
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.run_consistency import run_inconsistencies


@dataclass(frozen=True)
class Judged:
    """One row, predicted and measured, in seconds and bytes."""

    row: Row
    panel: str
    case: Case
    measured: Measured
    time: Time
    memory: Memory
    refused: bool  # the spec contradicts itself or its framework would not start, so there would be no plan

    @property
    def step_seconds(self) -> float:
        """Return the predicted seconds per step."""
        return self.time.step

    @property
    def expected_seconds(self) -> float:
        """Return the seconds per step by which layouts are chosen, which count the chance of a stall."""
        return self.time.expected

    @property
    def runs(self) -> bool:
        """Return whether the planner says that the run fits."""
        return self.memory.fits and not self.refused

    @property
    def memory_bytes(self) -> int:
        """Return the predicted bytes of the kind, and on the pipeline stage, that was measured."""
        stages = {"first": self.memory.by_stage[0], "last": self.memory.by_stage[-1], "worst": self.memory}
        memory, kind = stages[self.measured.memory_stage], self.measured.memory_kind
        return memory.cached - memory.framework if kind == "reserved" else int(getattr(memory, kind))


@dataclass(frozen=True)
class Pick:
    """The run of a panel that the planner would choose among those that it says fit.

    ``regret``: how much slower it is than the best; None if it crashed.
    """

    panel: str
    row_id: str
    regret: float | None


@dataclass(frozen=True)
class Score:
    """The statistics of one set, and the rows that count."""

    truth_set: TruthSet
    rows: tuple[Judged, ...]
    errors: Errors | None = None
    verdicts: Verdicts | None = None
    tau: float | None = None  # Kendall's, over all rows of a set of times
    ranking: Ranking | None = None
    picks: tuple[Pick, ...] = ()
    parts: tuple[tuple[str, Errors], ...] = ()  # by the values of the set's column ``by``


@dataclass(frozen=True)
class Outcome:
    """The result for one table: rows predicted, and counts by reason of the others. ``missing``: no such file."""

    rows: tuple[Judged, ...]
    skipped: Mapping[str, int]
    missing: bool = False


def judge(table: Table, directory: Path, framework: str | None = None) -> Outcome:
    """Predict every row of a file; count the rows that cannot be mapped by reason."""
    if not table.path(directory).is_file():
        return Outcome((), {}, missing=True)
    read_dimensions(directory)
    judged, skipped = [], Counter[str]()
    for row in table.read(directory):
        try:
            judged.append(_judge_row(table, row, framework))
        except (Unmapped, UsageError) as reason:
            skipped[str(reason)] += 1
    return Outcome(tuple(judged), dict(skipped.most_common()))


def _judge_row(table: Table, row: Row, framework: str | None) -> Judged:
    try:
        case, measured = table.build(row.inputs), table.measure(row.inputs, row.truth)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise Unmapped(f"a cell makes no sense: {type(error).__name__}: {error}") from error
    if framework is not None:
        case = Case(_under(case.spec, framework), case.layout)
    device = find_accelerator(case.spec.cluster)
    try:
        predicted = evaluate(case.spec, case.layout, device)
        memory = predicted.memory
        predicted_time = without_update(case, device, predicted.time)
        if case.program is not None:
            memory = plan_memory(case.spec, case.layout, device, case.program)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise Unmapped(f"the planner failed: {type(error).__name__}: {error}") from error
    if measured.mfu is None and measured.step_seconds:
        measured = replace(measured, mfu=predicted_time.mfu * predicted_time.step / measured.step_seconds)
    refused = any(run_inconsistencies(case.spec)) or bool(division_problems(case.spec, resolve_axes(case.spec)))
    return Judged(row, table.panel(row.inputs), case, measured, predicted_time, memory, refused)


def without_update(case: Case, device: Accelerator, time: Time) -> Time:
    """Return the time of a step in which the loss scaler skips the update, if the case says so."""
    if not case.skips_update or case.layout.offload == "none":
        return time
    layout = case.layout
    held = architecture(case.spec.transformer, layout.tensor_parallel, layout.expert_parallel).parameters
    shards = zero_shards(layout) if layout.zero_stage else 1
    skipped = host_update_seconds(case.spec, device, -(-held // layout.pipeline_parallel // shards))
    step = time.step - skipped
    return replace(time, step=step, optimizer=time.optimizer - skipped, mfu=time.mfu * time.step / step)


def _under(spec: RunSpec, framework: str) -> RunSpec:
    return spec.model_copy(update={"planner": spec.planner.model_copy(update={"framework": framework})})


def score(truth_set: TruthSet, outcome: Outcome) -> Score:
    """Return the statistics of a set over the rows that it keeps."""
    rows = [row for row in outcome.rows if truth_set.keep(row.row.inputs, row.measured)]
    if truth_set.quantity == "fits":
        rows = [row for row in rows if row.measured.ran is not None]
        return Score(truth_set, tuple(rows), verdicts=verdicts([(r.runs, bool(r.measured.ran)) for r in rows]))
    if truth_set.quantity == "memory":
        rows = [row for row in rows if row.measured.memory_bytes]
        pairs = [(float(row.memory_bytes), row.measured.memory_bytes or 0.0) for row in rows]
        return Score(truth_set, tuple(rows), errors=errors(pairs), parts=_parts(truth_set, rows, pairs))
    timed = [row for row in rows if row.measured.step_seconds]
    if truth_set.quantity == "ranking":
        return Score(truth_set, tuple(timed), ranking=ranking(_panels(timed)), picks=_picks(rows))
    times = [_times(row) for row in timed]
    parts = _parts(truth_set, timed, times)
    return Score(truth_set, tuple(timed), errors=errors(times), tau=kendall_tau(times), parts=parts)


def _parts(
    truth_set: TruthSet, rows: Sequence[Judged], pairs: Sequence[tuple[float, float]]
) -> tuple[tuple[str, Errors], ...]:
    """Return the errors of the rows with each value of the set's column ``by``."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row, pair in zip(rows, pairs, strict=True):
        if truth_set.by:
            found.setdefault(row.row.inputs[truth_set.by], []).append(pair)
    return tuple((value, each) for value in sorted(found) if (each := errors(found[value])))


def _times(row: Judged) -> tuple[float, float]:
    return row.step_seconds, row.measured.step_seconds or 0.0


def _panels(rows: Sequence[Judged]) -> list[list[Run]]:
    return [[Run(*_times(row), row.runs, row.expected_seconds) for row in panel] for panel in _by_panel(rows).values()]


def _by_panel(rows: Sequence[Judged]) -> dict[str, list[Judged]]:
    panels: dict[str, list[Judged]] = {}
    for row in rows:
        panels.setdefault(row.panel, []).append(row)
    return panels


def _picks(rows: Sequence[Judged]) -> tuple[Pick, ...]:
    """Return the planner's choice in each panel; crashed runs are candidates too."""
    found = []
    for panel, runs in _by_panel(rows).items():
        times = [run.measured.step_seconds for run in runs if run.measured.step_seconds]
        fitting = [run for run in runs if run.runs]
        if len(times) < 2 or not fitting:
            continue
        pick = min(fitting, key=lambda run: run.expected_seconds)
        seconds = pick.measured.step_seconds
        found.append(Pick(panel, pick.row.row_id, seconds / min(times) - 1 if seconds else None))
    return tuple(found)
