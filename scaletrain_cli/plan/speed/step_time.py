"""Seconds of one optimizer step by cause; ``plan_time`` is the entry.

kernels.py times one kernel, block_time.py one transformer block, stage_time.py one micro-batch on each pipeline stage,
and pipeline.py the schedule of all micro-batches. This module adds what happens once per step (gradient reduction,
optimizer, waiting for data). The stage that finishes last decides.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from scaletrain_cli.plan.catalogue.hardware import Accelerator, stated_rate
from scaletrain_cli.plan.catalogue.networks import Link
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.states import lighter_update_bytes
from scaletrain_cli.plan.muon import muon_seconds, muon_sent_bytes
from scaletrain_cli.plan.result import LIKELY, Layout, Network, PerStepBytes, Time
from scaletrain_cli.plan.speed.communication import (
    data_traffic,
    exposed,
    outer_traffic,
    sent_bytes,
    stall_seconds,
    tied_seconds,
)
from scaletrain_cli.plan.speed.kernels import rates
from scaletrain_cli.plan.speed.offload import offload_seconds
from scaletrain_cli.plan.speed.pipeline import one_forward_one_backward
from scaletrain_cli.plan.speed.recompute import recompute_flops_per_token
from scaletrain_cli.plan.speed.stage_time import (
    MicroBatchTime,
    StepSetting,
    stage_sizes,
    stage_times,
    step_setting,
)
from scaletrain_cli.plan.stages import Stage, zero_shards
from scaletrain_cli.plan.trained_parameters import has_muon
from scaletrain_cli.plan.trained_stages import TrainedStage, stage_flops_per_token, trained_stages
from scaletrain_cli.spec import RunSpec

# Maximum number of stages whose times a plan lists; no published run has more.
_MOST_STAGES = 64
# Tokens have 16 bits on disk up to this vocabulary size, and 32 above. Bytes/s of one node's storage, if the spec has
# none.
_SMALL_VOCABULARY = 65536
_STORAGE_BANDWIDTH = 1e9
# Seconds of a step that add up over the stages of a run.
_ADDED = "step compute exposed_communication bubble optimizer data_wait recompute stall_seconds".split()
_SHARES = ("mfu", "hfu")


@dataclass(frozen=True)
class _OncePerStep:
    """The work that one stage does once per step."""

    exposed: float  # seconds of gradient reduction and weight all-gather that do not overlap compute
    optimizer: float  # seconds
    sent: int  # bytes that one rank sends to data-parallel ranks


def plan_time(spec: RunSpec, layout: Layout, device: Accelerator) -> tuple[Time, Network]:
    """Return the seconds per optimizer step by cause with derived figures, and the bytes that a rank sends.

    If stages of the run train different parameters, these are means over its steps.
    """
    return plan_times(spec, [layout], device)[0]


def plan_times(spec: RunSpec, layouts: Sequence[Layout], device: Accelerator) -> list[tuple[Time, Network]]:
    """Return the same as ``plan_time`` for layouts that differ only in the number of micro-batches per step."""
    stages = trained_stages(spec)
    rows = [[_step_time(*pair) for pair in _micro_batches(spec, layouts, device, stage)] for stage in stages]
    return [mean_of_stages(spec, [stage.steps for stage in stages], times) for times in zip(*rows, strict=True)]


def step_seconds(spec: RunSpec, layouts: Sequence[Layout], device: Accelerator) -> list[Time]:
    """Return the times of ``plan_times`` without rates and bytes, which take a third of the time to compute."""
    stages = trained_stages(spec)
    if len(stages) > 1:
        return [time for time, _ in plan_times(spec, layouts, device)]
    return [_step_of_stage(*one)[0] for one in _micro_batches(spec, layouts, device, stages[0])]


def mean_of_stages(spec: RunSpec, steps: Sequence[int], times: Sequence[tuple[Time, Network]]) -> tuple[Time, Network]:
    """Return the mean of the times of a run's stages over its ``steps``, and the traffic of the one that sends most.

    Rates follow from the mean step.
    """
    if len(times) == 1:
        return times[0]
    pairs = [(count / spec.total_steps, time) for count, (time, _) in zip(steps, times, strict=True)]
    means = {name: sum(share * getattr(time, name) for share, time in pairs) for name in _ADDED}
    step = means["step"]
    # The share of the peak is that of the FLOPs of all stages.
    means |= {name: sum(share * getattr(time, name) * time.step for share, time in pairs) / step for name in _SHARES}
    time = max(pairs, key=lambda pair: pair[0])[1].of_step(**means, to_train=step * spec.total_steps)
    return time, max((network for _, network in times), key=lambda network: network.per_step_bytes.data)


def trained_stage_time(
    spec: RunSpec, layout: Layout, device: Accelerator, trained: TrainedStage
) -> tuple[Time, Network]:
    """Return the same as ``plan_time`` for steps that train what ``trained`` states."""
    return _step_time(*next(_micro_batches(spec, [layout], device, trained)))


def _micro_batches(
    spec: RunSpec, layouts: Sequence[Layout], device: Accelerator, trained: TrainedStage
) -> Iterator[tuple[StepSetting, list[MicroBatchTime]]]:
    """Yield layouts that differ only in the number of micro-batches, with the time of one on each pipeline stage."""
    setting = None
    for layout in layouts:
        # With a second copy of weights, only the first micro-batch gathers them over all ranks.
        if setting is None or layout.zero_secondary_shard_size > 1:
            setting = step_setting(spec, layout, device, trained)
            stages = stage_times(setting)
        yield setting._replace(layout=layout), stages


def _step_of_stage(setting: StepSetting, stages: list[MicroBatchTime]) -> tuple[Time, int, int]:
    """Return the time of a step without rates, the place of the pipeline stage that finishes last, and what it sends.

    That is, the bytes that one of its ranks sends to data-parallel ranks.
    """
    spec, layout, link, profile = setting.spec, setting.layout, setting.link, setting.profile
    per_rank, trained = setting.per_rank, setting.trained
    m = layout.gradient_accumulation_steps
    once: dict[int, _OncePerStep] = {}  # equal stages are the same object
    for stage, held in zip(stages, setting.stages, strict=True):
        if id(stage) not in once:
            once[id(stage)] = _once_per_step(setting, stage, held)
    schedule = one_forward_one_backward(
        [stage.seconds for stage in stages],
        m,
        layout.virtual_pipeline,
        [stage.filling for stage in stages],
        [once[id(stage)].exposed + once[id(stage)].optimizer for stage in stages],
    )
    slowest = stages[schedule.slowest]
    last = once[id(slowest)]
    communication = min(m * slowest.communication, schedule.busy) + last.exposed
    if trained.embedding:
        communication += tied_seconds(spec, layout, link, profile, per_rank.embedding)
    stalled = stall_seconds(layout, link)
    chance = link.stall_probability(layout.world_size) if stalled else 0.0
    communication += stalled if chance > LIKELY else 0.0
    compute = schedule.busy - min(m * slowest.communication, schedule.busy)
    step = compute + schedule.bubble + communication + last.optimizer
    # Reading the tokens, minus the step, because loaders read ahead.
    size = 2 if spec.transformer.vocab_size <= _SMALL_VOCABULARY else 4
    read = size * layout.global_batch_size * (spec.units_per_sample + 1) / spec.cluster.nodes
    waited = max(0.0, read / stated_rate(spec.cluster.storage_bandwidth, _STORAGE_BANDWIDTH) - step)
    time = Time(step + waited, compute, communication, schedule.bubble, last.optimizer, waited)
    if chance:
        time = replace(time, stall_probability=chance, stall_seconds=stalled)
    return time, schedule.slowest, last.sent


def _step_time(setting: StepSetting, stages: list[MicroBatchTime]) -> tuple[Time, Network]:
    spec, layout, device, *_, trained = setting
    time, place, sent = _step_of_stage(setting, stages)
    tokens = layout.global_batch_size * spec.units_per_sample
    needed = tokens * stage_flops_per_token(spec.transformer, trained)
    executed = needed + tokens * recompute_flops_per_token(spec, layout, trained)
    time = replace(
        with_rates(time, spec, layout, device, tokens, needed, executed),
        recompute=layout.gradient_accumulation_steps * stages[place].recompute,
        by_stage=tuple(stage.passes for stage in stages[:_MOST_STAGES]),
    )
    return time, Network(sent_bytes(spec, layout, setting.stages[place], sent))


def with_rates(
    time: Time, spec: RunSpec, layout: Layout, device: Accelerator, units: int, flops: float, executed: float
) -> Time:
    """Return the time of a step with the rates that follow from it.

    ``units``: tokens, or samples, of a step; ``flops``: of the model in a step, ``executed``: with recomputed ones.
    """
    step, peak = time.step, layout.world_size * device.peak_flops(spec.training.precision)
    return replace(
        time,
        tokens_per_second=units / step,
        tokens_per_second_per_gpu=units / step / layout.world_size,
        mfu=flops / step / peak,
        hfu=executed / step / peak,
        to_train=step * spec.total_steps,
        samples_per_second=layout.global_batch_size / step,
    )


def stage_bytes(spec: RunSpec, layout: Layout, device: Accelerator, position: int) -> PerStepBytes:
    """Return the bytes that a rank of pipeline stage ``position`` sends per step while the first parameters train."""
    setting = step_setting(spec, layout, device, trained_stages(spec)[0])
    stage = setting.stages[position]
    parameters, learned = stage_sizes(setting, stage)
    data = data_traffic(spec, layout, setting.link, setting.profile, parameters, stage.blocks, learned)
    sent = data.sent + _beside_gradients(spec, layout, setting.link, stage, learned)[1]
    return sent_bytes(spec, layout, stage, sent)


def _beside_gradients(spec: RunSpec, layout: Layout, link: Link, held: Stage, trained: int) -> tuple[float, int]:
    """Return the mean seconds of the outer steps of local SGD, and the bytes that those and Muon send per step."""
    seconds, sent = 0.0, 0
    if layout.local_sgd_groups > 1:
        seconds, sent = outer_traffic(spec, layout, link, trained)
    if has_muon(spec):
        sent += muon_sent_bytes(spec.transformer, spec.training.optimizer.muon, layout, held.start, held.blocks)
    return seconds, sent


def _once_per_step(setting: StepSetting, stage: MicroBatchTime, held: Stage) -> _OncePerStep:
    """Return what the stage ``held`` does once per step."""
    spec, layout, device, link, profile = setting.spec, setting.layout, setting.device, setting.link, setting.profile
    parameters, learned = stage_sizes(setting, held)
    data = data_traffic(spec, layout, link, profile, parameters, held.blocks, learned)
    # With v chunks per stage, the traffic of a chunk may also overlap passes of the stage's other chunks.
    others = min(layout.gradient_accumulation_steps, layout.pipeline_parallel - 1)
    windows = 1 + others * (1 - 1 / layout.virtual_pipeline)
    forward, backward = stage.overlappable
    overlaps = 0.0 if stage.blocking else 1.0
    reduce = exposed(data.reduce, windows * backward, overlaps * framework_of(spec).reduce_overlap(layout, profile))
    gather = exposed(data.gather, windows * forward, overlaps * profile.gather_overlap)
    optimizer = _optimizer_seconds(setting, parameters, learned)
    outer, beside = _beside_gradients(spec, layout, link, held, learned)
    if has_muon(spec):
        settings = spec.training.optimizer.muon
        own = rates(device, "bf16" if settings.newton_schulz_dtype == "bf16" else spec.training.precision)
        optimizer += muon_seconds(spec.transformer, settings, layout, held.start, held.blocks, own, link)
    return _OncePerStep(reduce + gather + outer, optimizer, data.sent + beside)


def _optimizer_seconds(setting: StepSetting, parameters: int, learned: int) -> float:
    spec, layout, device, rate, profile = setting.spec, setting.layout, setting.device, setting.rate, setting.profile
    shards = 1 if layout.zero_stage == 0 else zero_shards(layout)
    updated, held = -(-learned // shards), -(-parameters // shards)
    host = 0.0 if rate.is_cpu else profile.step_host + (profile.zero_host if layout.zero_stage else 0.0)
    if layout.offload != "none":
        return host + offload_seconds(spec, layout, device, updated, held)
    return host + updated * max(0.0, profile.optimizer - lighter_update_bytes(spec)) / rate.memory
