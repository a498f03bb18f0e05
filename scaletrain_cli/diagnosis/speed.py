"""Checks of the step time: beside the plan, over time, and where it goes, by the metrics of rank 0 and by events.

These have the step time, the wait for data, and ranks that wait for data or are slow. Clocks and use of the GPUs and
the time in collectives are in the telemetry, which utilization.py checks.
"""

from collections.abc import Iterator
from typing import Any

from scaletrain_cli.diagnosis.case import Case
from scaletrain_cli.diagnosis.curves import median
from scaletrain_cli.diagnosis.findings import Cause, Finding, warning_if
from scaletrain_cli.diagnosis.timing import planned_step_seconds, recent_steps, recent_steps_seconds
from scaletrain_cli.reasons import Reason

_WAIT_SHARE = 0.05
_HIGH_WAIT_SHARE = 0.1
_LEAST_WAIT_SECONDS = 0.01
_SLOWER, _MUCH_SLOWER = 1.25, 1.5
_SLOWING, _SLOWING_MUCH = 1.2, 1.5
_FEWEST = 40


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


def few_workers(case: Case, workers: int) -> Cause:
    """Return the cause that ``workers`` processes for each rank are too few to read its batches."""
    return case.cause("diagnosis.cause-few-workers", "data.loader.workers", max(2, 2 * workers), workers=workers)


def slow_storage(case: Case) -> Cause:
    """Return the cause that the storage is slow, against which reading further ahead helps."""
    return case.cause("diagnosis.cause-slow-storage", "data.loader.prefetch", prefetch=case.spec.data.loader.prefetch)


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
    causes = (
        case.cause("diagnosis.cause-slow-node", rank=latest["rank"]),
        case.cause("diagnosis.cause-uneven-data", "data.loader.workers"),
    )
    yield Finding(Reason("diagnosis.slow-rank", evidence), "warning", "high", causes)


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
