"""Detect silent corruption: state that changes between two updates, and replicas whose state differs.

Nothing may change the weights and the state of the optimizer between two updates, and replicas apply the same updates
to the same bits. A checksum is the sum of the bytes as 64-bit integers modulo 2^64: exact in any order, and a single
flipped bit changes it by a power of two. The sums are computed on the device and travel in the all-reduce of the step
consensus; ranks exchange more only where they differ.

A device that computes wrongly leaves no such trace, because all ranks apply the gradients that they have added up. So
all replicas may repeat one micro-batch now and then: their outputs must be equal, too.

Not detected: between two checks a change of what one rank alone holds, as the shards of ZeRO, and a wrong gradient.
"""

import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from scaletrain_cli.engine.checkpoint.checkpointing import Checkpointer
from scaletrain_cli.engine.compose import Composed
from scaletrain_cli.engine.context import RankContext
from scaletrain_cli.engine.faults import STATE_PARTS
from scaletrain_cli.engine.metrics.step_measures import fetched_later
from scaletrain_cli.engine.optim.deepspeed_optimizer import master_weights
from scaletrain_cli.engine.parallel.expert import is_sharded_over_experts
from scaletrain_cli.engine.parallel.mesh import coordinates_of
from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.evaluations import forget_newer
from scaletrain_cli.rundir.journal import CORRUPTION_EVENT
from scaletrain_cli.worker.checkpoint_commit import set_aside_newer

_COST = 0.003  # of the time of a step, which the sums of ``auto`` may take; the whole check may take 0.5 %
_CALIBRATED_IN = 3  # the step of an attempt whose time is compared with that of a check
_OUTPUTS = "outputs"
_WORD = 8  # bytes
_MASK = (1 << 62) - 1


class StateCorruptedError(ScaletrainError):
    """The state of some rank is corrupt (exit 1). The failure is that of the node with the corrupt rank."""

    def __init__(self, reason: Reason, failure_reason: Literal["hardware", "communication", "crash"]) -> None:
        super().__init__(reason)
        self.failure_reason = failure_reason


@torch.no_grad()
def bit_sum(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the bytes of tensors as 64-bit integers, modulo 2^64: int64 [] on ``device``.

    Bytes before the first and after the last whole word of a tensor are summed one by one, so that nothing is copied.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        values = tensor.detach().reshape(-1)
        data = values.view(torch.uint8)
        head = min(-(values.storage_offset() * values.element_size()) % _WORD, data.numel())
        end = head + (data.numel() - head) // _WORD * _WORD
        subtotal = data[:head].sum(dtype=torch.int64) + data[end:].sum(dtype=torch.int64)
        if head < end:  # a slice of no bytes at an odd place has no words
            subtotal += data[head:end].view(torch.int64).sum()
        total += subtotal.to(device, non_blocking=True)
    return total


def held_tensors(composed: Composed) -> tuple[list[Tensor], ...]:
    """Return the tensors of this rank that an update alone changes, by part of ``STATE_PARTS``."""
    engine, optimizer = composed.engine, getattr(composed.engine.optimizer, "optimizer", composed.engine.optimizer)
    weights: tuple[list[Tensor], list[Tensor]] = [], []
    for parameter in composed.model.parameters():
        weights[is_sharded_over_experts(parameter)].append(getattr(parameter, "ds_tensor", parameter))
    flat, known = master_weights(engine), set(map(id, chain(*weights)))
    # A state without dimensions counts steps.
    states = [state for weight in flat for state in optimizer.state.get(weight, {}).values()]
    states = [state for state in states if isinstance(state, Tensor) and state.dim() > 0]
    return *weights, [weight for weight in flat if id(weight) not in known], states


@torch.no_grad()
def flip_bit(tensors: Sequence[Tensor], bit: int) -> None:
    """Flip bit number ``bit``, modulo their number, of tensors one after the other: the fault to be found."""
    pieces = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
    byte = bit // 8 % sum(piece.numel() for piece in pieces)
    for piece in pieces:
        if byte < piece.numel():
            piece[byte] ^= 1 << bit % 8
            return
        byte -= piece.numel()


class _Checked(NamedTuple):
    """The sums after a step, that of the outputs if they are compared, and by part whether it had changed before the
    update; ``fetch`` waits for the device. ``repeated``: a micro-batch was.
    """

    step: int
    fetch: Callable[[], list[int]]
    repeated: bool


@dataclass
class StateCheck:
    """One rank's part in the checks, one in ``every`` steps (None: as often as ``_COST`` permits; 0: never).

    ``before_update`` and ``after_step`` enclose what may change the state. ``most_steps``: between two checks; as
    between two checkpoints, so that one from before the last clean check is kept. ``checked_step``: the last step after
    which the state was clean. ``outputs``: those of this rank for a micro-batch of a step, the same of all replicas,
    which are compared at the first check from each multiple of ``repeat_every`` steps on; 0: never.
    """

    context: RankContext
    composed: Composed
    checkpointer: Checkpointer
    every: int | None
    most_steps: int
    checked_step: int
    outputs: Callable[[int], Sequence[Tensor]]
    repeat_every: int = 0
    _after: Tensor | None = field(default=None, init=False)
    _changed: Tensor | None = field(default=None, init=False)
    _checked: deque[_Checked] = field(default_factory=deque, init=False)
    _compared: _Checked | None = field(default=None, init=False)
    _steps: int = field(default=0, init=False)  # of this attempt
    _next_step: int = field(default=0, init=False)
    _repeated: int = field(default=0, init=False)  # the last step of this attempt with such outputs
    _began: float = field(default=0.0, init=False)  # of a step
    _cost_seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        ranks = range(self.context.ranks.world_size)
        parts = (*STATE_PARTS, _OUTPUTS) if self.repeat_every else STATE_PARTS
        self._groups = [[_replica_key(self.context.layout, rank, part) for rank in ranks] for part in parts]
        # Of each part that ranks have replicas of: the number of their groups, and the place of this rank's group.
        names = [sorted(set(groups)) for groups in self._groups]
        self._places = {
            part: (len(keys), keys.index(self._groups[part][self.context.rank]))
            for part, keys in enumerate(names)
            if len(keys) < len(ranks)
        }
        if self.repeat_every:
            self.checkpointer.compared_step = self.checked_step

    @property
    def clean_step(self) -> int:
        """The last step after which state, and the outputs if they are compared, were clean."""
        compared = self.checkpointer.compared_step
        return self.checked_step if compared is None else min(self.checked_step, compared)

    def before_update(self) -> None:
        """Compare the state with that after the last step. On a GPU this only enqueues work."""
        if self._after is not None and self._next_step % (self.every or 1) == 0:
            began = self._now()
            self._changed = self._sums().ne(self._after).to(torch.int64)
            self._cost_seconds = 2 * (self._now() - began)  # as much again after the step

    def after_step(self, step: int) -> None:
        """Compute the sums that are due after ``step``. Collective."""
        if self.every == 0:
            return
        self._steps, self._next_step = self._steps + 1, step + 1
        if self.every is None and self._steps == _CALIBRATED_IN:
            share = self._cost_seconds / max(self._now() - self._began - self._cost_seconds / 2, 1e-9)
            share = -self.context.consensus.least(-share)  # the same on every rank
            self.every = max(1, min(self.most_steps, int(share / _COST) + 1))
        every, changed = self.every or 1, self._changed
        self._after = self._changed = None
        if step % every == 0 or (step + 1) % every == 0:
            self._after = self._sums()
        if self._after is not None and step % every == 0:
            changed = torch.zeros_like(self._after) if changed is None else changed
            last = max(self._repeated, self.checkpointer.compared_step or 0)
            repeated = self.repeat_every > 0 and step // self.repeat_every > last // self.repeat_every
            values = [self._after, *([self._sum_of_outputs(step, repeated)] if self.repeat_every else []), changed]
            self._checked.append(_Checked(step, fetched_later(torch.cat(values)), repeated))
        self._began = self._now()

    def forget(self, step: int) -> None:
        """Begin again with the state after ``step`` steps, which a checkpoint or another engine has replaced."""
        self._after = self._changed = None
        self._checked.clear()
        self.checked_step, self._repeated = min(self.checked_step, step), 0

    def for_consensus(self, step: int) -> list[int]:
        """Return what ``compare`` gets back as the largest values of all ranks; on a GPU those of the step before."""
        last = step - (self.context.device.type == "cuda")
        self._compared = self._checked.popleft() if self._checked and self._checked[0].step <= last else None
        if self._compared is None:
            return []
        values = self._compared.fetch()
        slots = [int(any(values[len(self._groups) :]))]
        for part, (groups, place) in self._places.items():
            own = _in_62_bits(values[part])
            slots += [*[-_MASK] * (2 * place), own, -own, *[-_MASK] * (2 * (groups - place - 1))]
        return slots

    def compare(self, largest: Sequence[int]) -> None:
        """Compare the replicas; collective where they differ. Raises StateCorruptedError on every rank."""
        if self._compared is None:
            return
        changed, *pairs = largest
        if not changed and all(one == -other for one, other in zip(pairs[::2], pairs[1::2], strict=True)):
            self.checked_step = self._compared.step
            if self._compared.repeated:
                self.checkpointer.compared_step = self._compared.step
            return
        gathered = self.context.consensus.gather([_in_62_bits(value) for value in self._compared.fetch()])
        step = self._compared.step
        reason, named = self.context.consensus.from_rank_zero(lambda: self._blamed(step, gathered or ()))
        self.context.heartbeat.beat(step, "save")
        self.checkpointer.finish()
        self.checkpointer.forget_copies(self.clean_step)
        if self.context.rank == 0:
            set_aside_newer(self.checkpointer.folder, self.clean_step, self.context.attempt)
            forget_newer(self.context.run, self.clean_step)
        details = {"clean_step": self.clean_step, "ranks": named, "message": str(reason), **reason.to_document()}
        self.context.report(CORRUPTION_EVENT, step=step, attempt=self.context.attempt, **details)
        self.context.consensus.barrier()
        if len(named) != 1:
            raise StateCorruptedError(reason, "crash")
        raise StateCorruptedError(reason, "hardware" if named == [self.context.rank] else "communication")

    def _blamed(self, step: int, by_rank: Sequence[Sequence[int]]) -> tuple[Reason, list[int]]:
        """Return why the state of some ranks is corrupt, and these ranks; ``by_rank``: sums and changes of every rank.

        A rank is named if its state changed between two updates, else if most of its replicas agree with each other.
        The outputs of replicas with different states differ, too. If several ranks compute a replica, or the experts of
        several, a wrong value of one shows in the outputs of another: then all of them are named.
        """
        params = {"step": step, "clean_step": self.clean_step}
        changes = [values[len(self._groups) :] for values in by_rank]
        if changed := [rank for rank, parts in enumerate(changes) if any(parts)]:
            parts = [name for place, name in enumerate(STATE_PARTS) if any(of_rank[place] for of_rank in changes)]
            code = "engine.state-changed" if len(changed) == 1 else "engine.state-changed-on-several"
            return Reason(code, {**params, "ranks": changed, "parts": parts}), changed
        differing: set[int] = set()
        code = "replica"
        for part, groups in enumerate(self._groups):
            if part == len(STATE_PARTS):
                if differing:
                    break
                code = "output"
            members: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for rank, group in enumerate(groups):
                members[group].append(rank)
            for replicas in members.values():
                (usual, times), *others = Counter(by_rank[rank][part] for rank in replicas).most_common()
                minority = [rank for rank in replicas if by_rank[rank][part] != usual]
                differing.update(minority if others and 2 * times > len(replicas) else replicas if others else ())
        if code == "output":
            axis = "expert_replica" if self.context.layout.expert_parallel > 1 else "data"
            places = [coordinates_of(self.context.layout, rank)[axis] for rank in range(len(by_rank))]
            differing = {rank for rank, place in enumerate(places) if place in {places[one] for one in differing}}
        named = sorted(differing)
        code = f"engine.{code}-differs" if len(named) == 1 else f"engine.{code}s-differ"
        return Reason(code, {**params, "ranks": named}), named

    def _sum_of_outputs(self, step: int, repeats: bool) -> Tensor:
        """Return the sum of the outputs, int64 [1]; 0 in a step that repeats no micro-batch."""
        if not repeats:
            return torch.zeros(1, dtype=torch.int64, device=self.context.device)
        self._repeated = step
        heartbeat = self.context.heartbeat
        heartbeat.beat(step, "evaluation", heartbeat.longest_seconds)  # compiled models are compiled again
        was, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an operation that has no deterministic form
            torch.use_deterministic_algorithms(True, warn_only=True)
            try:
                return bit_sum(self.outputs(step), self.context.device).reshape(1)
            finally:
                torch.use_deterministic_algorithms(was, warn_only=warns)

    def _sums(self) -> Tensor:
        """Return the sums of the parts, int64 [parts]."""
        return torch.stack([bit_sum(part, self.context.device) for part in held_tensors(self.composed)])

    def _now(self) -> float:
        if self.every is None and self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)
        return time.perf_counter()


def _replica_key(layout: Layout, rank: int, part: str) -> tuple[int, ...]:
    """Return a key that is equal for the ranks that hold the same values of a part of the state."""
    if layout.zero_stage > 0 and part in ("fp32-weights", "optimizer-state"):
        return (rank,)
    place = coordinates_of(layout, rank)
    if part == _OUTPUTS:
        further = ["sequence", "context"]
    else:
        further = ["shard"] if layout.zero_stage == 3 else [] if part == "weights" else ["expert"]
    return tuple(place[name] for name in ("pipeline", "tensor", "group", *further))


def _in_62_bits(value: int) -> int:
    """Return a sum as a number whose negative is an int64, too; each bit still counts."""
    unsigned = value % (1 << 64)
    return (unsigned ^ unsigned >> 62) & _MASK
