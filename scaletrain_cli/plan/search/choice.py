"""Which of the sized layouts to take, and why not the others. Sizes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from scaletrain_cli.plan.result import Alternative, Layout, Memory, Network, Time
from scaletrain_cli.plan.search.layouts import CHECKPOINTING, OFFLOAD

# Step times closer than this are the same, as far as the model can tell; then the simpler layout wins.
SAME_TIME = 1.02
MOST_ALTERNATIVES = 200
# A step time that rounds to 0.0 % less is called equal.
_NOT_FASTER = 0.9995
_WITHIN_ERROR = "faster by less than the error of the model, and less simple"
_FEWER_NEGATIVES = "accumulates, so that a sample meets fewer negatives"


class Sized(NamedTuple):
    """A layout whose memory is known."""

    layout: Layout
    memory: Memory


@dataclass(frozen=True)
class Candidate:
    """One layout with its size and speed."""

    layout: Layout
    memory: Memory
    time: Time
    network: Network

    @property
    def comfortable(self) -> bool:
        """Whether it fits with room for the error of the memory model; an out-of-memory error costs more than speed."""
        return self.memory.verdict == "fits"

    @property
    def expected_seconds(self) -> float:
        """Per step, if a run that runs out of memory is worth nothing."""
        return self.time.step / max(1 - self.memory.out_of_memory_probability, 1e-4)


class Reason(NamedTuple):
    """Why a layout was not taken: in general, and with its numbers."""

    family: str
    text: str


def choose(fitting: list[Candidate], *, contrastive: bool = False) -> Candidate | None:
    """The fastest that fits with room to spare, or else that fits; among equals the simplest.

    Speed counts as far as it can be expected: a layout that may run out of memory must be faster by as much. Where the
    loss is ``contrastive``, one that accumulates is taken only if none that does not fits with room.
    """
    pool = [candidate for candidate in fitting if candidate.comfortable] or fitting
    if contrastive:
        pool = [candidate for candidate in pool if candidate.layout.gradient_accumulation_steps == 1] or pool
    if not pool:
        return None
    limit = min(candidate.expected_seconds for candidate in pool) * SAME_TIME
    return min((candidate for candidate in pool if candidate.expected_seconds <= limit), key=simplicity)


def simplicity(candidate: Candidate) -> tuple[int, ...]:
    """Smaller is simpler: no offload, fewer axes, lower ZeRO stage, less recomputation, less memory."""
    layout = candidate.layout
    split = layout.tensor_parallel * layout.pipeline_parallel * layout.sequence_parallel * layout.context_parallel
    return (
        OFFLOAD.index(layout.offload),
        split,
        layout.expert_parallel,
        layout.virtual_pipeline,
        layout.zero_stage,
        CHECKPOINTING.index(layout.activation_checkpointing),
        candidate.memory.peak,
        layout.micro_batch_size,
    )


def best_alternatives(
    candidates: list[Candidate], chosen: Candidate, *, contrastive: bool = False
) -> tuple[Alternative, ...]:
    """All but the chosen one, fastest fitting first, then by memory; each with its reason."""
    rest = [candidate for candidate in candidates if candidate.layout != chosen.layout]
    rest.sort(key=lambda c: (not c.memory.fits, c.time.step if c.memory.fits else c.memory.peak, simplicity(c)))
    return tuple(
        Alternative(
            c.layout, c.time.step, c.memory.peak, c.memory.fits, reason(c, chosen, contrastive=contrastive).text
        )
        for c in rest[:MOST_ALTERNATIVES]
    )


def reason(candidate: Candidate, chosen: Candidate, *, contrastive: bool = False) -> Reason:
    """Why ``candidate`` was not taken."""
    memory = candidate.memory
    if not memory.fits:
        needed = f"needs {memory.peak / 1e9:,.1f} GB of {memory.capacity / 1e9:,.1f} GB"
        return Reason("does not fit", f"does not fit: {needed}")
    if not candidate.comfortable and chosen.comfortable:
        share = f"{100 * memory.peak / memory.capacity:.0f} % of the device"
        return Reason("fits with little room", f"fits with little room: {share}")
    slower = candidate.time.step / chosen.time.step
    if contrastive and candidate.layout.gradient_accumulation_steps > 1 == chosen.layout.gradient_accumulation_steps:
        return Reason(_FEWER_NEGATIVES, _FEWER_NEGATIVES)
    if slower > SAME_TIME:
        return Reason("slower", f"{slower:.2f} times as slow")
    if candidate.expected_seconds > chosen.expected_seconds * SAME_TIME:
        risk = f"{100 * candidate.memory.out_of_memory_probability:.0f} % likely"
        return Reason("more likely to run out of memory", f"{risk} to run out of memory")
    if slower < _NOT_FASTER:
        margin = f"{100 * (1 - slower):.1f} % faster"
        return Reason(_WITHIN_ERROR, f"{margin}, within the error of the model, and less simple")
    return Reason("not faster, and less simple", "not faster, and less simple")
