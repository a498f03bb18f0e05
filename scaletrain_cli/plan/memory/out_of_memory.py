"""What a framework can use of a device, and how likely a layout is to run out of it.

Taken as log-normal: the ratio of needed to estimated bytes has a median of one and the spread below. Both figures are
calibrated on the Ultra-Scale sweep (nanotron), and halves of its panels give the same: of runs estimated at 0.85 of
the device a quarter crashed, at 0.9 six of ten, at 0.95 three of four, beyond 1.15 all. That is before the memory is
full, because the fullest of many ranks decides, and NCCL and the allocator need room to work; a few percent of smaller
runs crashed too, for other reasons. Nothing comparable is published for the other frameworks.
"""

from __future__ import annotations

import math

# Share of the device that a run can fill. Without measured crashes: a margin for NCCL and fragmentation; our own
# engine's is in its parts.
_USABLE = {"nanotron": 0.91, "megatron": 0.95, "fsdp": 0.95, "deepspeed": 1.0}
# Standard deviation of the logarithm: measured on crashes for nanotron; for the others what the estimates miss the
# peaks of Megatron-LM's tests and of torchtitan's runs by, and for our own engine, which has no published runs, too.
SPREAD = {"nanotron": 0.12, "megatron": 0.08, "fsdp": 0.08, "deepspeed": 0.08}
# A layout more likely than this to fail is called tight.
_TIGHT = 0.1


def usable_bytes(framework: str, device_bytes: int, is_cpu: bool = False) -> int:
    """Bytes that a process can use of a device, its context included."""
    return device_bytes if is_cpu else int(_USABLE[framework] * device_bytes)


def out_of_memory_probability(framework: str, peak: int, capacity: int) -> float:
    """Between 0 and 1, rounded to 1e-4; one half where the peak is just the capacity."""
    if peak <= 0:
        return 0.0
    distance = math.log(peak / max(capacity, 1)) / SPREAD[framework]
    return round(0.5 * math.erfc(-distance / math.sqrt(2)), 4)


def verdict(fits: bool, probability: float) -> str:
    """``fits``, ``tight`` or ``does not fit``."""
    if not fits:
        return "does not fit"
    return "tight" if probability > _TIGHT else "fits"
