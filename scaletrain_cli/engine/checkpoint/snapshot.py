"""Copy the training state of a rank to host memory and back.

A checkpoint has several kinds of state: ``weight``, the elementwise states of the optimizer under their own names
(``exp_avg``), and ``average``. Each has one value per element of a matrix, so any layout can read it. States that are
quantized in blocks are ``opaque``: only the layout that saved them can read them. The random generators are JSON, so
that loading them cannot run code.
"""

import base64
import json
import random
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from scaletrain_cli.engine.checkpoint.flat_shards import FlatShard, FrozenShard, ShardedState
from scaletrain_cli.engine.checkpoint.shard_file import OPAQUE, Entry, Slice
from scaletrain_cli.engine.optim.averaging import WeightAverage
from scaletrain_cli.engine.optim.deepspeed_optimizer import use_master_weights
from scaletrain_cli.engine.optim.local_sgd import LocalSGD
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason

_ENGINE = ("global_steps", "global_samples", "skipped_steps")
_LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def counters(engine: Any) -> dict[str, dict[str, float]]:
    """Return the counters, the same on every rank and in every layout. ``loss_scaler`` is empty without fp16."""
    counts = {"engine": {name: getattr(engine, name) for name in _ENGINE}, "loss_scaler": {}}
    if engine.fp16_enabled():
        counts["loss_scaler"] = {name: getattr(engine.optimizer.loss_scaler, name) for name in _LOSS_SCALER}
    return counts


def set_counters(engine: Any, saved: dict[str, dict[str, float]]) -> None:
    """Restore what ``counters`` returned."""
    for name, value in saved["engine"].items():
        setattr(engine, name, value)
    for name, value in saved["loss_scaler"].items():
        setattr(engine.optimizer.loss_scaler, name, value)


WEIGHT, AVERAGE = "weight", "average"
# Of local SGD: the outer weights and their momentum. States of group g, above the first one, have names with "@g".
OUTER, OUTER_MOMENTUM = "outer", "outer_momentum"


class Counts(NamedTuple):
    """The counters of an optimizer: those of the first shard, and by name those of parameters that differ."""

    usual: dict[str, float]
    others: dict[str, dict[str, float]]

    def with_shard(self, shard: FlatShard, counts: dict[str, float]) -> "Counts":
        if not self.usual:
            return Counts(counts, self.others)
        if counts == self.usual:
            return self
        return Counts(self.usual, self.others | {placed.slice.name: counts for placed in shard.owned})


class CountedState(Protocol):
    """State by name, as ``StateReader`` reads it from files and a change of stage from memory."""

    @property
    def kinds(self) -> set[str]: ...

    def has(self, kind: str, name: str) -> bool: ...

    def counts_of(self, name: str) -> Mapping[str, float]: ...

    def read(self, kind: str, part: Slice) -> Tensor: ...

    def opaque(self, shard: int) -> dict[str, Tensor]: ...


class Snapshot:
    """Copies the state of a rank into host buffers that are allocated once, pinned if there is a GPU."""

    def __init__(self, states: ShardedState, average: WeightAverage | None, local_sgd: LocalSGD | None = None) -> None:
        self._states, self._average, self._local_sgd = states, average, local_sgd
        self._buffers: dict[str, Tensor] = {}
        self._frozen: list[Entry] | None = None
        self._pinned = states.device.type == "cuda"

    @torch.no_grad()
    def take(self) -> tuple[list[Entry], Counts]:
        """Return all state that this rank saves, and the counters of its optimizer. Valid until the next call.

        The first call allocates the buffers; call it once before the first save.
        """
        entries: list[Entry] = []
        counts, counters = Counts({}, {}), self._states.counter_names()
        for shard in self._states.shards:
            with self._states.weight(shard) as weight:
                mark = "" if self._local_sgd is None else _mark(self._local_sgd)
                for kind, values in self._kinds(shard, weight, counters):
                    entries += self._copied(shard, kind + mark, values)
                states = self._states.optimizer_states(weight)
                own = {name: float(value) for name, value in states.items() if name in counters}
            counts = counts.with_shard(shard, own)
        if self._frozen is None:
            self._frozen = [entry for shard in self._states.frozen for entry in self._of_frozen(shard)]
        entries += self._frozen
        for buffer in self._states.buffers:
            entries += self._of_frozen(buffer)
            if self._average is not None and (average := self._average.average_of(buffer.parameter)) is not None:
                entries += self._of_frozen(replace(buffer, parameter=average), AVERAGE)
        if self._pinned:
            torch.cuda.current_stream(self._states.device).synchronize()
        return entries, counts

    def frozen_changed(self) -> None:
        """Copy the frozen weights again in the next call of ``take``; otherwise they are copied only once."""
        self._frozen = None

    def _of_frozen(self, shard: FrozenShard, kind: str = WEIGHT) -> Iterator[Entry]:
        place = "frozen" if kind == WEIGHT else f"{kind} of buffer"
        for part, offset in shard.owned:
            values = shard.values[offset : offset + part.numel]
            yield Entry(
                f"{kind}/{part.name}", self._buffer(f"{place}/{part.name}", values).copy_(values, non_blocking=True)
            )

    def _kinds(self, shard: FlatShard, weight: Tensor, counters: Container[str]) -> Iterator[tuple[str, Tensor]]:
        yield WEIGHT, weight.detach()
        states = {name: value for name, value in self._states.optimizer_states(weight).items() if name not in counters}
        # bitsandbytes' 8-bit states have scales per block
        elementwise = all(state.numel() == weight.numel() for state in states.values())
        for name, value in sorted(states.items()):  # sorted, so that equal states make equal files
            yield (name if elementwise else f"{OPAQUE}/{shard.index}/{name}"), value
        if self._local_sgd is not None and self._local_sgd.groups.rank == 0:
            yield OUTER, self._local_sgd.outer[shard.index]
            if self._local_sgd.momentum:
                yield OUTER_MOMENTUM, self._local_sgd.momentum[shard.index]
        if self._average is not None and self._average.taken:
            yield AVERAGE, self._average.averages[shard.index]

    def _copied(self, shard: FlatShard, kind: str, values: Tensor) -> Iterator[Entry]:
        """Copy the owned part at once, and yield views of it by name."""
        flat = values.reshape(-1)
        if kind.startswith(OPAQUE):
            yield Entry(kind, self._buffer(kind, flat).copy_(flat, non_blocking=True))
        elif shard.owned:
            first = shard.owned[0].offset
            last = max(placed.offset + placed.slice.numel for placed in shard.owned)
            buffer = self._buffer(f"{kind}/{shard.index}", flat[first:last])
            buffer.copy_(flat[first:last], non_blocking=True)
            for part, offset in shard.owned:
                yield Entry(f"{kind}/{part.name}", buffer[offset - first : offset - first + part.numel])

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() != like.numel():
            buffer = torch.zeros(like.numel(), dtype=like.dtype, pin_memory=self._pinned)  # zeros touches the pages
            self._buffers[name] = buffer
        return buffer


@torch.no_grad()
def restore_state(
    reader: CountedState,
    states: ShardedState,
    average: WeightAverage | None,
    engine: Any,
    local_sgd: LocalSGD | None = None,
) -> None:
    """Write the state of a checkpoint into a rank's shards, in a new engine or one that has trained. Collective.

    Parameters whose weights the reader does not have keep theirs, and have no states of the optimizer yet. Raises
    ScaletrainError if the checkpoint is incomplete, and UsageError if another layout cannot read it.
    """
    averages: list[Tensor] = []
    mark = "" if local_sgd is None else _mark(local_sgd)  # of the kinds of state of this group
    if local_sgd is not None:
        for shard in states.shards:
            local_sgd.outer[shard.index].view(-1).copy_(_whole(shard, OUTER, reader))
            if local_sgd.momentum:
                local_sgd.momentum[shard.index].view(-1).copy_(_whole(shard, OUTER_MOMENTUM, reader))
    for shard in states.shards:
        opaque = reader.opaque(shard.index)
        first = shard.slices[0].slice.name if shard.slices else None
        with states.weight(shard) as weight:
            if first is not None and reader.has(WEIGHT + mark, first):
                weight.view(-1).copy_(_whole(shard, WEIGHT + mark, reader))
            own = states.optimizer_states(weight)
            parts = (kind.partition("@") for kind in reader.kinds - {OUTER, OUTER_MOMENTUM})
            kinds = sorted({kind for kind, at, group in parts if at + group == mark} - {WEIGHT, AVERAGE})
            kinds = [kind for kind in kinds if first is None or reader.has(kind + mark, first)]
            if not kinds and not opaque:
                own.clear()  # not updated yet, or an optimizer without states
            for kind in kinds if not opaque else ():
                values = _whole(shard, kind + mark, reader)
                if kind in own:
                    own[kind].view(-1).copy_(values)
                else:
                    own[kind] = values.to(weight.device).view(weight.shape)
            for name, values in opaque.items():
                own[name] = values.to(weight.device)
            counts = reader.counts_of(first or "") if kinds or opaque else {}
            for name, count in counts.items():
                # Adam's step counter: a tensor in torch, an int in bitsandbytes, which has no ``place`` for it.
                place = states.place_of_counts(weight)
                if isinstance(own.get(name), Tensor):
                    own[name].fill_(count)
                else:
                    own[name] = int(count) if place is None else torch.tensor(count, dtype=torch.float32, device=place)
            if average is not None and average.taken:
                averages.append(_whole(shard, AVERAGE + mark, reader).to(weight.device))
    for frozen in (*states.frozen, *states.buffers):  # which groups have alike
        for part, offset in frozen.slices:
            if reader.has(WEIGHT, part.name):
                frozen.values[offset : offset + part.numel].copy_(reader.read(WEIGHT, part))
    if average is not None:
        average.buffer_averages = [torch.empty_like(buffer) for buffer in average.buffers if average.taken]
        for buffers in states.buffers:
            if (mean := average.average_of(buffers.parameter)) is not None:
                for part, offset in buffers.slices:
                    mean.view(-1)[offset : offset + part.numel].copy_(reader.read(AVERAGE + mark, part))
        average.averages = [flat.view(w.shape) for flat, w in zip(averages, average.weights, strict=False)]
    use_master_weights(engine)


def _mark(local_sgd: LocalSGD) -> str:
    return f"@{local_sgd.groups.rank}" if local_sgd.groups.rank else ""


def _whole(shard: FlatShard, kind: str, reader: CountedState) -> Tensor:
    """Return the values of a whole shard, with zeros as padding."""
    values = torch.zeros(shard.numel)
    for part, offset in shard.slices:
        values[offset : offset + part.numel] = reader.read(kind, part)
    return values


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
