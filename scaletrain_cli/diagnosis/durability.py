"""Checks of checkpoints and restarts: what they cost, beside the plan."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scaletrain_cli.diagnosis.case import Case, check
from scaletrain_cli.diagnosis.curves import median
from scaletrain_cli.diagnosis.findings import Cause, Finding, warning_if
from scaletrain_cli.diagnosis.speed import recent_steps_seconds
from scaletrain_cli.reasons import Reason, Texts, reason_from

TEXTS: Texts = {
    "hung": "attempt {attempt} hung: {hang}",
    "state-corrupted": "silent corruption in attempt {attempt}: {corruption}",
    "restarts": "{restarts:of restart} took {share:percent} of the time: lost work {lost_work:seconds}, set-up "
    "{set_up:seconds}, waiting {idle:seconds}",
    "mirror-failing": "checkpoints are not copied to the mirror {to}, whose newest one is of step {step:whole}",
    "mirror-behind": "step {waiting:whole} waits for {lag:seconds} for the mirror {to}, whose newest checkpoint is of "
    "step {step:whole}",
    "saves-slow": "a checkpoint takes {seconds:seconds}, planned are {planned:seconds}; it blocks training for "
    "{blocked:seconds}, {share:percent} of the time",
    "saves-block": "checkpoints block training for {share:percent} of the time: {blocked:seconds} every "
    "{interval:seconds}",
    "checkpoint-interval": "checkpoints every {steps:.0f} steps cost {excess:percent} of the time more than every "
    "{best:whole} would, with {losses:seconds} between interruptions",
    "cause-ends": "attempts ended: {reason}, {times:of time}; `scaletrain explain` has the evidence",
    "cause-frequent-saves": "checkpoints are more frequent than interruptions need",
    "cause-long-interval": "checkpoints are too rare for these interruptions",
    "cause-long-set-up": "an attempt takes long until its first step: start of processes, loading, compilation",
    "cause-mirror-fails": "{cause}",
    "cause-mirror-slow": "the bandwidth to the mirror is less than a checkpoint needs in its interval",
    "cause-mirror-often": "each checkpoint is copied; with fewer the mirror keeps up",
    "cause-queue": "the job waits in the queue between attempts",
    "cause-rare-saves": "work since the last checkpoint is lost at each interruption",
    "cause-short-interval": "checkpoints are too frequent for these interruptions",
    "cause-slow-checkpoint-storage": "the storage wrote {bytes:bytes} in {seconds:seconds}",
    "cause-corrupting-node": "the memory or the device of the node of rank {ranks:list}: an event in its log "
    "(`dmesg`, `nvidia-smi -q`), or a test of the device, shows which",
    "cause-hung-rank": "what the rank does instead: see its stacks in attempts/{attempt:04d}/stacks",
    "cause-synchronous-saves": "training waits until a checkpoint is written",
}

_FEWEST_SAVES = 3
_SLOWER = 1.5
_LEAST_SECONDS = 1.0
_LEAST_BLOCKED_SECONDS = 0.1  # shorter ones are those of toy models
_SHARE = 0.03
_LARGE_SHARE = 0.1
_SHORT_RUN_SECONDS = 600.0
_MIRROR_LAG_SECONDS, _MIRROR_INTERVALS = 600.0, 3


@check()
def restarts(case: Case) -> Iterator[Finding]:
    """Yield a finding if restarts take over 10 % of the time, and 3 % more than planned.

    Restarts: set-up of all attempts but the first, lost work and the time between attempts. In a run of less than ten
    minutes one restart is a large share: a note.
    """
    goodput, ended = case.goodput, list(case.events_named("attempt-ended"))
    again = max(0, len({event.get("attempt") for event in case.events_named("started", "resumed")}) - 1)
    if goodput is None or goodput.wall <= 0 or not again:
        return
    set_up = goodput.restore * again / (again + 1)
    lost = goodput.lost_work + goodput.idle + set_up
    share, planned = lost / goodput.wall, 1 - case.plan.durability.expected_goodput
    if share <= _LARGE_SHARE or share <= planned + _SHARE:
        return
    reasons = Counter(str(event.get("reason")) for event in ended if event.get("reason") not in (None, "done"))
    why, times = reasons.most_common(1)[0] if reasons else ("unknown", 0)
    parts = {"lost_work": goodput.lost_work, "set_up": set_up, "idle": goodput.idle}
    first = case.cause("diagnosis.cause-ends", reason=why, times=times)
    by_part = {
        "lost_work": case.cause("diagnosis.cause-rare-saves", "checkpoint.every", "auto"),
        "set_up": case.cause("diagnosis.cause-long-set-up"),
        "idle": case.cause("diagnosis.cause-queue"),
    }
    second = by_part[max(parts, key=parts.__getitem__)]
    evidence = {"share": share, "restarts": again, **parts}
    serious = goodput.wall > _SHORT_RUN_SECONDS
    yield Finding(Reason("diagnosis.restarts", evidence), warning_if(serious), "high", (first, second))


@check()
def hangs(case: Case) -> Iterator[Finding]:
    """Yield a warning with the latest hang, as the launcher found it from the ranks of all nodes."""
    if "code" in (last := _not_over(case, "hang")):
        why = Reason("diagnosis.hung", {"attempt": last["attempt"], "hang": reason_from(last)})
        yield Finding(why, "warning", "high", (case.cause("diagnosis.cause-hung-rank", attempt=last["attempt"]),))


@check()
def corruption(case: Case) -> Iterator[Finding]:
    """Yield an error with the latest corruption of the state of a rank. The next attempt begins before it."""
    if last := _not_over(case, "corruption"):
        why = Reason("diagnosis.state-corrupted", {"attempt": last["attempt"], "corruption": reason_from(last)})
        yield Finding(why, "error", "high", (case.cause("diagnosis.cause-corrupting-node", ranks=last["ranks"]),))


@check(of_engine=True)
def slow_saves(case: Case) -> Iterator[Finding]:
    """Yield a finding if checkpoints take over 1.5 times as long as planned, and a second longer.

    A warning if they block training for over 3 % of its time and a second each, for over 10 %, or if one save lasts
    until the next is due. Goodput varies by 1 to 2 % a day in healthy runs (arXiv:2407.21783, section 3.3.4).
    """
    saves = list(case.events_named("checkpoint"))[-20:]
    step_seconds = recent_steps_seconds(case)
    if len(saves) < _FEWEST_SAVES or step_seconds is None:
        return
    seconds, blocked = _median(saves, "seconds"), _median(saves, "blocked_seconds")
    planned = case.plan.durability.save_seconds
    interval = _interval(saves) * step_seconds
    share = blocked / (interval + blocked) if interval > 0 else 0.0
    late = interval > 0 and seconds > interval
    slow = seconds > _SLOWER * planned and seconds > planned + _LEAST_SECONDS
    if not slow and share <= _SHARE:
        return
    evidence = {"seconds": seconds, "planned": planned, "blocked": blocked, "share": share, "interval": interval}
    serious = (share > _SHARE or late) and blocked >= _LEAST_SECONDS
    serious |= share > _LARGE_SHARE and blocked >= _LEAST_BLOCKED_SECONDS
    storage = case.cause(
        "diagnosis.cause-slow-checkpoint-storage",
        "cluster.storage_bandwidth",
        bytes=_median(saves, "bytes"),
        seconds=seconds,
    )
    in_front = case.cause("diagnosis.cause-synchronous-saves", "checkpoint.async", True)
    often = case.cause("diagnosis.cause-frequent-saves", "checkpoint.every", "auto")
    causes = (storage, often) if case.spec.checkpoint.asynchronous else (in_front, storage, often)
    code = Reason("diagnosis.saves-slow" if slow else "diagnosis.saves-block", evidence)
    yield Finding(code, warning_if(serious), "high", causes)


@check(of_engine=True)
def interval(case: Case) -> Iterator[Finding]:
    """Yield a finding if another checkpoint interval would save over 1 % of the time: a warning from 3 %.

    An interval of t seconds costs C / t + t / (2 M) of the time (Young 1974): C, the seconds that a save blocks, as
    measured; M, the planned time between interruptions without a last checkpoint. Compared with the best interval for
    the measured step and save. Rare events: not below three saves.
    """
    saves = list(case.events_named("checkpoint"))[-20:]
    step_seconds, losses = recent_steps_seconds(case), case.plan.durability.seconds_between_losses
    steps = _interval(saves)
    if len(saves) < _FEWEST_SAVES or step_seconds is None or losses is None or losses <= 0 or not steps:
        return
    from scaletrain_cli.plan.reliability.durability import best_interval_steps  # 70 modules, for runs with losses

    blocked, seconds = max(1e-6, _median(saves, "blocked_seconds")), _median(saves, "seconds")
    best = best_interval_steps(step_seconds, max(seconds, blocked), blocked, 1 / losses)
    given, least = (blocked / (count * step_seconds) + count * step_seconds / (2 * losses) for count in (steps, best))
    excess = given - least
    total = case.spec.total_steps * step_seconds
    if excess <= 0.01 or best > case.spec.total_steps:
        return
    evidence = {"steps": steps, "best": best, "excess": excess, "losses": losses, "blocked": blocked}
    cause = Cause(
        Reason("diagnosis.cause-long-interval" if steps > best else "diagnosis.cause-short-interval"),
        case.change("checkpoint.every", best),
    )
    serious = excess > _SHARE and total > _SHORT_RUN_SECONDS
    yield Finding(Reason("diagnosis.checkpoint-interval", evidence), warning_if(serious), "medium", (cause,))


@check()
def mirror(case: Case) -> Iterator[Finding]:
    """Yield a finding if the mirror fails, or if it is more than three checkpoints and ten minutes behind."""
    state = case.mirror
    if state is None or state.owner:
        return
    has = {"to": state.to, "step": state.step or 0}
    if state.problem is not None:
        cause = case.cause("diagnosis.cause-mirror-fails", cause=state.problem)
        yield Finding(Reason("diagnosis.mirror-failing", has), "warning", "high", (cause,))
        return
    saves, step_seconds = list(case.events_named("checkpoint"))[-20:], recent_steps_seconds(case)
    interval_seconds = _interval(saves) * (step_seconds or 0.0)
    lag = state.lag_seconds(state.updated)
    if lag > max(_MIRROR_LAG_SECONDS, _MIRROR_INTERVALS * interval_seconds):
        rate = case.cause("diagnosis.cause-mirror-slow", "checkpoint.mirror.bandwidth")
        often = case.cause("diagnosis.cause-mirror-often", "checkpoint.mirror.every")
        code = Reason("diagnosis.mirror-behind", has | {"lag": lag, "waiting": state.waiting_step or 0})
        yield Finding(code, "warning", "high", (rate, often))


def _not_over(case: Case, name: str) -> Mapping[str, Any]:
    """Return the latest event of this name; empty once an attempt trains again.

    `explain` tells how earlier attempts ended, and a receiver would be reminded for ever.
    """
    *_, last = [{}, *case.events_named(name, "started", "resumed")]
    return last if last.get("event") == name else {}


def _interval(saves: Sequence[Mapping[str, Any]]) -> float:
    """Return the median number of steps between saves of different steps; 0 for fewer than two."""
    steps = sorted({save["step"] for save in saves if isinstance(save.get("step"), int)})
    apart = [after - before for before, after in itertools.pairwise(steps)]
    return median(apart) if apart else 0.0


def _median(saves: Sequence[Mapping[str, Any]], name: str) -> float:
    values = [value for save in saves if isinstance(value := save.get(name), int | float)]
    return median(values) if values else 0.0
