"""Report ranks that wait for their batches: one wait holds up every rank, and more readers can end it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from scaletrain_cli.engine.context import RankContext

WINDOW_STEPS = 50
LARGEST_SHARE = 0.05  # of the time of a window; a smaller wait is not worth reporting


@dataclass
class DataWaits:
    """Sums up the waits of a rank; every 50 steps rank 0 reports the rank that waited most, if that is much.

    Reported again only after a window with less. The first wait of an attempt does not count: nothing was read ahead.
    """

    context: RankContext
    clock: Callable[[], float] = time.perf_counter
    _since: float | None = field(default=None, init=False)
    _waited: float = field(default=0.0, init=False)
    _steps: int = field(default=0, init=False)
    _reported: bool = field(default=False, init=False)

    def add(self, step: int, seconds: float, *, workers: int, prefetch: int) -> None:
        """Add the wait before ``step``. Collective at steps that are multiples of 50, the same on every rank."""
        now = self.clock()
        if self._since is not None:
            self._waited += seconds
            self._steps += 1
        if step % WINDOW_STEPS == 0 and self._since is not None:
            self._compare(step, self._waited / max(now - self._since, 1e-9), workers, prefetch)
        if self._since is None or step % WINDOW_STEPS == 0:
            self._since, self._waited, self._steps = now, 0.0, 0

    def _compare(self, step: int, share: float, workers: int, prefetch: int) -> None:
        shares = self.context.consensus.share(share)
        most = max(range(len(shares)), key=shares.__getitem__)
        high = shares[most] > LARGEST_SHARE
        if high and not self._reported:
            details = {"share": round(shares[most], 4), "steps": self._steps, "workers": workers, "prefetch": prefetch}
            self.context.report("data-wait", step=step, rank=most, **details)
        self._reported = high
