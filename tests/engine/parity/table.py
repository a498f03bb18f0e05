"""The parity table as text: one line per row, and the source of the figures."""

import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version

from tests.engine.parity.comparison import BF16, FP32, Difference
from tests.engine.parity.rows import STEPS, Row

HEADER = (
    "| layout | ranks | loss | gradient norm | weights | model states | activations | seconds | |\n|-|-|-|-|-|-|-|-|-|"
)
ACTIVATIONS = 0.05  # run beside plan


@dataclass(frozen=True)
class Line:
    """The result of a row. ``states``: bytes of the rank that differs most from its plan, run minus plan.

    ``activations``: of the rank that does, run / plan - 1. ``problem``: why there are no figures.
    """

    row: Row
    seconds: float
    found: Difference | None = None
    states: int = 0
    activations: float = 0.0
    problem: str = ""

    @property
    def right(self) -> bool:
        """Return True if the row is within its limits and has the planned bytes of model states."""
        limit = BF16 if "training.precision=bf16" in self.row.overrides else FP32
        planned = self.states == 0 and abs(self.activations) <= ACTIVATIONS
        return self.found is not None and self.found.within(limit) and planned

    def __str__(self) -> str:
        if self.found is None:
            return f"| {self.row.name} | {self.row.ranks} | {self.problem} | | | | | {self.seconds:.1f} | WRONG |"
        figures = (self.found.loss, self.found.norm, self.found.weight)
        cells = [self.row.name, str(self.row.ranks), *(f"{figure:.1e}" for figure in figures)]
        cells += [f"{self.states:+d} B" if self.states else "exact", f"{self.activations:+.1%}", f"{self.seconds:.1f}"]
        return f"| {' | '.join(cells)} | {'' if self.right else 'WRONG'} |"


def page(lines: list[Line], command: str) -> Iterator[str]:
    wrong = sum(not line.right for line in lines)
    yield "# Parity: every layout trains the model that one process trains\n"
    yield (
        f"{len(lines)} layouts of a small model, {STEPS} steps each, against a plain torch loop in one process "
        "with the same first weights and batches: the largest difference of the loss (nats), of the gradient norm "
        "(relative), and of any weight at the end. And the bytes of the rank that strays furthest from its plan: model "
        "states, and what its blocks save of one micro-batch (of mixtures the mean over ranks).\n"
    )
    yield (
        f"Allowed are {FP32.loss:g} of loss, {FP32.norm:g} of gradient norm and {FP32.weight:g} of a weight in fp32, "
        f"{BF16.loss:g} of loss in bf16, no byte of model states, and {ACTIVATIONS:.0%} of activations. "
        f"Rows beyond that: {wrong or 'none'}.\n"
    )
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "deepspeed"))
    yield f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {versions}, CPU, gloo. `{command}`\n"
    yield HEADER
    yield from map(str, lines)
