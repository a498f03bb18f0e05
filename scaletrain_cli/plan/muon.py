"""The cost of orthogonalizing the matrices of the blocks for Muon: temporary bytes, and seconds of a step.

Muon (K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; arXiv:2502.16982) replaces the
momentum of a matrix by an approximation of its nearest orthogonal matrix. The ranks of a pipeline stage divide the
matrices among themselves (engine/optim/muon.py). A fused projection is as many matrices as it fuses.
"""

from collections import Counter
from functools import lru_cache

from scaletrain_cli.plan.catalogue.networks import Link
from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.speed.kernels import Rates, matmul_seconds
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.training import MuonSpec

# Elements that a rank receives at once, so that temporary memory does not grow with the model.
ROUND_ELEMENTS = 2**26

# The numbers of equal matrices, by (outputs, inputs).
Shapes = tuple[tuple[tuple[int, int], int], ...]


def fused_widths(model: ModelSpec, name: str) -> tuple[int, ...]:
    """Return the output features of each matrix that a fused projection holds, in order; empty for any other matrix."""
    layer = name.removesuffix(".weight").rpartition(".")[2]
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    if layer in ("qkv_proj", "c_attn"):
        return queries, keys, keys
    if layer == "gate_up_proj":
        shared = model.shared_expert_intermediate_size if f".{model.shared_expert_name}." in name else 0
        return (shared or model.intermediate_size,) * 2
    return ()


def output_dim(model: ModelSpec) -> int:
    """Return the dimension of output features in the matrices of the blocks: GPT-2's are [inputs, outputs]."""
    return 1 if model.has_fused_qkv else 0


def newton_schulz_flops(rows: int, columns: int, iterations: int) -> int:
    """Return the FLOPs to orthogonalize a matrix: per iteration X Xᵀ, its square, and their product with X.

    The shorter side is that of the square matrices.
    """
    short, long = sorted((rows, columns))
    return iterations * (4 * short * short * long + 2 * short**3)


@lru_cache(maxsize=64)
def _shapes_by_block(model: ModelSpec) -> tuple[Shapes, ...]:
    counters: list[Counter[tuple[int, int]]] = [Counter() for _ in range(model.num_hidden_layers)]
    dim = output_dim(model)
    for parameter in model_parameters(model):
        if parameter.block is not None and parameter.is_orthogonalized:
            for width in fused_widths(model, parameter.name) or (parameter.shape[dim],):
                counters[parameter.block][width, parameter.shape[1 - dim]] += 1
    return tuple(tuple(counter.items()) for counter in counters)


@lru_cache(maxsize=1024)
def orthogonalized_shapes(model: ModelSpec, start: int, blocks: int) -> Shapes:
    """Return the matrices that Muon orthogonalizes in ``blocks`` blocks of the whole model, from block ``start``."""
    counts: Counter[tuple[int, int]] = Counter()
    for shapes in _shapes_by_block(model)[start : start + blocks]:
        counts.update(dict(shapes))
    return tuple(counts.items())


def muon_temporary_bytes(model: ModelSpec, settings: MuonSpec, layout: Layout, start: int, blocks: int) -> int:
    """Return the temporary bytes on a rank while it orthogonalizes its share of the matrices of a stage.

    What it sends and what it receives, or receives and puts together; two versions of the largest matrix, and two
    square ones.
    """
    shapes = orthogonalized_shapes(model, start, blocks)
    element = 2 if settings.newton_schulz_dtype == "bf16" else 4
    elements = sum(rows * columns * count for (rows, columns), count in shapes)
    largest = max((rows * columns for (rows, columns), _ in shapes), default=0)
    share = min(-(-elements // _ranks(layout)), max(ROUND_ELEMENTS, largest))
    one = max((2 * rows * columns + 2 * min(rows, columns) ** 2 for (rows, columns), _ in shapes), default=0)
    return element * (2 * max(share, min(elements, largest)) + one)


def muon_seconds(
    model: ModelSpec, settings: MuonSpec, layout: Layout, start: int, blocks: int, rate: Rates, link: Link
) -> float:
    """Return the seconds per step to orthogonalize the matrices of a stage, with both exchanges; nothing overlaps them.

    ``rate``: of the dtype of the iterations. The rank with most to do has its share, or the longest matrix.
    """
    ranks = _ranks(layout)
    shapes = orthogonalized_shapes(model, start, blocks)
    times = []
    for (rows, columns), count in shapes:
        short, long = sorted((rows, columns))
        gram, square = matmul_seconds(short, long, short, rate), matmul_seconds(short, short, short, rate)
        once = gram + square + matmul_seconds(short, short, long, rate)
        times.append((settings.newton_schulz_steps * once, count))
    compute = max(sum(seconds * count for seconds, count in times) / ranks, max((s for s, _ in times), default=0.0))
    return compute + sum(link.exchange(size, ranks) for size in _exchanged(settings, layout, shapes))


def muon_sent_bytes(model: ModelSpec, settings: MuonSpec, layout: Layout, start: int, blocks: int) -> int:
    """Return the bytes per step that an average rank sends in both exchanges."""
    ranks, shapes = _ranks(layout), orthogonalized_shapes(model, start, blocks)
    return int(sum(_exchanged(settings, layout, shapes)) * (ranks - 1) / ranks)


def _exchanged(settings: MuonSpec, layout: Layout, shapes: Shapes) -> tuple[float, float]:
    """Return the bytes that a rank sends to the owners of the matrices, and those that it gets back.

    With ZeRO it holds a part of each. Without, each replica has all parts, so that only tensor ranks send theirs, and
    all get the whole result.
    """
    element = 2 if settings.newton_schulz_dtype == "bf16" else 4
    elements = sum(rows * columns * count for (rows, columns), count in shapes)
    share = element * elements / _ranks(layout)
    if layout.zero_stage > 0:
        return share, share
    return share if layout.tensor_parallel > 1 else 0.0, element * elements / layout.tensor_parallel


def _ranks(layout: Layout) -> int:
    """Return the ranks of a pipeline stage, which share its matrices."""
    return layout.world_size // layout.pipeline_parallel
