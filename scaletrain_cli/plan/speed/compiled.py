"""What torch.compile makes of a framework's habits. Knows no device and no model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from scaletrain_cli.plan.speed.framework_time import FUSED_SCORES, FrameworkProfile


@cache
def fused(eager: FrameworkProfile) -> FrameworkProfile:
    """The same with torch.compile of each block: one kernel for a chain of element-wise operations and reductions.

    Each chain reads its inputs and writes its outputs once. A residual sum and the norm after it: two in, two out; the
    norm's gradient: three in, one out, and its inputs once more for the weight's. Embedding, head and loss stay eager,
    as in our engine and torchtitan. Host: about 15 launches forward and 25 backward of 20 us each, an estimate.
    """
    return replace(
        eager,
        forward_host=min(eager.forward_host, 0.3e-3),
        backward_host=min(eager.backward_host, 0.5e-3),
        norm_forward=min(eager.norm_forward, 16.0),
        norm_backward=min(eager.norm_backward, 20.0),
        gated=_less(eager.gated, (6.0, 10.0)),
        plain=_less(eager.plain, (4.0, 6.0)),
        rotary=eager.rotary if eager.complex_rotary else _less(eager.rotary, (4.0, 4.0)),
        scores=_less(eager.scores, FUSED_SCORES),
        small_kernels=(6, 10),
    )


def _less(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return min(one[0], other[0]), min(one[1], other[1])
