"""Checks of the step time: beside the plan, over time, and where it goes, by the metrics of rank 0 and by events.

These have the step time, the wait for data, and ranks that wait for data or are slow. Clocks and use of the GPUs and
the time in collectives are in the telemetry, which utilization.py checks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.diagnosis.case import Case, check, levels, worst
from scaletrain_cli.diagnosis.curves import median
from scaletrain_cli.diagnosis.findings import Cause, Finding, warning_if
from scaletrain_cli.plan.result import Range
from scaletrain_cli.reasons import Reason, Texts
from scaletrain_cli.rundir import goodput
from scaletrain_cli.rundir.goodput import RECENT_STEPS, MeasuredStep
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord

TEXTS: Texts = {
    "data-wait": "rank {rank} waits for data {share:percent} of the time, {wait:seconds} per step",
    "slow-rank": "rank {rank} is slow: {seconds:seconds} for its own work in a step, the others {others:seconds}; "
    "that is {share:percent} of a step",
    "slower-than-plan": "a step takes {measured:seconds}, {times:.2f} times the planned {planned:seconds}",
    "slowing-down": "steps take {now:seconds}, {times:.2f} times the {early:seconds} at the start of the attempt",
    "cause-chosen-workers": "the workers that were chosen cannot read and decode fast enough",
    "cause-few-workers": "{workers:of worker} cannot read and decode fast enough",
    "cause-growing-wait": "the wait for data has grown by {wait:seconds} per step",
    "cause-not-recorded": "{share:percent} of the excess has no recorded cause; the largest part of the plan is "
    "{part} ({seconds:seconds}). A profile can tell kernels, communication and the host apart",
    "cause-slow-rank-holds": "a slow rank explains {share:percent} of the excess",
    "cause-own-loader": "the program takes its batches too slowly: more workers or read-ahead of its loader, or "
    "faster storage",
    "cause-slow-storage": "the storage is slow; more batches read ahead (now {prefetch}) bridge its pauses",
    "cause-slower-device": "the device is throttled, hot, or shared with another process",
    "cause-waits-for-data": "waiting for data explains {share:percent} of the excess",
    "cause-slow-node": "the node or device of rank {rank} is slow or shared; `scaletrain preflight` measures it",
    "cause-uneven-data": "its batches take longer to read or are longer",
}


@dataclass(frozen=True)
class RunFigures:
    """Seconds and US dollars of a run; None where they are not known.

    ``eta_seconds``: until the last step, at the present rate and without interruptions; 0 after the last step.
    ``cost_so_far_usd``: of the attempts so far, at the planned price, for all GPUs of the run; ``cost_to_come_usd``: of
    ``eta_seconds``. ``step_seconds``: the median of the last 200 measured steps, and the planned time
    with its range from the 10th to the 90th percentile.
    """

    eta_seconds: float | None
    cost_so_far_usd: float | None
    cost_to_come_usd: float | None
    planned_step_seconds: float
    measured_step_seconds: float | None
    planned_step_range: Range | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values with stable keys."""
        span = self.planned_step_range
        return {
            "eta_seconds": self.eta_seconds,
            "cost_so_far_usd": self.cost_so_far_usd,
            "cost_to_come_usd": self.cost_to_come_usd,
            "step_seconds": {
                "planned": self.planned_step_seconds,
                "measured": self.measured_step_seconds,
                "planned_p10": None if span is None else span.p10,
                "planned_p90": None if span is None else span.p90,
            },
        }


def run_figures(run: RunDir, record: RunRecord, case: Case, *, step: int, is_over: bool, now: float) -> RunFigures:
    """Return the figures of a run after ``step`` steps. ``is_over``: it trains no more; ``now``: Unix seconds."""
    left = record.spec.total_steps - step
    measured = recent_steps_seconds(case)
    eta = None if is_over and left > 0 else goodput.remaining_seconds(run, left, measured)
    return RunFigures(
        eta_seconds=eta,
        cost_so_far_usd=goodput.cost_so_far(run, record, is_over=is_over, now=now),
        cost_to_come_usd=goodput.cost_to_come(record, eta),
        planned_step_seconds=planned_step_seconds(case),
        measured_step_seconds=measured,
        planned_step_range=goodput.planned_step_range(case.plan, case.history.last_step),
    )


def recent_steps(case: Case) -> list[MeasuredStep]:
    """Return the last 200 measured steps without the first of an attempt, which allocates and compiles."""
    history = case.history
    columns = (history.column(name)[-RECENT_STEPS - 1 :] for name in ("step_seconds", "data_wait", "attempt"))
    rows = zip(history.steps[-RECENT_STEPS - 1 :], *columns, strict=True)
    return goodput.without_first_steps([MeasuredStep(*row) for row in rows])


def recent_steps_seconds(case: Case) -> float | None:
    """Return the median seconds of the recent steps; None for fewer than five."""
    return goodput.typical_seconds(recent_steps(case))


def planned_step_seconds(case: Case) -> float:
    """Return the planned seconds of a step: those of the present training stage, if there are several."""
    return goodput.planned_step_seconds(case.plan, case.history.last_step)


_WAIT_SHARE = 0.05
_HIGH_WAIT_SHARE = 0.1
_LEAST_WAIT_SECONDS = 0.01
_SLOWER, _MUCH_SLOWER = 1.25, 1.5
_SLOWING, _SLOWING_MUCH = 1.2, 1.5
_FEWEST = 40
_SLOWER_RANK, _EXCESS_SHARE = 1.5, 0.2
_LEAST_EXCESS_ON_CPU = 0.01


@check()
def slow_rank(case: Case) -> Iterator[Finding]:
    """Yield a warning if one rank holds up the others at present, as the event ``stragglers`` of the engine records.

    The event needs a rank that takes 1.5 times as long for its own work as the median of the others, in two windows of
    20 steps in a row. The cost is the difference, since all ranks wait for it.
    """
    latest: dict[str, Any] | None = None
    for event in case.events:
        if event.get("event") in ("started", "resumed"):
            latest = None
        elif event.get("event") == "stragglers":
            latest = None if event.get("rank") is None else dict(event)
    if latest is None:
        return
    own, others = latest.get("seconds", 0.0), latest.get("others_seconds", 0.0)
    step = recent_steps_seconds(case)
    share = (own - others) / step if step else 0.0
    evidence = {"rank": latest["rank"], "seconds": own, "others": others, "share": min(1.0, max(0.0, share))}
    yield Finding(Reason("diagnosis.slow-rank", evidence), "warning", "high", case.slow_rank(latest["rank"]))


def few_workers(case: Case, workers: int) -> Cause:
    """Return the cause that ``workers`` processes for each rank are too few to read its batches."""
    return case.cause("diagnosis.cause-few-workers", "data.loader.workers", max(2, 2 * workers), workers=workers)


def slow_storage(case: Case) -> Cause:
    """Return the cause that the storage is slow, against which reading further ahead helps."""
    return case.cause("diagnosis.cause-slow-storage", "data.loader.prefetch", prefetch=case.spec.data.loader.prefetch)


@check()
def slow_work(case: Case) -> Iterator[Finding]:
    """Yield a warning if one rank works 1.5 times as long in a step as the median of the others, at present.

    All ranks end a step together, so the slow one waits least in collectives: work is the step without that wait, or
    where it is not measured the time before the rank first waits for another. The difference is at least 20 % of the
    step, and on a CPU 10 ms. Not in a pipeline, whose stages differ, and not where the event ``stragglers`` names one
    at present (``slow_rank``).
    """
    if case.plan.layout.pipeline_parallel > 1:
        return
    ranks = case.telemetry.ranks
    steps, waits = levels(case, ranks, "step_seconds"), levels(case, ranks, "communication_seconds")
    work = {rank: steps[rank] - waits[rank] for rank in steps if rank in waits} or levels(case, ranks, "own_seconds")
    slowest = worst(dict(work))
    if slowest is None or len(work) < 2 or any(slow_rank(case)):
        return
    rank, seconds = slowest
    others = median([value for other, value in work.items() if other != rank])
    step, excess = steps.get(rank, 0.0), seconds - others
    least = _LEAST_EXCESS_ON_CPU if case.on_cpu else 0.0
    if seconds <= _SLOWER_RANK * others or excess < max(_EXCESS_SHARE * step, least):
        return
    evidence = {"rank": rank, "seconds": seconds, "others": others, "share": excess / step if step else 0.0}
    yield Finding(Reason("diagnosis.slow-rank", evidence), "warning", "medium", case.slow_rank(rank))


@check(explains={"data-wait": ("utilization-low",)})
def data_wait(case: Case) -> Iterator[Finding]:
    """Yield a finding if steps wait for data: over 5 % of the time (the engine's event ``data-wait``).

    A warning above 10 %, if it is at least 10 ms per step: shorter waits are those of toy models. The last 200 measured
    steps of rank 0 count, or the latest event, which has the rank that waits longest.
    """
    rows = recent_steps(case)
    waits = [row.data_wait for row in rows if row.data_wait == row.data_wait]
    seconds = [row.seconds for row in rows if row.data_wait == row.data_wait]
    share = sum(waits) / sum(seconds) if sum(seconds) > 0 and len(waits) >= _FEWEST else 0.0
    rank = 0
    events = [event for event in case.events_named("data-wait") if event.get("step", 0) > case.history.last_step - 100]
    if events and events[-1].get("share", 0.0) > share:
        share, rank = events[-1]["share"], events[-1].get("rank", 0)
    if share <= _WAIT_SHARE:
        return
    wait = share * median(seconds) if seconds else 0.0
    loader = case.spec.data.loader
    recorded = next((event.get("workers") for event in reversed(events)), None)
    workers = recorded if isinstance(recorded, int) else loader.workers if isinstance(loader.workers, int) else None
    few = case.cause("diagnosis.cause-chosen-workers", "data.loader.workers")
    if workers is not None:
        few = few_workers(case, workers)
    evidence = {"share": share, "rank": rank, "wait": wait}
    causes: tuple[Cause, ...] = (few, slow_storage(case))
    if case.spec.code.own_program:
        causes = (case.cause("diagnosis.cause-own-loader"),)
    serious = share > _HIGH_WAIT_SHARE and wait >= _LEAST_WAIT_SECONDS
    yield Finding(Reason("diagnosis.data-wait", evidence), warning_if(serious), "high", causes)


@check(of_engine=True)
def slower_than_plan(case: Case) -> Iterator[Finding]:
    """Yield a finding if the median step takes over 1.25 times the planned time: a warning from 1.5 times.

    Within the plan's range (p90, from measured runs of the same kind) it is a note. For CPUs planned times are rough,
    and not compared. The excess is attributed to waiting for data and to a slow rank, as recorded; the rest has
    no recorded cause, and the plan's largest part is named.
    """
    measured, planned = recent_steps_seconds(case), planned_step_seconds(case)
    if case.on_cpu or measured is None or planned <= 0 or measured <= _SLOWER * planned:
        return
    waits = [row.data_wait for row in recent_steps(case) if row.data_wait == row.data_wait]
    excess = measured - planned
    waited = max(0.0, (median(waits) if waits else 0.0) - case.plan.time.data_wait)
    straggling = next((f.reason.params for f in slow_rank(case)), None)
    held = straggling["seconds"] - straggling["others"] if straggling else 0.0
    shares = {"data": min(1.0, waited / excess), "rank": min(1.0, held / excess)}
    time = case.plan.time
    parts = {"compute": time.compute, "communication": time.exposed_communication, "bubble": time.bubble}
    ranked: list[tuple[float, Cause]] = [
        (shares["data"], case.cause("diagnosis.cause-waits-for-data", "data.loader.workers", share=shares["data"])),
        (shares["rank"], case.cause("diagnosis.cause-slow-rank-holds", share=shares["rank"])),
    ]
    ranked = [(share, cause) for share, cause in ranked if share > _WAIT_SHARE]
    rest = max(0.0, 1 - sum(share for share, _ in ranked))
    largest = max(parts, key=parts.__getitem__)
    unknown = {"share": rest, "part": largest, "seconds": parts[largest]}
    ranked.append((rest, case.cause("diagnosis.cause-not-recorded", **unknown)))
    ranked.sort(key=lambda pair: -pair[0])
    evidence = {"measured": measured, "planned": planned, "times": measured / planned}
    much = max(_MUCH_SLOWER, case.plan.p90_ratio)
    why = Reason("diagnosis.slower-than-plan", evidence)
    yield Finding(why, warning_if(measured > much * planned), "high", tuple(cause for _, cause in ranked))


@check()
def slowing_down(case: Case) -> Iterator[Finding]:
    """Yield a finding if recent steps take over 1.2 times as long as earlier ones of the same attempt.

    Compared are the medians of the last 100 measured steps and of 100 after the tenth. The work of a step is the same
    throughout, so throttled or shared devices, growing waits and fragmentation are what changes. A warning from 1.5
    times; on a CPU, which other processes share, a note.
    """
    rows = case.history.of_last_attempt("step_seconds", "data_wait")
    if len(rows) < 3 * 100 or case.changes_while_training:
        return
    early, now = median([row[1] for row in rows[10:110]]), median([row[1] for row in rows[-100:]])
    if now <= _SLOWING * early:
        return
    waits = [[row[2] for row in part if row[2] == row[2]] for part in (rows[10:110], rows[-100:])]
    waited = median(waits[1]) - median(waits[0]) if all(waits) else 0.0
    evidence = {"early": early, "now": now, "times": now / early, "wait": max(0.0, waited)}
    data = case.cause("diagnosis.cause-growing-wait", "data.loader.workers", wait=waited)
    device = case.cause("diagnosis.cause-slower-device")
    causes = (data, device) if waited > (now - early) / 2 else (device, data) if waited > 0 else (device,)
    serious = now > _SLOWING_MUCH * early and not case.on_cpu
    yield Finding(Reason("diagnosis.slowing-down", evidence), warning_if(serious), "medium", causes)
