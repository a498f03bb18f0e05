"""Which blocks each pipeline stage holds: by time as our engine cuts them, by number or weight as others do.

Pure counts from the model's dimensions; knows no layout, no memory and no device.
"""

from __future__ import annotations

from functools import lru_cache

from scaletrain_cli.plan.architecture import (
    attention_matmul_flops,
    block_attention_flops,
    head_flops,
    mlp_matmul_flops,
)
from scaletrain_cli.spec import ModelSpec

# More blocks are spread by number, never by cost: nobody trains them, and a typing slip must end soon.
MOST_BLOCKS = 4096


def blocks_by_stage(model: ModelSpec, stages: int, framework: str) -> tuple[int, ...]:
    """Blocks on each of ``stages`` pipeline stages, as ``framework`` spreads them."""
    if framework == "deepspeed":
        return blocks_per_stage(model, stages)
    if framework == "nanotron" and stages > 1:
        return _by_weight(model, stages)
    return _by_number(model.num_hidden_layers, stages)


@lru_cache(maxsize=4096)
def blocks_per_stage(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """Blocks on each stage of our engine's pipeline: the slowest stage as fast as can be, the others alike.

    A stage costs the forward FLOPs of its blocks, the last one those of the head as well (the backward pass is twice
    the forward for both, and looking up embeddings costs next to nothing). Blocks count alike, with experts or not.
    What does not divide goes to the stages before the last, which hold fewer micro-batches in flight than the first.
    Every stage gets at least one block; ``stages`` must not exceed the blocks.
    """
    layers = model.num_hidden_layers
    if stages == 1:
        return (layers,)
    block = attention_matmul_flops(model) + block_attention_flops(model)
    block += mlp_matmul_flops(model, experts=bool(model.num_experts))
    head = head_flops(model)
    others, most = stages - 1, layers - (stages - 1)
    even = (layers * block - others * head) // (stages * block)  # blocks that make the last stage an average one

    def cost(last: int) -> tuple[int, int, int]:
        each, left = divmod(layers - last, others)
        slowest = max((each + (left > 0)) * block, last * block + head)
        squares = left * (each + 1) ** 2 + (others - left) * each**2
        return slowest, squares * block**2 + (last * block + head) ** 2, last

    last = min((min(max(1, even + near), most) for near in (-1, 0, 1, 2)), key=cost)
    each, left = divmod(layers - last, others)
    return (*[each] * (others - left), *[each + 1] * left, last)


def _by_number(layers: int, stages: int) -> tuple[int, ...]:
    """The first stages take what does not divide."""
    return tuple(layers // stages + (1 if index < layers % stages else 0) for index in range(stages))


@lru_cache(maxsize=4096)
def _by_weight(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """As nanotron does (models/base.py build_model): a stage ends at the block with which the cost reaches its share.

    The head costs what it weighs. Step times of the published 1B to 8B runs over 2 to 32 stages tell it from its
    variants (a share that must be passed, a block that opens the next stage, a head that costs nothing).
    """
    layers = model.num_hidden_layers
    block = model.hidden_size * (
        4 * model.num_attention_heads * model.head_dim + (3 if model.has_gated_mlp else 2) * model.intermediate_size
    )
    total = layers * block + model.vocab_size * model.hidden_size
    starts = [0]
    for stage in range(1, stages):  # counted by stage: a spec may have a billion blocks
        starts.append(min(layers, max(starts[-1] + 1, -(-total * stage // (block * stages)))))
    return tuple(end - start for start, end in zip(starts, [*starts[1:], layers], strict=True))


@lru_cache(maxsize=1024)
def loss_stage(model: ModelSpec, stages: int) -> int:
    """The stage on which nanotron computes the loss (models/base.py build_model), which must be the last.

    The head goes on where the blocks end and fills its stage; the cast of the logits and the loss cost nothing, and
    each moves on as long as stages are full. With many stages some are left empty behind the loss.
    """
    layers, hidden = model.num_hidden_layers, model.hidden_size
    if layers > MOST_BLOCKS:
        return stages - 1
    block = hidden * (4 * model.num_attention_heads * model.head_dim + 3 * model.intermediate_size)
    head = model.vocab_size * hidden
    total, cost, stage, placed = layers * block + head, 0, 0, 0
    for weight in (*[block] * layers, 0, head, 0, 0):  # blocks, final norm, head, cast, loss
        placed, cost = stage, cost + weight
        if stage < stages - 1 and cost * stages >= total * (stage + 1):
            stage += 1
    return placed
