"""Size every layout that a spec allows, and choose: the fastest that fits. Knows no advice and no prices."""

from __future__ import annotations

from dataclasses import dataclass

from scaletrain_cli.plan.hardware import Accelerator
from scaletrain_cli.plan.layouts import (
    CHECKPOINTING,
    Axes,
    build_layout,
    checkpointing_modes,
    micro_batch_sizes,
    zero_stages,
)
from scaletrain_cli.plan.memory import plan_memory
from scaletrain_cli.plan.result import Alternative, Layout, Memory, Network, Time
from scaletrain_cli.plan.timing import plan_time
from scaletrain_cli.spec import RunSpec

# A layout that fills more than this of the device is taken only if no other fits: the memory model errs by a few
# percent, and an out-of-memory error costs more than a slightly slower step.
_COMFORTABLE_SHARE = 0.92
# Step times closer than this are the same, as far as the model can tell; then the simpler layout wins.
_SAME_TIME = 1.02
_MOST_ALTERNATIVES = 200


@dataclass(frozen=True)
class Candidate:
    """One layout with its size and speed."""

    layout: Layout
    memory: Memory
    time: Time
    network: Network

    @property
    def comfortable(self) -> bool:
        return self.memory.peak <= _COMFORTABLE_SHARE * self.memory.capacity


def candidates(spec: RunSpec, axes: Axes, device: Accelerator) -> list[Candidate]:
    """Every layout tried. Memory grows with the micro-batch, so each series ends at the first that does not fit."""
    found = []
    for stage in zero_stages(spec, axes):
        for checkpointing in checkpointing_modes(spec):
            for micro_batch in micro_batch_sizes(spec, axes):
                candidate = evaluate(spec, build_layout(spec, axes, stage, checkpointing, micro_batch), device)
                found.append(candidate)
                if not candidate.memory.fits:
                    break
    return found


def evaluate(spec: RunSpec, layout: Layout, device: Accelerator) -> Candidate:
    """Memory, time and traffic of one layout."""
    time, network = plan_time(spec, layout, device)
    return Candidate(layout, plan_memory(spec, layout, device), time, network)


def choose(found: list[Candidate]) -> Candidate | None:
    """The fastest that fits with room to spare; among equals the lower ZeRO stage, less recomputation, less memory."""
    fitting = [candidate for candidate in found if candidate.memory.fits]
    pool = [candidate for candidate in fitting if candidate.comfortable] or fitting
    if not pool:
        return None
    limit = min(candidate.time.step for candidate in pool) * _SAME_TIME
    return min((candidate for candidate in pool if candidate.time.step <= limit), key=_simplicity)


def smallest(found: list[Candidate]) -> Candidate:
    """The one that needs the least memory."""
    return min(found, key=lambda candidate: (candidate.memory.peak, _simplicity(candidate)))


def alternatives(found: list[Candidate], chosen: Candidate) -> tuple[Alternative, ...]:
    """All but the chosen one, fastest fitting first, then by memory; each with its reason."""
    rest = [candidate for candidate in found if candidate is not chosen]
    rest.sort(key=lambda c: (not c.memory.fits, c.time.step if c.memory.fits else c.memory.peak, _simplicity(c)))
    return tuple(
        Alternative(c.layout, c.time.step, c.memory.peak, c.memory.fits, _reason(c, chosen))
        for c in rest[:_MOST_ALTERNATIVES]
    )


def _reason(candidate: Candidate, chosen: Candidate) -> str:
    memory = candidate.memory
    if not memory.fits:
        return f"does not fit: needs {memory.peak / 1e9:,.1f} GB of {memory.capacity / 1e9:,.1f} GB"
    if not candidate.comfortable and chosen.comfortable:
        return f"fits with little room: {100 * memory.peak / memory.capacity:.0f} % of the device"
    slower = candidate.time.step / chosen.time.step
    if slower > _SAME_TIME:
        return f"{slower:.2f} times as slow"
    return "no faster, and less simple"


def _simplicity(candidate: Candidate) -> tuple[int, int, int, int]:
    layout = candidate.layout
    recomputation = CHECKPOINTING.index(layout.activation_checkpointing)
    return layout.zero_stage, recomputation, candidate.memory.peak, layout.micro_batch_size
