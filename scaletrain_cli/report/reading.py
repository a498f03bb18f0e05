"""Reads the directory of a run into the JSON object of one run in a report (schema ``scaletrain.report/v1``).

A section whose files are missing or damaged is empty and named in ``missing``; only a run without a valid record, or
with damaged records of attempts, is an error, as for `scaletrain status`.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from scaletrain_cli.diagnosis.case import Case
from scaletrain_cli.diagnosis.checks import Diagnosis
from scaletrain_cli.diagnosis.curves import median
from scaletrain_cli.diagnosis.speed import RunFigures, recent_steps
from scaletrain_cli.errors import UsageError
from scaletrain_cli.event_texts import event_sentence
from scaletrain_cli.launch.attempts import AttemptRecord
from scaletrain_cli.launch.node.record import NodeRecord, read_node_records
from scaletrain_cli.launch.run_status import RunStatus
from scaletrain_cli.launch.view import RunView, read_view
from scaletrain_cli.reasons import Reason
from scaletrain_cli.report.curves import MOST_BINS, Curves, read_curves
from scaletrain_cli.report.hardware import hardware_of_run
from scaletrain_cli.rundir.bad_nodes import read_bad_nodes
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.evaluations import read_evaluations
from scaletrain_cli.rundir.goodput import read_ledger
from scaletrain_cli.rundir.measured import MODEL_STATES
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.profiles import profile_folders, summary_of
from scaletrain_cli.rundir.record import RunRecord, read_spec_lines, revision_path, revisions

SCHEMA = "scaletrain.report/v1"
_DAMAGE = (UsageError, OSError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
_MOST_EVENTS, _MOST_NODES, _MOST_MARKS = 300, 64, 400
_MOST_READ_ATTEMPTS = 8  # whose nodes are read: the latest ones
_MOST_EVALUATIONS = 100
_MOST_PROFILES, _MOST_KERNELS = 4, 10


def read_run_report(run: RunDir, *, most_bins: int = MOST_BINS) -> dict[str, Any]:
    """Return the figures of one run (docs/json.md). Raises UsageError when run.json is damaged."""
    view = read_view(run)
    record, attempts, case = view.record, view.attempts, view.case
    missing: list[Reason] = []

    def section(name: str, read: Callable[[], Any], empty: Any) -> Any:
        try:
            return read()
        except _DAMAGE as error:
            missing.append(Reason("report.section-damaged", {"section": name, "detail": str(error)}))
            return empty

    nothing = Curves(_EMPTY_TABLE, [], [], 0, True)
    curves = section("curves", lambda: read_curves(run.metrics, case.events, most_bins=most_bins), nothing)
    missing += _not_there(view, curves)
    evaluations = section(
        "evaluations",
        lambda: [
            {"step": one.step, "state": one.state, "metrics": dict(one.metrics), "errors": dict(one.errors)}
            for one in read_evaluations(run)[-_MOST_EVALUATIONS:]
        ],
        [],
    )
    nodes = section("nodes", lambda: _nodes(run, attempts, view.now), {"nodes": [], "not_shown": 0, "excluded": []})
    rows = section("plan", lambda: [dataclasses.asdict(row) for row in compared_figures(view)], [])
    return {
        "run_id": run.run_id,
        "name": record.spec.name,
        "created": record.created,
        "versions": dict(record.versions),
        "revision": record.revision,
        "status": view.to_json() | {"attempts": [dataclasses.asdict(attempt) for attempt in attempts]},
        "what": _what(record),
        "diagnosis": view.diagnosis.to_json(),
        "curves": dict(vars(curves)),
        "marks": section("marks", lambda: _marks(case.events, view.diagnosis), []),
        "planned": _planned_lines(view),
        "compared": rows,
        "attempts": section("attempts", lambda: _attempts(run, attempts, view.now, over=view.is_over), []),
        **nodes,
        "hardware": section("hardware", lambda: hardware_of_run(run, view.hardware), None),
        "profiles": section("profiles", lambda: _profiles(run), []),
        "evaluations": evaluations,
        "events": section("events", lambda: _events(case.events), {"rows": [], "not_shown": 0}),
        "spec": section("spec", lambda: spec_of(run), {"keys": [], "revisions": []}),
        "missing": [{**reason.to_document(), "text": str(reason)} for reason in missing],
    }


def _not_there(view: RunView, curves: Curves) -> Iterator[Reason]:
    """Yield what the run directory lacks; of one that is not mounted here, that alone."""
    if view.is_elsewhere:
        yield Reason("report.elsewhere", {"run": view.run.run_id})
        return
    if not curves.kept["step"]:
        yield Reason("report.no-metrics", {"file": str(view.run.metrics)})
    if not curves.every_row_read:
        yield Reason("report.sampled", {"rows": curves.rows_read})
    if view.status.goodput is None:
        yield Reason("report.no-ledger")
    if view.hardware is None:
        yield Reason("report.no-telemetry")


_EMPTY_TABLE: dict[str, Any] = {"step": [], "time": [], "attempt": [], "columns": {}}


def _what(record: RunRecord) -> dict[str, Any]:
    """Return what is trained, where, and the layout."""
    spec, plan = record.spec, record.plan
    return {
        "family": spec.model.family,
        "parameters": plan.model.parameters,
        "trainable_parameters": plan.model.trainable_parameters,
        "objective": spec.training.objective,
        "precision": spec.training.precision,
        "optimizer": spec.training.optimizer.name,
        "global_batch_size": spec.training.global_batch_size,
        "scheduler": spec.cluster.scheduler,
        "nodes": spec.cluster.nodes,
        "device": spec.cluster.gpu,
        "world_size": plan.layout.world_size,
        "layout": dataclasses.asdict(plan.layout),
        "clipping": spec.training.gradient_clipping,
    }


def _planned_lines(view: RunView) -> dict[str, float | None]:
    """Return the planned values that curves are drawn beside; None on a CPU where the plan means another thing."""
    plan, case = view.record.plan, view.case
    return {
        "step_seconds": view.figures.planned_step_seconds,
        "tokens_per_second": plan.time.tokens_per_second or None,
        "samples_per_second": plan.time.samples_per_second or None,
        "mfu": plan.time.mfu,
        "memory_bytes": None if case.on_cpu else plan.memory.peak,
        "memory_capacity_bytes": None if case.on_cpu else plan.memory.capacity,
    }


def _marks(events: Sequence[Mapping[str, Any]], diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Return what happened at a step: ``kind``, ``step``, ``time`` (None for a finding) and ``text``."""
    marks: list[dict[str, Any]] = []
    saves = [event for event in events if event.get("event") == "checkpoint"]
    kept = {id(event) for event in saves[:: max(1, -(-len(saves) // _MOST_MARKS))]}
    for event in events:
        name = str(event.get("event"))
        kind = {"started": "attempt", "resumed": "attempt", "rolled-back": "rollback", "spike": "spike"}.get(name, name)
        if kind not in ("attempt", "rollback", "spike", "checkpoint") or (
            name == "checkpoint" and id(event) not in kept
        ):
            continue
        step = event.get("from_step") if name == "rolled-back" else event.get("step")
        if isinstance(step, int) and isinstance(event.get("time"), int | float):
            more = {"to_step": event.get("to_step")} if name == "rolled-back" else {}
            more |= {"attempt": event.get("attempt")} if kind == "attempt" else {}
            marks.append({"kind": kind, "step": step, "time": event["time"], "text": event_sentence(event)} | more)
    for number, finding in enumerate(diagnosis.findings, 1):
        step = finding.reason.params.get("step")
        if isinstance(step, int):
            marks.append(
                {
                    "kind": "finding",
                    "step": step,
                    "time": None,
                    "text": f"{finding.severity} {number}: {finding.reason}",
                    "severity": finding.severity,
                    "number": number,
                }
            )
    return marks


def _attempts(run: RunDir, attempts: Sequence[AttemptRecord], now: float, *, over: bool) -> list[dict[str, Any]]:
    """Return the attempts with their ends and the seconds of their ledgers."""
    entries = []
    for attempt, after in itertools.zip_longest(attempts, attempts[1:]):
        ledger = read_ledger(run, attempt.number)
        known = max(attempt.started, ledger.updated) if ledger is not None else attempt.started
        until = attempt.ended if attempt.ended is not None else known if over or after is not None else now
        entries.append(
            {
                "number": attempt.number,
                "job_id": attempt.job_id,
                "started": attempt.started,
                "until": until,
                "is_open": attempt.ended is None and after is None and not over,
                "reason": attempt.reason,
                "exit_code": attempt.exit_code,
                "why": str(attempt.why) if attempt.message or attempt.code else "",
                "decision": "" if attempt.decision is None else str(attempt.decision.reason),
                "from_step": attempt.checkpoint_at_start,
                "last_step": attempt.last_step,
                "last_checkpoint_step": attempt.last_checkpoint_step,
                "nodes": list(attempt.nodes[:_MOST_NODES]),
                "node_count": len(attempt.nodes),
                "seconds": {} if ledger is None else dict(ledger.seconds),
            }
        )
    return entries


def _nodes(run: RunDir, attempts: Sequence[AttemptRecord], now: float) -> dict[str, Any]:
    """Return the nodes, those with failures first, and the nodes that are excluded by evidence of this run."""
    evidence = {node.node: node for node in read_bad_nodes(run.path.parent, now) if node.run_id == run.run_id}
    took_part: dict[str, list[int]] = {}
    failed: dict[str, list[dict[str, Any]]] = {}
    ranks: dict[str, list[int]] = {}
    for attempt in attempts:
        for name in attempt.nodes:
            took_part.setdefault(name, []).append(attempt.number)
    for attempt in attempts[-_MOST_READ_ATTEMPTS:]:
        for record in read_node_records(run, attempt.number):
            took_part.setdefault(record.name, []).append(attempt.number)
            ranks[record.name] = sorted({rank.rank for rank in record.ranks})
            if record.first_failure is not None and record.exit_code != 0:
                failed.setdefault(record.name, []).append(_failure(record, attempt))
    order = sorted(took_part, key=lambda name: (name not in evidence, -len(failed.get(name, ())), name))
    shown = [
        {
            "node": name,
            "attempts": sorted(set(took_part[name])),
            "ranks": ranks.get(name, []),
            "failures": failed.get(name, []),
            "excluded": None if name not in evidence else dataclasses.asdict(evidence[name]),
        }
        for name in order[:_MOST_NODES]
    ]
    excluded = [dataclasses.asdict(node) for node in evidence.values()]
    return {"nodes": shown, "not_shown": len(order) - len(shown), "excluded": excluded}


def _failure(record: NodeRecord, attempt: AttemptRecord) -> dict[str, Any]:
    rank = next((process for process in record.ranks if process.holds(record.first_failure)), None)
    return {
        "attempt": attempt.number,
        "rank": record.first_failure,
        "signal": None if rank is None else rank.signal,
        "exit_code": None if rank is None else rank.exit_code,
    }


def _profiles(run: RunDir) -> list[dict[str, Any]]:
    """Return the summaries of the latest profiles, with the first rows of their tables."""
    summaries = [summary for folder in profile_folders(run)[-_MOST_PROFILES:] if (summary := summary_of(folder))]
    for summary in summaries:
        for figures in summary["by_rank"]:
            for name in ("top_kernels", "top_operators"):
                if isinstance(figures.get(name), list):
                    figures[name] = figures[name][:_MOST_KERNELS]
    return summaries


def _events(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the latest events; of more than 300, checkpoints between the first and the last of them are left out."""
    chosen = list(events)
    if len(chosen) > _MOST_EVENTS:
        chosen = [event for event in chosen if event.get("event") != "checkpoint"]
    if len(chosen) > _MOST_EVENTS:
        chosen = [*chosen[:20], *chosen[-(_MOST_EVENTS - 20) :]]
    rows = [
        {"time": event.get("time"), "event": str(event.get("event")), "text": event_sentence(event)} for event in chosen
    ]
    return {"rows": rows, "not_shown": len(events) - len(rows)}


def verdict(status: Mapping[str, Any], findings: Sequence[Mapping[str, Any]]) -> str:
    """Return how a run is: ``good``, ``attention`` (warnings, or it does not train) or ``bad`` (failed, or errors)."""
    severities = {finding["severity"] for finding in findings}
    if status["state"] == "failed" or "error" in severities:
        return "bad"
    stands = status["state"] in ("unknown", "suspended", "cancelled", "ended-idle", "preempted")
    return "attention" if stands or "warning" in severities else "good"


_HIDDEN = "(set)"  # the values of environment variables may be secrets
_LAYOUT = "plan.layout."


def spec_of(run: RunDir) -> dict[str, Any]:
    """Return ``keys``: of the latest revision, each with its value and its ``place``, the lines in the file first.

    ``revisions``: for each its number, time, overrides, and the keys of spec and layout that it ``changed``.
    """
    lines = read_spec_lines(run)
    before = _flat_document(read_document(run.record) or {})
    made = []
    for number in revisions(run):
        document = read_document(revision_path(run, number)) or {}
        after = _flat_document(document)
        made.append(
            {
                "revision": number,
                "created": document.get("created"),
                "overrides": [without_secrets(str(override)) for override in document.get("overrides", ())],
                "changed": differences(before, after),
            }
        )
        before = after
    keys = [
        {"key": key, "value": value, "place": lines.get(key, "")}
        for key, value in before.items()
        if not key.startswith(_LAYOUT)
    ]
    return {"keys": keys, "revisions": made}


def without_secrets(override: str) -> str:
    """Return ``KEY=VALUE`` without the values of environment variables."""
    key = override.partition("=")[0].strip()
    return f"{key}={_HIDDEN}" if key == "env" or key.startswith("env.") else override


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the keys with another value, each with both; None where a side lacks the key."""
    return [
        {"key": key, "before": before.get(key), "after": after.get(key)}
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    ]


def _flat_document(document: Mapping[str, Any]) -> dict[str, Any]:
    spec, plan = document.get("spec"), document.get("plan")
    flat = dict(_leaves("", spec)) if isinstance(spec, dict) else {}
    layout = plan.get("layout") if isinstance(plan, dict) else None
    return flat | ({f"{_LAYOUT}{key}": value for key, value in layout.items()} if isinstance(layout, dict) else {})


def _leaves(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        if prefix == "env":
            return [(f"env.{name}", _HIDDEN) for name in value]
        return [
            leaf for name, part in value.items() for leaf in _leaves(f"{prefix}.{name}" if prefix else str(name), part)
        ]
    if isinstance(value, list | dict):
        return [(prefix, json.dumps(value))]
    return [(prefix, value)]


Unit = Literal["bytes", "seconds", "usd", "share", "steps", "per_second"]
Topic = Literal["memory", "step time", "throughput", "cost", "checkpoints", "goodput"]
_MEASURED_MEMORY = (*MODEL_STATES, "activations", "host", "allocated", "reserved")
# The parts of the planned time of a step, with the columns of the telemetry of ranks that measure them.
_CAUSES = {
    "compute": ("forward_seconds", "backward_seconds"),
    "exposed_communication": ("communication_seconds",),
    "bubble": (),
    "optimizer": ("optimizer_seconds",),
    "data_wait": ("data_wait_seconds",),
}


@dataclass(frozen=True)
class Compared:
    """One figure; None where it was not planned or not measured."""

    topic: Topic
    name: str
    unit: Unit
    planned: float | None
    measured: float | None


def compared_figures(view: RunView) -> list[Compared]:
    """Return all figures that have a plan or a measurement, in the order of their topics."""
    case, figures, hardware = view.case, view.figures, view.hardware
    by_rank = {} if hardware is None else dict(hardware.step_parts)
    fullest = None if hardware is None or hardware.memory is None else hardware.memory.highest
    compared = [*_memory(case, fullest), *_step(case, figures, by_rank), *_throughput(case, view.status)]
    goodput = None if case.goodput is None else case.goodput.share
    compared += [*_cost(case, figures), *_checkpoints(case)]
    compared.append(Compared("goodput", "goodput", "share", case.plan.durability.expected_goodput, goodput))
    return [figure for figure in compared if figure.planned is not None or figure.measured is not None]


def _memory(case: Case, fullest: float | None) -> Iterator[Compared]:
    """Yield the parts of the fullest pipeline stage, and the peak.

    On a CPU only those that were measured: the memory of a process has its libraries, too.
    """
    planned: dict[str, int] = asdict(case.plan.memory)
    stage = None if case.measured is None else case.measured.stages[case.measured.worst].figures
    for name in _MEASURED_MEMORY:
        figure = None if stage is None else stage.get(name)
        if figure is not None:
            yield Compared("memory", name, "bytes", figure.planned, figure.measured)
        elif planned.get(name) and not case.on_cpu:
            yield Compared("memory", name, "bytes", planned[name], None)
    for name in (
        () if case.on_cpu else ("step_temporaries", "logits", "communication_buffers", "framework", "fragmentation")
    ):
        if planned[name]:
            yield Compared("memory", name, "bytes", planned[name], None)
    _, peaks = case.history.known("memory_bytes")
    known = [value for value in (fullest, max(peaks, default=None)) if value is not None]
    yield Compared("memory", "peak", "bytes", None if case.on_cpu else case.plan.memory.peak, max(known, default=None))


def _step(case: Case, figures: RunFigures, by_rank: Mapping[str, float]) -> Iterator[Compared]:
    yield Compared("step time", "step", "seconds", figures.planned_step_seconds, figures.measured_step_seconds)
    waits = [step.data_wait for step in recent_steps(case) if step.data_wait == step.data_wait]
    for name, columns in _CAUSES.items():
        known = [by_rank[column] for column in columns if column in by_rank]
        measured = sum(known) if known else median(waits) if name == "data_wait" and waits else None
        planned: float = getattr(case.plan.time, name)
        if planned or measured is not None:
            yield Compared("step time", name, "seconds", planned, measured)


def _throughput(case: Case, status: RunStatus) -> Iterator[Compared]:
    time = case.plan.time
    for name, planned in (
        ("tokens_per_second", time.tokens_per_second),
        ("samples_per_second", time.samples_per_second),
    ):
        if (measured := getattr(status, name)) is not None:
            yield Compared("throughput", name, "per_second", planned or None, measured)
    if status.mfu is not None:
        yield Compared("throughput", "mfu", "share", time.mfu, status.mfu)


def _cost(case: Case, figures: RunFigures) -> Iterator[Compared]:
    so_far, to_come = figures.cost_so_far_usd, figures.cost_to_come_usd
    whole = None if so_far is None or to_come is None else so_far + to_come
    yield Compared("cost", "whole_run", "usd", case.plan.cost.expected_usd, whole)
    if so_far is not None:
        yield Compared("cost", "so_far", "usd", None, so_far)


def _checkpoints(case: Case) -> Iterator[Compared]:
    planned, saves = case.plan.durability, list(case.events_named("checkpoint"))
    for name, key, unit in _SAVES:
        values = [float(value) for save in saves if isinstance(value := save.get(name), int | float)]
        yield Compared("checkpoints", name, unit, getattr(planned, key), median(values) if values else None)
    steps = sorted({save["step"] for save in saves if isinstance(save.get("step"), int)})
    apart = [float(after - before) for before, after in itertools.pairwise(steps)]
    yield Compared("checkpoints", "interval", "steps", planned.interval_steps, median(apart) if apart else None)
    times = [save["time"] for save in saves if isinstance(save.get("time"), int | float)]
    between = [after - before for before, after in itertools.pairwise(times) if after > before]
    yield Compared(
        "checkpoints", "interval_time", "seconds", planned.interval_seconds, median(between) if between else None
    )


_SAVES: tuple[tuple[str, str, Unit], ...] = (
    ("bytes", "checkpoint_bytes", "bytes"),
    ("seconds", "save_seconds", "seconds"),
    ("blocked_seconds", "blocked_seconds", "seconds"),
)
