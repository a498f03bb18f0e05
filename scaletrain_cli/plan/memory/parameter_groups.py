"""The parameter tensors of a rank by the optimizer's parameter groups, in the order of the engine's modules."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from scaletrain_cli.plan.architecture import architecture, attention_matrices
from scaletrain_cli.plan.memory.states import quantized_bytes
from scaletrain_cli.plan.parameter import EngineTensor
from scaletrain_cli.plan.parameters import block_tensors, end_tensors, model_parameters
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.stages import Stage
from scaletrain_cli.plan.trained_stages import GroupNumber, PartTensors, TrainedStage
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.hybrid import DENSE_BLOCK, SPARSE_BLOCK


class Tensors(NamedTuple):
    """Elements of each parameter tensor in a part of the model, by the optimizer's parameter groups.

    Matrices have weight decay, vectors do not. ``experts`` are matrices that fewer ranks replicate than the others, and
    ``expert_biases`` their vectors.
    """

    matrices: tuple[int, ...] = ()
    vectors: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    expert_biases: tuple[int, ...] = ()


class Group(NamedTuple):
    """One parameter group: its tensors in order, run-length encoded as (sizes, number of repetitions)."""

    runs: tuple[tuple[tuple[int, ...], int], ...]

    @property
    def elements(self) -> int:
        return sum(sum(sizes) * times for sizes, times in self.runs)

    @property
    def largest(self) -> int:
        """Elements of the group's largest tensor."""
        return max(max(sizes) for sizes, _ in self.runs)

    def pieces(self, ranks: int) -> int:
        """Return the elements on one of ``ranks`` ranks if each tensor is sharded by itself, rounded up (stage 3)."""
        return sum(sum(-(-size // ranks) for size in sizes) * times for sizes, times in self.runs)

    def tensor_at(self, element: int) -> tuple[int, int]:
        """Return (start, end) of the tensor that contains this element of the flattened group.

        Raises IndexError behind the last element.
        """
        start = 0
        for sizes, times in self.runs:
            length = sum(sizes)
            if element < start + length * times:
                start += (element - start) // length * length
                for size in sizes:
                    if element < start + size:
                        return start, start + size
                    start += size
            start += length * times
        raise IndexError(element)


class SharedGroup(NamedTuple):
    """A group, and whether its tensors are experts, which fewer ranks share than the others.

    ``orthogonalized``: Muon updates it, and AdamW the other groups.
    """

    group: Group
    experts: bool = False
    orthogonalized: bool = False


class StageTensors(NamedTuple):
    """The tensors of one pipeline stage: the optimizer's parameter groups, and what is frozen; none is empty.

    ``quantized``: bytes of frozen linear layers in 8 or 4 bits; ``largest_quantized``: elements of the largest.
    """

    trained: tuple[SharedGroup, ...]
    frozen: tuple[SharedGroup, ...] = ()
    quantized: int = 0
    largest_quantized: int = 0


def stage_tensors(spec: RunSpec, layout: Layout, stage: Stage, trained: TrainedStage) -> StageTensors:
    """Return the tensors of one rank of a pipeline stage while it trains what ``trained`` states."""
    model, tensor, expert = spec.transformer, layout.tensor_parallel, layout.expert_parallel
    if not trained.runs:
        return StageTensors(
            stage_groups(model, tensor, expert, stage.start, stage.blocks, first=stage.first, last=stage.last)
        )
    return _named_tensors(model, tensor, expert, stage._replace(position=min(stage.position, 1)), trained)


@lru_cache(maxsize=4096)
def _named_tensors(model: ModelSpec, tensor: int, expert: int, stage: Stage, trained: TrainedStage) -> StageTensors:
    parts: list[tuple[PartTensors, int]] = [(run.part, run.blocks) for run in trained.blocks_of(model, stage)]
    if stage.first:
        parts.insert(0, (trained.opening, 1))
    elif stage.last and model.tie_word_embeddings:
        parts.insert(0, (PartTensors(trained.opening.tensors[:1], trained.opening.groups[:1]), 1))
    if stage.last:
        parts.append((trained.closing, 1))
    runs: dict[tuple[GroupNumber, bool], list[tuple[tuple[int, ...], int]]] = {}
    quantization = model.quantization
    quantized = largest = 0
    for part, times in parts:
        sizes: dict[tuple[GroupNumber, bool], list[int]] = {}
        for each, number in zip(part.tensors, part.groups, strict=True):
            elements = each.on_rank(tensor, expert)
            if number is None and quantization != "none" and each.is_linear:
                quantized += times * quantized_bytes(quantization, elements, each.rows_on_rank(tensor))
                largest = max(largest, elements)
            else:
                sizes.setdefault((number, expert > 1 and each.experts > 0), []).append(elements)
        for key, found in sizes.items():
            runs.setdefault(key, []).append((tuple(found), times))
    groups = [
        (number, SharedGroup(Group(tuple(found)), experts, number in trained.orthogonalized))
        for (number, experts), found in runs.items()
    ]
    return StageTensors(
        tuple(group for number, group in groups if number is not None),
        tuple(group for number, group in groups if number is None),
        quantized,
        largest,
    )


@lru_cache(maxsize=1024)
def elements_in_small_tensors(model: ModelSpec, tensor: int, most: int) -> int:
    """Return the elements of a whole model in tensors of up to ``most`` elements on each of ``tensor`` tensor ranks."""
    if model.adapter is not None:
        sizes = (-(-each.numel // (1 if each.tensor_dim is None else tensor)) for each in model_parameters(model))
        return sum(size for size in sizes if size <= most)
    groups = stage_groups(model, tensor, 1, 0, model.num_hidden_layers, first=True, last=True)
    runs = [run for each in groups for run in each.group.runs]
    return sum(sum(size for size in sizes if size <= most) * times for sizes, times in runs)


@lru_cache(maxsize=1024)
def most_groups(model: ModelSpec, tensor: int, expert: int, stages: tuple[Stage, ...], trained: TrainedStage) -> int:
    """Return the parameter groups of the stage with most; others have a number in place of each that they lack."""
    return max(
        len(_named_tensors(model, tensor, expert, stage._replace(position=min(stage.position, 1)), trained).trained)
        for stage in stages
    )


@lru_cache(maxsize=4096)
def stage_groups(
    model: ModelSpec, tensor: int, expert: int, start: int, blocks: int, *, first: bool, last: bool
) -> tuple[SharedGroup, ...]:
    """Return the parameter groups of ``blocks`` blocks if all train, without empty ones, which DeepSpeed skips.

    ``tensor`` and ``expert``: degrees of parallelism. ``first``, ``last``: with what is before and after all blocks.
    """
    opening, closing = _ends(model, tensor, first=first, last=last)
    parts = [(opening, 1), *_runs_of_blocks(model, tensor, expert, start, blocks), (closing, 1)]
    runs = [tuple((part[kind], times) for part, times in parts if times and part[kind]) for kind in range(4)]
    return tuple(SharedGroup(Group(found), experts=kind >= 2) for kind, found in enumerate(runs) if found)


class BlockMatrices(NamedTuple):
    """The matrices of one block in the order in which its forward pass uses them, attention first."""

    attention: tuple[int, ...]
    others: tuple[int, ...]


@lru_cache(maxsize=1024)
def matrices_in_order(
    model: ModelSpec, tensor: int, expert: int
) -> tuple[tuple[int, ...], tuple[tuple[BlockMatrices, int], ...], tuple[int, ...]]:
    """Return the matrices of a whole model as one rank uses them: before the blocks, of runs of blocks, and after.

    The last are none if the head is the embedding. Of a block of a hybrid model all matrices count as one.
    """
    opening, closing = _ends(model, tensor, first=True, last=True)
    attention = () if model.block_types else tuple(each.on_rank(tensor, 1) for each in attention_matrices(model))
    runs = [
        (BlockMatrices(attention, (*part.matrices[len(attention) :], *part.experts)), times)
        for part, times in _runs_of_blocks(model, tensor, expert, 0, model.num_hidden_layers)
    ]
    return opening.matrices, tuple(runs), closing.matrices


def _runs_of_blocks(model: ModelSpec, tensor: int, expert: int, start: int, blocks: int) -> list[tuple[Tensors, int]]:
    """Return the tensors of runs of equal blocks, and how many blocks each has.

    Of a block of a hybrid model all matrices count as one, and all vectors: the engine builds no such blocks.
    """
    if not model.block_types:
        runs = model.block_runs(start, blocks)
        kinds = {moe: block_tensors(model, SPARSE_BLOCK if moe else DENSE_BLOCK) for moe, _ in runs}
        return [(_by_kind(kinds[moe], tensor, expert), times) for moe, times in runs]
    found = []
    for block, times in architecture(model, tensor, expert).kinds(start, blocks):
        stacked = (block.routed,) if block.routed else ()
        matrices = (block.shared - block.vectors, *(() if expert > 1 else stacked))
        found.append((Tensors(matrices, (block.vectors,), stacked if expert > 1 else ()), times))
    return found


def _ends(model: ModelSpec, tensor: int, *, first: bool, last: bool) -> tuple[Tensors, Tensors]:
    """Return the tensors before and after the blocks; with a tied head, the last stage has a copy of the embedding."""
    opening, closing = end_tensors(model)
    if not first:
        opening = opening[:1] if last and model.tie_word_embeddings else ()
    return _by_kind(opening, tensor, 1), _by_kind(closing if last else (), tensor, 1)


def _by_kind(tensors: Iterable[EngineTensor], tensor: int, expert: int) -> Tensors:
    kinds: tuple[list[int], ...] = ([], [], [], [])
    for each in tensors:
        apart = expert > 1 and each.experts > 0
        kinds[2 * apart + (not each.is_matrix)].append(each.on_rank(tensor, expert))
    return Tensors(*map(tuple, kinds))
