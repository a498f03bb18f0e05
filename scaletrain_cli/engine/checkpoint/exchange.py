"""Move the state of the optimizer between ranks in memory, where another set of parameters begins to train.

Each rank holds slices of matrices in one partition and needs those of another one. Ranks tell each other both, so that
every rank knows what each pair sends; the values travel by all-to-all, some matrices at a time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from scaletrain_cli.engine.checkpoint.shard_file import OPAQUE, Overlap, Slice, overlaps
from scaletrain_cli.engine.checkpoint.snapshot import Counts
from scaletrain_cli.engine.process_group import RankConsensus
from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.reasons import Reason

_BATCH_NUMEL = 2**26  # elements of whole matrices that travel at once


@dataclass(frozen=True)
class HeldState:
    """The state that a rank kept of a destroyed engine: slices by name, values by ``kind/name``, and counters."""

    slices: dict[str, Slice]
    values: dict[str, Tensor]
    counts: Counts
    counters: dict[str, dict[str, float]]


class _Manifest(NamedTuple):
    """The slices that one rank holds, and those that it needs.

    ``kinds``: the names of the held slices by kind of state. A parameter has only its weight until its first update.
    ``opaque``: the rank has states that only one layout can read.
    """

    held: dict[str, Slice]
    needed: dict[str, Slice]
    kinds: dict[str, list[str]]
    opaque: bool
    counts: dict[str, float]
    other_counts: dict[str, dict[str, float]]


@dataclass(frozen=True)
class ExchangedState:
    """The state that this rank needs, as ``restore_state`` reads it: of the parameters that the earlier engine had."""

    values: Mapping[str, Tensor]
    counts: Mapping[str, Mapping[str, float]]
    usual_counts: Mapping[str, float]
    kinds: set[str]

    def has(self, kind: str, name: str) -> bool:
        """Return True if the earlier engine had this kind of state of a parameter."""
        return f"{kind}/{name}" in self.values

    def counts_of(self, name: str) -> Mapping[str, float]:
        return self.counts.get(name, self.usual_counts)

    def read(self, kind: str, part: Slice) -> Tensor:
        """Return the values of a slice, flat."""
        return self.values[f"{kind}/{part.name}"]

    def opaque(self, shard: int) -> dict[str, Tensor]:
        """Return nothing: state that only one layout can read cannot be moved."""
        return {}


def exchange(
    held: HeldState, needed: dict[str, Slice], consensus: RankConsensus, device: torch.device
) -> ExchangedState:
    """Return the state of the parameters in ``needed`` that any rank holds. Collective.

    Raises UsageError for states that are quantized in blocks, and ScaletrainError if the ranks lack a part: both on
    every rank.
    """
    kinds: dict[str, list[str]] = {}
    for key in held.values:
        kind, _, name = key.partition("/")
        if name in held.slices:
            kinds.setdefault(kind, []).append(name)
    opaque = any(key.startswith(OPAQUE) for key in held.values)
    mine = _Manifest(held.slices, needed, kinds, opaque, held.counts.usual, held.counts.others)
    manifests = consensus.gather_everywhere(mine)
    if any(manifest.opaque for manifest in manifests):
        raise UsageError(Reason("engine.states-bound-to-stage"))
    wanted = {name for manifest in manifests for name in manifest.needed}
    names = sorted({name for manifest in manifests for name in manifest.held} & wanted)
    tensors: dict[str, Tensor] = {}
    lacking: list[tuple[str, str]] = []
    for kind in sorted({kind for manifest in manifests for kind in manifest.kinds}):
        of_kind = sorted({name for manifest in manifests for name in manifest.kinds.get(kind, ())} & wanted)
        for batch in _batches(of_kind, manifests):
            values, missing = _exchanged(kind, batch, held, manifests, device)
            tensors |= values
            lacking += [(kind, name) for name in missing]
    for kind, name in (pair for of_rank in consensus.gather_everywhere(lacking) for pair in of_rank):
        raise ScaletrainError(Reason("engine.state-not-held", {"kind": kind, "name": name}))
    owners = {name: manifest for manifest in reversed(manifests) for name in manifest.held}
    counts = {name: owners[name].other_counts.get(name, owners[name].counts) for name in names}
    usual = next((manifest.counts for manifest in manifests if manifest.counts), {})
    return ExchangedState(tensors, counts, usual, {key.partition("/")[0] for key in tensors})


def _batches(names: list[str], manifests: list[_Manifest]) -> Iterator[list[str]]:
    """Yield names of matrices that together have about ``_BATCH_NUMEL`` elements."""
    shapes = {name: part.whole_shape for manifest in manifests for name, part in manifest.held.items()}
    batch: list[str] = []
    numel = 0
    for name in names:
        batch.append(name)
        numel += torch.Size(shapes[name]).numel()
        if numel >= _BATCH_NUMEL:
            yield batch
            batch, numel = [], 0
    if batch:
        yield batch


def _exchanged(
    kind: str, names: list[str], held: HeldState, manifests: list[_Manifest], device: torch.device
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the values of one kind that this rank needs, on the host, in fp32, and the names of which parts lack."""
    me, outgoing, send, receive = manifests[dist.get_rank()], [], [], []
    of_rank = [{name: peer.held[name] for name in set(names) & set(peer.kinds.get(kind, ()))} for peer in manifests]
    own = [name for name in names if name in of_rank[dist.get_rank()]]
    for other, theirs in zip(manifests, of_rank, strict=True):
        parts = [
            held.values[f"{kind}/{name}"][run.at_first : run.at_first + run.length].float()
            for name in own
            for run in _shared(me.held[name], other.needed.get(name))
        ]
        outgoing += parts
        send.append(sum(part.numel() for part in parts))
        runs = (run for name in names for run in _shared(theirs.get(name), me.needed.get(name)))
        receive.append(sum(run.length for run in runs))
    incoming = torch.empty(sum(receive), device=device)
    sent = torch.cat(outgoing) if outgoing else torch.empty(0)
    dist.all_to_all_single(incoming, sent.to(device), receive, send)
    arrived, position = incoming.cpu(), 0
    tensors = {name: torch.zeros(me.needed[name].numel) for name in names if name in me.needed}
    missing = {name: values.numel() for name, values in tensors.items()}
    for theirs in of_rank:
        for name in names:
            for run in _shared(theirs.get(name), me.needed.get(name)):
                tensors[name][run.at_second : run.at_second + run.length] = arrived[position : position + run.length]
                position, missing[name] = position + run.length, missing[name] - run.length
    values = {f"{kind}/{name}": values for name, values in tensors.items()}
    return values, [name for name, count in missing.items() if count]


def _shared(held: Slice | None, needed: Slice | None) -> list[Overlap]:
    return [] if held is None or needed is None else list(overlaps(held, needed))
