"""The random generators of a rank, as bytes for a checkpoint."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """Of Python, NumPy and torch, pickled; uint8."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def restore_random_state(saved: Tensor, device: torch.device) -> None:
    """Go on from what ``random_state`` found. The file that it comes from was verified by its hash."""
    state = torch.load(io.BytesIO(saved.numpy().tobytes()), weights_only=False)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
