"""Put one rank together: ranks connected, data open, model, optimizer, DeepSpeed and checkpoints, in that order."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import torch

from scaletrain_cli.engine.checkpoint.checkpointing import Checkpointer
from scaletrain_cli.engine.checkpoint.resume_point import find_resume_point
from scaletrain_cli.engine.checkpoint.schedule import CheckpointSchedule, DiskSpaceError, check_disk_space
from scaletrain_cli.engine.compose import compose
from scaletrain_cli.engine.data.batches import BatchReader, Prefetcher
from scaletrain_cli.engine.data.dataset import DatasetInfo, TokenSequences, open_dataset, prepare_dataset
from scaletrain_cli.engine.faults import Faults
from scaletrain_cli.engine.health import preflight
from scaletrain_cli.engine.health.guard import Guard
from scaletrain_cli.engine.health.rollback import GuardActions
from scaletrain_cli.engine.health.stragglers import Stragglers
from scaletrain_cli.engine.metrics.goodput_ledger import LedgerClock
from scaletrain_cli.engine.metrics.metrics import DeferredMetrics
from scaletrain_cli.engine.metrics.out_of_memory import remember_allocations
from scaletrain_cli.engine.metrics.plan_check import PlanCheck
from scaletrain_cli.engine.numa import pin_to_numa_node
from scaletrain_cli.engine.optim.averaging import WeightAverage
from scaletrain_cli.engine.parallel.mesh import build_mesh
from scaletrain_cli.engine.process_group import RankConsensus, Ranks, StepDecision, connect
from scaletrain_cli.engine.step import stepper
from scaletrain_cli.engine.step_sync import StepSync
from scaletrain_cli.engine.trainer import Trainer
from scaletrain_cli.errors import ExitCode, PreemptedError, ScaletrainError, UsageError, WrongNodesError
from scaletrain_cli.rundir.journal import has_committed, read_events, read_rollbacks, record_event
from scaletrain_cli.rundir.paths import RunDir, swap_folder
from scaletrain_cli.rundir.record import RunRecord, checkpoint_folder
from scaletrain_cli.rundir.shared_datasets import owner_of_dataset
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.worker.heartbeat import DATA_SECONDS, IMPORT_SECONDS, Heartbeat, collective_seconds
from scaletrain_cli.worker.signals import PreemptionFlag

_HELD_BACK = "validation-held-back"


def assemble(
    run: RunDir, record: RunRecord, ranks: Ranks, attempt: int, flag: PreemptionFlag, heartbeat: Heartbeat
) -> Trainer:
    """Connect the ranks and build everything the loop needs, in the order that the parts require.

    Raises WrongNodesError when the job is not the one that was planned, PreemptedError when it is asked to leave on the
    way, and what its parts raise.
    """
    spec, layout = record.spec, record.plan.layout
    ledger = LedgerClock(run, attempt, ranks.rank)
    if ranks.world_size != layout.world_size:
        raise WrongNodesError(f"planned for {layout.world_size} ranks, started as {ranks.world_size}")
    device = _device(spec.cluster.gpu == "cpu", ranks.local_rank)
    if pinned := pin_to_numa_node(device, ranks.local_rank, spec.cluster.gpus_per_node, os.environ):
        print(pinned, flush=True)
    remember_allocations(device)
    heartbeat.allow(
        hang_seconds=None if spec.guard.hang == "auto" else spec.guard.hang,
        step_seconds=record.plan.time.step,
        bytes_per_node=record.plan.durability.checkpoint_bytes / spec.cluster.nodes,
        compiled=layout.compile,
    )
    hang_seconds = collective_seconds(heartbeat.longest_seconds)
    heartbeat.beat(0, "connect", IMPORT_SECONDS + heartbeat.set_up_seconds)  # ranks elsewhere may still import
    connect(device, hang_seconds)
    consensus, set_up = RankConsensus(hang_seconds), RankConsensus(DATA_SECONDS)
    if preflight.is_wanted(record):
        heartbeat.beat(0, "preflight")
        preflight.check_together(run, record, ranks, attempt, set_up, device)
    heartbeat.beat(0, "data", DATA_SECONDS)
    dataset, train, validation = _open_data(run, record, ranks, set_up)
    begin = find_resume_point(run, checkpoint_folder(run, spec), attempt, ranks, set_up)
    _check_disk_space(record, checkpoint_folder(run, spec), ranks, set_up)
    rollbacks = set_up.follow_rank_zero(read_rollbacks(run) if ranks.rank == 0 else [])
    heartbeat.beat(begin.step, "set-up")
    _leave_if_asked(flag, set_up)
    torch.backends.cuda.matmul.allow_tf32 = spec.training.precision == "tf32"
    _seed(spec.training.seed, ranks.rank)
    mesh = build_mesh(layout)
    resuming = begin.checkpoint is not None
    swap = swap_folder(run.run_id, attempt, int(os.environ.get("NODE_RANK", "0")), os.environ)
    composed = compose(spec, layout, mesh, device, swap_folder=swap, resuming=resuming)
    drive = stepper(composed, mesh, device, spec.training)
    average = None
    if spec.training.averaging.name != "none":
        average = WeightAverage(composed.engine, spec.training.averaging, spec.total_steps)
    _leave_if_asked(flag, set_up)
    stragglers = Stragglers(run, ranks.rank, consensus, device)
    stragglers.watch(composed.engine, layout)
    faults = Faults.from_environment(ranks.rank, attempt, checkpoint_folder(run, spec))
    checkpointer = Checkpointer(
        run,
        spec,
        composed,
        mesh,
        ranks,
        set_up,
        attempt=attempt,
        faults=faults,
        average=average,
        alike={} if drive.adaptive_clip is None else {"adaptive_clip": drive.adaptive_clip},
        expected_seconds=record.plan.durability.save_seconds,
    )
    masked = spec.data.loss_mask == "document_starts"
    read_train, read_validation = (
        BatchReader(sequences, layout, mesh, spec.training.seed, masked) for sequences in (train, validation)
    )
    return Trainer(
        run=run,
        record=record,
        ranks=ranks,
        attempt=attempt,
        resume_point=begin,
        device=device,
        model=composed.model,
        stepper=drive,
        average=average,
        optimizer=composed.optimizer,
        checkpointer=checkpointer,
        dataset=dataset,
        prefetcher=Prefetcher(read_train.batch, device),
        validation=read_validation,
        faults=faults,
        guard=GuardActions(run, record, ranks, set_up, checkpointer, _guard(spec), rollbacks, ledger, heartbeat),
        deferred_metrics=DeferredMetrics(device),
        ledger=ledger,
        step_sync=StepSync(run, ranks, consensus, checkpointer, _checkpoint_schedule(record), flag, heartbeat, ledger),
        heartbeat=heartbeat,
        stragglers=stragglers,
        plan_check=PlanCheck(run, record, attempt, composed, average, mesh, consensus, device),
    )


def preflight_alone(run: RunDir, record: RunRecord, ranks: Ranks, attempt: int) -> ExitCode:
    """Connect the ranks, have them measure each other, and leave. Raises WrongNodesError on those that are bad."""
    device = _device(record.spec.cluster.gpu == "cpu", ranks.local_rank)
    connect(device, DATA_SECONDS)
    preflight.check_together(run, record, ranks, attempt, RankConsensus(DATA_SECONDS), device)
    return ExitCode.DONE


def _check_disk_space(record: RunRecord, folder: Path, ranks: Ranks, consensus: RankConsensus) -> None:
    """Rank 0 looks; all ranks raise NoRoomError together."""
    problem = ""
    if ranks.rank == 0:
        try:
            saved, size = record.spec.checkpoint, record.plan.durability.checkpoint_bytes
            check_disk_space(folder, size, ranks.world_size, saved.keep, saved.keep_every)
        except DiskSpaceError as error:
            problem = str(error)
    if problem := consensus.follow_rank_zero(problem):
        raise DiskSpaceError(problem)


def _checkpoint_schedule(record: RunRecord) -> CheckpointSchedule:
    planned = record.plan.durability
    return CheckpointSchedule(record.spec.checkpoint.every, planned.interval_steps, planned.seconds_between_losses)


def _guard(spec: RunSpec) -> Guard:
    fresh = spec.transformer.weights is None
    return Guard(
        factor=spec.guard.spike.factor,
        patience=spec.guard.spike.patience,
        fresh_warmup_steps=spec.training.schedule.warmup_steps if fresh else None,
    )


def _leave_if_asked(flag: PreemptionFlag, set_up: RankConsensus) -> None:
    """Between two stages of a set-up that may take longer than the grace period; the ranks leave together."""
    verdict, _, _ = set_up.reach(StepDecision.PREEMPT if flag.raised else StepDecision.CONTINUE, writing=False)
    if verdict is StepDecision.PREEMPT:
        raise PreemptedError("asked to leave before the first step; the newest checkpoint is as it was")


def _seed(seed: int, rank: int) -> None:
    """Give each rank random streams of its own; resuming restores them."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed((seed + rank) % 2**63)


def _device(cpu: bool, local_rank: int) -> torch.device:
    if cpu:
        return torch.device("cpu")
    if torch.cuda.device_count() <= local_rank:
        raise WrongNodesError(f"rank needs GPU {local_rank} and torch sees {torch.cuda.device_count()} on this node")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _open_data(
    run: RunDir, record: RunRecord, ranks: Ranks, consensus: RankConsensus
) -> tuple[DatasetInfo, TokenSequences, TokenSequences]:
    """Prepare on rank 0, then open everywhere; an error of rank 0 is raised on all, not waited out."""
    spec, folder, failure = record.spec, Path(), ""
    if ranks.rank == 0:
        try:
            folder = prepare_dataset(spec.data, run.path.parent)
            if (owner := owner_of_dataset(folder)) is not None:
                record_event(run, "data-of-another-user", folder=str(folder), owner=owner)
        except ScaletrainError as error:
            failure = str(error)
    folder, failure = consensus.follow_rank_zero((folder, failure))
    if failure:
        raise UsageError(failure)
    info, train, validation = open_dataset(folder, spec.transformer.seq_len, ranks.rank, ranks.world_size)
    if info.vocab_size > spec.transformer.vocab_size:
        raise UsageError(
            f"{folder} has {info.vocab_size} token ids and model.vocab_size is {spec.transformer.vocab_size}."
        )
    if spec.evaluation.every:
        held_back = consensus.follow_rank_zero(
            sequences_held_back(run, record, len(train), len(validation)) if ranks.rank == 0 else 0
        )
        if held_back < 0:
            raise UsageError(_too_little_to_validate(record, len(train), len(validation)))
        if held_back:
            rest = len(train) - held_back
            train, validation = train.part(0, rest), train.part(rest, held_back)
    return info, train, validation


def sequences_held_back(run: RunDir, record: RunRecord, train: int, validation: int) -> int:
    """Return how many of the ``train`` sequences to validate on, where the ``validation`` ones are too few.

    Decided by the first attempt that needs them, for all that follow, whatever their layout: an event says so. -1 where
    neither is enough, and where the run has a checkpoint that was trained without.
    """
    layout, decided = record.plan.layout, None
    width = layout.micro_batch_size * layout.data_parallel
    for event in read_events(run):
        if event["event"] == _HELD_BACK:
            decided = int(event["sequences"])
    if decided is None:
        if validation >= width:
            return 0
        if has_committed(run):  # trained on all sequences so far: fewer would give each step another batch
            return -1
        # One round of any layout of this batch size, where that is no large part of what there is.
        whole = layout.global_batch_size
        decided = whole if train >= 10 * whole else min(whole, max(width, train // 20))
    if decided < width or train < 2 * decided:
        return -1
    if not any(event["event"] == _HELD_BACK for event in read_events(run)):
        record_event(run, _HELD_BACK, sequences=decided, of=train)
        print(f"validating on the last {decided} of {train} sequences: the validation split holds {validation}")
    return decided


def _too_little_to_validate(record: RunRecord, train: int, validation: int) -> str:
    layout, length = record.plan.layout, record.spec.transformer.seq_len
    width = layout.micro_batch_size * layout.data_parallel
    return (
        f"data.source is too small to validate on: it makes {train} sequences of {length} tokens to train on and "
        f"{validation} to validate on, and one round of validation takes {width}. Give more text, or submit the run "
        "with a shorter model.seq_len or with evaluation.every: 0."
    )
