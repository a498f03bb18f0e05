"""Items of a rehearsal that real steps show: gradients, speed, memory, data rate, checkpoints and preemption."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from scaletrain_cli.diagnosis.curves import deviation, median
from scaletrain_cli.diagnosis.memory import ABOVE_PLAN, FULL, LEAST_BYTES, large_micro_batch
from scaletrain_cli.diagnosis.rehearsal import Item
from scaletrain_cli.diagnosis.speed import few_workers, slow_storage
from scaletrain_cli.engine.metrics.memory_measurement import peak_memory_bytes
from scaletrain_cli.engine.metrics.step_measures import StepMeasures
from scaletrain_cli.engine.rehearsal.trials import Trials, finite
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import list_checkpoints
from scaletrain_cli.rundir.journal import read_events, read_metrics
from scaletrain_cli.rundir.measured import read_measured
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record

_SHARE = 0.15  # of the budget
_FEWEST_STEPS, _MOST_STEPS = 6, 30
_WARM = 2  # steps that load kernels, fill caches and allocate
_SLOWER = 1.5  # times the plan
_LEAST_NORM = 1e-7
_MOST_SPREAD = 100.0  # of the norms after the first steps, the largest over the median
_WAIT_SHARE, _LEAST_WAIT_SECONDS = 0.1, 0.01
_BURST_SECONDS, _BURST_BATCHES = 5.0, 8


@dataclass(frozen=True)
class Steps:
    """Steps of training, in order; ``seconds`` and ``waits`` without the first two, which load kernels."""

    measures: tuple[StepMeasures, ...]
    untouched: tuple[str, ...]  # tensors whose gradient was zero in every step
    memory_bytes: float

    @property
    def losses(self) -> list[float]:
        """Return the losses, the first step's first."""
        return [measure.values["loss"] for measure in self.measures]

    @property
    def norms(self) -> list[float]:
        """Return the gradient norms before clipping."""
        return [measure.values["grad_norm"] for measure in self.measures]

    @property
    def seconds(self) -> list[float]:
        """Return the seconds of the steps after the first two."""
        return [measure.seconds for measure in self.measures[_WARM:]]

    @property
    def waits(self) -> list[float]:
        """Return the seconds that these steps waited for their batch."""
        return [measure.values["data_wait"] for measure in self.measures[_WARM:]]


def train(trials: Trials) -> Steps:
    """Train the first steps of the run as they will be trained, and update the time that a step takes.

    As many as fit into 15 % of the budget, from 6 to 30.
    """
    trainer = trials.trainer
    measures: list[StepMeasures] = []
    wanted, step = _FEWEST_STEPS, 0
    while step < min(wanted, trials.case.spec.total_steps):
        step += 1
        trainer.optimizer_step(step)
        if step in (1, _FEWEST_STEPS):  # the plan of a CPU is rough; the first step is slow
            measures += trainer.deferred_metrics.remaining()
            seconds = trials.consensus.on_values({"seconds": median([measure.seconds for measure in measures[-4:]])})
            trials.step_seconds = seconds["seconds"]
        if step == _FEWEST_STEPS:
            wanted = max(_FEWEST_STEPS, trials.steps_in(_SHARE, _FEWEST_STEPS, _MOST_STEPS))
    measures += trainer.deferred_metrics.remaining()
    agreed = tuple(measure._replace(values=trials.consensus.on_values(measure.values)) for measure in measures)
    own = [measure.seconds for measure in agreed[_WARM:] or agreed]
    trials.step_seconds = trials.consensus.on_values({"seconds": median(own)})["seconds"]
    memory = trials.largest(float(peak_memory_bytes(trainer.context.device)))
    return Steps(agreed, tuple(_without_gradient(trials)), memory)


def times_of_run(run: RunDir, attempt: int, fewest: int) -> dict[str, Any]:
    """Return the figures of the item ``speed`` for the steps of an attempt, without its first two.

    Empty if there are not ``fewest``. Unlike the steps of ``train``, these are of the whole training loop.
    """
    rows = [line for line in read_metrics(run) if line.get("attempt") == attempt and line.get("step_seconds")]
    seconds = [float(line["step_seconds"]) for line in rows[_WARM:]]
    if len(seconds) < fewest:
        return {}
    middle = median(seconds)
    batch = read_record(run).plan.layout.global_batch_size
    return {
        "step_seconds": finite(middle),
        "spread_seconds": finite(deviation(seconds)),
        "steps": len(seconds),
        "samples_per_second": finite(batch / middle),
    }


def _without_gradient(trials: Trials) -> list[str]:
    """Return the tensors whose first moment is exactly zero after the steps: no gradient has reached them.

    Optimizers without a moment show nothing. Experts that no token was routed to are left out.
    """
    states = trials.trainer.checkpointer.states
    seen: dict[str, bool] = {}
    for shard in states.shards:
        with states.weight(shard) as weight:
            own = states.optimizer_states(weight)
            moment = next((own[name] for name in ("exp_avg", "momentum_buffer") if name in own), None)
            if not isinstance(moment, torch.Tensor) or moment.numel() != weight.numel():
                continue
            flat = moment.reshape(-1)
            for part, offset in shard.slices:
                name = part.name
                if "expert" not in name:
                    seen[name] = seen.get(name, False) or bool(flat[offset : offset + part.numel].any())
    reached: dict[str, bool] = {}
    for names in trials.consensus.gather_everywhere(seen):
        for name, has in names.items():
            reached[name] = reached.get(name, False) or has
    return [name for name, has in reached.items() if not has]


def gradients(trials: Trials, steps: Steps) -> Item:
    """Judge the norms of the steps: finite, not zero, without a jump of 100 times the median, at every parameter."""
    case, norms, losses = trials.case, steps.norms, steps.losses
    known = [norm for norm in norms if math.isfinite(norm)]
    figures: dict[str, Any] = {
        "steps": len(norms),
        "norms": [finite(norm) for norm in norms],
        "losses": [finite(loss) for loss in losses],
        "tensors_without_gradient": len(steps.untouched),
    }
    rate = case.rate_too_high()
    if len(known) < len(norms) or not all(map(math.isfinite, losses)):
        if case.spec.training.precision == "fp16" and len(known) > 1:
            known = known or [0.0]  # the first descent of the loss scale
        else:
            half = case.cause("diagnosis.cause-fp16-overflow", "training.precision", "bf16")
            causes = (half, rate) if case.spec.training.precision == "fp16" else (rate,)
            at = next(
                at for at, norm in enumerate(norms, 1) if not math.isfinite(norm) or not math.isfinite(losses[at - 1])
            )
            return Item("gradients", "failed", Reason("rehearsal.norm-not-finite", {"step": at}), figures, causes)
    usual, largest = median(known), max(known)
    params = {"steps": len(norms), "norm": usual, "largest": largest, "least": min(known)}
    if usual < _LEAST_NORM:
        causes = (case.cause("diagnosis.cause-no-gradient", norm=usual),)
        return Item("gradients", "failed", Reason("rehearsal.norm-zero", params), figures, causes)
    if steps.untouched:
        names = list(steps.untouched[:3])
        figures["without_gradient"] = list(steps.untouched[:20])
        untouched = {"count": len(steps.untouched), "names": names, "steps": len(norms)}
        cause = case.cause("rehearsal.cause-detached", "training.trainable")
        return Item("gradients", "failed", Reason("rehearsal.without-gradient", untouched), figures, (cause,))
    if largest > _MOST_SPREAD * usual:
        return Item("gradients", "failed", Reason("rehearsal.norm-jumps", params), figures, (rate,))
    return Item("gradients", "passed", Reason("rehearsal.norm-even", params), figures)


def speed(trials: Trials, steps: Steps) -> Item:
    """Compare the median step with the plan: on GPUs, slower than 1.5 times, and than the plan's p90, fails.

    For CPUs planned times are rough.
    """
    planned, measured = trials.case.plan.time.step, median(steps.seconds or [trials.step_seconds])
    spread = deviation(steps.seconds) if len(steps.seconds) > 2 else 0.0
    times = measured / planned if planned > 0 else 1.0
    figures = {
        "step_seconds": finite(measured),
        "spread_seconds": finite(spread),
        "planned_step_seconds": finite(planned),
        "steps": len(steps.seconds),
        "samples_per_second": finite(trials.case.plan.layout.global_batch_size / measured),
    }
    params = {"measured": measured, "planned": planned, "times": times, "spread": spread, "steps": len(steps.seconds)}
    if times > max(_SLOWER, trials.case.plan.p90_ratio) and not trials.case.on_cpu:
        causes = (
            trials.case.cause("rehearsal.cause-slow-step", "layout"),
            trials.case.cause("rehearsal.cause-other-device", "cluster.gpu"),
        )
        return Item("speed", "failed", Reason("rehearsal.slower-than-plan", params), figures, causes)
    return Item("speed", "passed", Reason("rehearsal.step-time", params), figures)


def memory(trials: Trials, steps: Steps) -> Item:
    """Compare memory with the plan by measured.json, and the peak with the capacity. Rank 0 judges."""
    return trials.consensus.from_rank_zero(lambda: _memory(trials, steps))


def _memory(trials: Trials, steps: Steps) -> Item:
    case, plan = trials.case, trials.case.plan.memory
    measured = read_measured(trials.trainer.context.run)
    figures: dict[str, Any] = {"peak_bytes": int(steps.memory_bytes), "capacity_bytes": plan.capacity}
    figures |= {"planned_peak_bytes": plan.peak}
    causes = (large_micro_batch(case),)
    if measured is not None:
        parts = measured.stages[measured.worst].figures
        figures["parts"] = {name: {"planned": part.planned, "measured": part.measured} for name, part in parts.items()}
        for name, part in parts.items():
            excess = part.measured - part.planned
            if name in ("allocated", "reserved") and case.on_cpu:
                continue
            if excess > ABOVE_PLAN * part.planned and excess > LEAST_BYTES:
                params = {"part": name.replace("_", " "), "measured": part.measured, "planned": part.planned}
                return Item("memory", "failed", Reason("diagnosis.memory-above-plan", params), figures, causes)
    used = steps.memory_bytes + (0 if case.on_cpu else max(0, plan.peak - plan.reserved))
    params = {"used": used, "capacity": plan.capacity, "share": used / plan.capacity, "planned": plan.peak}
    if plan.capacity > 0 and used > FULL * plan.capacity:
        return Item("memory", "failed", Reason("diagnosis.memory-nearly-full", params), figures, causes)
    return Item("memory", "passed", Reason("rehearsal.memory-as-planned", params), figures)


def data_rate(trials: Trials, steps: Steps) -> Item:
    """Measure the wait for batches in the steps, and read batches alone: steps may live on what was read ahead."""
    trainer, case = trials.trainer, trials.case
    seconds, waits = sum(steps.seconds), sum(steps.waits)
    share = waits / seconds if seconds > 0 else 0.0
    first = len(steps.measures) + 1 + trainer.context.spec.data.loader.read_ahead(trainer.readers)
    began, read = time.perf_counter(), 0
    while read < _BURST_BATCHES and (read == 0 or trials.largest(time.perf_counter() - began) < _BURST_SECONDS):
        ahead = range(first + read + 1, min(first + _BURST_BATCHES, first + read + 1 + max(1, trainer.readers)))
        trials.batches(first + read, list(ahead))
        read += 1
    read_seconds = trials.largest(time.perf_counter() - began) / read
    figures = {
        "wait_seconds": finite(waits / max(1, len(steps.waits))),
        "wait_share": round(share, 4),
        "read_seconds": finite(read_seconds),
        "step_seconds": finite(trials.step_seconds),
        "workers": trainer.readers,
    }
    busy = read_seconds / trials.step_seconds if trials.step_seconds > 0 else 0.0
    params = {"seconds": read_seconds, "step": trials.step_seconds, "share": share, "busy": busy}
    waits_long = share > _WAIT_SHARE and waits / max(1, len(steps.waits)) > _LEAST_WAIT_SECONDS
    if waits_long or (busy > 1 and read_seconds > _LEAST_WAIT_SECONDS):
        causes = (few_workers(case, trainer.readers), slow_storage(case))
        return Item("data-rate", "failed", Reason("rehearsal.data-slow", params), figures, causes)
    return Item("data-rate", "passed", Reason("rehearsal.data-fast", params), figures)


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
    saved = [checkpoint for checkpoint in list_checkpoints(trainer.checkpointer.folder) if checkpoint.step == step]
    size = trials.consensus.follow_rank_zero(sum(file.size for file in saved[0].files.values()) if saved else 0)
    _, load_seconds = trials.timed(lambda: trainer.checkpointer.restore(saved[0]))
    kinds = sorted({kind for diff in trials.consensus.gather_everywhere(trials.differs_from(before)) for kind in diff})
    again = trials.step(trials.batches(step + 1), trials.peak_rate).loss
    if trainer.context.rank == 0:
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
        cause = case.cause("rehearsal.cause-damaged-storage", "checkpoint.dir")
        return Item("restore", "failed", Reason("rehearsal.restored-other-state", params), figures, (cause,))
    if not abs(again - first) <= tolerance and math.isfinite(first):
        params |= {"loss": again, "expected": first}
        return Item("restore", "failed", Reason("rehearsal.restored-other-loss", params), figures)
    if seconds > max(_LEAST_SLOW_SECONDS, _SLOW_SAVE * planned):
        cause = case.cause("rehearsal.cause-slow-checkpoints", "checkpoint.dir")
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
