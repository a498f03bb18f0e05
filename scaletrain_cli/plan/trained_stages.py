"""The blocks that each training stage trains, in the form in which memory and time are counted.

trained_parameters.py decides by name. Here equal blocks are joined to runs, so that the size of a layout is computed
without each parameter. A model of which everything trains, with one learning rate, has no names: its one stage has no
runs.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple

from scaletrain_cli.plan.architecture import head_flops, parameter_count, training_flops_per_token
from scaletrain_cli.plan.block_graph import WHOLE, Adapter, BlockTraining, backward_products, block_flops
from scaletrain_cli.plan.identity_cache import cached_by_identity
from scaletrain_cli.plan.parameter import EngineTensor, engine_tensors
from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.plan.stages import Stage
from scaletrain_cli.plan.trained_parameters import Stage as NamedStage
from scaletrain_cli.plan.trained_parameters import training_stages, trains_everything
from scaletrain_cli.spec import ModelSpec, RunSpec

# Number of the optimizer's parameter group; None: frozen.
GroupNumber = int | None


class PartTensors(NamedTuple):
    """The tensors of one part of the model, in order, with the optimizer's group of each."""

    tensors: tuple[EngineTensor, ...]
    groups: tuple[GroupNumber, ...]

    @property
    def trained(self) -> list[EngineTensor]:
        """The tensors that train."""
        return [tensor for tensor, group in zip(self.tensors, self.groups, strict=True) if group is not None]


class BlockRun(NamedTuple):
    """``blocks`` blocks from block ``start`` that have the same tensors and train the same ones."""

    start: int
    blocks: int
    experts: bool
    training: BlockTraining
    part: PartTensors


class TrainedStage(NamedTuple):
    """Steps that train the same parameters. ``runs`` is empty if everything trains with one learning rate.

    ``opening``: tensors before the blocks, ``closing``: after them. ``embedding`` and ``head``: whether these train.
    ``orthogonalized``: the groups that Muon updates.
    """

    first_step: int
    last_step: int
    runs: tuple[BlockRun, ...] = ()
    opening: PartTensors = PartTensors((), ())
    closing: PartTensors = PartTensors((), ())
    embedding: bool = True
    head: bool = True
    final_norm: bool = True
    orthogonalized: frozenset[int] = frozenset()

    @property
    def steps(self) -> int:
        return self.last_step - self.first_step + 1

    @property
    def is_uniform(self) -> bool:
        """Return whether all blocks of a kind train alike."""
        return len({(run.experts, run.training) for run in self.runs}) == len({run.experts for run in self.runs})

    def blocks_of(self, model: ModelSpec, stage: Stage) -> tuple[BlockRun, ...]:
        """Return the runs on one pipeline stage."""
        if not self.runs:
            return _whole_runs(model.block_runs(stage.start, stage.blocks), stage.start)
        runs, end = [], stage.start + stage.blocks
        for run in self.runs:
            first, last = max(run.start, stage.start), min(run.start + run.blocks, end)
            if first < last:
                runs.append(run._replace(start=first, blocks=last - first))
        return tuple(runs)


@lru_cache(maxsize=4096)
def _whole_runs(kinds: tuple[tuple[bool, int], ...], first: int) -> tuple[BlockRun, ...]:
    """Return the runs of blocks that train as a whole; ``kinds``: (has experts, blocks) of each from ``first`` on."""
    starts = accumulate((count for _, count in kinds), initial=first)
    return tuple(
        BlockRun(start, count, experts, WHOLE, PartTensors((), ()))
        for start, (experts, count) in zip(starts, kinds, strict=False)
    )


def trained_stages(spec: RunSpec) -> tuple[TrainedStage, ...]:
    """Return the stages of a run, from step 1 on. Raises UsageError with all problems of ``training.trainable``."""
    if trains_everything(spec):
        return (TrainedStage(1, spec.total_steps),)
    return _converted(spec.transformer, training_stages(spec))


def stage_of_step(spec: RunSpec, step: int) -> TrainedStage:
    """Return the stage that trains a step, counted from 1."""
    return next(stage for stage in trained_stages(spec) if step <= stage.last_step)


@cached_by_identity
def _converted(model: ModelSpec, named: tuple[NamedStage, ...]) -> tuple[TrainedStage, ...]:
    return tuple(trained_stage(model, stage) for stage in named)


def trained_stage(model: ModelSpec, stage: NamedStage, *, reached: bool = False) -> TrainedStage:
    """Return what a stage trains. ``reached``: the hidden states before the first block have a gradient anyway."""
    numbers: dict[object, int] = {}
    orthogonalized: set[int] = set()

    def number(names: Iterable[str]) -> GroupNumber:
        """Return the group of the first of these names; those of one tensor have the same."""
        name = next(iter(names))
        if name not in stage.since:
            return None
        settings = tuple(phase.settings[name] for phase in stage.phases)
        group = numbers.setdefault((stage.since[name], settings), len(numbers))
        if settings[0].orthogonalized:
            orthogonalized.add(group)
        return group

    opening: PartTensors = PartTensors((), ())
    closing: PartTensors = PartTensors((), ())
    blocks: list[PartTensors] = []
    for (place, _), members in groupby(model_parameters(model), key=lambda p: (p.place, p.block)):
        tensors = list(engine_tensors(members))
        part = PartTensors(tuple(tensor for tensor, _ in tensors), tuple(number(names) for _, names in tensors))
        if place == "block":
            blocks.append(part)
        elif place == "embedding":
            opening = part
        else:
            closing = part
    trained = {tensor.name for part in (opening, closing) for tensor in part.trained}
    table = opening.tensors[0].name
    embedding = any(name.removesuffix(".weight") == table.removesuffix(".weight") for name in trained)
    reached = reached or bool(opening.trained)
    runs: list[BlockRun] = []
    shared: dict[PartTensors, PartTensors] = {}  # equal parts are one object, which compares faster
    for index, block in enumerate(blocks):
        part = shared.setdefault(block, block)
        moe = model.has_experts(index)
        training = _block_training(part, reached)
        reached = backward_products(model, training, moe).reached
        last = runs[-1] if runs else None
        if last is not None and last.part is part and last.training == training and last.experts == moe:
            runs[-1] = last._replace(blocks=last.blocks + 1)
        else:
            runs.append(BlockRun(index, 1, moe, training, part))
    return TrainedStage(
        stage.first_step,
        stage.last_step,
        tuple(runs),
        opening,
        closing,
        embedding=embedding,
        head=embedding if model.tie_word_embeddings else any(name.startswith("lm_head.") for name in trained),
        final_norm=any("lm_head" not in tensor.name for tensor in closing.trained),
        orthogonalized=frozenset(orthogonalized),
    )


_FACTOR_A = (".lora_A.weight", "_lora_A", ".lora_embedding_A")


def _block_training(part: PartTensors, reached: bool) -> BlockTraining:
    modules, adapters = set(), []
    for tensor, group in zip(part.tensors, part.groups, strict=True):
        if tensor.rank:
            factor = next((end for end in _FACTOR_A if tensor.name.endswith(end)), None)
            if factor is not None:
                adapters.append(Adapter(tensor.name.removesuffix(factor), tensor.rank))
        elif group is not None:
            modules.add(tensor.name.removesuffix(".weight"))
    everything = not adapters and all(group is not None for group in part.groups)
    return BlockTraining(reached, None if everything else frozenset(modules), tuple(adapters))


def reached_blocks(model: ModelSpec, trained: TrainedStage) -> int:
    """Return the number of blocks that have a backward pass."""
    if not trained.runs:
        return model.num_hidden_layers
    return sum(run.blocks for run in trained.runs if backward_products(model, run.training, run.experts).reached)


def stage_flops_per_token(model: ModelSpec, trained: TrainedStage) -> int:
    """Return the FLOPs per token of forward and backward pass, without recomputation.

    The gradient of the hidden states before the head is needed if a weight before it trains, that of the head's weight
    if it trains itself.
    """
    if not trained.runs:
        return training_flops_per_token(model)
    blocks = sum(run.blocks * sum(block_flops(model, run.training, run.experts)) for run in trained.runs)
    return blocks + head_flops(model) * (1 + trains_before_head(model, trained) + trained.head)


def trains_before_head(model: ModelSpec, trained: TrainedStage) -> bool:
    """Return whether the hidden states before the head have a gradient."""
    return trained.final_norm or reached_blocks(model, trained) > 0


def trained_count(spec: RunSpec, stage: TrainedStage) -> int:
    """Return the number of parameters of the whole model, or of its adapters, that train in a stage."""
    if not stage.runs:
        return parameter_count(spec.transformer)
    parts = [(run.part, run.blocks) for run in stage.runs] + [(stage.opening, 1), (stage.closing, 1)]
    return sum(times * tensor.elements for part, times in parts for tensor in part.trained)


def orthogonalized_by_stage(spec: RunSpec) -> list[int]:
    """Return, for each stage, the parameters that Muon orthogonalizes."""
    names = {tensor.name: tensor.numel for tensor in model_parameters(spec.transformer) if tensor.is_orthogonalized}
    return [sum(names.get(name, 0) for name in stage.since) for stage in training_stages(spec)]
