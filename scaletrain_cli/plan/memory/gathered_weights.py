"""Compute how many weights ZeRO-3 gathers and holds in a micro-batch, by a replay of DeepSpeed's rules.

From the second step on DeepSpeed knows in which order modules use their parameters in the passes of a micro-batch
(DeepSpeed 0.19.8, partitioned_param_coordinator.py). The replay follows its rules:

* A module that begins gathers its weights, if they are not there (``_fetch_sub_module_impl``), and then those of the
  next modules: until the elements gathered ahead reach stage3_prefetch_bucket_size, or all that are there reach
  stage3_max_live_parameters; the last matrix may exceed either. Weights that are there are passed over.
* A module that ends frees its weights (``__params_to_release``), unless a use was passed over which is still to come,
  or is less than stage3_max_reuse_distance elements of other uses away.
* Small parameters (stage3_param_persistence_threshold) are never freed; they are gathered after the update.

So the matrices at the end of the forward pass are still there in the backward pass, as many as fit into
stage3_max_live_parameters together, and of a small model all. A recomputed block uses the last matrix first, because
the backward pass of that asks for the recomputation, and then all from the first on. Of a block that fits in part
little more than the last matrix stays: the others, behind those that were freed, are freed before their turn comes.
"""

import bisect
import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from scaletrain_cli.plan.memory.activations import Recomputation
from scaletrain_cli.plan.memory.buffers import PERSISTENT_ELEMENTS, REUSE_ELEMENTS
from scaletrain_cli.plan.memory.parameter_groups import BlockMatrices, matrices_in_order
from scaletrain_cli.spec import ModelSpec

# Blocks between as many first and last ones are left out: their weights are gathered in each pass.
_MOST_BLOCKS = 64


class GatheredWeights(NamedTuple):
    """Elements of the matrices of a rank, without small ones: all, and those that a micro-batch gathers.

    ``loss`` and ``head``: those that are there when the head runs forward and backward. ``backward``: how many blocks
    have not run backward yet, and the most that are there when the last of them does, where these are more than at any
    block that ran backward before it.
    """

    elements: int
    gathered: int
    loss: int
    head: int
    backward: tuple[tuple[int, int], ...]


class _Use(NamedTuple):
    """A module begins or ends; ``matrix``: the place of its matrix among all, _NONE if it has none."""

    matrix: int
    begins: bool


_NONE = -1
# Modules of the engine without a matrix begin, too, and gather ahead then (engine/model/base.py): a block, its norm
# and its attention; dropout, the norm and the MLP; dropout. Backward in the opposite order, but what others are part of
# begins before them.
_BEGINS = _Use(_NONE, True)


@lru_cache(maxsize=1024)
def gathered_weights(
    model: ModelSpec, tensor: int, expert: int, recompute: Recomputation, live: int, prefetch: int
) -> GatheredWeights:
    """Return what a micro-batch gathers on one of ``tensor`` tensor ranks, of ``expert`` ranks that share experts.

    ``live``: stage3_max_live_parameters; ``prefetch``: stage3_prefetch_bucket_size.
    """
    opening, runs, closing = matrices_in_order(model, tensor, expert)
    blocks, left_out = _first_and_last(runs)
    sizes: list[int] = []
    table = _add(sizes, opening)
    forward, backward = [_BEGINS, *_each(table), _BEGINS], list[list[_Use]]()
    for place, block in blocks:
        attention, others = _add(sizes, block.attention), _add(sizes, block.others)
        forward += [*_forward(attention, others), _BEGINS]
        backward.append(_backward(attention, others, recompute, whole=recompute.blocks(1, place) == 1))
    head = _add(sizes, closing) if closing else table
    forward += [_BEGINS, *_each(head)]
    parts = [[_BEGINS, *_each(head), _BEGINS], *backward[::-1], [_BEGINS, *(_Use(matrix, True) for matrix in table)]]
    gathered, held = _replay(sizes, [*forward, *itertools.chain(*parts)], live, prefetch)
    at_loss, behind = held[len(forward) - 2], held[len(forward) :]
    at_head, behind = behind[1], behind[len(parts[0]) :]  # the head begins after the model
    most, fullest = 0, list[tuple[int, int]]()
    for (place, _), part in zip(blocks[::-1], parts[1:], strict=False):
        if (there := max(behind[: len(part)])) > most:
            most = there
            fullest.append((place + 1, there))
        behind = behind[len(part) :]
    return GatheredWeights(left_out + sum(sizes), 2 * left_out + gathered, at_loss, at_head, tuple(fullest))


def _first_and_last(runs: Sequence[tuple[BlockMatrices, int]]) -> tuple[list[tuple[int, BlockMatrices]], int]:
    """Return the first and last blocks with their places, and the elements of the large matrices of those between."""
    blocks: list[tuple[int, BlockMatrices]] = []
    count, first, left_out = sum(times for _, times in runs), 0, 0
    for block, times in runs:
        ahead = range(first, min(first + times, _MOST_BLOCKS))
        behind = range(max(first, _MOST_BLOCKS, count - _MOST_BLOCKS), first + times)
        blocks += [(place, block) for place in (*ahead, *behind)]
        left_out += (times - len(ahead) - len(behind)) * sum(_large((*block.attention, *block.others)))
        first += times
    return blocks, left_out


def _large(sizes: Sequence[int]) -> list[int]:
    return [size for size in sizes if size > PERSISTENT_ELEMENTS]


def _add(sizes: list[int], of_part: Sequence[int]) -> list[int]:
    """Append those of a part of the model that are not small, and return their places."""
    sizes += (large := _large(of_part))
    return list(range(len(sizes) - len(large), len(sizes)))


def _each(matrices: Sequence[int]) -> list[_Use]:
    return [_Use(matrix, begins) for matrix in matrices for begins in (True, False)]


def _forward(attention: list[int], others: list[int]) -> list[_Use]:
    return [_BEGINS, _BEGINS, _BEGINS, *_each(attention), _BEGINS, _BEGINS, _BEGINS, *_each(others)]


def _backward(attention: list[int], others: list[int], recompute: Recomputation, *, whole: bool) -> list[_Use]:
    """Return the uses of a block's matrices in its backward pass; ``whole``: it is recomputed.

    The backward pass of the last matrix asks for the recomputation, which ends within its module
    (torch/utils/checkpoint.py, early stop).
    """
    uses = [_BEGINS, _BEGINS, _BEGINS]
    if whole and others:
        *before, last = others
        again = _forward(attention, before)[1:]
        uses += [_Use(last, True), *again, _Use(last, True), _Use(last, False), *_each(before[::-1])]
    else:
        uses += _each(others[::-1])
    uses += [_BEGINS, _BEGINS, _BEGINS]
    if recompute.attention_only and attention:
        *before, last = attention
        uses += [_Use(last, True), *_each(before), _Use(last, True), _Use(last, False), *_each(before[::-1])]
    else:
        uses += _each(attention[::-1])
    return [*uses, _BEGINS]


def _replay(sizes: Sequence[int], uses: Sequence[_Use], live: int, prefetch: int) -> tuple[int, list[int]]:
    """Return the elements that are gathered for the uses of matrices of these sizes, and those held after each use."""
    order = [use.matrix for use in uses if use.begins]
    places: list[list[int]] = [[] for _ in sizes]  # in ``order``, at which each is used
    traversed = [0]
    for place, matrix in enumerate(order):
        traversed.append(traversed[-1] + (0 if matrix == _NONE else sizes[matrix]))
        if matrix != _NONE:
            places[matrix].append(place)
    passed_over = [-1] * len(sizes)  # the last place of each that was looked at
    held = [False] * len(sizes)
    ahead = step = available = gathered = 0
    after: list[int] = []
    for matrix, begins in uses:
        if begins:
            fetched = 0
            if matrix != _NONE and not held[matrix]:
                held[matrix], fetched = True, sizes[matrix]
            available += fetched
            ahead = max(ahead, step + 1)
            most, of_next = min(live - available, prefetch), 0
            while ahead < len(order) and of_next < most:
                if (following := order[ahead]) != _NONE:
                    passed_over[following] = ahead
                    if not held[following]:
                        held[following] = True
                        of_next += sizes[following]
                ahead += 1
            available += of_next
            gathered += fetched + of_next
            step += 1
        elif passed_over[matrix] <= step and not _comes_soon(places[matrix], step, traversed):
            held[matrix] = False
            available -= sizes[matrix]
        after.append(available)
    return gathered, after


def _comes_soon(places: Sequence[int], step: int, traversed: Sequence[int]) -> bool:
    """Return whether a matrix is used again within stage3_max_reuse_distance of the modules from ``step`` on."""
    next_use = bisect.bisect_left(places, step)
    return next_use < len(places) and traversed[places[next_use]] - traversed[step] < REUSE_ELEMENTS
