"""Checks of what keeps a step from being faster, by the telemetry of ranks and GPUs, and by plans of other settings."""

from collections.abc import Iterator

from scaletrain_cli.diagnosis.case import Case, check, grown, level, levels, worst
from scaletrain_cli.diagnosis.curves import median
from scaletrain_cli.diagnosis.findings import Cause, Finding, warning_if
from scaletrain_cli.diagnosis.speed import planned_step_seconds, recent_steps_seconds
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason, Texts

TEXTS: Texts = {
    "host-bound": "the GPUs wait for the host: it needs {seconds:seconds} per step, {share:percent} of it, to launch "
    "kernels, and they are busy for {utilization:percent} of the time",
    "communication-bound": "each of {ranks:of rank} waits in collectives for at least {share:percent} of the step, "
    "{seconds:seconds}; planned are {planned:seconds}",
    "micro-batches-small": "a step takes {passes:whole} passes of micro-batches of {micro_batch}; with {larger} it "
    "would be {gain:percent} shorter by the plan, and need {peak:bytes} of {capacity:bytes}",
    "recomputation-needless": "activations are recomputed ({mode}), though memory has room: {used:bytes} of "
    "{capacity:bytes} are used, {peak:bytes} would be without; the step would be {gain:percent} shorter by the plan",
    "utilization-low": "the MFU is {mfu:percent}, planned are {planned:percent}; a step takes {step:seconds} instead "
    "of {expected:seconds}",
    "cause-not-compiled": "kernels are launched one by one; a compiled graph launches fewer",
    "cause-small-kernels": "the model's kernels are too small for this GPU",
    "cause-small-micro-batch": "micro-batches of {micro_batch} give each pass too little work",
    "cause-recomputes": "recomputation saves memory that is not needed",
    "cause-slow-link": "the link between ranks is slower than its data sheet, or shared",
    "cause-link-errors": "the InfiniBand ports of {node} had {errors:of error}",
    "cause-small-batch": "each gradient exchange follows little work; larger batches per rank exchange less often",
    "cause-sharded-weights": "ZeRO-3 gathers weights in each pass; stages 1 and 2 do not",
    "cause-part-data": "waiting for data: {seconds:seconds}, {share:percent} of the step",
    "cause-part-communication": "waiting in collectives: {seconds:seconds}, {share:percent} of the step",
    "cause-part-optimizer": "the optimizer: {seconds:seconds}, {share:percent} of the step",
    "cause-part-forward": "forward passes: {seconds:seconds}, {share:percent} of the step",
    "cause-part-backward": "backward passes: {seconds:seconds}, {share:percent} of the step",
    "cause-not-split": "the parts of the step were not measured; a profile has them",
}

_HOST_SHARE = 0.9
_IDLE, _VERY_IDLE = 0.85, 0.6
_COMMUNICATION, _MUCH_COMMUNICATION = 0.25, 0.4
_MUCH_ON_CPU = 0.7  # Gloo takes half of a step of a toy model with tensor or sequence parallelism
_ABOVE_PLAN = 0.1
_LEAST_SECONDS = 0.02  # on a CPU: shorter waits are those of toy models
_GAIN, _LARGE_GAIN = 0.1, 0.25
_ROOM = 0.7
_PARTS = {
    "data_wait": ("diagnosis.cause-part-data", "data.loader.workers"),
    "communication": ("diagnosis.cause-part-communication", "layout"),
    "optimizer": ("diagnosis.cause-part-optimizer", "layout.offload"),
    "forward": ("diagnosis.cause-part-forward", "training.micro_batch_size"),
    "backward": ("diagnosis.cause-part-backward", "training.micro_batch_size"),
}


@check(explains={"communication-bound": ("utilization-low",)})
def communication(case: Case) -> Iterator[Finding]:
    """Yield a finding if every rank waits in collectives for over 25 % of the step; a warning from 40 %, on a CPU 70 %.

    The rank that waits least waits for no other rank, so what it waits is the transfer. On GPUs the share must exceed
    that of the plan by 10 points; on a CPU, of which plans are rough, a warning also needs 20 ms per step.
    """
    steps = levels(case, case.telemetry.ranks, "step_seconds")
    waits = levels(case, case.telemetry.ranks, "communication_seconds")
    known = {rank: waits[rank] for rank in waits if steps.get(rank)}
    if len(known) < 2:
        return
    least = min(known, key=known.__getitem__)
    seconds, of_step = known[least], known[least] / steps[least]
    time = case.plan.time
    planned = time.exposed_communication / time.step if time.step > 0 else 0.0
    if of_step <= _COMMUNICATION or (not case.on_cpu and of_step <= planned + _ABOVE_PLAN):
        return
    serious = of_step > _MUCH_ON_CPU and seconds >= _LEAST_SECONDS if case.on_cpu else of_step > _MUCH_COMMUNICATION
    evidence = {"share": of_step, "seconds": seconds, "planned": time.exposed_communication, "ranks": len(known)}
    errors = worst({node: grown(series, "infiniband_errors") for node, series in case.telemetry.nodes.items()})
    causes = [case.cause("diagnosis.cause-slow-link", "cluster.internode")]
    if errors is not None and errors[1] > 0:
        params = {"node": errors[0], "errors": errors[1]}
        causes.insert(0, case.cause("diagnosis.cause-link-errors", **params))
    layout = case.plan.layout
    if layout.gradient_accumulation_steps == 1 or layout.micro_batch_size == 1:
        causes.append(case.cause("diagnosis.cause-small-batch", "training.global_batch_size"))
    if layout.zero_stage == 3:
        causes.append(case.cause("diagnosis.cause-sharded-weights", "layout.zero_stage", 1))
    yield Finding(Reason("diagnosis.communication-bound", evidence), warning_if(serious), "medium", tuple(causes))


@check(explains={"host-bound": ("utilization-low",)})
def host_bound(case: Case) -> Iterator[Finding]:
    """Yield a finding if the host needs over 90 % of a step to launch its kernels, and GPUs are busy for under 85 %.

    A warning below 60 %. ``utilization`` is the share of time with any kernel; a GPU that waits for the next launch has
    none. On a CPU host and device are one.
    """
    busy = levels(case, case.telemetry.gpus, "utilization")
    steps = levels(case, case.telemetry.ranks, "step_seconds")
    hosts = levels(case, case.telemetry.ranks, "host_seconds")
    shares = {rank: hosts[rank] / steps[rank] for rank in hosts if steps.get(rank)}
    if case.on_cpu or not busy or not shares:
        return
    usual, of_host = median(list(busy.values())), median(list(shares.values()))
    if usual >= _IDLE or of_host <= _HOST_SHARE:
        return
    layout = case.plan.layout
    evidence = {"share": of_host, "utilization": usual, "seconds": median(list(hosts.values()))}
    causes = []
    if layout.gradient_accumulation_steps > 1:
        causes.append(_small_micro_batch(case, 2 * layout.micro_batch_size))
    if not layout.compile:
        causes.append(case.cause("diagnosis.cause-not-compiled", "training.compile", True))
    causes.append(case.cause("diagnosis.cause-small-kernels", "model"))
    yield Finding(Reason("diagnosis.host-bound", evidence), warning_if(usual < _VERY_IDLE), "medium", tuple(causes))


@check(of_engine=True)
def small_micro_batches(case: Case) -> Iterator[Finding]:
    """Yield a finding if a larger micro-batch fits, and makes the step faster by 10 % or more, by the plan.

    Planned are micro-batches of 2, 4, 8, ... times the size, with fewer passes for the same global batch. It fits if
    its planned peak, by as much larger as the measured one is than its plan, is below 90 % of the device. A warning on
    GPUs from 25 % on.
    """
    layout = case.plan.layout
    if layout.gradient_accumulation_steps < 2 or case.spec.code.own_program or not len(case.history):
        return
    best: tuple[float, int, RunPlan] | None = None
    passes, size = layout.gradient_accumulation_steps, layout.micro_batch_size
    while passes % 2 == 0:
        passes, size = passes // 2, size * 2
        plan = _planned(case, size, layout.activation_checkpointing)
        if plan is None or plan.memory.peak * _measured_excess(case) > 0.9 * plan.memory.capacity:
            break
        gain = 1 - plan.time.step / case.plan.time.step
        if best is None or gain > best[0] + 0.02:
            best = gain, size, plan
    if best is None or best[0] < _GAIN:
        return
    gain, size, plan = best
    evidence = {"micro_batch": layout.micro_batch_size, "passes": layout.gradient_accumulation_steps, "gain": gain}
    evidence |= {"peak": plan.memory.peak, "capacity": plan.memory.capacity, "larger": size}
    serious = gain > _LARGE_GAIN and not case.on_cpu
    yield Finding(
        Reason("diagnosis.micro-batches-small", evidence), warning_if(serious), "low" if case.on_cpu else "medium",
        (_small_micro_batch(case, size),),
    )  # fmt: skip


@check(of_engine=True)
def needless_recomputation(case: Case) -> Iterator[Finding]:
    """Yield a finding if activations are recomputed that fit into memory, and that takes over 5 % of the step.

    Planned is the same layout without recomputation; its peak, by as much larger as the measured one is than its plan,
    must be below 90 % of the device, and the measured one below 70 %. A warning from 15 % of the step on.
    """
    layout, capacity = case.plan.layout, case.plan.memory.capacity
    if layout.activation_checkpointing == "none" or case.on_cpu or case.spec.code.own_program:
        return
    used = _measured_peak(case)
    if used is None or used > _ROOM * capacity:
        return
    plan = _planned(case, layout.micro_batch_size, "none")
    peak = 0.0 if plan is None else plan.memory.peak * _measured_excess(case)
    if plan is None or peak > 0.9 * capacity:
        return
    gain = 1 - plan.time.step / case.plan.time.step
    if gain < 0.05:
        return
    evidence = {"mode": layout.activation_checkpointing, "used": used, "peak": peak, "capacity": capacity, "gain": gain}
    cause = case.cause("diagnosis.cause-recomputes", "layout.activation_checkpointing", "none")
    yield Finding(Reason("diagnosis.recomputation-needless", evidence), warning_if(gain > 0.15), "medium", (cause,))


@check()
def low_utilization(case: Case) -> Iterator[Finding]:
    """Yield a finding if the measured MFU is below 70 % of the planned one: a warning below half of it.

    Its causes are what the split of the step says, the largest share first; other findings have their figures.
    """
    rank = case.telemetry.ranks.get(0)
    measured = None if rank is None else level(case, rank, "mfu")
    planned, step = case.plan.time.mfu, recent_steps_seconds(case)
    if case.on_cpu or rank is None or measured is None or planned <= 0 or step is None or measured >= 0.7 * planned:
        return
    expected = case.plan.time
    seconds = {column: level(case, rank, f"{column}_seconds") for column in _PARTS}
    known = {column: value for column, value in seconds.items() if value is not None and value > 0.02 * step}
    usual = {
        "data_wait": expected.data_wait,
        "communication": expected.exposed_communication,
        "optimizer": expected.optimizer,
    }
    parts = [
        (value - usual.get(column, 0.0), case.cause(*_PARTS[column], share=value / step, seconds=value))
        for column, value in known.items()
    ]
    parts.sort(key=lambda pair: -pair[0])
    evidence = {"mfu": measured, "planned": planned, "step": step, "expected": planned_step_seconds(case)}
    causes = tuple(cause for _, cause in parts) or (case.cause("diagnosis.cause-not-split"),)
    yield Finding(Reason("diagnosis.utilization-low", evidence), warning_if(measured < 0.5 * planned), "medium", causes)


def _small_micro_batch(case: Case, size: int) -> Cause:
    params = {"micro_batch": case.plan.layout.micro_batch_size}
    return case.cause("diagnosis.cause-small-micro-batch", "training.micro_batch_size", size, **params)


def _planned(case: Case, micro_batch: int, checkpointing: str) -> RunPlan | None:
    """Return the plan of the run's layout with another micro-batch or recomputation; None if there is none."""
    from scaletrain_cli.plan import make_plan  # 70 modules, for a finding that is rare

    layout = case.plan.layout
    names = ("data_parallel", "tensor_parallel", "pipeline_parallel", "sequence_parallel", "context_parallel")
    fixed = {name: getattr(layout, name) for name in (*names, "expert_parallel", "zero_stage")}
    fixed["activation_checkpointing"] = checkpointing
    other = case.spec.with_changes("layout", **fixed).with_changes("training", micro_batch_size=micro_batch)
    try:
        plan = make_plan(other)
    except UsageError:
        return None
    # With other blocks on a stage, its memory is not what was measured.
    return plan if plan.layout.pipeline_split == layout.pipeline_split else None


def _measured_peak(case: Case) -> float | None:
    peaks = [value for series in case.telemetry.ranks.values()
             for value in series.highest.get("memory_reserved_bytes", ()) if value == value]  # fmt: skip
    stages = () if case.measured is None else case.measured.stages
    peaks += [stage.figures["reserved"].measured for stage in stages if "reserved" in stage.figures]
    return max(peaks) if peaks else None


def _measured_excess(case: Case) -> float:
    """Return by which factor the measured peak exceeds its plan, at least 1."""
    measured, planned = _measured_peak(case), case.plan.memory.reserved
    return max(1.0, measured / planned) if measured is not None and planned else 1.0
