"""Which device or node is worse than the others, from what each rank has measured. Pure: figures in, findings out.

A device is held against the others of the same job, not against a datasheet: what all have in common is the plan's to
explain, what one of them has alone is that node's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

# A GPU that is held down by heat or power loses a third or more; between healthy ones of a kind lie a few per cent.
_SLOW_DEVICE = 0.7
# A link that fell back to TCP, or to fewer lanes, is several times slower.
_SLOW_NODE = 0.5
_SLOW_ALL = 0.3
_FEWEST_TO_COMPARE = 3  # of two, nobody knows which one is wrong
_CLOCK_SECONDS = 5.0


@dataclass(frozen=True)
class RankMeasures:
    """One rank's. ``links``: bytes per second to and from a rank of another node at once, one for each partner."""

    rank: int
    node_rank: int
    node: str
    device: str
    total_bytes: int
    free_bytes: int
    flops: float
    links: tuple[float, ...]
    clock: float
    versions: dict[str, str]


@dataclass(frozen=True)
class Expected:
    """What the plan says: bytes of a rank's peak, seconds of the all-reduce that was measured, and of the measured."""

    peak_bytes: int
    all_reduce_seconds: float
    measured_seconds: float


@dataclass(frozen=True)
class Finding:
    """``keeps_off``: no attempt should run on that node; else it is worth a word. ``rank`` -1: of no rank alone.

    ``costs_speed``: the job would run all the same, slower.
    """

    rank: int
    node: str
    message: str
    keeps_off: bool
    costs_speed: bool = False


def judge(measures: Sequence[RankMeasures], expected: Expected) -> list[Finding]:
    """Everything that is wrong with these ranks, what keeps off first."""
    found = [
        *_memory(measures, expected),
        *_devices(measures),
        *_links(measures),
        *_versions(measures),
        *_clocks(measures),
        *_together(expected),
    ]
    return sorted(found, key=lambda finding: not finding.keeps_off)


def _memory(measures: Sequence[RankMeasures], expected: Expected) -> Iterator[Finding]:
    for one in measures:
        if one.total_bytes and one.free_bytes < expected.peak_bytes:
            message = (
                f"{one.device} has {one.free_bytes / 1e9:.1f} GB free of {one.total_bytes / 1e9:.1f} GB and the plan "
                f"needs {expected.peak_bytes / 1e9:.1f} GB"
            )
            yield Finding(one.rank, one.node, message, keeps_off=True)


def _devices(measures: Sequence[RankMeasures]) -> Iterator[Finding]:
    usual = median(one.flops for one in measures)
    if len(measures) < _FEWEST_TO_COMPARE:
        return
    for one in measures:
        if one.flops < _SLOW_DEVICE * usual:
            message = f"{one.device} multiplies {one.flops / 1e12:.3g} TFLOP/s, the others {usual / 1e12:.3g}"
            yield Finding(one.rank, one.node, message, keeps_off=True, costs_speed=True)


def _links(measures: Sequence[RankMeasures]) -> Iterator[Finding]:
    """By the best link of each node: a healthy node looks bad beside a bad partner, but not beside all of them."""
    best = {one.rank: max(one.links) for one in measures if one.links}
    if len(best) < _FEWEST_TO_COMPARE:
        return
    usual = median(best.values())
    for one in measures:
        if one.rank in best and best[one.rank] < _SLOW_NODE * usual:
            message = f"its network moves {best[one.rank] / 1e9:.3g} GB/s, that of the other nodes {usual / 1e9:.3g}"
            yield Finding(one.rank, one.node, message, keeps_off=True, costs_speed=True)


def _versions(measures: Sequence[RankMeasures]) -> Iterator[Finding]:
    for name in sorted({name for one in measures for name in one.versions}):
        told = [one.versions.get(name, "none") for one in measures]
        usual = max(sorted(set(told)), key=told.count)
        for one, version in zip(measures, told, strict=True):
            if version != usual:
                message = f"{name} {version}, the others have {usual}"
                yield Finding(one.rank, one.node, message, keeps_off=False)


def _clocks(measures: Sequence[RankMeasures]) -> Iterator[Finding]:
    usual = median(one.clock for one in measures)
    for one in measures:
        if abs(one.clock - usual) > _CLOCK_SECONDS:
            side = "ahead of" if one.clock > usual else "behind"
            message = f"its clock is {abs(one.clock - usual):.0f} s {side} the others'"
            yield Finding(one.rank, one.node, message, keeps_off=False)


def _together(expected: Expected) -> Iterator[Finding]:
    if expected.all_reduce_seconds and expected.measured_seconds * _SLOW_ALL > expected.all_reduce_seconds:
        message = (
            f"an all-reduce over all ranks takes {expected.measured_seconds * 1e3:.0f} ms, where the plan counts "
            f"{expected.all_reduce_seconds * 1e3:.0f}: NCCL_DEBUG=INFO says whether it uses the network that is meant"
        )
        yield Finding(-1, "", message, keeps_off=False)
