"""The parameter tensors of a rank by the optimizer's parameter groups, in the order of the engine's modules."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from scaletrain_cli.plan.memory.states import quantized_bytes
from scaletrain_cli.plan.parameter import EngineTensor
from scaletrain_cli.plan.parameters import block_tensors, end_tensors, model_parameters
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.stages import Stage
from scaletrain_cli.plan.trained_stages import GroupNumber, PartTensors, TrainedStage
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.hybrid import DENSE_BLOCK, SPARSE_BLOCK


class Group(NamedTuple):
    """One parameter group: its tensors in order, run-length encoded as (sizes, number of repetitions)."""

    runs: tuple[tuple[tuple[int, ...], int], ...]

    @property
    def elements(self) -> int:
        return sum(sum(sizes) * times for sizes, times in self.runs)

    @property
    def largest(self) -> int:
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
    alike = stage._replace(position=min(stage.position, 1))
    return stage_groups(spec.transformer, layout.tensor_parallel, layout.expert_parallel, alike, trained)


@lru_cache(maxsize=4096)
def stage_groups(model: ModelSpec, tensor: int, expert: int, stage: Stage, trained: TrainedStage) -> StageTensors:
    """Return the same for degrees of tensor and expert parallelism in place of a layout."""
    if trained.runs:
        opening, closing = trained.opening, trained.closing
        parts = [(run.part, run.blocks) for run in trained.blocks_of(model, stage)]
    else:
        opening, closing = map(_whole, end_tensors(model))
        parts = [(_whole(tensors), times) for tensors, times in _blocks(model, stage.start, stage.blocks)]
    if stage.first:
        parts.insert(0, (opening, 1))
    elif stage.last and model.tie_word_embeddings:
        parts.insert(0, (PartTensors(opening.tensors[:1], opening.groups[:1]), 1))
    if stage.last:
        parts.append((closing, 1))
    runs: dict[tuple[GroupNumber, bool], list[tuple[tuple[int, ...], int]]] = {}
    quantization = model.quantization
    quantized = largest = 0
    for part, times in parts:
        sizes: dict[tuple[GroupNumber, bool], list[int]] = {}
        for weight, number in zip(part.tensors, part.groups, strict=True):
            elements = weight.on_rank(tensor, expert)
            if number is None and quantization != "none" and weight.is_linear:
                quantized += times * quantized_bytes(quantization, elements, weight.rows_on_rank(tensor))
                largest = max(largest, elements)
            else:
                sizes.setdefault((number, expert > 1 and weight.experts > 0), []).append(elements)
        for key, tensor_sizes in sizes.items():
            runs.setdefault(key, []).append((tuple(tensor_sizes), times))
    groups = [
        (number, SharedGroup(Group(tuple(repeated)), experts, number in trained.orthogonalized))
        for (number, experts), repeated in sorted(runs.items(), key=lambda run: (run[0][0] or 0, run[0][1]))
    ]
    return StageTensors(
        tuple(group for number, group in groups if number is not None),
        tuple(group for number, group in groups if number is None),
        quantized,
        largest,
    )


def _whole(tensors: tuple[EngineTensor, ...]) -> PartTensors:
    """Return a part of the model that trains as a whole: matrices are a group with weight decay, vectors one without.

    DeepSpeed skips a group without parameters.
    """
    return PartTensors(tensors, tuple(0 if tensor.is_matrix else 1 for tensor in tensors))


def _blocks(model: ModelSpec, start: int, blocks: int) -> list[tuple[tuple[EngineTensor, ...], int]]:
    """Return the tensors of runs of equal blocks, and how many blocks each has; of a hybrid model not in order."""
    kinds = model.parts_between(start, blocks)
    if not model.block_types:
        kinds = tuple((SPARSE_BLOCK if moe else DENSE_BLOCK, n) for moe, n in model.block_runs(start, blocks))
    return [(block_tensors(model, parts), times) for parts, times in kinds]


@lru_cache(maxsize=1024)
def elements_in_small_tensors(model: ModelSpec, tensor: int, most: int) -> int:
    """Return the elements of a whole model in tensors of up to ``most`` elements on each of ``tensor`` tensor ranks."""
    if model.adapter is not None:
        sizes = [
            (-(-weight.numel // (1 if weight.tensor_dim is None else tensor)), 1) for weight in model_parameters(model)
        ]
    else:
        parts = [*((tensors, 1) for tensors in end_tensors(model)), *_blocks(model, 0, model.num_hidden_layers)]
        sizes = [(weight.on_rank(tensor, 1), times) for tensors, times in parts for weight in tensors]
    return sum(size * times for size, times in sizes if size <= most)


@lru_cache(maxsize=1024)
def most_groups(model: ModelSpec, tensor: int, expert: int, stages: tuple[Stage, ...], trained: TrainedStage) -> int:
    """Return the parameter groups of the stage with most; others have a number in place of each that they lack."""
    alike = (stage._replace(position=min(stage.position, 1)) for stage in stages)
    return max(len(stage_groups(model, tensor, expert, stage, trained).trained) for stage in alike)


class BlockMatrices(NamedTuple):
    """The matrices of one block in the order in which its forward pass uses them, attention first."""

    attention: tuple[int, ...]
    others: tuple[int, ...]


@lru_cache(maxsize=1024)
def matrices_in_order(
    model: ModelSpec, tensor: int, expert: int
) -> tuple[tuple[int, ...], tuple[tuple[BlockMatrices, int], ...], tuple[int, ...]]:
    """Return the matrices of a whole model as one rank uses them: before the blocks, of runs of blocks, and after.

    The last are none if the head is the embedding.
    """

    def sizes(tensors: Iterable[EngineTensor]) -> tuple[int, ...]:
        return tuple(weight.on_rank(tensor, expert) for weight in tensors if weight.is_matrix)

    runs = []
    for tensors, times in _blocks(model, 0, model.num_hidden_layers):
        mlp = [weight for weight in tensors if weight.name.startswith("mlp.")]
        runs.append((BlockMatrices(sizes(weight for weight in tensors if weight not in mlp), sizes(mlp)), times))
    opening, closing = end_tensors(model)
    return sizes(opening), tuple(runs), sizes(closing)
