"""Detect ranks that are slower than the others, by their own work every 20 steps; rank 0 records persistent ones.

All ranks finish a step together, so what counts is the time before a rank first waits for another rank: from the step
consensus to the end of its first forward pass if that needs no other rank, otherwise to its beginning.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import nn

from scaletrain_cli.engine.context import RankContext
from scaletrain_cli.engine.metrics.step_measures import Clock, clock_of
from scaletrain_cli.plan.result import Layout

WINDOW_STEPS = 20
_FEWEST_STEPS = 5
_SLOWER_THAN_OTHERS = 1.5
_SHARE_OF_STEP = 0.05  # a smaller cost is not worth reporting


@dataclass(frozen=True)
class Straggler:
    """The slowest rank of a window: its own work per step, and the median of the others', in seconds."""

    rank: int
    seconds: float
    others_seconds: float


def slowest(own_seconds: Sequence[float], step_seconds: float) -> Straggler | None:
    """Return the slowest rank if it is much slower than the others and that matters for the whole step; else None."""
    if len(own_seconds) < 2:
        return None
    rank = max(range(len(own_seconds)), key=lambda index: own_seconds[index])
    worst, others = own_seconds[rank], median([*own_seconds[:rank], *own_seconds[rank + 1 :]])
    if worst <= _SLOWER_THAN_OTHERS * others or worst - others < _SHARE_OF_STEP * step_seconds:
        return None
    return Straggler(rank, worst, others)


@dataclass
class StragglerConfirmation:
    """Confirms a straggler after two windows in a row, and clears it after one."""

    _before: int | None = None
    _reported: int | None = None

    def changed(self, straggler: Straggler | None) -> bool:
        """Return True if this window confirms another straggler than the last one reported, or that there is none."""
        rank = straggler.rank if straggler is not None else None
        confirmed, self._before = rank == self._before, rank
        if not confirmed or rank == self._reported:
            return False
        self._reported = rank
        return True


@dataclass
class Stragglers:
    """Measures one rank's own work and compares it. ``begin`` is collective at the end of a window."""

    context: RankContext
    own_seconds: Callable[[], float] | None = field(default=None, init=False)  # of the present step, once it is known
    _clock: Clock = field(init=False)
    _running: bool = field(default=False, init=False)
    _seconds: list[Callable[[], float]] = field(default_factory=list, init=False)
    _begun: int = field(default=0, init=False)  # steps in this window
    _since: float = field(default=0.0, init=False)
    _confirmation: StragglerConfirmation = field(default_factory=StragglerConfirmation, init=False)

    def __post_init__(self) -> None:
        self._clock = clock_of(self.context.device)

    def watch(self, engine: nn.Module, layout: Layout) -> None:
        """Stop the clock where a rank's own work ends: ZeRO-3 and sharded layers wait inside the forward pass.

        In a pipeline later stages wait for earlier ones, so there the clock never stops.
        """
        if layout.pipeline_parallel > 1:
            return
        cuts = layout.tensor_parallel * layout.sequence_parallel * layout.context_parallel * layout.expert_parallel
        if layout.zero_stage < 3 and cuts == 1:
            engine.register_forward_hook(self._stop)
        else:
            engine.register_forward_pre_hook(self._stop, prepend=True)

    def begin(self, step: int) -> None:
        """Start the clock after the consensus before ``step``; compare the ranks at the end of a window."""
        now = time.perf_counter()
        if step % WINDOW_STEPS == 0:
            if self._begun >= _FEWEST_STEPS:
                self._compare(step, (now - self._since) / self._begun)
            self._seconds.clear()
            self._begun = 0
        if self._begun == 0:
            self._since = now
        self._begun += 1
        self._running, self.own_seconds = True, None
        self._clock.start()

    def _stop(self, *_: Any) -> None:
        if self._running:  # once per step, and not in an evaluation
            self._running = False
            self.own_seconds = self._clock.stop()
            self._seconds.append(self.own_seconds)

    def _compare(self, step: int, step_seconds: float) -> None:
        own = median(seconds() for seconds in self._seconds) if self._seconds else 0.0
        straggler = slowest(self.context.consensus.share(own), step_seconds)
        if self._confirmation.changed(straggler):
            details = {"rank": None} if straggler is None else vars(straggler)
            self.context.report("stragglers", step=step, **details)
