"""Seconds of one optimizer step by cause, from kernels, communication and the pipeline's schedule. Knows no memory.

Each stage computes and communicates for one micro-batch (block_time.py, communication.py); the host must issue its
kernels in that time or the GPU waits for it; the schedule puts the stages together (pipeline_time.py); gradients,
optimizer and data come once per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from scaletrain_cli.plan.architecture import Architecture, architecture, training_flops_per_token
from scaletrain_cli.plan.block_time import PartTime, Slice, block_time, embedding_time, head_time
from scaletrain_cli.plan.communication import (
    BlockTraffic,
    block_traffic,
    boundary_seconds,
    data_traffic,
    exposed,
    sent_bytes,
    shards_norms,
    tied_seconds,
)
from scaletrain_cli.plan.framework_time import Habits, habits_of
from scaletrain_cli.plan.hardware import Accelerator
from scaletrain_cli.plan.kernels import Rates, rates
from scaletrain_cli.plan.networks import Link, cluster_link
from scaletrain_cli.plan.offload_time import offload_seconds
from scaletrain_cli.plan.pipeline_time import blocks_by_stage, one_forward_one_backward
from scaletrain_cli.plan.recompute import recompute_flops_per_token, recompute_seconds, recomputed_forwards
from scaletrain_cli.plan.result import Layout, Network, StageTime, Time
from scaletrain_cli.plan.stages import local_tokens, zero_shards
from scaletrain_cli.spec import ModelSpec, RunSpec

# A plan shows this many stages one by one; nobody runs more, and a typing slip must end soon.
_MOST_STAGES = 64
# Tokens on disk: 16 bits up to this vocabulary, 32 above; storage that a node reads from, unless the spec says.
_SMALL_VOCABULARY = 65536
_STORAGE_BANDWIDTH = 1e9


# GPUs that one socket of a two-socket server of eight drives.
_SOCKET = 4
# Host and device work at once, and the longer one decides; but some kernels are short and others long, so each waits
# for the other now and then. The exponent of the norm that stands for it, calibrated on vTrain's runs.
_QUEUE = 9.0


@dataclass(frozen=True)
class _Stage:
    """One pipeline stage and micro-batch: GPU seconds forward, backward and again; host; exposed communication."""

    forward: float
    backward: float
    again: float
    communication: float
    host: float
    stall: float  # of the host, while neighbours send and receive

    @cached_property
    def seconds(self) -> float:
        """Of forward and backward: the device's, unless the host cannot issue its kernels that fast."""
        return self._with(self.host + self.stall)

    @cached_property
    def filling(self) -> float:
        """The same while the pipeline fills and drains."""
        return self._with(self.host) if self.stall else self.seconds

    @cached_property
    def passes(self) -> StageTime:
        """Forward and backward; communication and waiting for the host fall on both in proportion."""
        compute = self.forward + self.backward + self.again
        forward = self.forward / compute if compute else 0.5
        return StageTime(self.seconds * forward, self.seconds * (1 - forward))

    def _with(self, host: float) -> float:
        device = self.forward + self.backward + self.again + self.communication
        longer = max(device, host)
        return float(longer * (1 + (min(device, host) / longer) ** _QUEUE) ** (1 / _QUEUE)) if longer else 0.0


def plan_time(spec: RunSpec, layout: Layout, device: Accelerator) -> tuple[Time, Network]:
    """Seconds per optimizer step by cause, and what follows; and the traffic of the busiest rank."""
    model, habits = spec.transformer, habits_of(spec.planner.framework, device.compute_capability)
    rate, link = rates(device, spec.training.precision), cluster_link(spec.cluster, device)
    whole = _architecture(model, layout.tensor_parallel, layout.expert_parallel)
    blocks = blocks_by_stage(model, layout.pipeline_parallel, habits.balances_stages)
    stages = _stages(spec, layout, device, rate, link, habits, whole, blocks)
    m = layout.gradient_accumulation_steps
    schedule = one_forward_one_backward(
        [stage.seconds for stage in stages], m, layout.virtual_pipeline, [stage.filling for stage in stages]
    )
    busiest, index = stages[schedule.slowest], schedule.slowest
    parameters = _stage_parameters(whole, model, blocks, index)
    data = data_traffic(spec, layout, link, habits, parameters, blocks[index])
    # With v chunks per stage all but the last are done, or not yet wanted, while others run.
    windows = 1 + min(m, len(blocks) - 1) * (1 - 1 / layout.virtual_pipeline)
    reduce = exposed(data.reduce, windows * (busiest.backward + busiest.again), habits.reduce_overlap)
    gather = exposed(data.gather, windows * busiest.forward, habits.gather_overlap)
    communication = min(m * busiest.communication, schedule.busy) + reduce + gather
    communication += tied_seconds(spec, layout, link, habits, whole.embedding)
    compute = schedule.busy - min(m * busiest.communication, schedule.busy)
    optimizer = _optimizer_seconds(spec, layout, device, rate, habits, parameters)
    step = compute + schedule.bubble + communication + optimizer
    waited = _data_wait(spec, layout, step)
    step += waited
    tokens = layout.global_batch_size * model.seq_len
    needed = tokens * _model_flops(model)
    executed = needed + tokens * recompute_flops_per_token(spec, layout)
    peak = layout.world_size * device.peak_flops(spec.training.precision)
    time = Time(
        step=step,
        compute=compute,
        exposed_communication=communication,
        bubble=schedule.bubble,
        optimizer=optimizer,
        data_wait=waited,
        tokens_per_second=tokens / step,
        tokens_per_second_per_gpu=tokens / step / layout.world_size,
        mfu=needed / step / peak,
        hfu=executed / step / peak,
        to_train=step * spec.total_steps,
        samples_per_second=layout.global_batch_size / step,
        recompute=m * busiest.again,
        by_stage=tuple(stage.passes for stage in stages[:_MOST_STAGES]),
    )
    return time, Network(sent_bytes(spec, layout, blocks[index], data.sent))


def _stages(
    spec: RunSpec,
    layout: Layout,
    device: Accelerator,
    rate: Rates,
    link: Link,
    habits: Habits,
    whole: Architecture,
    blocks: tuple[int, ...],
) -> list[_Stage]:
    model, last = spec.transformer, len(blocks) - 1
    cut = _slice(spec, layout, device)
    traffic = block_traffic(spec, layout, link, habits)
    boundary = boundary_seconds(spec, layout, link) * layout.virtual_pipeline * (1 - habits.pipeline_overlap)
    head, embedding = head_time(model, cut, habits, rate), embedding_time(model, cut, rate)
    known: dict[tuple[int, int, bool, bool], _Stage] = {}
    found, first = [], 0
    for index, count in enumerate(blocks):
        dense = max(0, min(first + count, whole.dense_layers) - first)
        first += count
        key = (count, dense, index == 0, index == last)
        if key not in known:
            ends = [part for part, here in ((embedding, index == 0), (head, index == last)) if here]
            # Each stage receives and sends, forward and backward; the ends do half of it.
            transfers = boundary * (2 * (last > 0) + 2 * (0 < index < last))
            parameters = _stage_parameters(whole, model, blocks, index)
            known[key] = _stage(
                spec, layout, rate, link, habits, cut, traffic, (dense, count - dense), ends, transfers, parameters
            )
        found.append(known[key])
    return found


def _stage(
    spec: RunSpec,
    layout: Layout,
    rate: Rates,
    link: Link,
    habits: Habits,
    cut: Slice,
    traffic: BlockTraffic,
    blocks: tuple[int, int],
    ends: list[PartTime],
    transfers: float,
    parameters: int,
) -> _Stage:
    """One stage of so many dense blocks and blocks with experts."""
    model, count = spec.transformer, sum(blocks)
    parts = [block_time(model, cut, habits, rate, kind) if blocks[kind] else None for kind in (False, True)]
    held = [(blocks[kind], part) for kind, part in enumerate(parts) if part is not None]
    forward = sum(n * part.forward for n, part in held) + sum(part.forward for part in ends)
    backward = sum(n * part.backward for n, part in held) + sum(part.backward for part in ends)
    backward += parameters * habits.accumulate / rate.memory
    again = sum(n * recompute_seconds(spec, layout, part) for n, part in held)
    forwards = recomputed_forwards(spec, layout)
    communication = count * (traffic.forward * (1 + forwards) + traffic.backward)
    communication += blocks[1] * traffic.experts * (2 + forwards) + transfers
    if layout.zero_stage >= 2:
        data = data_traffic(spec, layout, link, habits, parameters, count)
        communication += exposed(data.forward, forward, habits.reduce_overlap)
        communication += exposed(data.backward, backward + again, habits.reduce_overlap)
    if rate.is_cpu:
        return _Stage(forward, backward, again, communication, 0.0, 0.0)
    host = count * (habits.forward_host * (1 + forwards) + habits.backward_host) + habits.micro_batch_host
    host += habits.end_host * len(ends) + habits.experts_host * blocks[1]
    stall = 0.0
    if layout.tensor_parallel > 1:
        host += count * habits.tensor_host
        if layout.tensor_parallel > _SOCKET:
            host += count * habits.socket_host
        if layout.pipeline_parallel > 1 and layout.world_size > spec.cluster.gpus_per_node:
            stall = count * layout.tensor_parallel * habits.stage_stall
    return _Stage(forward, backward, again, communication, host, stall)


def _slice(spec: RunSpec, layout: Layout, device: Accelerator) -> Slice:
    model = spec.transformer
    expert_tensor = spec.layout.expert_tensor_parallel
    wanted = spec.planner.attention
    grouped = model.num_key_value_heads != model.num_attention_heads
    flash = device.fuses_attention(spec.training.precision, model.head_dim, grouped)
    return Slice(
        tokens=local_tokens(spec, layout),
        keys=model.seq_len,
        tensor=layout.tensor_parallel,
        sequence=layout.sequence_parallel,
        expert=layout.expert_parallel,
        expert_tensor=layout.tensor_parallel if expert_tensor == "auto" else expert_tensor,
        sharded_norms=shards_norms(spec, layout),
        flash=flash if wanted == "auto" else wanted == "flash",
        compiled=spec.training.compile,
    )


@lru_cache(maxsize=64)
def _model_flops(model: ModelSpec) -> int:
    return training_flops_per_token(model)


@lru_cache(maxsize=1024)
def _architecture(model: ModelSpec, tensor: int, expert: int) -> Architecture:
    return architecture(model, tensor, expert)


def _stage_parameters(whole: Architecture, model: ModelSpec, blocks: tuple[int, ...], index: int) -> int:
    """Parameters on one tensor and expert rank of a stage."""
    found = whole.blocks_parameters(sum(blocks[:index]), blocks[index])
    if index == 0:
        found += whole.embedding
    if index == len(blocks) - 1:
        tied_copy = whole.embedding if not whole.head and len(blocks) > 1 else 0
        found += whole.final_norm + whole.head + tied_copy
    return found


def _optimizer_seconds(
    spec: RunSpec, layout: Layout, device: Accelerator, rate: Rates, habits: Habits, parameters: int
) -> float:
    updated = parameters if layout.zero_stage == 0 else -(-parameters // zero_shards(layout))
    host = 0.0 if rate.is_cpu else habits.step_host + (habits.zero_host if layout.zero_stage else 0.0)
    if layout.offload != "none":
        return host + offload_seconds(spec, layout, device, updated)
    return host + updated * habits.optimizer / rate.memory


def _data_wait(spec: RunSpec, layout: Layout, step: float) -> float:
    """Seconds that a step waits for its tokens: read ahead by a node's loaders, they only matter on slow storage."""
    given = spec.cluster.storage_bandwidth
    size = 2 if spec.transformer.vocab_size <= _SMALL_VOCABULARY else 4
    read = size * layout.global_batch_size * (spec.transformer.seq_len + 1) / spec.cluster.nodes
    return max(0.0, read / (_STORAGE_BANDWIDTH if given == "auto" else max(given, 1.0)) - step)
