"""One parameter of a model under its Hugging Face name, and the engine's tensors that hold parameters."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Parameter(NamedTuple):
    """One tensor of a Hugging Face file.

    ``place``: ``embedding`` of tokens, ``opening`` for all else before the blocks (patches or stem of a vision
    network), ``block`` (with its number from 0 in ``block``, counted by tower) or ``closing`` (final norm and head).
    ``tensor_dim``: the dimension that tensor ranks shard, None if each has the whole. ``tensor``: the name of the
    engine's tensor that holds it: the same name, except that the experts of a layer are stacked. ``adapter``: a factor
    of a low-rank adapter. ``below``: layers between it and the head, as layer-wise learning rates count them; None if
    its place decides. ``decays``: False for matrices without weight decay, such as positions of vision networks.
    ``trains``: False for what files have and the model does not compute. ``heads``: of each of its parts along
    ``tensor_dim``, of which a tensor rank holds whole ones, at least one; empty if single channels are sharded.
    ``tower``: ``image`` or ``text`` in CLIP and LLaVA, else empty.
    """

    name: str
    shape: tuple[int, ...]
    place: str
    block: int | None
    tensor_dim: int | None
    tensor: str
    adapter: bool = False
    below: int | None = None
    decays: bool = True
    trains: bool = True
    heads: tuple[int, ...] = ()
    tower: str = ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Return True for at least two dimensions: not for norms and biases."""
        return len(self.shape) > 1

    @property
    def is_orthogonalized(self) -> bool:
        """Return True for what Muon updates: matrices of blocks, but not gates of one output. AdamW updates others."""
        return self.place == "block" and len(self.shape) == 2 and min(self.shape) > 1 and not self.adapter


# Matrices that are no linear layers to an adapter or a quantizer: routers, and those outside of blocks.
_NOT_LINEAR = ("mlp.gate.", "model.", "transformer.", "lm_head.")


class EngineTensor(NamedTuple):
    """One tensor of the engine's modules, of one part of the model.

    ``name``: within the block, or the whole name outside of blocks. ``elements``: in all; ``sharded``: the heads or
    channels of each part that tensor ranks shard, empty if each rank has the whole; ``experts``: the number of experts
    stacked in it; ``rank``: of the adapter that it belongs to, 0 for the model's own. ``rows``: of a matrix, or of
    that of one expert; ``shards_rows``: tensor ranks shard these.
    """

    name: str
    elements: int
    sharded: tuple[int, ...]
    experts: int
    is_matrix: bool
    rank: int = 0
    rows: int = 0
    shards_rows: bool = False

    def rows_on_rank(self, tensor: int) -> int:
        """Return the rows of a matrix on one of ``tensor`` tensor ranks."""
        return -(-self.rows // tensor) if self.shards_rows else self.rows

    @property
    def is_linear(self) -> bool:
        """Return whether the tensor is the weight of a linear layer of a block, without routers and stacked experts."""
        own = self.is_matrix and not self.rank and not self.experts
        return own and self.name.endswith(".weight") and not self.name.startswith(_NOT_LINEAR)

    def on_rank(self, tensor: int, expert: int) -> int:
        """Return the elements on one rank of ``tensor`` x ``expert`` parallel ranks."""
        size = self.elements
        if self.sharded:
            size = size // sum(self.sharded) * sum(-(-count // tensor) for count in self.sharded)
        return size // self.experts * -(-self.experts // expert) if self.experts else size


def engine_tensors(parameters: Iterable[Parameter]) -> Iterator[tuple[EngineTensor, list[str]]]:
    """Yield the tensors of one part of the model in order, each with the names of its parameters."""
    stacked: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        stacked.setdefault(parameter.tensor, []).append(parameter)
    for name, members in stacked.items():
        first = members[0]
        experts = len({p.name.split(".experts.")[1].split(".")[0] for p in members}) if first.name != name else 0
        dim = first.tensor_dim
        tensor = EngineTensor(
            name if first.block is None else name.split(f".{first.block}.", 1)[1],
            sum(parameter.numel for parameter in members),
            () if dim is None else first.heads or (first.shape[dim],),
            experts,
            first.is_matrix,
            _rank(first),
            rows=first.shape[0] * len(members) // max(experts, 1),
            shards_rows=dim == 0,
        )
        yield tensor, [parameter.name for parameter in members]


def _rank(parameter: Parameter) -> int:
    """Return the rank of the adapter that a parameter belongs to; 1 for a magnitude; 0 without an adapter."""
    if not parameter.adapter:
        return 0
    if not parameter.is_matrix:
        return 1
    return parameter.shape[0] if "_A" in parameter.name else parameter.shape[-1]
