"""What a rank holds of the training state, copied to the host and back. Knows no file format and no commit.

A checkpoint consists of kinds: ``weight``, the optimizer's elementwise states under its own names (``exp_avg``), and
``average``. Each is one value per element of a matrix, so each can be shared out anew. States quantised in blocks
cannot: they are ``opaque`` and fit only the layout that saved them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from scaletrain_cli.engine.optimization.averaging import WeightAverage
from scaletrain_cli.engine.optimization.master_weights import use_master_weights
from scaletrain_cli.engine.state.holders import HeldStates, Holder
from scaletrain_cli.engine.state.reader import OPAQUE, StateReader
from scaletrain_cli.engine.state.shard_file import Entry

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

    def _kinds(self, holder: Holder, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield WEIGHT, weight.detach()
        states = {name: value for name, value in self._states.optimizer_states(weight).items() if _is_tensor(value)}
        elementwise = is_elementwise(states, weight)
        for name, value in sorted(states.items()):  # equal states make equal files
            yield (name if elementwise else f"{OPAQUE}/{holder.index}/{name}"), value
        if self._average is not None and self._average.taken:
            yield AVERAGE, self._average.averages[holder.index]

    def _copied(self, holder: Holder, kind: str, values: Tensor) -> Iterator[Entry]:
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


def _whole(holder: Holder, kind: str, reader: StateReader) -> Tensor:
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
