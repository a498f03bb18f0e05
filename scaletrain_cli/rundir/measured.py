"""attempts/NNNN/measured.json: memory measured once per attempt, with the planned values."""

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.rundir.documents import DamagedError, reporting_damage, typed, undamaged_document, write_document
from scaletrain_cli.rundir.paths import RunDir

SCHEMA = "scaletrain.measured/v1"
# Figures that are counted from tensors and must equal those of the plan.
MODEL_STATES = ("parameters", "gradients", "optimizer_states")


@dataclass(frozen=True)
class Figure:
    """Measured and planned bytes on one rank."""

    planned: int
    measured: int

    @property
    def difference(self) -> float | None:
        """Return the measured excess as a share of the planned bytes; None if none were planned."""
        return self.measured / self.planned - 1 if self.planned else None


@dataclass(frozen=True)
class StageFigures:
    """Figures of the worst rank of a pipeline stage.

    parameters, gradients, optimizer_states; ``activations``: kept by the stage's blocks for one micro-batch. If any:
    ``host``, offloaded bytes; ``allocated`` and ``reserved``, on a GPU: the maximum in tensors, and in the allocator,
    during the step.
    """

    stage: int
    figures: dict[str, Figure]


@dataclass(frozen=True)
class Measured:
    """Memory in one optimizer step of an attempt. ``worst`` is the stage with the highest planned memory."""

    attempt: int
    step: int
    ranks: int
    device: str
    worst: int
    stages: tuple[StageFigures, ...]

    @property
    def model_states(self) -> Figure:
        """Return the sum of the model states on the worst stage, without offloaded bytes."""
        figures = self.stages[self.worst].figures
        known = [figures[name] for name in MODEL_STATES if name in figures]
        return Figure(sum(figure.planned for figure in known), sum(figure.measured for figure in known))

    def to_json(self) -> dict[str, Any]:
        """Return JSON values as stored, with the difference of each figure from the plan."""
        stages = [
            {"stage": stage.stage}
            | {
                name: dataclasses.asdict(figure) | {"difference": figure.difference}
                for name, figure in stage.figures.items()
            }
            for stage in self.stages
        ]
        return {"schema": SCHEMA, **dataclasses.asdict(self), "stages": stages}


def write_measured(run: RunDir, measured: Measured) -> None:
    """Write measured.json of an attempt. Raises OSError."""
    write_document(run.measured(measured.attempt), measured.to_json())


def read_measured(run: RunDir) -> Measured | None:
    """Return the measurement of the newest attempt that has one, or None."""
    for attempt in reversed(run.attempts()):
        data = undamaged_document(run.measured(attempt))
        if data is not None and data.get("schema") == SCHEMA:
            with contextlib.suppress(DamagedError), reporting_damage(run.measured(attempt)):
                stages = tuple(_stage(stage) for stage in data["stages"])
                measured = Measured(attempt, data["step"], data["ranks"], data["device"], data["worst"], stages)
                assert measured.model_states is not None, "worst"
                return measured
    return None


def _stage(data: dict[str, Any]) -> StageFigures:
    by_name = {name: value for name, value in data.items() if name != "stage"}
    stored = {name: {key: value[key] for key in ("planned", "measured")} for name, value in by_name.items()}
    return StageFigures(data["stage"], {name: typed(Figure, value) for name, value in stored.items()})
