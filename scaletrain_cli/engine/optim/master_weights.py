"""The fp32 weights that this rank's optimizer updates, in each of DeepSpeed's wrappers. Knows no averages.

The wrappers have no common way to them: zero/stage_1_and_2.py, zero/stage3.py and bf16_optimizer.py name their flat
partitions each in its own way. Without ZeRO they are the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# What ZeRO-3 keeps on NVMe, brought into memory piece by piece.


@contextmanager
def in_memory(optimizer: Any, index: int) -> Generator[Tensor]:
    """Piece ``index`` of the fp32 weights of DeepSpeed's stage 3, with its optimizer states; what changes is kept.

    Pieces below a megabyte never leave memory.
    """
    swapped = optimizer._swappable_optimizer_subgroup(index)
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_in(index)
    yield optimizer.fp32_partitioned_groups_flat[index]
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_out(index)


def master_weights(engine: Any) -> list[Tensor]:
    """This rank's share, as flat pieces that the optimizer writes into; together the ranks hold every weight."""
    optimizer = engine.optimizer
    for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return [parameter for parameter in engine.module.parameters() if parameter.requires_grad]


@torch.no_grad()
def use_master_weights(engine: Any) -> None:
    """Let every rank compute with the master weights as they are now, as after a step. Collective."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        optimizer._partition_all_parameters()
        for index in range(len(optimizer.fp32_partitioned_groups_flat)):
            with in_memory(optimizer, index):
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if optimizer.persistent_parameters:  # small ones stay whole on every rank
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    elif stage > 0:
        optimizer.update_lp_params()
