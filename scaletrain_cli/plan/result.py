"""The result of planning as frozen data in SI units (bytes are integers), and the JSON of `scaletrain plan --json`.

The JSON is the stable contract `scaletrain.plan/v1`: keys are added, never renamed or removed.
"""

import dataclasses
from dataclasses import dataclass, field, replace
from typing import Any

from scaletrain_cli.reasons import Reason, reason_from

SCHEMA = "scaletrain.plan/v1"


@dataclass(frozen=True)
class ModelSize:
    """Parameters (all, and those that one token uses), and training FLOPs per token, without recomputation.

    ``parameters`` and ``active_parameters`` are without adapters. ``trainable_parameters``: those that train, adapters
    included, in the stage of the run that trains most.
    """

    parameters: int
    active_parameters: int
    flops_per_token: float
    trainable_parameters: int = 0


@dataclass(frozen=True)
class TrainingStage:
    """Steps that train the same parameters: how many, peak bytes on the fullest rank, and seconds per step."""

    first_step: int
    last_step: int
    trainable_parameters: int
    peak: int
    step_seconds: float


@dataclass(frozen=True)
class Layout:
    """The layout of a run: degrees of parallelism, batch sizes (in samples), and settings resolved from ``auto``.

    world_size = data x tensor x pipeline x sequence x context. ``cross_entropy``: ``whole``, ``chunked`` or ``liger``;
    ``compile``: whether blocks are compiled. ``local_sgd_groups``: the groups of data-parallel ranks that reduce
    gradients, and shard states, among themselves only. ``zero_shard_size``: ranks over which ZeRO shards, 0 for all
    replicas. ``zero_secondary_shard_size``: ranks that have a second copy of the weights between them (hpZ); 1: none.
    ``pipeline_split``: the number of blocks on each pipeline stage; empty: divided by time.
    """

    world_size: int
    data_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    virtual_pipeline: int
    sequence_parallel: int
    context_parallel: int
    expert_parallel: int
    zero_stage: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    global_batch_size: int
    activation_checkpointing: str
    offload: str
    cross_entropy: str = "whole"
    compile: bool = False
    local_sgd_groups: int = 1
    zero_shard_size: int = 0
    zero_secondary_shard_size: int = 1
    pipeline_split: tuple[int, ...] = ()


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one rank of one pipeline stage, at the peak of a step.

    ``peak``: the device's memory in use, the sum of ``parameters`` to ``fragmentation`` and ``step_temporaries``.
    ``allocated``: the part in tensors, as torch.cuda.max_memory_allocated counts it. ``reserved``: the part that the
    caching allocator holds, with fragmentation; the rest of the peak is the CUDA context and NCCL. ``cached``: what
    nvidia-smi may show, the peak and what the allocator keeps of other phases until memory runs short. ``host``: bytes
    of this rank in the node's memory, not in the peak. ``step_temporaries``: temporary tensors of the optimizer's
    update, if the peak is there.
    """

    parameters: int
    gradients: int
    optimizer_states: int
    activations: int
    logits: int
    communication_buffers: int
    framework: int
    fragmentation: int
    peak: int
    allocated: int = 0
    reserved: int = 0
    cached: int = 0
    host: int = 0
    step_temporaries: int = 0


@dataclass(frozen=True, kw_only=True)
class Memory(StageMemory):
    """Bytes on the fullest rank, compared with the device; ``by_stage`` has the bytes of each pipeline stage.

    ``capacity``: bytes of the device that a process can use. ``fits``: the peak is at most the capacity. ``verdict``:
    ``fits``, ``tight`` or ``does not fit``. ``out_of_memory_probability`` (0 to 1) follows from the error of the
    estimate against published measurements.
    """

    capacity: int
    fits: bool
    by_stage: tuple[StageMemory, ...]
    verdict: str = "fits"
    out_of_memory_probability: float = 0.0


@dataclass(frozen=True)
class StageTime:
    """Seconds of one micro-batch on one pipeline stage, including communication and waiting for the host."""

    forward: float
    backward: float


LIKELY = 0.5  # a probability above it is more likely than not


@dataclass(frozen=True)
class Time:
    """Seconds per optimizer step, and figures derived from them.

    ``step`` is the sum of compute, exposed_communication, bubble, optimizer and data_wait. ``compute``: of the slowest
    stage, including recomputation (also in ``recompute``) and waiting for the host. ``to_train``: seconds of all steps
    and of the pass before them that computes the reference of ``reference_pairs`` pairs, ``reference`` seconds.
    ``mfu`` counts the model's FLOPs with unmasked attention (PaLM, arXiv:2204.02311, appendix B), ``hfu`` recomputed
    FLOPs too. ``by_stage``: the first 64 stages. ``stall_probability``: that sends between nodes stall throughout the
    run (catalogue/networks.json), which adds ``stall_seconds`` to every step; in ``step``, as exposed communication, if
    it is more likely than not.
    """

    step: float
    compute: float
    exposed_communication: float
    bubble: float
    optimizer: float
    data_wait: float
    tokens_per_second: float = 0.0
    tokens_per_second_per_gpu: float = 0.0
    mfu: float = 0.0
    hfu: float = 0.0
    to_train: float = 0.0
    samples_per_second: float = 0.0
    recompute: float = 0.0
    by_stage: tuple[StageTime, ...] = ()
    reference: float = 0.0
    reference_pairs: int = 0
    stall_probability: float = 0.0
    stall_seconds: float = 0.0

    def of_step(self, step: float, **changes: Any) -> "Time":
        """Return the time with steps of another length: rates follow from it, other fields only from ``changes``."""
        rates = ("tokens_per_second", "tokens_per_second_per_gpu", "samples_per_second", "mfu", "hfu")
        return replace(self, step=step, **{name: getattr(self, name) * self.step / step for name in rates} | changes)

    @property
    def unstalled(self) -> float:
        """Seconds of a step of a run that does not stall."""
        return self.step - (self.stall_seconds if self.stall_probability > LIKELY else 0.0)

    @property
    def expected(self) -> float:
        """Seconds by which layouts are compared: the mean over runs that stall and runs that do not, at least ``step``.

        Once stalls are likely the mean counts on luck: the layout chosen by it may be slower than the one with the
        shortest step by as much as a stall takes.
        """
        return max(self.step, self.unstalled + self.stall_probability * self.stall_seconds)


@dataclass(frozen=True)
class Calibration:
    """Measured step times of earlier runs as multiples of the planned ones.

    ``factor``: the median of ``runs`` measurements; ``low`` and ``high``: the 10th and 90th percentile of their steps.
    ``newest``: Unix time of the newest one, on ``nodes`` nodes with the packages in ``versions``. ``same_workload``: of
    the same model in the same layout; otherwise of similar runs.
    """

    factor: float
    low: float
    high: float
    runs: int
    newest: float
    same_workload: bool
    nodes: int
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Range:
    """10th and 90th percentile of a figure, in its unit."""

    p10: float
    p90: float


@dataclass(frozen=True)
class MeasuredError:
    """The error of plans for measured runs. ``p10`` to ``p90``: percentiles of measured divided by planned.

    ``calibrated``: whether runs of this framework, regime and hardware were measured, else the nearest ones count.
    ``basis``: ``published runs`` or ``own runs``, of which ``n`` count, from ``sources``; empty if there are none.
    ``measured_framework``, ``measured_regime``, ``measured_hardware``: of the published runs; hardware is empty if they
    are on several architectures. ``date``: of the comparison.
    """

    calibrated: bool
    framework: str
    regime: str
    hardware: str
    basis: str = ""
    measured_framework: str = ""
    measured_regime: str = ""
    measured_hardware: str = ""
    p10: float = 1.0
    p50: float = 1.0
    p90: float = 1.0
    n: int = 0
    sources: tuple[str, ...] = ()
    date: str = ""


@dataclass(frozen=True)
class Ranges:
    """10th to 90th percentiles of a plan's figures; None where they are not calibrated, or the plan has no figure.

    Dollars are with interruptions: ``usd`` of each market, not ``Cost.on_demand_usd`` and ``spot_usd``.
    """

    time: MeasuredError
    memory: MeasuredError
    step_seconds: Range | None = None
    to_train_seconds: Range | None = None
    wall_seconds: Range | None = None
    on_demand_usd: Range | None = None
    spot_usd: Range | None = None
    expected_usd: Range | None = None
    peak_bytes: Range | None = None


@dataclass(frozen=True)
class PerStepBytes:
    """Bytes that one rank sends per optimizer step, by axis of parallelism."""

    tensor: int
    pipeline: int
    data: int
    sequence: int
    expert: int


@dataclass(frozen=True)
class Network:
    """The traffic of one rank of the slowest pipeline stage."""

    per_step_bytes: PerStepBytes


@dataclass(frozen=True)
class Durability:
    """Checkpoint size and interval (Young 1974), and goodput under interruptions (Daly 2006).

    ``grace_ok``: a step and a checkpoint take no longer than the grace period. ``blocked_seconds``: time that one
    checkpoint blocks training. ``seconds_between_losses``: mean time between interruptions without a last checkpoint.
    ``lost_work_seconds``: work to repeat, mean over all interruptions. ``wall_seconds``: the run with interruptions,
    but without waiting for capacity; None if it would never finish. ``copy_bytes_per_node``: host memory for the copy
    of the state from which checkpoints are written. ``memory_copy_steps``: steps between copies in host memory, None
    for none; ``memory_copy_bytes_per_node``: host memory for them; ``memory_copies_on_partners``: another node keeps
    those of a node too, from which a spare node that replaces it resumes; ``memory_copy_cost``: the time for which
    training waits for copies, as a share of the steps.
    """

    checkpoint_bytes: int
    save_seconds: float
    interval_steps: int
    interval_seconds: float
    expected_goodput: float
    grace_ok: bool
    blocked_seconds: float = 0.0
    restart_seconds: float = 0.0
    seconds_between_interruptions: float | None = None
    seconds_between_losses: float | None = None
    interruptions_expected: float | None = None
    lost_work_seconds: float = 0.0
    wall_seconds: float | None = None
    copy_bytes_per_node: int = 0
    memory_copy_steps: int | None = None
    memory_copy_bytes_per_node: int = 0
    memory_copies_on_partners: bool = False
    memory_copy_cost: float = 0.0


@dataclass(frozen=True)
class Market:
    """The run on one market, on demand or spot: US dollars and seconds with that market's interruptions."""

    price_per_gpu_hour: float | None
    price_source: Reason
    goodput: float
    wall_seconds: float | None
    usd: float | None


@dataclass(frozen=True)
class Cost:
    """US dollars of the run; None without a price.

    ``on_demand_usd`` and ``spot_usd``: without interruptions. ``expected_usd``: on the run's own market, with them.
    """

    price_per_gpu_hour: float | None
    price_source: Reason
    on_demand_usd: float | None
    spot_usd: float | None
    expected_usd: float | None
    on_demand: Market | None = None
    spot: Market | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields; each ``price_source`` as text, with its code in ``price_source_reason``."""
        markets = {"on_demand": self.on_demand, "spot": self.spot}
        rows = {name: None if market is None else _priced(market) for name, market in markets.items()}
        return _priced(self) | rows


@dataclass(frozen=True)
class Sanity:
    """One check of the training recipe: its figure as text; ``verdict`` is ``ok``, ``note`` or ``warning``."""

    topic: str
    value: str
    verdict: str
    message: Reason


@dataclass(frozen=True)
class Alternative:
    """A layout that was considered, and why it was not chosen. ``step_seconds``: without waiting for data."""

    layout: Layout
    step_seconds: float
    peak_bytes: int
    fits: bool
    why: Reason


@dataclass(frozen=True)
class Rejection:
    """Layouts, or degrees of an axis, that one reason excludes: how many, and one example."""

    reason: Reason
    count: int
    example: str

    @property
    def text(self) -> str:
        """Return the reason as text, after the setting that it is about, if there is one."""
        key = self.reason.params.get("key")
        return f"{key}: {self.reason}" if key else str(self.reason)


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run: printed, submitted, checked on the nodes and compared with measurements.

    ``considered``: the number of layouts that the spec allows. ``alternatives``: the best of those that were sized.
    ``rejected``: counts by reason of the layouts that were not chosen, and of excluded degrees. ``training_stages``:
    empty if all steps train the same parameters; otherwise memory is that of the fullest, time the mean over the steps.
    ``calibration``: None if times are the planner's own.
    """

    model: ModelSize
    layout: Layout
    memory: Memory
    time: Time
    network: Network
    durability: Durability
    cost: Cost
    ranges: Ranges
    alternatives: tuple[Alternative, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    considered: int = 1
    warnings: tuple[Reason, ...] = ()
    assumptions: tuple[Reason, ...] = ()
    sanity: tuple[Sanity, ...] = ()
    training_stages: tuple[TrainingStage, ...] = ()
    calibration: Calibration | None = None
    schema: str = SCHEMA

    @property
    def p90_ratio(self) -> float:
        """Return the 90th percentile of the seconds per step as a multiple of the planned ones; 1 if not calibrated."""
        step = self.ranges.step_seconds
        return 1.0 if step is None else step.p90 / self.time.step

    def to_json(self) -> dict[str, Any]:
        """Return the stable JSON object, ``schema`` first. Each text has its reason code and parameters beside it."""
        data = {key: value for key, value in dataclasses.asdict(self).items() if key not in _REASONED}
        data["alternatives"] = [
            dataclasses.asdict(option.layout)
            | {"time": {"step": option.step_seconds}, "memory": {"peak": option.peak_bytes}, "fits": option.fits}
            | {"why": str(option.why), **option.why.to_document()}
            for option in self.alternatives
        ]
        data["rejected"] = [
            {"reason": refusal.text, "count": refusal.count, "example": refusal.example, **refusal.reason.to_document()}
            for refusal in self.rejected
        ]
        data["sanity"] = [
            {"topic": check.topic, "value": check.value, "verdict": check.verdict, "message": f"{check.message}."}
            | check.message.to_document()
            for check in self.sanity
        ]
        data["cost"] = self.cost.to_json()
        for name in ("warnings", "assumptions"):
            reasons: tuple[Reason, ...] = getattr(self, name)
            stop = "." if name == "warnings" else ""
            data[name] = [f"{reason}{stop}" for reason in reasons]
            data[f"{name.removesuffix('s')}_reasons"] = [reason.to_document() for reason in reasons]
        return {"schema": data.pop("schema"), **data}


_REASONED = ("alternatives", "rejected", "sanity", "warnings", "assumptions")


def _priced(row: Market | Cost) -> dict[str, Any]:
    source = {"price_source": str(row.price_source), "price_source_reason": row.price_source.to_document()}
    return dataclasses.asdict(row) | source


def _read_price(row: dict[str, Any]) -> dict[str, Any]:
    fields = dict(row)
    return fields | {"price_source": reason_from(fields.pop("price_source_reason"))}


def with_reasons(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON object of a plan with its texts converted back to reasons, for validation as a RunPlan.

    Alternatives are left out, because they are not used again.
    """
    changed: dict[str, Any] = {"alternatives": []}
    changed["rejected"] = [
        {"reason": reason_from(row), "count": row["count"], "example": row["example"]} for row in plan["rejected"]
    ]
    changed["sanity"] = [
        {key: row[key] for key in ("topic", "value", "verdict")} | {"message": reason_from(row)}
        for row in plan["sanity"]
    ]
    for name in ("warnings", "assumptions"):
        changed[name] = [reason_from(reason) for reason in plan[f"{name.removesuffix('s')}_reasons"]]
    cost = _read_price(plan["cost"])
    changed["cost"] = cost | {name: cost[name] and _read_price(cost[name]) for name in ("on_demand", "spot")}
    return {key: value for key, value in plan.items() if not key.endswith("_reasons")} | changed
