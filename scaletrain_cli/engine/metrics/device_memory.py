"""Memory of a rank: the highest use of its GPU, in the attempt and in each second, or what is resident on a CPU."""

import logging
import math
import resource
import time
from collections.abc import Callable

import torch

from scaletrain_cli.worker.telemetry import resident_bytes

logger = logging.getLogger(__name__)

# The highest use before torch's own peak was last reset, in bytes by device; torch has one peak for all who read it.
_earlier_peaks: dict[torch.device, int] = {}


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most bytes allocated on the GPU since the first update, or resident on a CPU."""
    if device.type == "cuda":
        return max(_earlier_peaks.get(device, 0), torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak_memory(device: torch.device) -> None:
    """Measure the peak from now on, such as from the first update."""
    _earlier_peaks.pop(device, None)
    torch.cuda.reset_peak_memory_stats(device)


class MemorySampler:
    """Reads the memory of this rank, at most once per ``interval_seconds``."""

    def __init__(
        self, device: torch.device, interval_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._device, self._interval_seconds, self._clock = device, interval_seconds, clock
        self._read = -interval_seconds

    def due(self) -> dict[str, float]:
        """Return the columns of memory in bytes, or nothing if they were read less than an interval ago.

        ``memory_bytes``: on a GPU the most that was allocated since the last reading, on a CPU what is resident now.
        ``memory_reserved_bytes``: what the caching allocator of a GPU holds. ``allocation_retries``: how often it had
        to return memory to the device and try again, since the start of the process.
        """
        now = self._clock()
        if now - self._read < self._interval_seconds:
            return {}
        self._read = now
        try:
            return self._columns()
        except (OSError, RuntimeError) as error:  # of an allocator without statistics
            logger.warning("the memory of this rank is not measured: %s", error)
            self._interval_seconds = math.inf
            return {}

    def _columns(self) -> dict[str, float]:
        if self._device.type != "cuda":
            return {"memory_bytes": float(resident_bytes())}
        stats = torch.cuda.memory_stats(self._device)
        peak = stats["allocated_bytes.all.peak"]
        _earlier_peaks[self._device] = max(_earlier_peaks.get(self._device, 0), peak)
        torch.cuda.reset_peak_memory_stats(self._device)
        return {
            "memory_bytes": float(peak),
            "memory_reserved_bytes": float(stats["reserved_bytes.all.current"]),
            "allocation_retries": float(stats["num_alloc_retries"]),
        }
