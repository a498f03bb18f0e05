"""Axes of parallelism: their degrees, the rules that restrict these, and what a framework supports."""

from dataclasses import dataclass, field
from functools import lru_cache
from math import isqrt
from typing import Any, NamedTuple

from scaletrain_cli.errors import Problem
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec

AXES = (
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline",
    "sequence_parallel",
    "context_parallel",
    "expert_parallel",
)
CHECKPOINTING = ("none", "selective", "full")
OFFLOAD = ("none", "optimizer", "optimizer+params")
_OFFLOAD_STAGE = {"auto": 0, "none": 0, "optimizer": 1, "optimizer+params": 3}


class Axes(NamedTuple):
    """The degree of parallelism of each axis in one layout."""

    data: int
    tensor: int
    pipeline: int
    virtual: int
    sequence: int
    context: int
    expert: int

    @classmethod
    def of(cls, layout: Layout) -> "Axes":
        """Return those of a layout."""
        return cls(layout.data_parallel, *(getattr(layout, axis) for axis in AXES))

    @property
    def model_parallel(self) -> int:
        """Number of ranks that work on the same sequences."""
        return self.tensor * self.pipeline * self.sequence * self.context

    @property
    def shards(self) -> int:
        """Number of ranks over which ZeRO may shard states."""
        return self.data * self.sequence * self.context


@dataclass(frozen=True)
class Capabilities:
    """Features of a framework: axes other than data whose degree may exceed 1, ZeRO stages, and offload modes."""

    axes: frozenset[str]
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    offload: tuple[str, ...] = ("none",)


@dataclass(frozen=True)
class Rule:
    """A rule that a setting breaks: the setting's dotted key, its value, and the code of the reason.

    ``params``: parameters of the rule's text; ``fix``: parameters of its remedies (reason_texts/plan/).
    """

    key: str
    given: object
    code: str
    params: dict[str, Any] = field(default_factory=dict)
    fix: dict[str, Any] = field(default_factory=dict)

    @property
    def reason(self) -> Reason:
        """Return the reason, with key and value among its parameters."""
        return Reason(f"plan.{self.code}", {"key": self.key, "given": self.given, **self.params, **self.fix})

    @property
    def rejection(self) -> Reason:
        """Return the reason without the value, to count all values that break the rule in the same way."""
        return Reason(f"plan.{self.code}", {"key": self.key, **self.params})

    def problem(self, where: str) -> Problem:
        """Return the broken rule as a problem at the location ``where``."""
        return Problem.because(where, self.key, self.reason, self.given)

    @property
    def message(self) -> str:
        """Return the text of the rule with a full stop."""
        return f"{self.reason}."

    @property
    def hint(self) -> str:
        """Return the remedies as sentences."""
        return " ".join(self.reason.remedies)

    @property
    def text(self) -> str:
        """Return key, value, rule and remedy on one line."""
        subject = self.key if self.given is None else f"{self.key} = {self.given}"
        return f"{subject}: {self.message} {self.hint}".strip()


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order, in O(sqrt(number))."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


@lru_cache(maxsize=4096)  # a search asks for the same few again and again
def nearest_divisors(number: int, wanted: int) -> tuple[int, ...]:
    """Return the divisors of ``number`` nearest to ``wanted``, below (or equal) and above: one or two numbers."""
    factors = divisors(number) if number <= 10**12 else [1]
    below = max((n for n in factors if n <= wanted), default=1)
    above = min((n for n in factors if n > wanted), default=below)
    return (below,) if above == below else (below, above)


def resolve_axes(spec: RunSpec) -> Axes:
    """Return the degrees that the spec sets, 1 for those on auto; data parallelism takes the remaining ranks."""
    layout = spec.layout
    axes = Axes(1, *(1 if (degree := getattr(layout, axis)) == "auto" else degree for axis in AXES))
    left = max(1, spec.world_size // axes.model_parallel)
    return axes._replace(data=left if layout.data_parallel == "auto" else layout.data_parallel)


def offload_stage(spec: RunSpec, offload: str) -> int:
    """Return the lowest ZeRO stage that supports an offload mode.

    DeepSpeed offloads only what it shards, and to NVMe only in stage 3 (zero/offload_config.py).
    """
    return 3 if spec.layout.offload_device == "nvme" and offload != "none" else _OFFLOAD_STAGE[offload]
