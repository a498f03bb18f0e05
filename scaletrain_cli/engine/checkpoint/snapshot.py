"""What a rank holds of the training state, copied to the host and back. Knows no file format and no commit.

A checkpoint consists of kinds: ``weight``, the optimizer's elementwise states under its own names (``exp_avg``), and
``average``. Each is one value per element of a matrix, so each can be shared out anew. States quantised in blocks
cannot: they are ``opaque`` and fit only the layout that saved them.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scaletrain_cli.engine.checkpoint.flat_shards import FlatShard, HeldStates
from scaletrain_cli.engine.checkpoint.shard_file import OPAQUE, Entry, StateReader
from scaletrain_cli.engine.optim.averaging import WeightAverage
from scaletrain_cli.engine.optim.master_weights import use_master_weights
from scaletrain_cli.errors import UsageError

# The few numbers that DeepSpeed counts besides what it trains, as a checkpoint keeps them: steps, loss scale.


_ENGINE = ("global_steps", "global_samples", "skipped_steps")
_LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def counters(engine: Any) -> dict[str, dict[str, float]]:
    """As they are now, the same on every rank and in every layout. The loss scale is that of fp16, else empty."""
    found = {"engine": {name: getattr(engine, name) for name in _ENGINE}, "loss_scaler": {}}
    if engine.fp16_enabled():
        found["loss_scaler"] = {name: getattr(engine.optimizer.loss_scaler, name) for name in _LOSS_SCALER}
    return found


def set_counters(engine: Any, saved: dict[str, dict[str, float]]) -> None:
    """Go on from what ``counters`` found."""
    for name, value in saved["engine"].items():
        setattr(engine, name, value)
    for name, value in saved["loss_scaler"].items():
        setattr(engine.optimizer.loss_scaler, name, value)


# The random generators of a rank, as bytes for a checkpoint: JSON, so that loading one can run no code.


SCHEMA = "scaletrain.random/v1"
_NUMPY_WORDS = 624  # of MT19937, which is what np.random has


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
    """Set the generators to what ``random_state`` returned. Raises UsageError where it is anything else."""
    try:
        state = json.loads(saved.numpy().tobytes())
        if state["schema"] != SCHEMA:
            raise ValueError(state["schema"])
        version, words, gauss = state["python"]
        name, keys, position, has_gauss, cached = state["numpy"]
        # NumPy takes what it is given: a position past the end would read outside its words.
        if name != "MT19937" or len(keys) != _NUMPY_WORDS or not 0 <= position <= _NUMPY_WORDS:
            raise ValueError("numpy")
        random.setstate((version, tuple(words), gauss))
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_tensor(state["torch"]))
        if "cuda" in state and device.type == "cuda":
            torch.cuda.set_rng_state(_tensor(state["cuda"]), device)
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError) as error:
        raise UsageError(
            f"the checkpoint's random state is not {SCHEMA}: another version of scaletrain wrote it, in a format that "
            "this version does not load because it can run code. Resume with the version that wrote it, or export the "
            "weights with `scaletrain checkpoint export` and start a run with model.weights."
        ) from error


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


WEIGHT, AVERAGE = "weight", "average"


class Snapshot:
    """Copies the state of a rank into buffers on the host that are allocated once, pinned where there is a GPU."""

    def __init__(self, states: HeldStates, average: WeightAverage | None) -> None:
        self._states, self._average = states, average
        self._buffers: dict[str, Tensor] = {}
        self._pinned = states.device.type == "cuda"

    @torch.no_grad()
    def take(self) -> tuple[list[Entry], dict[str, float]]:
        """All that this rank saves, as it is now, and what its optimizer counts. Valid until the next call.

        The first call allocates; so that this delays no save, call it once before.
        """
        entries: list[Entry] = []
        counts: dict[str, float] = {}
        for holder in self._states.holders:
            with self._states.weight(holder) as weight:
                for kind, values in self._kinds(holder, weight):
                    entries += self._copied(holder, kind, values)
                for name, value in self._states.optimizer_states(weight).items():
                    if not isinstance(value, Tensor) or value.dim() == 0:
                        counts[name] = float(value)
        if self._pinned:
            torch.cuda.current_stream(self._states.device).synchronize()
        return entries, counts

    def _kinds(self, holder: FlatShard, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield WEIGHT, weight.detach()
        states = {name: value for name, value in self._states.optimizer_states(weight).items() if _is_tensor(value)}
        elementwise = is_elementwise(states, weight)
        for name, value in sorted(states.items()):  # equal states make equal files
            yield (name if elementwise else f"{OPAQUE}/{holder.index}/{name}"), value
        if self._average is not None and self._average.taken:
            yield AVERAGE, self._average.averages[holder.index]

    def _copied(self, holder: FlatShard, kind: str, values: Tensor) -> Iterator[Entry]:
        """The owned part in one copy, as views of it by name."""
        flat = values.reshape(-1)
        if kind.startswith(OPAQUE):
            yield Entry(kind, self._buffer(kind, flat).copy_(flat, non_blocking=True))
        elif holder.owned:
            first = holder.owned[0].offset
            last = max(held.offset + held.piece.numel for held in holder.owned)
            buffer = self._buffer(f"{kind}/{holder.index}", flat[first:last])
            buffer.copy_(flat[first:last], non_blocking=True)
            for piece, offset in holder.owned:
                yield Entry(f"{kind}/{piece.name}", buffer[offset - first : offset - first + piece.numel])

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        found = self._buffers.get(name)
        if found is None or found.numel() != like.numel():
            found = torch.zeros(like.numel(), dtype=like.dtype, pin_memory=self._pinned)  # zeros: the pages are there
            self._buffers[name] = found
        return found


@torch.no_grad()
def put_back(reader: StateReader, states: HeldStates, average: WeightAverage | None, engine: Any) -> None:
    """Write what a checkpoint holds into a rank's holders, in a fresh engine as in one that trains. Collective.

    Raises ScaletrainError for a checkpoint that has not all of it, UsageError for one that another layout cannot read.
    """
    averages: list[Tensor] = []
    for holder in states.holders:
        opaque = reader.opaque(holder.index)
        with states.weight(holder) as weight:
            weight.view(-1).copy_(_whole(holder, WEIGHT, reader))
            own = states.optimizer_states(weight)
            for kind in sorted(reader.kinds - {WEIGHT, AVERAGE}) if not opaque else ():
                _fill(own, kind, weight, _whole(holder, kind, reader))
            for name, values in opaque.items():
                own[name] = values.to(weight.device)
            for name, count in reader.counts.items():
                _set_count(own, name, count, states.place_of_counts(weight))
            if AVERAGE in reader.kinds:
                averages.append(_whole(holder, AVERAGE, reader).to(weight.device))
    if average is not None:
        average.averages = [flat.view(w.shape) for flat, w in zip(averages, average.weights, strict=False)]
    use_master_weights(engine)


def _whole(holder: FlatShard, kind: str, reader: StateReader) -> Tensor:
    """All of a holder, with zeros for padding."""
    values = torch.zeros(holder.numel)
    for piece, offset in holder.held:
        values[offset : offset + piece.numel] = reader.read(kind, piece)
    return values


def _fill(states: dict[str, Any], name: str, weight: Tensor, values: Tensor) -> None:
    if name in states:
        states[name].view(-1).copy_(values)
    else:
        states[name] = values.to(weight.device).view(weight.shape)


def _set_count(states: dict[str, Any], name: str, count: float, place: torch.device | None) -> None:
    """Adam's step number: a tensor in torch, a whole number in bitsandbytes, which has no ``place`` for it."""
    if isinstance(states.get(name), Tensor):
        states[name].fill_(count)
    else:
        states[name] = int(count) if place is None else torch.tensor(count, dtype=torch.float32, device=place)


def is_elementwise(states: dict[str, Tensor], weight: Tensor) -> bool:
    """Whether every state is one value per weight; bitsandbytes' 8-bit ones come with scales of blocks."""
    return all(state.numel() == weight.numel() for state in states.values())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
