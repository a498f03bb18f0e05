"""The ranges of a plan's figures, 10th to 90th percentile, from the measured error of the planner.

catalogue/errors.json has measured values as multiples of planned ones: their 10th, 50th and 90th percentile over
published runs, by framework, regime (what limits a run of this kind) and architecture of the GPU. The benchmark
writes it: ``make bench-planner TRUTH=DIR ARGS=--write``. A plan whose framework, regime or architecture nobody has
measured has the range of the nearest evidence, wider by what whole kinds of runs differ from others. Measurements of
the user replace the published ones.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from scaletrain_cli.plan.calibration import samples_length
from scaletrain_cli.plan.catalogue.hardware import Accelerator, near_ranks
from scaletrain_cli.plan.result import (
    Calibration,
    Cost,
    Durability,
    Layout,
    MeasuredError,
    Memory,
    Range,
    Ranges,
    RunPlan,
    Time,
)
from scaletrain_cli.plan.speed.kernels import generation
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.project_files import packaged_data
from scaletrain_cli.spec import ClipSpec, RunSpec
from scaletrain_cli.spec.loader_processes import decodes_beside_gpus

# Models with fewer parameters keep no GPU busy, and the host sets the pace: 12 layers of 512 channels, for example.
_TINY = 150_000_000
# Tokens of one rank and micro-batch below which launching kernels and the hooks of ZeRO-3 take a part of the step that
# differs between hosts and versions. Four times as many do not change the error any more, and nor does the number of
# nodes.
_FEW_TOKENS = 4096
# Normal quantile of 0.9: the distance from the median to the 90th percentile, in standard deviations.
_P90 = 1.2816
_SMALL = 1e-9
_HALVINGS = 60
_ERRORS = "plan/catalogue/errors.json"
# Architectures by generation: the evidence of the nearest one counts for one that nobody has measured.
_GENERATIONS = {"volta": 0, "turing": 1, "ampere": 2, "ada": 3, "hopper": 3, "cdna3": 3, "blackwell": 4}
USUAL = "usual sizes"


class Quantiles(NamedTuple):
    """Percentiles of measured / planned."""

    p10: float
    p50: float
    p90: float


Percentiles = Quantiles | MeasuredError


def regime_of(spec: RunSpec, layout: Layout) -> str:
    """Return what limits runs of this kind, as errors.json names it; known before the run.

    For what no published run has, its name, which is not in errors.json.
    """
    workload = workload_of(spec.model)
    if not workload.counts_tokens:
        # Rates with files to decode were published for CLIP alone.
        return "decoded images" if decodes_beside_gpus(spec) and isinstance(spec.model, ClipSpec) else "images"
    if part := workload.unmeasured_part(spec.model):
        return part
    if layout.local_sgd_groups > 1:
        return "local SGD"
    if spec.training.precision == "fp4":
        return "fp4"
    if layout.offload != "none" or spec.layout.activation_offload:
        return "offload"
    if workload.parameter_count(spec.model) < _TINY:
        return "tiny model"
    if layout.tensor_parallel > near_ranks(spec.cluster):
        return "tensor parallelism between nodes"
    shared = layout.sequence_parallel * layout.context_parallel
    if layout.micro_batch_size * samples_length(spec) // shared < _FEW_TOKENS:
        return "small micro-batches"
    return (
        "pipeline between nodes"
        if layout.pipeline_parallel > 1 and layout.world_size > near_ranks(spec.cluster)
        else USUAL
    )


def architecture_of(device: Accelerator) -> str:
    """Return the architecture of a device, such as ``hopper``; ``cpu`` for CPU ranks, ``other`` if it is not known."""
    if device.is_cpu:
        return "cpu"
    name = generation(device.name)
    return next((known for known in _GENERATIONS if known in name), name)


def find_error(errors: dict[str, Any], framework: str, regime: str, hardware: str) -> MeasuredError | None:
    """Return the error of runs of this kind, or of the nearest kind that was measured, wider; None if there is none.

    ``errors``: one quantity of errors.json. Of one framework and regime, the architecture itself counts before the
    nearest generation, and that before all together. A regime that the framework lacks is looked up in the others, the
    one with most runs first; one that none has is taken for usual sizes. Ranks on CPUs have none.
    """
    frameworks = errors["frameworks"]
    if hardware == "cpu" or framework not in frameworks:
        return None
    others = sorted((name for name in frameworks if name != framework), key=lambda name: -frameworks[name]["runs"])
    kinds = [(name, kind) for kind in (regime, USUAL) for name in (framework, *others)]
    for name, kind in kinds:
        rows = [row for row in frameworks[name]["cells"] if row["regime"] == kind]
        if rows:
            row = min(rows, key=lambda row: _distance(row["hardware"], hardware))
            asked, measured = (framework, regime, hardware), (name, kind, row["hardware"])
            quantiles = Quantiles(row["p10"], row["p50"], row["p90"])
            if measured != asked:
                quantiles = widened(quantiles, errors["apart"])
            error = MeasuredError(measured == asked, *asked, "published runs", *measured, *quantiles)
            return replace(error, n=row["n"], sources=tuple(row["sources"]))
    return None


def _distance(measured: str, hardware: str) -> float:
    """Return how far the runs of a cell are from an architecture, in generations; those on all GPUs above any."""
    if measured == hardware:
        return -1.0
    if measured in _GENERATIONS and hardware in _GENERATIONS:
        newer = _GENERATIONS[measured] - _GENERATIONS[hardware]
        return abs(newer) - (newer > 0) / 10
    return 9.0 if measured else 8.0


def widened(error: Percentiles, spread: float) -> Quantiles:
    """Return the percentiles with a shift of their own: its variance adds to theirs.

    ``spread``: of that shift, as the logarithm of a ratio at its 90th percentile. A negative one is subtracted: the
    known sources differ more from each other than new runs do from them.
    """

    def apart(distance: float) -> float:
        return math.sqrt(max(distance**2 + math.copysign(spread**2, spread), distance**2 / 4))

    low, high = (apart(math.log(end / error.p50)) for end in (error.p10, error.p90))
    return Quantiles(error.p50 * math.exp(-low), error.p50, error.p50 * math.exp(high))


def step_range(time: Time, error: Percentiles) -> Range:
    """Return the 10th and 90th percentile of the step seconds; the planned seconds are always inside."""
    lowest, highest = time.unstalled * error.p10 / 10, (time.unstalled + time.stall_seconds) * error.p90 * 10

    def at(share: float) -> float:
        low, high = lowest, highest
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if share_below(time, error, middle) < share else (low, middle)
        return math.sqrt(low * high)

    return Range(min(at(0.1), time.step), max(at(0.9), time.step))


def share_below(time: Time, error: Percentiles, seconds: float) -> float:
    """Return the share of runs planned like this one whose steps take at most ``seconds``.

    The error is normal on each side of its median, in logarithms. A run that may stall is a mixture of one that does
    and one that does not.
    """
    chance, unstalled = time.stall_probability, time.unstalled
    share = (1 - chance) * _share_below(seconds / unstalled, error)
    return share + (chance * _share_below(seconds / (unstalled + time.stall_seconds), error) if chance else 0.0)


def _share_below(ratio: float, error: Percentiles) -> float:
    apart = math.log(ratio / error.p50)
    width = math.log(error.p90 / error.p50) if apart > 0 else math.log(error.p50 / error.p10)
    return 0.5 * (1 + math.erf(apart / max(width, _SMALL) * _P90 / math.sqrt(2)))


def plan_ranges(
    spec: RunSpec,
    device: Accelerator,
    layout: Layout,
    memory: Memory,
    time: Time,
    durability: Durability,
    cost: Cost,
    calibration: Calibration | None,
) -> Ranges:
    """Return the ranges of a plan's figures. Days and dollars are in proportion to the seconds per step."""
    kind = spec.planner.framework, regime_of(spec, layout), architecture_of(device)
    timed, held = (find_error(packaged_data(_ERRORS)[quantity], *kind) for quantity in ("time", "memory"))
    unknown = MeasuredError(False, *kind)
    ranges = Ranges(_around_plan(timed or unknown), _around_plan(held or unknown))
    if calibration is not None:
        step = Range(*(time.step * bound / calibration.factor for bound in (calibration.low, calibration.high)))
        own = replace(unknown, calibrated=True, basis="own runs", n=calibration.runs)
        ranges = replace(ranges, time=replace(own, p10=step.p10 / time.step, p90=step.p90 / time.step))
    elif timed is not None:
        step = step_range(time, timed)
    else:
        step = None
    if held is not None:
        ranges = replace(ranges, peak_bytes=Range(memory.peak * ranges.memory.p10, memory.peak * ranges.memory.p90))
    if step is None:
        return ranges
    low, high = step.p10 / time.step, step.p90 / time.step

    def scaled(value: float | None) -> Range | None:
        return None if value is None else Range(low * value, high * value)

    return replace(
        ranges,
        step_seconds=step,
        to_train_seconds=scaled(time.to_train),
        wall_seconds=scaled(durability.wall_seconds),
        on_demand_usd=scaled(cost.on_demand.usd if cost.on_demand else None),
        spot_usd=scaled(cost.spot.usd if cost.spot else None),
        expected_usd=scaled(cost.expected_usd),
    )


def chance_within(plan: RunPlan, seconds: float | None, dollars: float | None) -> float | None:
    """Return the probability that a run ends within so many seconds and dollars, interruptions included.

    A limit that is None does not count. Return None without evidence on the time, or if the run never ends.
    """
    error, planned = plan.ranges.time, (plan.durability.wall_seconds, plan.cost.expected_usd)
    shares = [limit / amount for limit, amount in zip((seconds, dollars), planned, strict=True) if limit and amount]
    if not error.basis or not shares or planned[0] is None:
        return None
    return share_below(plan.time, error, min(shares) * plan.time.step)


def _around_plan(error: MeasuredError) -> MeasuredError:
    """Return the error of published runs with percentiles between which the planned figure is."""
    if not error.basis:
        return error
    return replace(error, p10=min(1.0, error.p10), p90=max(1.0, error.p90), date=packaged_data(_ERRORS)["date"])
