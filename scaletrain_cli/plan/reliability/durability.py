"""Checkpoint size and interval, and goodput: the share of time that is progress, under interruptions.

Goodput follows Daly (Future Generation Computer Systems 22, 2006, eq. 20). The formula of Kokolis et al.
(arXiv:2410.21680), (1 - (R + interval / 2) / M) / (1 + save / interval) with restart time R and mean time between
interruptions M, is its first-order approximation.
"""

import math
from typing import NamedTuple

from scaletrain_cli.plan.catalogue.hardware import HOPPER, Accelerator, stated_rate
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.states import (
    MasterWeights,
    checkpoint_bytes_per_parameter,
    chosen_master,
    outer_bytes_per_parameter,
    weight_bytes,
)
from scaletrain_cli.plan.result import Durability, Layout, Time
from scaletrain_cli.plan.trained_parameters import has_muon
from scaletrain_cli.plan.trained_stages import orthogonalized_by_stage
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.spec import RunSpec

# Bytes/s that one node writes to shared storage: BLOOM wrote 2.3 TB in 40 s from 48 nodes
# (bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles.md).
_STORAGE_BYTES_PER_SECOND_PER_NODE = 1.2e9
# Copies from device to pageable host memory, one thread per GPU; an assumption, not measured. A slower link limits it.
_COPY_BYTES_PER_SECOND_PER_GPU = 5e9
# From an interruption until ranks begin to load (requeue, start, process groups); an assumption, not measured.
_START_SECONDS = 180.0
_CPU_START_SECONDS = 15.0
# The same where a spare node of the job replaces one that failed; an assumption, not measured on GPUs.
_REPLACEMENT_SECONDS = 60.0
# GPU hours between failures of a job. Llama 3 on H100 (arXiv:2407.21783, section 3.3.4): 419 unexpected interruptions
# in 54 days on 16,384 GPUs. A100 and older: OPT-175B's about two machines a day of 124 (facebookresearch/metaseq,
# projects/OPT/chronicles/final_update.md); Meta's RSC says 8,090 of jobs and 29,500 to 82,000 of nodes
# (arXiv:2410.21680).
_GPU_HOURS_BETWEEN_FAILURES = 54 * 24 * 16384 / 419
_GPU_HOURS_BETWEEN_FAILURES_BEFORE_HOPPER = 12 * 992
# Mean hours between preemptions of a job, of any size, because capacity is lost by zone more than by node: pooled over
# 21 traces of AWS V100 and K80 instances (skypilot-org/spot-traces, 2022 and 2023).
SPOT_HOURS_BETWEEN_PREEMPTIONS = 2.4
# Copies in host memory: the share of the time that those of ``auto`` may take, and the share of the free host memory.
MEMORY_COST, MEMORY_SHARE = 0.01, 0.5
# The two newest, and the buffers from which the next one is written; and the two newest of another node.
_COPIES_HELD, _COPIES_HELD_WITH_PARTNERS = 3, 5
# Bytes/s at which the ranks of a node send copies to another one, by TCP over 100 Gbit/s; an assumption.
_SENT_BYTES_PER_SECOND_PER_NODE = 5e9
# Bytes/s at which a rank writes and hashes a copy by SHA-256, with the processor's instructions for it; an assumption.
_HASHED_BYTES_PER_SECOND = 1e9
# Above this number of expected interruptions per interval no run finishes, and exp() would overflow.
_MOST_INTERRUPTIONS = 700.0
# Halvings of the interval in which the best time between checkpoints is searched for, and a margin for rounding.
_HALVINGS = 40
_ROUNDING = 1 + 1e-6


def checkpoint_bytes(spec: RunSpec, layout: Layout) -> int:
    """Return the bytes of a checkpoint: the state of the whole job, in which replicated state is written once.

    Frozen weights are stored without optimizer states, and not at all if they stay those of ``model.weights``. If what
    trains changes, the bytes are those of the largest checkpoint. Each group of local SGD has a state of its own beside
    the outer weights.
    """
    stage = 3 if framework_of(spec).stores_master_weights_alone else layout.zero_stage
    training = spec.training
    master = chosen_master(spec, MasterWeights.OF_EACH_PARTITION, engine=framework_of(spec).is_engine)
    optimizer, groups = training.optimizer, layout.local_sgd_groups

    def bytes_with(name: str) -> int:
        return checkpoint_bytes_per_parameter(training.precision, stage, name, master, optimizer.state_dtype)

    own = others = bytes_with(optimizer.name)
    stored = workload_of(spec.model).stored_parameters(spec)
    orthogonalized = [trained for trained, _ in stored]
    if has_muon(spec):  # AdamW has two moments of each of the other parameters
        others, orthogonalized = bytes_with("adamw"), orthogonalized_by_stage(spec)
    outer = 0 if groups == 1 else outer_bytes_per_parameter(training.local_sgd)
    return max(
        groups * (count * own + (trained - count) * others)
        + trained * outer
        + frozen * weight_bytes(training.precision)
        for (trained, frozen), count in zip(stored, orthogonalized, strict=True)
    )


def save_seconds(spec: RunSpec, layout: Layout) -> float:
    """Return the seconds until a checkpoint is committed: what rank 0 writes alone, then what all nodes write."""
    size = checkpoint_bytes(spec, layout)
    weights = workload_of(spec.model).parameter_count(spec.model) * weight_bytes(spec.training.precision)
    alone = framework_of(spec).written_alone_bytes(layout, size, weights)
    return (alone + (size - alone) / spec.storing_nodes) / _storage_rate(spec)


def gpu_hours_between_failures(device: Accelerator) -> tuple[float, str]:
    """Return (GPU hours between failures of a large job on this GPU generation, their source)."""
    if 7.0 <= device.cuda_capability < HOPPER:
        return _GPU_HOURS_BETWEEN_FAILURES_BEFORE_HOPPER, "OPT-175B's chronicle reports (facebookresearch/metaseq)"
    return _GPU_HOURS_BETWEEN_FAILURES, "Llama 3 reports (arXiv:2407.21783, section 3.3.4)"


def interruptions_per_second(spec: RunSpec, device: Accelerator) -> tuple[float, float]:
    """Return the interruptions per second of the whole job: (preemptions, with notice; failures, without).

    ``cluster.mean_time_between_interruptions`` is for the whole job. On spot it is the time between preemptions, and
    failures add to it; on demand it is the time between interruptions of any cause.
    """
    cluster = spec.cluster
    stated = cluster.mean_time_between_interruptions
    if not cluster.spot and stated is not None:
        return 0.0, 1 / max(stated, 1e-3)
    between_preemptions = 3600 * SPOT_HOURS_BETWEEN_PREEMPTIONS if stated is None else max(stated, 1e-3)
    preemptions = 1 / between_preemptions if cluster.spot else 0.0
    if cluster.per_node_mtbf is not None:
        return preemptions, cluster.nodes / max(cluster.per_node_mtbf, 1e-3)
    hours, _ = gpu_hours_between_failures(device)
    return preemptions, spec.world_size / (3600 * hours)


def plan_durability(spec: RunSpec, layout: Layout, time: Time, device: Accelerator) -> Durability:
    """Return checkpoint interval, goodput and lost work.

    An interruption costs the restart and the work since the last valid checkpoint. If the grace period is long enough
    for one step and a last checkpoint, a preemption costs the restart and that checkpoint, and only failures lose work.
    """
    size = checkpoint_bytes(spec, layout)
    save = save_seconds(spec, layout)
    blocked = _blocked_seconds(spec, size, save, device)
    preemptions, failures = interruptions_per_second(spec, device)
    between = 1 / (preemptions + failures)
    grace_ok = save + time.step <= spec.cluster.grace_seconds
    noticed = preemptions if grace_ok else 0.0
    sudden = preemptions + failures - noticed
    if spec.checkpoint.every == "auto":
        interval_steps = min(spec.total_steps, best_interval_steps(time.step, save, blocked, sudden))
    else:
        interval_steps = spec.checkpoint.every
    interval = interval_steps * time.step
    restart = _restart_seconds(spec, size, device)
    behind = save - blocked
    copies = _memory_copies(spec, size, time.step, interval_steps, device)
    # A spare node replaces one that fails; a preemption takes the whole job, and its copies.
    after_loss = (failures * _replacement_seconds(spec, size, device) + (sudden - failures) * restart) / sudden
    # Interruptions per second after which the run resumes from memory, and from disk; seconds that the former cost.
    from_memory, from_disk, repeated, again = 0.0, sudden, 0.0, 0.0
    if copies.on_partners:
        from_memory = failures - _requeued(spec, failures)
        after_loss, from_disk = restart, sudden - from_memory
        repeated = copies.seconds / 2 + copies.written  # half an interval, and until a copy is whole
        again = _replaced_seconds(spec, size, device) + repeated
    goodput = expected_goodput(interval, save, blocked, after_loss, from_disk)
    goodput /= 1 + copies.cost + noticed * (restart + save) + from_memory * again
    lost = (_lost_seconds(interval + blocked, from_disk) + behind) * from_disk + repeated * from_memory
    wall = time.to_train / goodput if goodput > 0 else None
    return Durability(
        checkpoint_bytes=size,
        save_seconds=save,
        interval_steps=interval_steps,
        interval_seconds=interval,
        expected_goodput=goodput,
        grace_ok=grace_ok,
        blocked_seconds=blocked,
        restart_seconds=restart,
        seconds_between_interruptions=between,
        seconds_between_losses=1 / sudden,
        interruptions_expected=None if wall is None else wall / between,
        lost_work_seconds=lost * between,
        wall_seconds=wall,
        copy_bytes_per_node=math.ceil(size / spec.cluster.nodes),
        memory_copy_steps=copies.every,
        memory_copy_bytes_per_node=copies.bytes_per_node,
        memory_copies_on_partners=copies.on_partners,
        memory_copy_cost=copies.cost,
    )


class _Copies(NamedTuple):
    """Copies in host memory: steps and seconds between two, the seconds that each blocks training and takes in all.

    ``on_partners``: another node has them too. ``every`` is None without copies.
    """

    every: int | None = None
    seconds: float = math.inf
    blocked: float = 0.0
    written: float = 0.0
    bytes_per_node: int = 0
    on_partners: bool = False

    @property
    def cost(self) -> float:
        """Return the share of the time that training waits: a copy waits until the last one is whole."""
        return (self.blocked + max(0.0, self.written - self.seconds)) / self.seconds


def _memory_copies(spec: RunSpec, size: int, step: float, interval_steps: int, device: Accelerator) -> _Copies:
    given, bytes_per_node = spec.checkpoint.in_memory, memory_copy_bytes(spec, size)
    if given == "off" or memory_copies_lack_room(spec, bytes_per_node):
        return _Copies()
    # Without a node that takes the place of a lost one, the job and its copies end with it.
    more = bytes_per_node * _COPIES_HELD_WITH_PARTNERS // _COPIES_HELD
    on_partners = may_have_partners(spec) and not memory_copies_lack_room(spec, more)
    blocked = size / (min(_COPY_BYTES_PER_SECOND_PER_GPU, device.host_bandwidth) * spec.world_size)
    written = size / (_HASHED_BYTES_PER_SECOND * spec.world_size)
    if on_partners:
        # Own files are hashed and received ones are written while files are sent.
        written = max(written, size / (_SENT_BYTES_PER_SECOND_PER_NODE * spec.cluster.nodes))
    every = max(1, math.ceil(max(blocked / MEMORY_COST, written) / step)) if given == "auto" else given
    if every >= interval_steps:
        return _Copies()
    return _Copies(every, every * step, blocked, written, more if on_partners else bytes_per_node, on_partners)


def may_have_partners(spec: RunSpec) -> bool:
    """Return whether copies in host memory are of use on a second node: a spare one may replace the first."""
    return spec.cluster.spare_nodes > 0 and spec.cluster.nodes > 1


def memory_copy_bytes(spec: RunSpec, size: int) -> int:
    """Return the host memory of each node for copies of a state of ``size`` bytes, those of its own ranks alone."""
    return _COPIES_HELD * math.ceil(size / spec.cluster.nodes)


def without_partners(bytes_per_node: int) -> int:
    """Return the part of the host memory for copies that those of a node's own ranks take."""
    return bytes_per_node * _COPIES_HELD // _COPIES_HELD_WITH_PARTNERS


def memory_copies_lack_room(spec: RunSpec, bytes_per_node: int) -> bool:
    """Return whether copies do not fit in their share of the host memory that the spec requests."""
    given = spec.cluster.section.host_memory_per_node
    return given is not None and bytes_per_node > MEMORY_SHARE * given


def most_goodput(spec: RunSpec, device: Accelerator, size: int, step_seconds: float) -> float:
    """Return an upper bound on the goodput of layouts with checkpoints of at least ``size`` bytes, at any interval.

    ``step_seconds``: a lower bound on their steps, which decides whether a preemption can wait for a last checkpoint.
    """
    save = size / spec.cluster.nodes / _storage_rate(spec)
    blocked, restart = _blocked_seconds(spec, size, save, device), _replacement_seconds(spec, size, device)
    preemptions, failures = interruptions_per_second(spec, device)
    if spec.checkpoint.in_memory != "off" and may_have_partners(spec):
        failures = _requeued(spec, failures)
    behind = restart + save - blocked
    goodput = _most_share(blocked, behind, preemptions + failures)
    if save + step_seconds <= spec.cluster.grace_seconds:
        goodput = max(goodput, _most_share(blocked, behind, failures) / (1 + preemptions * (restart + save)))
    return min(1.0, goodput * _ROUNDING)


def _most_share(blocked: float, restart: float, rate: float) -> float:
    """Return the most that ``expected_goodput`` can be, over all intervals.

    With x and d, interval and ``blocked`` in units of 1 / ``rate``, its derivative is 0 where (1 - x) e^(x + d) = 1.
    That has one solution in (0, 1), where the share is (1 - x) e^(-R/M).
    """
    if rate <= 0:
        return 1.0
    low, high, cost = 0.0, 1.0, blocked * rate
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        # log1p, because 1 - x may be 0 to rounding
        low, high = (middle, high) if math.log1p(-middle) + middle + cost > 0 else (low, middle)
    return (1 - low) * math.exp(-min(restart * rate, _MOST_INTERRUPTIONS))


def _blocked_seconds(spec: RunSpec, size: int, save: float, device: Accelerator) -> float:
    """Return the seconds that a checkpoint blocks training: the whole ``save``, or the copies to host memory."""
    if not spec.checkpoint.asynchronous:
        return save
    rate = min(_COPY_BYTES_PER_SECOND_PER_GPU, device.host_bandwidth) * spec.world_size
    return min(save, size / rate)


def _restart_seconds(spec: RunSpec, size: int, device: Accelerator) -> float:
    """Return the seconds from an interruption until all ranks have loaded a checkpoint of ``size`` bytes."""
    started = _CPU_START_SECONDS if device.is_cpu else _START_SECONDS
    return started + size / (_storage_rate(spec) * spec.cluster.nodes)


def _replacement_seconds(spec: RunSpec, size: int, device: Accelerator) -> float:
    """Return the same after a failure, which a spare node of the job replaces if it has one: the mean."""
    requeued, replaced = _restart_seconds(spec, size, device), _replaced_seconds(spec, size, device)
    return replaced + _requeued(spec, requeued - replaced)


def _replaced_seconds(spec: RunSpec, size: int, device: Accelerator) -> float:
    """Return the same where a spare node takes the place of one that fails."""
    saved = 0.0 if device.is_cpu else _START_SECONDS - _REPLACEMENT_SECONDS
    return _restart_seconds(spec, size, device) - saved


def _requeued(spec: RunSpec, amount: float) -> float:
    """Return the share of failures that requeue the job: those of the first node, and that after the last spare one.

    A requeued job has all its spare nodes again.
    """
    spare, nodes = spec.cluster.spare_nodes, spec.cluster.nodes
    return amount * (1 - spare / (spare + 1) * (1 - 1 / nodes))


def spare_nodes_pay_from(spec: RunSpec, device: Accelerator) -> float:
    """Return the seconds of queue wait after a failure from which on the spare nodes save more time than they cost.

    As nodes of the run they would shorten it by their share of its nodes. A requeue costs the wait at each failure;
    with s spare nodes only each (s + 1)th failure is one.
    """
    _, failures = interruptions_per_second(spec, device)
    return (spec.cluster.spare_nodes + 1) / spec.cluster.nodes / failures


def best_interval_steps(step: float, save: float, blocked: float, sudden: float) -> int:
    """Return the steps between checkpoints by Young (1974): an interval of sqrt(2 C M) seconds.

    C: ``blocked``, the seconds that a checkpoint blocks training; M: 1 / ``sudden``, the mean time between
    interruptions without a last checkpoint. ``step``: seconds of a step; ``save``: seconds until a checkpoint is
    committed.
    """
    # At most one checkpoint per write, and at least one per expected interruption.
    wanted = min(max(math.sqrt(2 * blocked / sudden), save), max(1 / sudden, save))
    return max(1, round(wanted / step))


def expected_goodput(interval: float, save: float, blocked: float, restart: float, sudden: float) -> float:
    """Return the share of time that is progress (Daly 2006, eq. 20): tau / (M e^(R/M) (e^((tau + delta)/M) - 1)).

    tau: ``interval``; delta: ``blocked``; M: 1 / ``sudden``; R: ``restart``, and while a checkpoint is written in the
    background the rest of ``save``, as a restart still loads the one before. See ``best_interval_steps``.
    """
    expected, behind = (interval + blocked) * sudden, (restart + save - blocked) * sudden
    if expected + behind > _MOST_INTERRUPTIONS:
        return 0.0
    if expected < 1e-12:
        return interval / (interval + blocked)
    return interval * sudden / (math.exp(behind) * math.expm1(expected))


def _storage_rate(spec: RunSpec) -> float:
    return stated_rate(spec.cluster.storage_bandwidth, _STORAGE_BYTES_PER_SECOND_PER_NODE)


def _lost_seconds(segment: float, rate: float) -> float:
    """Return the mean seconds since the last checkpoint at the time of an interruption.

    M - L / (e^(L/M) - 1): the mean of an exponential distribution with mean M = 1 / ``rate``, truncated at L =
    ``segment``, the seconds between checkpoints. If interruptions are rare, that is half a segment.
    """
    expected = segment * rate
    if expected < 1e-6:
        return segment / 2
    return 1 / rate - (segment / math.expm1(expected) if expected < _MOST_INTERRUPTIONS else 0.0)
