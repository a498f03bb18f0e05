"""What ZeRO-3 keeps on NVMe, brought into memory piece by piece. Knows nothing of checkpoints.

DeepSpeed's own checkpoints lose it: after loading one it begins with fresh moments and the weights of before (engine.py
load_checkpoint skips the optimizer's state; measured).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


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
