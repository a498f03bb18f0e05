"""What an explanation of a plan is: questions in order, each with its arithmetic and an answer.

Part of the JSON of ``scaletrain plan --explain --json``, under ``explanation``; keys are added, never renamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.search.layout_rules import broken_rules
from scaletrain_cli.plan.search.layout_search import Candidate, evaluate
from scaletrain_cli.plan.search.layouts import CHECKPOINTING, Axes
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.training import LayoutSpec

# Layouts that were not chosen, sized for an explanation: what if one axis were folded away, on fewer ranks or more.


def on_one_rank(spec: RunSpec) -> RunSpec:
    """The same run with one rank, for what a device alone would have to hold."""
    cluster = spec.cluster.model_copy(update={"nodes": 1, "gpus_per_node": 1})
    return spec.model_copy(update={"cluster": cluster})


def modes(spec: RunSpec) -> tuple[str, ...]:
    """Kinds of recomputation that the network knows; those of vision are not selective."""
    return CHECKPOINTING if isinstance(spec.model, ModelSpec) else ("none", "full")


def samples(spec: RunSpec) -> str:
    """What a batch counts."""
    return "sequences" if isinstance(spec.model, ModelSpec) else spec.unit


def sized(spec: RunSpec, layout: Layout, device: Accelerator, **changes: Any) -> Candidate | None:
    """``layout`` with some fields changed, data parallelism taking what the others leave.

    None where a rule of the framework forbids it or something does not divide; what the spec pins does not matter.
    """
    changed = replace(layout, world_size=spec.world_size, **changes)
    others = changed.tensor_parallel * changed.pipeline_parallel * changed.sequence_parallel * changed.context_parallel
    if changed.world_size % others:
        return None
    data = changed.world_size // others
    if changed.global_batch_size % (data * changed.micro_batch_size):
        return None
    if changed.pipeline_parallel == 1:
        changed = replace(changed, virtual_pipeline=1)
    if data * changed.sequence_parallel * changed.context_parallel % changed.expert_parallel:
        changed = replace(changed, expert_parallel=1)
    accumulation = changed.global_batch_size // (data * changed.micro_batch_size)
    changed = replace(changed, data_parallel=data, gradient_accumulation_steps=accumulation)
    axes = Axes(
        data=data,
        tensor=changed.tensor_parallel,
        pipeline=changed.pipeline_parallel,
        virtual=changed.virtual_pipeline,
        sequence=changed.sequence_parallel,
        context=changed.context_parallel,
        expert=changed.expert_parallel,
    )
    return None if any(broken_rules(_unpinned(spec), axes)) else evaluate(spec, changed, device)


def _unpinned(spec: RunSpec) -> RunSpec:
    training = spec.training.model_copy(update={"micro_batch_size": "auto"})
    return spec.model_copy(update={"layout": LayoutSpec(), "training": training})


def row(name: str, candidate: Candidate, note: str = "") -> Row:
    """One line of an explanation: what the layout needs, and how long its step takes."""
    memory = candidate.memory
    return Row(name, memory.peak, candidate.time.step, memory.peak / memory.capacity, memory.fits, note)


@dataclass(frozen=True)
class Row:
    """One line of arithmetic. ``share`` is of the device's memory for bytes, of the step for seconds."""

    name: str
    bytes: int | None = None
    seconds: float | None = None
    share: float | None = None
    fits: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Question:
    """One step of the decision. ``answer`` is None where the question is how much; ``follows`` leads to the next."""

    key: str
    question: str
    rows: tuple[Row, ...]
    answer: bool | None
    verdict: str
    follows: str = ""


def distinct(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Without the rows that need just as much memory as the one before and more time: they change nothing."""
    kept: list[Row] = []
    for row in rows:
        same = kept and kept[-1].bytes == row.bytes and (row.seconds or 0.0) >= (kept[-1].seconds or 0.0)
        if same:
            kept[-1] = replace(kept[-1], note="recomputation saves nothing")
        else:
            kept.append(row)
    return tuple(kept)


def percent(share: float) -> str:
    """``86 %``, and a decimal below ten."""
    return f"{share:.0%}".replace("%", " %") if share >= 0.0995 else f"{share:.1%}".replace("%", " %")


def times(share: float) -> str:
    """``86 % of`` or ``15 times``."""
    return f"{percent(share)} of" if share < 9.995 else f"{share:,.0f} times"
