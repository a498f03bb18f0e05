"""rehearsal.json: what a rehearsal has found, a verdict for each item, and what it measured (docs/rehearsal.md).

The engine writes it, the command line reads it; the measured figures are the input of a calibration of the planner.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from scaletrain_cli.diagnosis.case import place_of
from scaletrain_cli.diagnosis.findings import Cause, Change
from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.rundir.documents import read_document, reporting_damage, write_document
from scaletrain_cli.rundir.paths import RunDir

SCHEMA = "scaletrain.rehearsal/v1"
FILE = "rehearsal.json"
VARIABLE = "SCALETRAIN_REHEARSAL"  # of the ranks: ``Options`` as JSON
LOG_PREFIX = "rehearsal.json "  # of the line of rank 0's log with the document, at the end
Verdict = Literal["passed", "failed", "skipped"]
# The items in the order in which they run, each with what it checks.
ITEMS: dict[str, str] = {
    "labels": "labels are the next tokens, or vary between images; some, and not all, count in the loss",
    "duplicates": "the first samples differ from each other",
    "first-loss": "the first loss is that of equal outputs, for a new model",
    "causality": "no token sees later tokens or other documents of its sequence",
    "gradients": "the gradient norm of the first steps is finite and even, and reaches every parameter",
    "speed": "a step takes as long as planned",
    "memory": "memory is as planned, and leaves room",
    "data-rate": "batches are read as fast as they are trained on",
    "learning-rate": "the learning rate is near the best of a range test",
    "overfit": "a few samples are overfitted",
    "restore": "a checkpoint restores the state to the bit",
    "preemption": "a preemption signal ends in a checkpoint, from which the run continues",
}


@dataclass(frozen=True)
class Options:
    """The items to rehearse: the names of the items, and the seconds that those that train may take together."""

    items: tuple[str, ...] = tuple(ITEMS)
    budget_seconds: float = 100.0

    def to_text(self) -> str:
        """Return the text of the variable of the ranks."""
        return json.dumps({"items": list(self.items), "budget_seconds": self.budget_seconds})

    @classmethod
    def from_text(cls, text: str) -> Options:
        """Return the options of ``to_text``; the defaults for an empty text. Raises ValueError for another one."""
        data = json.loads(text or "{}")
        items = tuple(name for name in ITEMS if name in data.get("items", ITEMS))
        return cls(items, float(data.get("budget_seconds", cls.budget_seconds)))


@dataclass(frozen=True)
class Item:
    """The verdict on an item: ``reason`` says what was found, or why the item does not apply (``skipped``).

    ``figures``: what was measured, JSON values. ``causes``: of a failure, the likeliest first. ``seconds``: it took.
    """

    name: str
    verdict: Verdict
    reason: Reason
    figures: Mapping[str, Any] = field(default_factory=dict)
    causes: tuple[Cause, ...] = ()
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the stable JSON object (docs/json.md)."""
        return {
            "item": self.name,
            "verdict": self.verdict,
            **self.reason.to_document(),
            "text": str(self.reason),
            "figures": dict(self.figures),
            "causes": [cause.to_json() for cause in self.causes],
            "seconds": round(self.seconds, 3),
        }

    def located(self, spec_lines: Mapping[str, str]) -> Item:
        """Return the item with the ``file:line`` of each key to change, as ``spec_lines`` has it by key."""
        causes = (
            cause
            if cause.change is None
            else replace(cause, change=replace(cause.change, place=place_of(cause.change.key, spec_lines)))
            for cause in self.causes
        )
        return replace(self, causes=tuple(causes))


@dataclass(frozen=True)
class Rehearsal:
    """The contents of rehearsal.json.

    ``measured``: step times, memory and checkpoints beside the plan, and the model, layout, devices and versions that
    they hold for (docs/rehearsal.md). ``running``: the item that is in progress; it failed if the job has ended.
    ``preempted_at``: the step of the injected preemption, after which the next attempt continues; None before it.
    """

    run_id: str
    created: float
    items: tuple[Item, ...]
    measured: Mapping[str, Any] = field(default_factory=dict)
    running: str | None = None
    preempted_at: int | None = None

    @property
    def passed(self) -> bool:
        """Return whether no item failed."""
        return all(item.verdict != "failed" for item in self.items)

    def item(self, name: str) -> Item | None:
        """Return the item of that name; None if it was not rehearsed."""
        return next((item for item in self.items if item.name == name), None)

    def with_items(self, items: Sequence[Item]) -> Rehearsal:
        """Return the rehearsal with further items, or with newer verdicts on those that it has."""
        kept = {item.name: item for item in self.items} | {item.name: item for item in items}
        order = [name for name in ITEMS if name in kept] + [name for name in kept if name not in ITEMS]
        return replace(self, items=tuple(kept[name] for name in order))

    def to_json(self) -> dict[str, Any]:
        """Return the document that is stored."""
        return {
            "schema": SCHEMA,
            "run_id": self.run_id,
            "created": self.created,
            "passed": self.passed,
            "items": [item.to_json() for item in self.items],
            "measured": dict(self.measured),
            "running": self.running,
            "preempted_at": self.preempted_at,
        }


def write_rehearsal(run: RunDir, rehearsal: Rehearsal) -> None:
    """Write rehearsal.json of a run directory. Raises OSError."""
    write_document(run.path / FILE, rehearsal.to_json())


def read_rehearsal(run: RunDir) -> Rehearsal | None:
    """Return rehearsal.json of a run directory; None if there is none. Raises UsageError for a damaged one."""
    data = read_document(run.path / FILE)
    if data is None or data.get("schema") != SCHEMA:
        return None
    with reporting_damage(run.path / FILE):
        return rehearsal_from(data)


def rehearsal_from(data: Mapping[str, Any]) -> Rehearsal:
    """Return the rehearsal of a document. Raises KeyError and TypeError for another one."""
    return Rehearsal(
        run_id=str(data["run_id"]),
        created=float(data["created"]),
        items=tuple(_item(entry) for entry in data["items"]),
        measured=dict(data["measured"]),
        running=data["running"],
        preempted_at=data["preempted_at"],
    )


def _item(data: Mapping[str, Any]) -> Item:
    causes = tuple(
        Cause(reason_from(cause), None if cause["change"] is None else Change(**cause["change"]))
        for cause in data["causes"]
    )
    return Item(data["item"], data["verdict"], reason_from(data), data["figures"], causes, data["seconds"])
