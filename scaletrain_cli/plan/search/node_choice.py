"""Which node counts are worth planning: a coarse pass, then those that could still be better. Plans and sizes none."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.search.bounds import Bounds
from scaletrain_cli.plan.search.layouts import checkpointing_modes
from scaletrain_cli.plan.search.rejections import Tally, divisors
from scaletrain_cli.plan.search.search_space import axes_to_try, groups
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.cluster import MOST_NODES

# In the coarse pass, node counts closer than this say the same twice; large clusters, which take longest to plan, are
# looked at more coarsely, since the pass after it looks closely where it matters.
_STEP = 1.2
_LARGE_STEP = 1.5
_LARGE = 16
# Node counts bounded after the coarse pass, at some ten milliseconds each.
_MOST_BOUNDED = 48


def most_nodes(spec: RunSpec, max_gpus: int) -> int:
    """Of so many GPUs; never more than a spec may name, whatever limit was given."""
    return min(max_gpus // spec.cluster.gpus_per_node, MOST_NODES)


def node_counts(spec: RunSpec, max_gpus: int) -> list[int]:
    """Node counts of the coarse pass, ascending: powers of two, counts that divide the batch, and the spec's own."""
    per_node = spec.cluster.gpus_per_node
    most = most_nodes(spec, max_gpus)
    if spec.cluster.scheduler == "local":
        return [1]
    wanted = {1 << power for power in range(most.bit_length())}
    dividing = [ranks // per_node for ranks in divisors(spec.training.global_batch_size) if ranks % per_node == 0]
    found: list[int] = []
    for count in sorted(count for count in wanted | set(dividing) if count <= most):
        step = _STEP if count <= _LARGE else _LARGE_STEP
        if not found or count >= step * found[-1] or count in wanted:
            found.append(count)
    return sorted({*found, *([spec.cluster.nodes] if spec.cluster.nodes <= most else [])})


def likeliest(spec: RunSpec, counts: Sequence[int], near: int) -> list[int]:
    """Of many node counts, those that divide best and are nearest to ``near``, ascending.

    Data parallelism divides the batch, so the ranks over their common divisor must be shared out in another way: the
    less of that a count asks for, the more layouts it has.
    """
    per_node, batch = spec.cluster.gpus_per_node, spec.training.global_batch_size

    def order(nodes: int) -> tuple[int, int]:
        ranks = nodes * per_node
        return ranks // math.gcd(ranks, batch), abs(nodes - near)

    return sorted(sorted(counts, key=order)[:_MOST_BOUNDED])


def least_step_seconds(spec: RunSpec) -> float:
    """No layout of this cluster takes a shorter step; infinite where no layout divides."""
    bounds = Bounds(spec, find_accelerator(spec.cluster), checkpointing_modes(spec)[0])
    found = (bounds.step_seconds(group.axes, group.micro_batches) for group in groups(spec, axes_to_try(spec, Tally())))
    return min((min(seconds) for seconds in found), default=math.inf)
