"""The same run sharded over ranks, each through its own assembly and step; then the whole weights."""

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from scaletrain_cli.engine.assembly import assemble
from scaletrain_cli.engine.metrics.memory_measurement import (
    ModelStateBytes,
    watching_activations,
    watching_model_states,
)
from scaletrain_cli.engine.parallel.expert import is_sharded_over_experts
from scaletrain_cli.engine.parallel.mesh import ShardSpec, shard_spec_of
from scaletrain_cli.engine.process_group import Ranks
from scaletrain_cli.engine.trainer import Trainer
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.memory.engine_memory import saved_activation_bytes
from scaletrain_cli.plan.memory.engine_states import engine_states
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.stages import replicas, stages_in, zero_shards
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_record
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.worker.checkpoint_commit import open_attempt
from scaletrain_cli.worker.heartbeat import Heartbeat
from scaletrain_cli.worker.signals import PreemptionFlag
from tests.engine.parity.reference import Trained
from tests.engine.ranks import on_ranks


@dataclass(frozen=True)
class Piece:
    """A rank's part of a parameter: its shard, of the experts on its expert rank."""

    shard_spec: ShardSpec | None
    expert_rank: int
    values: Tensor


@dataclass(frozen=True)
class RankReport:
    """By step the loss and the gradient norm; pieces of the weights, unless another rank holds the same; bytes of the
    last step, of activations those of one micro-batch.
    """

    losses: list[float]
    norms: list[float]
    pieces: dict[str, Piece]
    states: ModelStateBytes
    activations: int


@dataclass(frozen=True)
class LayoutRun:
    """A run that was trained in its layout: what it came to, how it was planned, and what each rank held."""

    trained: Trained
    record: RunRecord
    states: list[ModelStateBytes]
    activations: list[int]


def train_in_layout(spec: RunSpec, *interrupted_after: int, between: Callable[[], None] = lambda: None) -> LayoutRun:
    """All steps of a run; with steps to be interrupted after, each part in other processes, from a checkpoint.

    ``between`` is called before each part but the first.
    """
    created = create_run(spec, make_plan(spec))
    parts = [*interrupted_after, spec.total_steps]
    losses: list[float] = []
    norms: list[float] = []
    for attempt, last in enumerate(parts, start=1):
        if attempt > 1:
            between()
        open_attempt(created.run.checkpoints, attempt)
        place = (created.run.path, attempt, last)
        reports = on_ranks(spec.world_size, train_rank, *place, connected=False)
        for other in reports[1:]:
            assert (other.losses, other.norms) == (reports[0].losses, reports[0].norms), "ranks do not agree"
        losses += reports[0].losses
        norms += reports[0].norms
    trained = Trained(losses, norms, whole_weights([report.pieces for report in reports]))
    return LayoutRun(
        trained, created.record, [report.states for report in reports], [report.activations for report in reports]
    )


def begun_run(spec: RunSpec) -> RunDir:
    """Return a new run whose first attempt has begun."""
    run = create_run(spec, make_plan(spec)).run
    open_attempt(run.checkpoints, 1)
    run.attempt(1).mkdir(parents=True)  # as the agent does
    return run


def assembled(path: Path, attempt: int = 1) -> Trainer:
    """Return this rank's trainer of the run in ``path``."""
    run = RunDir(path)
    with contextlib.redirect_stdout(io.StringIO()):
        return assemble(run, read_record(run), Ranks.from_environment(), attempt, PreemptionFlag(), Heartbeat(None))


def ready(path: Path) -> Trainer:
    """Return this rank's trainer of the run in ``path``, which trains from the newest checkpoint on."""
    trainer = assembled(path)
    with contextlib.redirect_stdout(io.StringIO()):
        assert trainer.prepare_batches(trainer.resume().step)
    return trainer


def train_rank(path: Path, attempt: int, last: int) -> RankReport:
    """One rank's part of the run in ``path``, from its newest checkpoint to a step; before the end, with another."""
    with contextlib.redirect_stdout(io.StringIO()):
        return _train_rank(path, attempt, last)


def _train_rank(path: Path, attempt: int, last: int) -> RankReport:
    trainer = assembled(path, attempt)
    record, begin = trainer.context.record, trainer.resume()
    assert trainer.prepare_batches(begin.step)
    measured = []
    for step in range(begin.step + 1, last):
        trainer.optimizer_step(step)
        trainer.step_sync.agree(step)  # no state check finds anything
        measured += trainer.deferred_metrics.remaining()
    composed = trainer.composed
    trainer.stages.enter(last, 0.0)  # what is watched must not be replaced meanwhile
    with watching_model_states(composed.engine) as states, watching_activations(composed.model) as saved:
        trainer.optimizer_step(last)
    measured += trainer.deferred_metrics.remaining()
    if last < record.spec.total_steps:
        trainer.save(last, wait=True)
    pieces = local_pieces(trainer.composed.model, replica(trainer.context.rank, record.plan.layout), record.plan.layout)
    losses, norms = [[step.values[name] for step in measured] for name in ("loss", "grad_norm")]
    held = states.bytes
    if trainer.local_sgd is not None:
        held = replace(held, optimizer_states=held.optimizer_states + trainer.local_sgd.bytes)
    return RankReport(losses, norms, pieces, held, saved.bytes)


def stray_state_bytes(run: LayoutRun) -> int:
    """Run minus plan, of the rank and figure where they differ most: bytes of weights, gradients, optimizer states.

    The plan is that of the first tensor rank; the last ones have fewer tokens of the vocabulary.
    """
    spec, layout = run.record.spec, run.record.plan.layout
    stray = []
    for rank, held in enumerate(run.states):
        stage = stages_in(spec, layout)[stage_of(rank, layout)]
        planned = engine_states(spec, layout, stage, replica(rank, layout) % zero_shards(layout))[0]
        found = [getattr(held, name) - size for name, size in planned._asdict().items()]
        if rank % layout.tensor_parallel:  # the last rank may have a tenth less
            found = [max(0, each) or min(0, each + size // 10) for each, size in zip(found, planned, strict=True)]
        stray += found
    return max(stray, key=abs)


def stray_activations(run: LayoutRun) -> float:
    """Run beside plan, of the rank where they differ most: 0.05 for one that saves 5 % more.

    Of mixtures the mean over the ranks of a stage, because the plan has every expert equally busy.
    """
    spec, layout = run.record.spec, run.record.plan.layout
    stray = []
    for stage in range(layout.pipeline_parallel):
        by_rank = [size for rank, size in enumerate(run.activations) if stage_of(rank, layout) == stage]
        if spec.transformer.num_experts:
            by_rank = [sum(by_rank) // len(by_rank)]
        planned = saved_activation_bytes(spec, layout, find_accelerator(spec.cluster), stage)
        stray += [saved / planned - 1 if planned else float(saved) for saved in by_rank]
    return max(stray, key=abs)


def stage_of(rank: int, layout: Layout) -> int:
    """The pipeline stage that a rank runs."""
    return rank // (layout.world_size // layout.pipeline_parallel)


def replica(rank: int, layout: Layout) -> int:
    """This rank's place among those that DeepSpeed counts as data-parallel."""
    return rank // layout.tensor_parallel % replicas(layout)


def local_pieces(model: nn.Module, replica: int, layout: Layout) -> dict[str, Piece]:
    """This rank's parameters by Hugging Face name, those of ZeRO-3 gathered. Collective."""
    import deepspeed  # not for the tests' own process, whose environment it would change

    pieces: dict[str, Piece] = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            copies = layout.expert_parallel if is_sharded_over_experts(parameter) else 1
            if replica < copies:
                values = parameter.detach().to(torch.float32, copy=True)
                pieces[name] = Piece(shard_spec_of(parameter), replica, values)
    return pieces


def whole_weights(ranks: list[dict[str, Piece]]) -> dict[str, Tensor]:
    """Every parameter of the model, from what the ranks hold of it."""
    held: dict[str, dict[int, list[Piece]]] = {}
    for pieces in ranks:
        for name, piece in pieces.items():
            held.setdefault(name, {}).setdefault(piece.expert_rank, []).append(piece)
    return {
        name: torch.cat([_joined(experts[rank]) for rank in sorted(experts)]) for name, experts in sorted(held.items())
    }


def _joined(pieces: list[Piece]) -> Tensor:
    """The slices put together. A tied weight is whole on two pipeline stages, which must not differ."""
    by_rank = {piece.shard_spec.rank if piece.shard_spec else 0: piece.values for piece in pieces}
    for piece in pieces:
        assert torch.equal(piece.values, by_rank[piece.shard_spec.rank if piece.shard_spec else 0]), (
            "copies of a weight differ"
        )
    spec = pieces[0].shard_spec
    if spec is None:
        return by_rank[0]
    return spec.join([by_rank[rank] for rank in range(spec.ranks)])
