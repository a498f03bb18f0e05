"""How likely a layout is to run out of memory, from how far the estimate misses what others measured.

Taken as log-normal: the ratio of measured to estimated peak has a median of one and the spread below, calibrated per
framework on published runs (benchmarks/planner_accuracy.py prints the errors).
"""

from __future__ import annotations

import math

# Standard deviation of the logarithm of measured over estimated bytes. Our own engine has no published runs: taken as
# the widest.
_SPREAD = {"megatron": 0.06, "nanotron": 0.08, "fsdp": 0.10, "deepspeed": 0.10}
# A layout this likely to fail is called tight.
_TIGHT = 0.1


def out_of_memory_probability(framework: str, peak: int, capacity: int) -> float:
    """Between 0 and 1; one half where the peak is just the capacity."""
    if peak <= 0:
        return 0.0
    distance = math.log(peak / max(capacity, 1)) / _SPREAD[framework]
    return round(0.5 * math.erfc(-distance / math.sqrt(2)), 4)


def verdict(fits: bool, probability: float) -> str:
    """``fits``, ``tight`` or ``does not fit``."""
    if not fits:
        return "does not fit"
    return "tight" if probability > _TIGHT else "fits"
