"""The peak of a training step over its phases, and the memory outside PyTorch's caching allocator.

Outside the allocator are the CUDA context and NCCL. NCCL's memory grows with the number of communicators, hardly with
the number of ranks beyond two nodes (NVIDIA/nccl issue 986), and with the peers of an all-to-all, each of which has a
connection of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

from scaletrain_cli.plan.axes import Axes
from scaletrain_cli.plan.memory.states import ModelStates
from scaletrain_cli.plan.result import Layout, StageMemory

# The CUDA context, with the kernels of PyTorch, cuBLAS and FlashAttention, on current GPUs.
_CONTEXT = 700_000_000
# One NCCL communicator: NVIDIA/nccl issue 964 reports 544 MB with two A100 and 688 MB with more, including growth of
# the context. The fullest run of the Ultra-Scale sweep, with four communicators, left 1.9 GB of an H100.
_COMMUNICATOR = 400_000_000
# One peer of an all-to-all: the first all-to-all of eight H100 took 3.28 GB (NVIDIA/nccl issue 1685), 0.47 GB for each
# of the seven peers in the node.
_PEER = 470_000_000
# A CPU rank: the Python process with torch and DeepSpeed (250 MB), and the arenas of malloc.
_CPU_PROCESS = 500_000_000


def outside_allocator_bytes(layout: Layout, gpus_per_node: int, is_cpu: bool = False) -> int:
    """Return the bytes that one process takes on its device outside the caching allocator."""
    if is_cpu:
        return _CPU_PROCESS
    return outside_bytes_of_axes(Axes.of(layout), gpus_per_node) + (_COMMUNICATOR if layout.zero_shard_size else 0)


def outside_bytes_of_axes(axes: Axes, gpus_per_node: int) -> int:
    """Return the bytes outside the allocator of a GPU rank, without those of groups that shard by themselves."""
    communicators = sum(degree > 1 for degree in (axes.shards, axes.tensor, axes.pipeline, axes.context))
    neighbors = axes.tensor * axes.context
    peers = max(0, min(max(axes.expert, axes.sequence), max(1, gpus_per_node // neighbors)) - 1)
    return _CONTEXT + _COMMUNICATOR * communicators + _PEER * peers


class PhaseMemory(NamedTuple):
    """Bytes of one phase of a step, beside weights, gradients and optimizer states.

    ``temporary`` exists only during the optimizer's update. ``gathered`` and ``copied``: weights that ZeRO-3 has
    gathered, and gradients that are being reduced; both are allocated on CUDA streams of their own.
    """

    activations: int
    logits: int
    buffers: int
    temporary: int
    gathered: int = 0
    copied: int = 0


def cached_bytes(passes: Sequence[PhaseMemory], update: PhaseMemory, cast: int, initial: int, largest: int) -> int:
    """Return the bytes of the caching allocator's segments beside states, after the first steps.

    The allocator keeps what is freed. It lends a free block only to a tensor on the stream that the block was allocated
    for, and only if the block is as large (c10/cuda/CUDACachingAllocator.cpp, ``get_free_block``). So each stream keeps
    its own maximum, and the ``cast`` gradients of the update, one tensor, find no room in what the passes before it
    left, unless one tensor of those was as large (``largest``). ``initial``: of a tensor that was freed before the
    first step, so that the passes and the rest of the update use its block. When memory runs short the allocator gives
    back what is not in use (``release_cached_blocks``): a run needs none of it.
    """
    used = max(sum(phase) - phase.gathered - phase.copied for phase in passes)
    if cast > largest:
        used = max(used, update.buffers + initial) + cast
    return max(used, sum(update)) + max(phase.gathered for phase in passes) + max(phase.copied for phase in passes)


def peak_memory(
    states: ModelStates, phase: PhaseMemory, fragmentation: int, framework: int, host: int, cached: int = 0
) -> StageMemory:
    """Return the bytes of a stage in its fullest phase.

    ``framework``: bytes outside the caching allocator; ``host``: bytes in the node's memory; ``cached``: what the
    allocator holds beside states when all phases have run, if that is more.
    """
    allocated = sum(states) + sum(phase)
    return StageMemory(
        parameters=states.parameters,
        gradients=states.gradients,
        optimizer_states=states.optimizer_states,
        activations=phase.activations,
        logits=phase.logits,
        communication_buffers=phase.buffers + phase.gathered + phase.copied,
        framework=framework,
        fragmentation=fragmentation,
        peak=allocated + fragmentation + framework,
        allocated=allocated,
        reserved=allocated + fragmentation,
        cached=sum(states) + max(cached, sum(phase)) + fragmentation + framework,
        host=host,
        step_temporaries=phase.temporary,
    )
