"""What is alive at one moment of a training step, and the peak that follows. Knows no model, framework or device."""

from __future__ import annotations

from typing import NamedTuple

from scaletrain_cli.plan.memory.states import ModelStates
from scaletrain_cli.plan.result import StageMemory


class Moment(NamedTuple):
    """Bytes beside the model's states; ``temporary`` is what the optimizer step takes and gives back."""

    activations: int
    logits: int
    buffers: int
    temporary: int


def peak_memory(states: ModelStates, moment: Moment, fragmentation: int, framework: int, host: int) -> StageMemory:
    """Bytes of a stage at its worst moment. ``framework``: outside the allocator; ``host``: in the node's memory."""
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
