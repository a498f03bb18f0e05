"""Muon: the update, on the elements of each rank, of matrices that ZeRO and tensor parallelism have sharded.

Momentum is elementwise, so each rank keeps that of the elements it updates; whole matrices are orthogonalized.
Gradients are reduced, unscaled and clipped before, in every ZeRO stage. torch.optim.Muon rounds to the dtype of the
iteration first of all, as the exchange does: nothing is lost, and the result is that of one process.

To orthogonalize a matrix, one rank of its pipeline stage receives the parts from the ranks that hold them, puts them
together in the whole shape, and returns to each rank its elements of the result. The matrices are divided among the
ranks so that all have about equal work. Both exchanges are in the dtype of the iteration.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaletrain_cli.engine.checkpoint.flat_shards import FlatShard
from scaletrain_cli.engine.model.materialization import Matrix, matrices_of
from scaletrain_cli.engine.parallel.expert import is_sharded_over_experts
from scaletrain_cli.engine.parallel.mesh import Mesh, coordinates_of, group_of
from scaletrain_cli.plan.muon import ROUND_ELEMENTS, fused_widths, newton_schulz_flops, output_dim
from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.training import MuonSpec, OptimizerSpec

# The key of a parameter group whose matrices are orthogonalized.
ORTHOGONALIZED = "orthogonalized"

# torch.optim.Muon's coefficients of the quintic iteration, which are K. Jordan's, and its least norm.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST_NORM = 1e-7


def newton_schulz(matrix: Tensor, iterations: int) -> Tensor:
    """Return the approximate orthogonal factor of a matrix [rows, columns], in its dtype.

    Each iteration takes X to (a + b X Xᵀ + c (X Xᵀ)²) X. Singular values end between about 0.7 and 1.2.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=_LEAST_NORM)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def rate_factor(rows: int, columns: int, rule: str) -> float:
    """Return the factor of the learning rate of a matrix with ``rows`` outputs and ``columns`` inputs.

    ``original``: sqrt(max(1, rows / columns)) (K. Jordan). ``match_rms_adamw``: 0.2 sqrt(max(rows, columns)), with
    which updates are as large as AdamW's (arXiv:2502.16982, section 2.2).
    """
    return math.sqrt(max(1.0, rows / columns)) if rule == "original" else 0.2 * math.sqrt(max(rows, columns))


# Orthogonalizes matrices that several ranks hold together, given the updates of weights. Yields of each piece (weight,
# offset, values, factor): the orthogonalized values, and the factor of their learning rate. Collective.
Orthogonalize = Callable[[dict[Tensor, Tensor]], Iterator[tuple[Tensor, int, Tensor, float | Tensor]]]


class Muon(torch.optim.Optimizer):
    """Muon for the parameter groups marked with ``ORTHOGONALIZED``, and AdamW for the others.

    ``connect`` must be called once DeepSpeed has replaced the parameters of the groups by its flat parts.
    """

    counts_like_torch = True  # a tensor per weight counts its steps

    def __init__(self, groups: list[dict[str, Any]], settings: OptimizerSpec, fused: bool) -> None:
        self._settings, self._momentum = settings.muon, settings.momentum
        self._orthogonalize: Orthogonalize | None = None
        self._adamw = torch.optim.AdamW(
            [torch.zeros(1)],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=fused or None,
        )
        super().__init__(groups, self._adamw.defaults)

    def connect(self, orthogonalize: Orthogonalize) -> None:
        """Set how whole matrices are orthogonalized."""
        self._orthogonalize = orthogonalize

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have gradients, which it changes. Collective."""
        loss = None if closure is None else closure()
        others = [group for group in self.param_groups if not group.get(ORTHOGONALIZED)]
        if others:
            self._adamw.param_groups, self._adamw.state = others, self.state
            self._adamw.step()
        updates: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            if group.get(ORTHOGONALIZED):
                for weight in group["params"]:
                    if weight.grad is not None:
                        updates[weight] = self._with_momentum(weight)
                        weight.mul_(1 - group["lr"] * group["weight_decay"])
        if updates:
            assert self._orthogonalize is not None
            rates = {
                weight: group["lr"]
                for group in self.param_groups
                for weight in group["params"]
                if group.get(ORTHOGONALIZED)
            }
            for weight, offset, values, factor in self._orthogonalize(updates):
                part = weight.view(-1)[offset : offset + values.numel()]
                values = values.to(weight.device)
                if isinstance(factor, Tensor):
                    part.addcmul_(values.to(part.dtype), factor.to(weight.device), value=-rates[weight])
                else:
                    part.add_(values, alpha=-rates[weight] * factor)
        return loss

    def _with_momentum(self, weight: Tensor) -> Tensor:
        """Return the update before it is orthogonalized, in the memory of the gradient."""
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        if "step" not in state:
            place = weight.device if self.defaults.get("fused") else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=place)
        state["step"] += 1
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - self._momentum)
        return gradient.lerp_(buffer, self._momentum) if self._settings.nesterov else gradient.copy_(buffer)


class _Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of a rank's tensor shard of a matrix, at ``offset`` in flat shard ``shard``."""

    matrix: int
    start: int
    stop: int
    shard: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def _gathered(
    place: tuple[int, int], pieces: Sequence[_Piece], group: dist.ProcessGroup
) -> list[tuple[tuple[int, int], list[_Piece]]]:
    """Return the place and the pieces of every rank of the group, in its order."""
    on_gpu = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    head = torch.tensor([*place, len(pieces)], device=device)
    heads = [torch.empty_like(head) for _ in range(dist.get_world_size(group))]
    dist.all_gather(heads, head, group=group)
    known = [header.tolist() for header in heads]
    mine = torch.zeros(max(1, *(count for *_, count in known)), len(_Piece._fields), dtype=torch.int64, device=device)
    if pieces:
        mine[: len(pieces)] = torch.tensor(pieces, dtype=torch.int64, device=device)
    rows = [torch.empty_like(mine) for _ in known]
    dist.all_gather(rows, mine, group=group)
    return [
        ((first, second), [_Piece(*row) for row in every[:count].tolist()])
        for (first, second, count), every in zip(known, rows, strict=True)
    ]


@dataclass(frozen=True)
class _Whole:
    """A matrix of a block: the matrices that it fuses have ``widths`` output features along dimension ``dim``."""

    matrix: Matrix
    widths: tuple[int, ...]
    dim: int
    flops: int

    def shapes(self) -> Iterator[tuple[int, int]]:
        """Yield (outputs, inputs) of each matrix in it."""
        inputs = self.matrix.whole_shape[1 - self.dim]
        yield from ((width, inputs) for width in self.widths)

    def orthogonalized(self, whole: Tensor, iterations: int) -> Tensor:
        """Return the orthogonalized matrices in the place of those in ``whole``."""
        if len(self.widths) == 1:
            return newton_schulz(whole, iterations)
        return torch.cat(
            [newton_schulz(part, iterations) for part in torch.split(whole, list(self.widths), self.dim)], self.dim
        )

    def joined(self, shards: list[Tensor]) -> Tensor:
        parts = [shard.view(self.matrix.shape) for shard in shards]
        return parts[0] if self.matrix.shard_spec is None else self.matrix.shard_spec.join(parts)

    def shard(self, whole: Tensor, tensor_rank: int) -> Tensor:
        spec = self.matrix.shard_spec
        return whole.reshape(-1) if spec is None else replace(spec, rank=tensor_rank).take(whole).reshape(-1)

    def factor(self, rule: str, piece: _Piece, tensor_rank: int) -> float | Tensor:
        """Return the factor of the learning rate of a piece: of each element if fused matrices differ in it."""
        factors = [rate_factor(*shape, rule) for shape in self.shapes()]
        if len(set(factors)) == 1:
            return factors[0]
        rates = torch.cat([torch.full((width,), factor) for width, factor in zip(self.widths, factors, strict=True)])
        whole = rates.unsqueeze(1 - self.dim).expand(self.matrix.whole_shape)
        return self.shard(whole, tensor_rank)[piece.start : piece.stop]


class _Round(NamedTuple):
    """Pieces that travel at once, by rank: to the owners of their matrices, from their holders, and back."""

    outgoing: list[list[_Piece]]
    incoming: list[list[_Piece]]
    returned: list[list[_Piece]]
    results: list[list[_Piece]]
    owned: list[int]


class _Holders:
    """The ranks that hold pieces of the same matrices, and who orthogonalizes which. Collective to create.

    ``pieces``: those of this rank. ``place``: (tensor rank, replica) of this rank. ``sharded``: replicas hold different
    elements, as with ZeRO. Flat shards have the same index on all ranks.
    """

    def __init__(
        self,
        wholes: list[_Whole],
        pieces: list[_Piece],
        place: tuple[int, int],
        group: dist.ProcessGroup | None,
        *,
        sharded: bool,
    ) -> None:
        self._wholes, self._group, self._sharded = wholes, group, sharded
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        holders = [(place, pieces)]
        if group is not None:
            holders = _gathered(place, pieces, group)
        self._places: list[tuple[int, int]] = [place for place, _ in holders]
        self._pieces = [sorted(held) for _, held in holders]
        self._shards = {piece.matrix: piece.shard for held in self._pieces for piece in held}
        self._rounds: dict[frozenset[int], list[_Round]] = {}

    def rounds(self, shards: Collection[int]) -> list[_Round]:
        """Return the rounds that orthogonalize the matrices of these flat shards; the same on every rank."""
        key = frozenset(shards)
        if key not in self._rounds:
            self._rounds[key] = list(self._planned(key))
        return self._rounds[key]

    def _planned(self, shards: frozenset[int]) -> Iterator[_Round]:
        batch: list[int] = []
        size = 0
        for number in sorted(matrix for matrix, shard in self._shards.items() if shard in shards):
            elements = math.prod(self._wholes[number].matrix.whole_shape)
            if batch and size + elements > self.ranks * ROUND_ELEMENTS:
                yield self._round(batch)
                batch, size = [], 0
            batch.append(number)
            size += elements
        if batch:
            yield self._round(batch)

    def _round(self, matrices: list[int]) -> _Round:
        owners = self._owners(matrices)
        me, ranks = self.rank, range(self.ranks)
        mine = [piece for piece in self._pieces[me] if piece.matrix in owners]
        held = [[p for p in pieces if p.matrix in owners and owners[p.matrix] == me] for pieces in self._pieces]
        return _Round(
            outgoing=[[p for p in mine if owners[p.matrix] == r and self._sends(me, r, p.matrix)] for r in ranks],
            incoming=[[p for p in held[r] if self._sends(r, me, p.matrix)] for r in ranks],
            returned=held,
            results=[[p for p in mine if owners[p.matrix] == r] for r in ranks],
            owned=[matrix for matrix in matrices if owners[matrix] == me],
        )

    def _owners(self, matrices: list[int]) -> dict[int, int]:
        """Return the rank that orthogonalizes each matrix: the costliest first, on the rank with the least work."""
        busy = [0] * self.ranks
        owners = {}
        for number in sorted(matrices, key=lambda matrix: (-self._wholes[matrix].flops, matrix)):
            rank = busy.index(min(busy))
            owners[number] = rank
            busy[rank] += self._wholes[number].flops
        return owners

    def _sends(self, rank: int, owner: int, matrix: int) -> bool:
        """Return whether a rank sends its pieces of a matrix; of equal copies those nearest to the owner are used."""
        (tensor, replica), (tensor_of_owner, replica_of_owner) = self._places[rank], self._places[owner]
        if self._wholes[matrix].matrix.shard_spec is None and tensor != tensor_of_owner:
            return False
        return self._sharded or replica == replica_of_owner

    def run(
        self, updates: dict[int, Tensor], dtype: torch.dtype, device: torch.device, iterations: int
    ) -> Iterator[tuple[_Piece, Tensor]]:
        """Yield this rank's pieces and their orthogonalized values; ``updates``: by flat shard. Collective."""

        def values_of(piece: _Piece) -> Tensor:
            values = updates[piece.shard].reshape(-1)[piece.offset : piece.offset + piece.numel]
            return values.to(device=device, dtype=dtype)

        for turn in self.rounds(updates):
            arrived = self._exchange(
                [list(map(values_of, part)) for part in turn.outgoing], turn.incoming, dtype, device
            )
            shards: dict[tuple[int, int], Tensor] = {}  # by matrix and tensor rank
            for rank, (pieces, values) in enumerate(zip(turn.incoming, arrived, strict=True)):
                for piece, part in zip(pieces, values, strict=True):
                    place = (piece.matrix, self._places[rank][0])
                    if place not in shards:
                        shape = self._wholes[piece.matrix].matrix.shape
                        shards[place] = torch.empty(math.prod(shape), dtype=dtype, device=device)
                    shards[place][piece.start : piece.stop] = part
            del arrived
            tensor_ranks = sorted({tensor for tensor, _ in self._places})
            for number in turn.owned:
                whole = self._wholes[number]
                parts = [shards.pop((number, tensor)) for tensor in tensor_ranks if (number, tensor) in shards]
                result = whole.orthogonalized(whole.joined(parts), iterations)
                shards |= {(number, tensor): whole.shard(result, tensor) for tensor in tensor_ranks}
            results = [
                [shards[piece.matrix, self._places[rank][0]][piece.start : piece.stop] for piece in pieces]
                for rank, pieces in enumerate(turn.returned)
            ]
            answers = self._exchange(results, turn.results, dtype, device)
            del shards, results
            for pieces, values in zip(turn.results, answers, strict=True):
                yield from zip(pieces, values, strict=True)

    def factor(self, piece: _Piece, rule: str) -> float | Tensor:
        """Return the factor of the learning rate of a piece of this rank."""
        return self._wholes[piece.matrix].factor(rule, piece, self._places[self.rank][0])

    def _exchange(
        self, sent: list[list[Tensor]], expected: list[list[_Piece]], dtype: torch.dtype, device: torch.device
    ) -> list[list[Tensor]]:
        """Return the values of the expected pieces, by the rank that sends them."""
        if self._group is None:
            return sent
        flat = torch.cat([torch.empty(0, dtype=dtype, device=device), *(value for part in sent for value in part)])
        sizes = [[piece.numel for piece in pieces] for pieces in expected]
        received = torch.empty(sum(map(sum, sizes)), dtype=dtype, device=device)
        # As bytes, because not every backend knows every dtype.
        dist.all_to_all_single(
            received.view(torch.uint8),
            flat.view(torch.uint8),
            [sum(lengths) * dtype.itemsize for lengths in sizes],
            [sum(value.numel() for value in part) * dtype.itemsize for part in sent],
            group=self._group,
        )
        by_rank = torch.split(received, [sum(lengths) for lengths in sizes])
        return [list(torch.split(part, lengths)) for part, lengths in zip(by_rank, sizes, strict=True)]


class MatrixExchange:
    """Orthogonalizes matrices that several ranks hold together."""

    def __init__(
        self, holders: list[_Holders], weights: list[Tensor], settings: MuonSpec, device: torch.device
    ) -> None:
        """``weights``: the tensors that the optimizer updates, by the index of their flat shard."""
        self._holders, self._settings, self._device = holders, settings, device
        self._weights = weights
        self._shards = {id(weight): index for index, weight in enumerate(weights)}

    def orthogonalize(self, updates: dict[Tensor, Tensor]) -> Iterator[tuple[Tensor, int, Tensor, float | Tensor]]:
        shards = {self._shards[id(weight)]: update for weight, update in updates.items()}
        dtype = torch.bfloat16 if self._settings.newton_schulz_dtype == "bf16" else torch.float32
        for holders in self._holders:
            for piece, values in holders.run(shards, dtype, self._device, self._settings.newton_schulz_steps):
                weight = self._weights[piece.shard]
                yield weight, piece.offset, values, holders.factor(piece, self._settings.adjust_lr)


def connect_muon(
    optimizer: Muon,
    shards: Sequence[FlatShard],
    weights: list[Tensor],
    model: nn.Module,
    spec: RunSpec,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
) -> None:
    """Give the optimizer its matrices; ``shards``: the flat shards of ``weights``, which it updates. Collective.

    A rank shares matrices with all ranks of its pipeline stage, and experts with those that have the same ones.
    """
    own, settings = spec.transformer, spec.training.optimizer.muon
    names = {p.name for p in model_parameters(own) if p.is_orthogonalized}
    place = (mesh.tensor.rank, mesh.synchronous.rank)
    holders = []
    for experts in (False, True) if mesh.expert.size > 1 else (False,):
        wholes = [
            _whole(own, matrix, settings.newton_schulz_steps)
            for parameter, matrices in matrices_of(model).items()
            for matrix in matrices
            if matrix.name in names and is_sharded_over_experts(parameter) == experts
        ]
        numbers = {whole.matrix.name: number for number, whole in enumerate(wholes)}
        pieces = [
            _Piece(numbers[part.name], part.start, part.stop, shard.index, offset)
            for shard in shards
            for part, offset in shard.slices
            if part.name in numbers
        ]
        group = _group(layout, mesh, experts=experts)
        holders.append(_Holders(wholes, pieces, place, group, sharded=layout.zero_stage > 0))
    optimizer.connect(MatrixExchange(holders, weights, settings, device).orthogonalize)


def _whole(model: ModelSpec, matrix: Matrix, iterations: int) -> _Whole:
    dim = output_dim(model)
    outputs, inputs = matrix.whole_shape[dim], matrix.whole_shape[1 - dim]
    widths = fused_widths(model, matrix.name) or (outputs,)
    return _Whole(matrix, widths, dim, sum(newton_schulz_flops(width, inputs, iterations) for width in widths))


def _group(layout: Layout, mesh: Mesh, *, experts: bool) -> dist.ProcessGroup | None:
    """Return the ranks that hold the same matrices as this one; None if it is alone. Collective among them."""
    shared = ("pipeline", "group", "expert") if experts else ("pipeline", "group")
    own = coordinates_of(layout, dist.get_rank())
    ranks = [
        rank
        for rank in range(layout.world_size)
        if all(coordinates_of(layout, rank)[axis] == own[axis] for axis in shared)
    ]
    replicas = mesh.expert_replicas if experts else mesh.synchronous
    if len(ranks) == 1:
        return None
    return replicas.group if len(ranks) == replicas.size else group_of(ranks)
