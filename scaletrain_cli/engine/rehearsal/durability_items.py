"""Items about surviving: a checkpoint that restores the state to the bit, and a preemption."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from scaletrain_cli.diagnosis.findings import Cause
from scaletrain_cli.diagnosis.rehearsal import Item
from scaletrain_cli.engine.rehearsal.trials import Trials, finite
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import list_checkpoints
from scaletrain_cli.rundir.journal import read_events, read_metrics
from scaletrain_cli.rundir.paths import RunDir

_TOLERANCE = 1e-4  # of a loss on GPUs, where the order of additions is not deterministic
PREEMPTED_AT, STEPS = 3, 6  # of the run that is preempted: the signal's step, and the last one
_SLOW_SAVE = 3.0  # times the plan, and at least this many seconds
_LEAST_SLOW_SECONDS = 30.0


def restore(trials: Trials, step: int) -> Item:
    """Save the state after ``step`` steps, train on, restore it, and compare both the state and the next loss.

    The checkpoint is removed afterwards, so that the run can begin at its first step. The loss must be equal to the bit
    on CPUs, and within 1e-4 on GPUs.
    """
    trainer, case = trials.trainer, trials.case
    before = trials.copy()
    _, seconds = trials.timed(lambda: trainer.save(step, wait=True))
    costs = trainer.checkpointer.take_costs()
    first = trials.step(trials.batches(step + 1), trials.peak_rate).loss
    folder = trainer.checkpointer.folder
    saved = [each for each in list_checkpoints(folder) if each.step == step]
    size = trials.consensus.follow_rank_zero(sum(each.size for each in saved[0].files.values()) if saved else 0)
    _, load_seconds = trials.timed(lambda: trainer.checkpointer.restore(saved[0]))
    different = trials.consensus.gather(trials.differs_from(before))
    kinds: list[str] = trials.consensus.follow_rank_zero(sorted({kind for each in different or () for kind in each}))
    again = trials.step(trials.batches(step + 1), trials.peak_rate).loss
    if trainer.ranks.rank == 0:
        trainer.checkpointer.delete_newer(0)
    trials.consensus.barrier()
    trainer.checkpointer.committed_step = None
    trials.restore()
    planned = case.plan.durability.save_seconds
    figures: dict[str, Any] = {
        "bytes": size,
        "save_seconds": finite(seconds),
        "blocked_seconds": finite(max((cost.blocked_seconds for cost in costs), default=0.0)),
        "planned_save_seconds": finite(planned),
        "restore_seconds": finite(load_seconds),
        "loss_after": finite(first),
        "loss_after_restore": finite(again),
        "different": kinds,
    }
    params: dict[str, Any] = {"size": size, "seconds": seconds, "load": load_seconds, "planned": planned}
    tolerance = 0.0 if case.on_cpu else _TOLERANCE * abs(first)
    if kinds:
        params |= {"kinds": kinds}
        cause = Cause(Reason("rehearsal.cause-damaged-storage"), case.change("checkpoint.dir"))
        return Item("restore", "failed", Reason("rehearsal.restored-other-state", params), figures, (cause,))
    if not abs(again - first) <= tolerance and math.isfinite(first):
        params |= {"loss": again, "expected": first}
        return Item("restore", "failed", Reason("rehearsal.restored-other-loss", params), figures)
    if seconds > max(_LEAST_SLOW_SECONDS, _SLOW_SAVE * planned):
        cause = Cause(Reason("rehearsal.cause-slow-checkpoints"), case.change("checkpoint.dir"))
        return Item("restore", "failed", Reason("rehearsal.save-slow", params), figures, (cause,))
    return Item("restore", "passed", Reason("rehearsal.restored", params), figures)


def preemption(run: RunDir, expected: Mapping[int, float], preempted_at: int, *, on_cpu: bool) -> Item:
    """Judge the run after it was preempted before step ``preempted_at`` and has continued, by its own journal.

    It must resume from a checkpoint of the last step that it trained, and its losses must be those of the same steps
    in an undisturbed trial (``expected``, by step): to the bit on CPUs, within 1e-4 on GPUs.
    """
    events = read_events(run)
    resumed = [event for event in events if event["event"] == "resumed"]
    losses = {line["step"]: line["loss"] for line in read_metrics(run) if "loss" in line}
    lost = sum(event.get("lost_steps", 0) for event in resumed)
    stopped = [event["time"] for event in events if event["event"] == "preempted"]
    figures: dict[str, Any] = {
        "signal_before_step": preempted_at,
        "resumed_from_step": resumed[-1]["step"] if resumed else None,
        "lost_steps": lost,
        "seconds_to_resume": finite(resumed[-1]["time"] - stopped[-1]) if resumed and stopped else None,
        "losses": {str(step): finite(loss) for step, loss in losses.items()},
    }
    if not resumed:
        return Item("preemption", "failed", Reason("rehearsal.not-resumed", {"step": preempted_at}), figures)
    params = {"step": resumed[-1]["step"], "lost": lost}
    if lost:
        return Item("preemption", "failed", Reason("rehearsal.preemption-lost-steps", params), figures)
    tolerance = 0.0 if on_cpu else _TOLERANCE
    for step, loss in sorted(losses.items()):
        if step in expected and not abs(loss - expected[step]) <= tolerance * abs(expected[step]):
            params = {"step": step, "loss": loss, "expected": expected[step]}
            return Item("preemption", "failed", Reason("rehearsal.resumed-other-loss", params), figures)
    return Item("preemption", "passed", Reason("rehearsal.resumed", params | {"steps": len(losses)}), figures)
