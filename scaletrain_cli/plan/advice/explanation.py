"""The data of an explanation: questions, each with rows of numbers and an answer; and sizing of the layouts compared.

``scaletrain plan --explain --json`` has them under ``explanation``; keys are added, never renamed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from scaletrain_cli.plan.axes import Axes
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.search.layout_search import Candidate, evaluate
from scaletrain_cli.plan.search.layouts import broken_rules
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.training import LayoutSpec


def sized(spec: RunSpec, layout: Layout, device: Accelerator, **changes: Any) -> Candidate | None:
    """Return ``layout`` with some fields changed, sized; data parallelism takes the remaining ranks.

    Returns None if a rule excludes the layout or a size does not divide. Values that the spec sets are ignored.
    """
    changed = replace(layout, world_size=spec.world_size, **changes)
    data, left = divmod(changed.world_size, Axes.of(changed).model_parallel)
    if left:
        return None
    if changed.global_batch_size % (data * changed.micro_batch_size):
        return None
    if changed.pipeline_parallel == 1:
        changed = replace(changed, virtual_pipeline=1)
    if len(changed.pipeline_split) != changed.pipeline_parallel:
        changed = replace(changed, pipeline_split=())
    if data * changed.sequence_parallel * changed.context_parallel % changed.expert_parallel:
        changed = replace(changed, expert_parallel=1)
    accumulation = changed.global_batch_size // (data * changed.micro_batch_size)
    changed = replace(changed, data_parallel=data, gradient_accumulation_steps=accumulation)
    unpinned = spec.with_changes("training", micro_batch_size="auto").model_copy(update={"layout": LayoutSpec()})
    return None if any(broken_rules(unpinned, Axes.of(changed))) else evaluate(spec, changed, device)


def at_best_micro_batch(spec: RunSpec, layout: Layout, device: Accelerator, **changes: Any) -> Candidate | None:
    """Return ``sized`` with the fastest micro-batch that fits; with the smallest if none does."""
    best, size = None, 1
    while size <= layout.global_batch_size:
        candidate = sized(spec, layout, device, micro_batch_size=size, **changes)
        if candidate is None or (best and not candidate.memory.fits):
            break
        best = min(best or candidate, candidate, key=lambda option: option.time.step)
        if not candidate.memory.fits:
            break
        size *= 2
    return best


def varied(name: str, candidate: Candidate) -> "Row":
    """Return a row with the layout's recomputation and micro-batch in its name."""
    size = candidate.layout.micro_batch_size
    given = f", micro {size}" if size > 1 else ""
    return row(f"{name}, recompute {candidate.layout.activation_checkpointing}{given}", candidate)


def row(name: str, candidate: Candidate, note: Reason | None = None) -> "Row":
    """Return a row with the memory and step time of a layout."""
    memory = candidate.memory
    return Row(name, memory.peak, candidate.time.step, memory.peak / memory.capacity, memory.fits, note)


@dataclass(frozen=True)
class Row:
    """One row of numbers. ``share``: of the device's memory if the row has bytes, otherwise of the step."""

    name: str
    bytes: int | None = None
    seconds: float | None = None
    share: float | None = None
    fits: bool | None = None
    note: Reason | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields; ``note`` as text, with its reason code beside it."""
        row = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.note is None:
            return row | {"note": ""}
        return row | {"note": str(self.note), **self.note.to_document()}


@dataclass(frozen=True)
class Question:
    """One step of the decision. ``answer``: yes or no, None for other questions. ``follows``: what it leads to."""

    key: str
    question: Reason
    rows: tuple[Row, ...]
    answer: bool | None
    verdict: tuple[Reason, ...]
    follows: tuple[Reason, ...] = ()

    @property
    def verdict_text(self) -> str:
        return _sentences(self.verdict)

    @property
    def follows_text(self) -> str:
        return _sentences(self.follows)

    def to_json(self) -> dict[str, Any]:
        """Return question, verdict and follows as text, and their codes under ``reasons``."""
        return {
            "key": self.key,
            "question": f"{self.question}?",
            "rows": [row.to_json() for row in self.rows],
            "answer": self.answer,
            "verdict": self.verdict_text,
            "follows": self.follows_text,
            "reasons": {
                "question": self.question.to_document(),
                "verdict": [reason.to_document() for reason in self.verdict],
                "follows": [reason.to_document() for reason in self.follows],
            },
        }


def _sentences(reasons: Sequence[Reason]) -> str:
    return " ".join(f"{reason}." for reason in reasons)


def distinct(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows without those that are slower than the row before and need as much memory."""
    kept: list[Row] = []
    for row in rows:
        same = kept and kept[-1].bytes == row.bytes and (row.seconds or 0.0) >= (kept[-1].seconds or 0.0)
        if same:
            kept[-1] = replace(kept[-1], note=Reason("plan.recomputation-saves-nothing"))
        else:
            kept.append(row)
    return tuple(kept)
