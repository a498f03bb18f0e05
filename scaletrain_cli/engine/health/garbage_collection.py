"""Python's garbage collector at fixed steps, on all ranks at once, instead of on each when it likes. Knows no training.

One rank that stops for a collection makes all others wait in the next collective.
"""

from __future__ import annotations

import gc

_STEPS_BETWEEN = 50


class GarbageCollection:
    """A context in which only ``after_step`` collects; entered once everything long-lived is there."""

    def __enter__(self) -> GarbageCollection:
        gc.disable()
        gc.collect()
        gc.freeze()  # what is alive now stays so: no collection need look at it again
        return self

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        gc.enable()

    def after_step(self, step: int) -> None:
        """Collect, if it is time. Cheap: only what was made since the start is looked at."""
        if step % _STEPS_BETWEEN == 0:
            gc.collect()
