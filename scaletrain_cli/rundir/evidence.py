"""What the words of an error, or of the end of a log, give away about its cause. For engine and agent alike.

Knows the messages of CUDA, NCCL, gloo, torch and Linux; neither torch itself nor what follows from a cause.
"""

from __future__ import annotations

import re

# Cause before consequence: a device that breaks also breaks the connections of its rank.
_SIGNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "hardware",
        # NVIDIA's names for what no program can do to a device: docs.nvidia.com/deploy/xid-errors. A device-side
        # assertion or an illegal address is a program's own error, whatever Xid the driver logs for it.
        re.compile(
            r"[Uu]ncorrectable (ECC|NVLink)|ECC error|\bXid \(|fallen off the bus|GPU is lost|hardware stack error"
        ),
    ),
    ("disk-full", re.compile(r"No space left on device|Disk quota exceeded")),
    ("oom", re.compile(r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED")),
    ("host-oom", re.compile(r"DefaultCPUAllocator: .*allocate memory|Cannot allocate memory")),
    (
        "communication",
        re.compile(
            r"NCCL error|\bnccl(System|Remote|Internal|Unhandled)\w*Error|Watchdog caught collective operation timeout"
            r"|\bgloo\b.*(closed|reset|refused|timed? ?out|pair)|Connection closed by peer|Timed out waiting \d+ ?ms"
            r"|Socket Timeout",
            re.I,
        ),
    ),
)


def reason_in(text: str) -> str | None:
    """The reason that the words point to; None when they say nothing of the kind."""
    return next((reason for reason, sign in _SIGNS if sign.search(text)), None)
