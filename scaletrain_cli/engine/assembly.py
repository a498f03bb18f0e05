"""Build the parts of one rank: ranks connected, data open, model, optimizer, DeepSpeed, checkpoints, in that order."""

import logging
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scaletrain_cli.data.images.compatibility import require_same_tokenizer
from scaletrain_cli.data.images.prepared import is_of_images
from scaletrain_cli.data.stages import SkipRange, batch_number, keeps_batches, merged_skip_ranges, sources_before
from scaletrain_cli.engine.checkpoint.checkpointing import Checkpointer, identify_base
from scaletrain_cli.engine.checkpoint.memory_copies import open_memory_copies
from scaletrain_cli.engine.checkpoint.resume_point import find_resume_point
from scaletrain_cli.engine.checkpoint.schedule import CheckpointSchedule, DiskSpaceError, check_disk_space
from scaletrain_cli.engine.compose import Composed, compose
from scaletrain_cli.engine.context import RankContext
from scaletrain_cli.engine.data.batches import BatchReader
from scaletrain_cli.engine.data.prepared import tokenizer_path
from scaletrain_cli.engine.data.rows import RowSamples
from scaletrain_cli.engine.data.sample_order import mixture_of_run, sample_order
from scaletrain_cli.engine.data.splits import RunData, Samples, open_data, open_reader
from scaletrain_cli.engine.deepspeed_engine import forward_dtype
from scaletrain_cli.engine.evaluation.inference import SampleAnswers
from scaletrain_cli.engine.faults import Faults
from scaletrain_cli.engine.health import preflight
from scaletrain_cli.engine.health.guard import Guard
from scaletrain_cli.engine.health.rollback import GuardActions
from scaletrain_cli.engine.health.state_check import StateCheck
from scaletrain_cli.engine.health.stragglers import Stragglers
from scaletrain_cli.engine.metrics.data_waits import DataWaits
from scaletrain_cli.engine.metrics.goodput_ledger import LedgerClock
from scaletrain_cli.engine.metrics.out_of_memory import remember_allocations
from scaletrain_cli.engine.metrics.plan_check import PlanCheck
from scaletrain_cli.engine.metrics.profiler import StepProfiler
from scaletrain_cli.engine.metrics.rank_measures import RankMeasures
from scaletrain_cli.engine.metrics.step_measures import DeferredMetrics
from scaletrain_cli.engine.model.base import VisionModel
from scaletrain_cli.engine.model.vision.batch_norm import statistics_of
from scaletrain_cli.engine.numa import pin_to_numa_node
from scaletrain_cli.engine.objectives.base import Objective
from scaletrain_cli.engine.objectives.dpo import first_loss
from scaletrain_cli.engine.objectives.reference import ReferencePass
from scaletrain_cli.engine.optim.averaging import WeightAverage
from scaletrain_cli.engine.optim.local_sgd import LocalSGD
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh, build_mesh
from scaletrain_cli.engine.process_group import RankConsensus, Ranks, connect
from scaletrain_cli.engine.stages import StageSwitch
from scaletrain_cli.engine.step import build_stepper
from scaletrain_cli.engine.step_sync import StepSync
from scaletrain_cli.engine.trainer import Trainer
from scaletrain_cli.engine.validation import Validation
from scaletrain_cli.errors import ExitCode, InfeasibleError, PreemptedError, UsageError, WrongNodesError
from scaletrain_cli.own_processes import usable_cores
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.trained_parameters import base_names, trained_at
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import Checkpoint, read_client_state
from scaletrain_cli.rundir.evaluations import MOST_WAITING
from scaletrain_cli.rundir.journal import read_events, read_rollbacks
from scaletrain_cli.rundir.paths import RunDir, copies_folder, swap_folder
from scaletrain_cli.rundir.record import RunRecord, checkpoint_folder
from scaletrain_cli.spec import LlavaSpec, RunSpec
from scaletrain_cli.spec.loader_processes import loader_processes
from scaletrain_cli.worker.heartbeat import DATA_SECONDS, IMPORT_SECONDS, Heartbeat, collective_seconds
from scaletrain_cli.worker.loop_adapter import StepDecision
from scaletrain_cli.worker.signals import PreemptionFlag

logger = logging.getLogger(__name__)

_TARGETS_READ = 512  # by which the spread of the targets of a regression is known well enough


def assemble(
    run: RunDir, record: RunRecord, ranks: Ranks, attempt: int, flag: PreemptionFlag, heartbeat: Heartbeat
) -> Trainer:
    """Connect the ranks and build the parts of the training loop, in the order in which they depend on each other.

    Raises WrongNodesError if the job is not the one that was planned, PreemptedError if a preemption signal arrives
    before the loop starts, and the errors of the parts.
    """
    spec, layout, checkpoints = record.spec, record.plan.layout, checkpoint_folder(run, record.spec)
    ledger = LedgerClock(run, attempt, ranks.rank)
    if ranks.world_size != layout.world_size:
        params = {"planned": layout.world_size, "found": ranks.world_size}
        raise WrongNodesError(Reason("engine.world-size-differs", params))
    device = _device(spec.cluster.gpu == "cpu", ranks.local_rank)
    readers = loader_processes(spec, usable_cores() // spec.cluster.gpus_per_node)
    if pinned := pin_to_numa_node(device, ranks.local_rank, spec.cluster.gpus_per_node, os.environ):
        logger.info(pinned)
    remember_allocations(device)

    # The ranks find each other, then the nodes, the data and the disk are checked.
    consensus, long_consensus = _connect(record, device, heartbeat)
    context = RankContext(run, record, ranks, attempt, device, heartbeat, consensus, long_consensus)
    if preflight.is_enabled(record):
        heartbeat.beat(0, "preflight")
        preflight.check_together(run, record, ranks, attempt, long_consensus, device)
    heartbeat.beat(0, "data", DATA_SECONDS)
    data = open_data(run, record, ranks, long_consensus)
    copies_here = None if record.plan.durability.memory_copy_steps is None else copies_folder(run)
    resume_point = find_resume_point(context, checkpoints, copies_here)
    long_consensus.from_rank_zero(lambda: _check_disk_space(record, checkpoints, ranks), DiskSpaceError)
    rollbacks = long_consensus.from_rank_zero(lambda: read_rollbacks(run))
    skipped = merged_skip_ranges([*spec.data.skip, *(rollback.skip for rollback in rollbacks)])
    first_batch = batch_number(resume_point.step + 1, skipped)
    if (saved := resume_point.checkpoint) is not None:  # before an event records what other data would change
        require = partial(_require_same_data, context, data, saved, first_batch, skipped)
        long_consensus.from_rank_zero(require, UsageError)
    mixed = partial(mixture_of_run, run, record, data.sizes, first_batch)  # which records it if it is a new one
    mixture = long_consensus.from_rank_zero(mixed, InfeasibleError)
    heartbeat.beat(resume_point.step, "set-up")
    _stop_if_preempted(flag, long_consensus)

    # The model, its optimizer and the engine around them.
    torch.backends.cuda.matmul.allow_tf32 = spec.training.precision == "tf32"
    own_seed = spec.training.seed + ranks.rank  # resuming restores the states of the generators
    random.seed(own_seed)
    np.random.seed(own_seed % 2**32)
    torch.manual_seed(own_seed % 2**63)
    mesh = build_mesh(layout)
    swap = swap_folder(run.run_id, attempt, int(os.environ.get("NODE_RANK", "0")), os.environ)
    resuming = resume_point.checkpoint is not None
    trained, base = trained_at(spec, resume_point.step), identify_base(spec, ranks, long_consensus)
    composed = compose(spec, layout, mesh, device, swap_folder=swap, resuming=resuming, trained=trained)
    if not is_of_images(spec):
        rows = data.samples if isinstance(data.samples, RowSamples) else None
        pairs = rows is not None and rows.pairs
        if composed.objective.reads_pairs and not pairs:
            raise UsageError(Reason("engine.objective-needs-pairs"))
        if pairs and not composed.objective.reads_pairs:
            raise UsageError(Reason("engine.pairs-need-dpo", {"objective": spec.training.objective}))
        if rows is not None and rows.weighted and layout.cross_entropy == "liger":
            raise InfeasibleError(Reason("engine.liger-without-weights"))
    else:
        from scaletrain_cli.engine.data.images.opening import JoinedImages  # which needs Pillow
        from scaletrain_cli.engine.objectives.images import ImageObjective

        if isinstance(composed.objective, ImageObjective) and isinstance(data.samples, JoinedImages):
            composed.objective.describe_classes(data.samples.class_names, several_labels=data.samples.several_labels)
    stepper = build_stepper(composed, mesh, device, spec.training, list(data.sizes) if len(data.sizes) > 1 else ())
    average = _weight_average(spec, composed)
    local_sgd = None
    if layout.local_sgd_groups > 1:
        local_sgd = LocalSGD(composed.engine, spec.training.local_sgd, mesh.groups, spec.total_steps, device)
    _stop_if_preempted(flag, long_consensus)

    # Monitoring, checkpoints and batches.
    stragglers = Stragglers(context)
    stragglers.watch(composed.engine, layout)
    faults = Faults.from_environment(ranks.rank, attempt, checkpoints)
    faults.change_model(composed.model)
    checkpointer = Checkpointer(
        context,
        composed,
        mesh,
        faults=faults,
        average=average,
        local_sgd=local_sgd,
        adaptive_clip=stepper.adaptive_clip,
        base=base,
        copies=open_memory_copies(context, resume_point, faults.copy_delay_seconds),
    )
    stages = StageSwitch(context, mesh, composed, stepper, checkpointer, stragglers, swap, trained)
    order = sample_order(spec.training.seed, data.sizes, mixture.stages) if len(data.sizes) > 1 else None
    training = open_reader(spec, data.samples, layout, mesh, order)
    profiler = StepProfiler(context, preempted=lambda: flag.raised)
    planned = record.plan.durability
    due = CheckpointSchedule(spec.checkpoint.every, planned.interval_steps, planned.seconds_between_losses)
    every = None if spec.guard.checksum == "auto" else min(spec.guard.checksum, due.interval_steps)
    if layout.offload != "none" and spec.layout.offload_device == "nvme":
        every = 0  # DeepSpeed moves weights and states to disk and back between updates

    def outputs_of_the_first_replica(step: int) -> list[Tensor]:
        """Return what this rank computes of the first micro-batch of the first replica."""
        first = replace(mesh.without_groups(), data=Axis(mesh.data.size))
        batch = open_reader(spec, data.samples, layout, first, order).batch(step)
        return stepper.outputs_of(batch.micro_batches()[0].to(device))

    state_check = StateCheck(
        context,
        composed,
        checkpointer,
        every=every,
        most_steps=due.interval_steps,
        checked_step=resume_point.step,
        outputs=outputs_of_the_first_replica,
        repeat_every=min(spec.guard.replay, due.interval_steps),
    )
    step_sync = StepSync(context, checkpointer, due, flag, ledger, profiler, state_check)
    reference = None
    if composed.objective.reads_pairs:
        hashes = {name: (info.fingerprint, info.seal) for name, info in data.infos.items()}
        reference = ReferencePass(context, mesh, stepper, hashes, partial(step_sync.goes_on, resume_point.step))
    zero_shot = None
    if data.zero_shot is not None:
        from scaletrain_cli.engine.data.images.opening import zero_shot_of  # which needs Pillow

        zero_shot = zero_shot_of(spec, data.zero_shot, layout, mesh, device)
    return Trainer(
        context=context,
        resume_point=resume_point,
        readers=readers,
        composed=composed,
        stages=stages,
        stepper=stepper,
        average=average,
        local_sgd=local_sgd,
        checkpointer=checkpointer,
        data=data,
        training=training,
        validation=Validation(
            context,
            composed,
            stepper,
            average,
            readers={name: open_reader(spec, samples, layout, mesh) for name, samples in data.validation.items()},
            shares=mixture.validation_shares(data.validation),
            step_sync=step_sync,
            zero_shot=zero_shot,
            answers=_sample_answers(context, mesh, data),
        ),
        faults=faults,
        guard=GuardActions(
            context,
            checkpointer,
            guard_of(spec, layout, composed.objective, data.samples),
            rollbacks,
            ledger,
            stages,
            mixture_batches=tuple(stage.first // layout.global_batch_size + 1 for stage in mixture.stages[1:]),
        ),
        deferred_metrics=DeferredMetrics(device),
        data_waits=DataWaits(context),
        ledger=ledger,
        profiler=profiler,
        step_sync=step_sync,
        stragglers=stragglers,
        measures=RankMeasures(context, composed, stepper, stragglers, mesh, first_step=resume_point.step + 1),
        reference=reference,
        plan_check=PlanCheck(context, composed, local_sgd or average, mesh),
    )


def _connect(record: RunRecord, device: torch.device, heartbeat: Heartbeat) -> tuple[RankConsensus, RankConsensus]:
    """Join the process group; return the consensus of the steps, and one that waits as long as set-up may take."""
    spec, base = record.spec, 0.0  # bytes that a node reads, and hashes, of weights that no checkpoint has
    if base_names(spec):
        base = 2.0 * record.plan.model.parameters * forward_dtype(spec.training.precision).itemsize
    heartbeat.allow(
        hang_seconds=None if spec.guard.hang == "auto" else spec.guard.hang,
        step_seconds=record.plan.time.step,
        bytes_per_node=record.plan.durability.checkpoint_bytes / spec.storing_nodes + base,
        compiled=record.plan.layout.compile,
    )
    hang_seconds = collective_seconds(heartbeat.longest_seconds)
    heartbeat.beat(0, "connect", IMPORT_SECONDS + heartbeat.set_up_seconds)  # other ranks may still be importing
    connect(device, hang_seconds)
    return RankConsensus(hang_seconds), RankConsensus(DATA_SECONDS)


def preflight_alone(run: RunDir, record: RunRecord, ranks: Ranks, attempt: int) -> ExitCode:
    """Connect the ranks, measure devices and links, and return. Raises WrongNodesError on ranks that fail."""
    device = _device(record.spec.cluster.gpu == "cpu", ranks.local_rank)
    connect(device, DATA_SECONDS)
    preflight.check_together(run, record, ranks, attempt, RankConsensus(DATA_SECONDS), device)
    return ExitCode.DONE


def _check_disk_space(record: RunRecord, folder: Path, ranks: Ranks) -> None:
    saved, size = record.spec.checkpoint, record.plan.durability.checkpoint_bytes
    awaited = MOST_WAITING if record.spec.evaluation.tasks else 0
    also_kept = awaited if saved.keep_best is None else 1 + 2 * awaited  # those under evaluation, too
    also_kept += saved.mirror.to is not None  # the one that is being copied
    check_disk_space(folder, size, ranks.world_size, saved.keep, saved.keep_every, also_kept)


def _require_same_data(
    context: RankContext, data: RunData, checkpoint: Checkpoint, first_batch: int, skipped: Sequence[SkipRange]
) -> None:
    """Raise UsageError if the checkpoint was trained on other data or batches."""
    sample = (first_batch - 1) * context.spec.training.global_batch_size
    trained = sources_before(read_events(context.run), sample, next(iter(data.infos)))
    saved = read_client_state(checkpoint.path)
    if saved is None:
        raise UsageError(Reason("engine.checkpoint-without-data", {"checkpoint": checkpoint.path.name}))
    data.require_same(checkpoint.path.name, saved, trained)
    require_same_tokenizer(context.spec, checkpoint.path.name, saved)
    if not keeps_batches(checkpoint.step, map(tuple, saved["skipped"]), skipped):
        raise UsageError(Reason("data.skips-trained-batches", {"batch": first_batch - 1}))


def _weight_average(spec: RunSpec, composed: Composed) -> WeightAverage | None:
    settings = spec.training.averaging
    if settings.name == "none":
        return None
    # the correction biases of experts, which are buffers too, belong to the latest router
    buffers = statistics_of(composed.model) if isinstance(composed.model, VisionModel) else []
    return WeightAverage(composed.engine, settings, spec.total_steps, buffers)


def guard_of(spec: RunSpec, layout: Layout, objective: Objective, train: Samples) -> Guard:
    """Return the loss guard of a run; ``objective`` and ``train`` decide for images only."""
    return Guard(
        factor=spec.guard.spike.factor,
        patience=spec.guard.spike.patience,
        fresh_warmup_steps=spec.training.schedule.warmup_steps if spec.is_from_scratch else None,
        least_loss=_least_loss(spec, layout, objective, train),
    )


def _least_loss(spec: RunSpec, layout: Layout, objective: Objective, train: Samples) -> float:
    """Return what the loss falls from towards 0; three times a loss near 0 is no spike. 0 for the loss of tokens."""
    if spec.training.objective == "dpo":
        return first_loss(spec.training.dpo)
    if not is_of_images(spec):
        return 0.0
    from scaletrain_cli.engine.data.images.opening import JoinedImages  # which needs Pillow
    from scaletrain_cli.engine.objectives.images import ImageObjective

    if not isinstance(objective, ImageObjective):
        return 0.0
    targets = None
    if spec.training.objective == "regression" and isinstance(train, JoinedImages):
        apart = -(-len(train) // _TARGETS_READ)
        targets = torch.tensor([train.label(number) for number in range(0, len(train), apart)], dtype=torch.float32)
    return objective.uninformed_loss(layout.global_batch_size, targets)


def _sample_answers(context: RankContext, mesh: Mesh, data: RunData) -> SampleAnswers | None:
    """Return what answers rows of the validation split; None without ``evaluation.sample_answers``."""
    spec, layout, run = context.spec, context.layout, context.run
    if not isinstance(spec.model, LlavaSpec) or not spec.evaluation.sample_answers or not spec.evaluation.every:
        return None
    reader = open_reader(spec, next(iter(data.validation.values())), layout, mesh)
    tokenizer = tokenizer_path(spec, run.path.parent, run)
    assert isinstance(reader, BatchReader)
    assert tokenizer is not None
    return SampleAnswers(spec.model, reader, tokenizer, context.device, layout.compile)


def _stop_if_preempted(flag: PreemptionFlag, long_consensus: RankConsensus) -> None:
    """Raise PreemptedError on every rank if any rank got a preemption signal. Set-up may outlast the grace period."""
    decision, *_ = long_consensus.reach(StepDecision.PREEMPT if flag.raised else StepDecision.CONTINUE, writing=False)
    if decision is StepDecision.PREEMPT:
        raise PreemptedError(Reason("engine.preempted-in-set-up"))


def _device(cpu: bool, local_rank: int) -> torch.device:
    if cpu:
        return torch.device("cpu")
    if torch.cuda.device_count() <= local_rank:
        params = {"local_rank": local_rank, "found": torch.cuda.device_count()}
        raise WrongNodesError(Reason("engine.gpu-missing", params))
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
