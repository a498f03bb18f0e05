"""The peak of a training step over its phases, and memory outside PyTorch's allocator.

NCCL's memory grows with the number of communicators, not of ranks beyond two nodes (NVIDIA/nccl issue 986),
and with the peers of an all-to-all, each a separate connection.
"""

from __future__ import annotations

from typing import NamedTuple

from scaletrain_cli.plan.memory.states import ModelStates
from scaletrain_cli.plan.result import Layout, StageMemory

# The context with the kernels of PyTorch, cuBLAS and flash attention, on current GPUs.
_CONTEXT = 700_000_000
# One communicator: 544 MB with two A100, 688 MB with more (NVIDIA/nccl issue 964), the context's growth included. The
# fullest run of the Ultra-Scale sweep, with four of them, left 1.9 GB of an H100.
_COMMUNICATOR = 400_000_000
# The first all-to-all of eight H100 took 3.28 GB (NVIDIA/nccl issue 1685): 0.47 GB for each of seven peers in a node.
_PEER = 470_000_000
# A CPU rank: the interpreter with torch and DeepSpeed, 250 MB, and its arenas.
_CPU_PROCESS = 500_000_000


def outside_allocator_bytes(layout: Layout, gpus_per_node: int, is_cpu: bool = False) -> int:
    """Return the bytes of one process on its device outside of tensors."""
    if is_cpu:
        return _CPU_PROCESS
    axes = (
        layout.data_parallel * layout.sequence_parallel * layout.context_parallel,
        layout.tensor_parallel,
        layout.pipeline_parallel,
        layout.context_parallel,
    )
    communicators = sum(degree > 1 for degree in axes)
    neighbors = layout.tensor_parallel * layout.context_parallel
    exchanging = max(layout.expert_parallel, layout.sequence_parallel)
    peers = max(0, min(exchanging, max(1, gpus_per_node // neighbors)) - 1)
    return _CONTEXT + _COMMUNICATOR * communicators + _PEER * peers


class PhaseMemory(NamedTuple):
    """Bytes beside the model's states; ``temporary`` exists during the optimizer step only."""

    activations: int
    logits: int
    buffers: int
    temporary: int


def peak_memory(states: ModelStates, moment: PhaseMemory, fragmentation: int, framework: int, host: int) -> StageMemory:
    """Return the bytes of a stage at its peak. ``framework``: outside the allocator; ``host``: in the node's memory."""
    allocated = sum(states) + sum(moment)
    return StageMemory(
        parameters=states.parameters,
        gradients=states.gradients,
        optimizer_states=states.optimizer_states,
        activations=moment.activations,
        logits=moment.logits,
        communication_buffers=moment.buffers,
        framework=framework,
        fragmentation=fragmentation,
        peak=allocated + fragmentation + framework,
        allocated=allocated,
        reserved=allocated + fragmentation,
        host=host,
        step_temporaries=moment.temporary,
    )
