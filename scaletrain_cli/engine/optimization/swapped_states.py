"""Checkpoints of what ZeRO-3 keeps on NVMe. Knows nothing of how they are written.

DeepSpeed copies its swap files into the checkpoint, past whoever writes and hashes that, and after loading them begins
with fresh moments and the weights of before (engine.py load_checkpoint skips the optimizer's state; measured). Here the
swapped pieces pass through memory instead, as a part of the checkpoint like any other.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class SwappedStates:
    """The pieces of this rank that lie on NVMe. A save needs as much host memory as they are large."""

    def __init__(self, engine: Any) -> None:
        """From here on DeepSpeed leaves its swap files out of checkpoints."""
        self._outer = engine.optimizer
        engine.zero_nvme_offload_optimizer = lambda: False

    def state_dict(self) -> dict[str, Any]:
        """Copies of fp32 weights and optimizer states, piece by piece."""
        pieces = []
        for index in self._swapped():
            with self._in_memory(index) as weight:
                states = self._outer.optimizer.state[weight]
                pieces.append({"weight": weight.detach().clone(), "states": {k: _copy(v) for k, v in states.items()}})
        return {"pieces": pieces}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict`` of the same rank in the same layout, after DeepSpeed has loaded the rest."""
        outer = self._outer
        outer._partition_all_parameters()
        for index, piece in zip(self._swapped(), state["pieces"], strict=True):
            with self._in_memory(index) as weight:
                weight.copy_(piece["weight"])
                outer.optimizer.state[weight] = piece["states"]
                outer._reassign_or_swap_out_partitioned_parameters(index)
        if outer.persistent_parameters:
            outer.persistent_parameters[0].all_gather(outer.persistent_parameters)

    def _swapped(self) -> list[int]:
        """Pieces below a megabyte stay in memory, where DeepSpeed saves them."""
        pieces = range(len(self._outer.fp16_groups))
        return [index for index in pieces if self._outer._swappable_optimizer_subgroup(index)]

    @contextmanager
    def _in_memory(self, index: int) -> Generator[Tensor]:
        self._outer._optimizer_states_and_gradient_swap_in(index)
        yield self._outer.fp32_partitioned_groups_flat[index]
        self._outer._optimizer_states_and_gradient_swap_out(index)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
