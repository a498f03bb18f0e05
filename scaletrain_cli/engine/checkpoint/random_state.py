"""The random generators of a rank as JSON, so that loading them cannot run code."""

import base64
import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason

SCHEMA = "scaletrain.random/v1"
_NUMPY_WORDS = 624  # of MT19937, the generator of np.random


def random_state(device: torch.device) -> Tensor:
    """Return the states of Python's, NumPy's and torch's generators, and the device's, as UTF-8 JSON; uint8."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "schema": SCHEMA,
        "python": [version, list(words), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _text(torch.cuda.get_rng_state(device))
    return torch.frombuffer(bytearray(json.dumps(state, separators=(",", ":")).encode()), dtype=torch.uint8)


def restore_random_state(saved: Tensor, device: torch.device) -> None:
    """Set the generators to what ``random_state`` returned. Raises UsageError for anything else."""
    try:
        state = json.loads(saved.numpy().tobytes())
        if state["schema"] != SCHEMA:
            raise ValueError(state["schema"])
        version, words, gauss = state["python"]
        name, keys, position, has_gauss, cached = state["numpy"]
        # NumPy does not check its input: a position past the end would read outside its words.
        if name != "MT19937" or len(keys) != _NUMPY_WORDS or not 0 <= position <= _NUMPY_WORDS:
            raise ValueError("numpy")
        random.setstate((version, tuple(words), gauss))
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_tensor(state["torch"]))
        if "cuda" in state and device.type == "cuda":
            torch.cuda.set_rng_state(_tensor(state["cuda"]), device)
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError) as error:
        raise UsageError(Reason("engine.random-state-unknown", {"schema": SCHEMA})) from error


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
