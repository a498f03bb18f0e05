"""The interface of a workload: sizes, memory, time, search limits, warnings and assumptions of one kind of network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from scaletrain_cli.plan.axes import Axes, Rule
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.frameworks.base import Framework
from scaletrain_cli.plan.result import Layout, Memory, ModelSize, Network, Time
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.run import AnyModel


class Degrees(NamedTuple):
    """The degrees of one axis that divide, ascending; the largest useful one, and the reason against larger ones."""

    dividing: list[int]
    largest: int
    reason: Reason


class Workload(ABC):
    """One kind of network. Methods that return nothing here have the default of most kinds."""

    # Whether training consumes text tokens, which recipe and data checks need.
    counts_tokens: ClassVar[bool] = False
    # Modes of activation checkpointing, the fastest first.
    checkpointing: ClassVar[tuple[str, ...]] = ("none", "full")
    # Whether the time of offloading is modeled.
    offloads: ClassVar[bool] = False
    # Whether torch.compile of its blocks is modeled by the time profile of a framework.
    compiles: ClassVar[bool] = False

    @abstractmethod
    def size(self, model: AnyModel) -> ModelSize:
        """Return parameters, and training FLOPs per token, image or pair."""

    def parameter_count(self, model: AnyModel) -> int:
        """Return the number of trainable parameters, a tied head counted once."""
        return self.size(model).parameters

    @abstractmethod
    def memory(self, spec: RunSpec, layout: Layout, device: Accelerator) -> Memory:
        """Return the memory of the worst rank against the device, and of each pipeline stage."""

    @abstractmethod
    def time(self, spec: RunSpec, layout: Layout, device: Accelerator) -> tuple[Time, Network]:
        """Return seconds per optimizer step by cause, and the traffic of the busiest rank."""

    def layers(self, spec: RunSpec) -> int:
        """Return the number of blocks that a pipeline can distribute over stages."""
        return 1

    def heads(self, spec: RunSpec) -> int:
        """Return the number of attention heads that tensor parallelism can shard."""
        return 1

    def contrastive(self, spec: RunSpec) -> bool:
        """Return whether the loss compares each sample with all others of a micro-batch."""
        return False

    def cross_entropy(
        self, spec: RunSpec, framework: Framework, tokens: int, tensor_parallel: int, device_bytes: int
    ) -> str:
        """Return the implementation of the loss of a micro-batch of ``tokens`` tokens per rank."""
        return "whole"

    def compiled_by_default(self, spec: RunSpec) -> bool:
        """Return whether ``training.compile: auto`` may compile this model."""
        return False

    def degrees(self, spec: RunSpec, axis: str) -> Degrees | None:
        """Return the degrees of one axis that this model supports; None if only 1 is possible."""
        return None

    def rules(self, spec: RunSpec, axes: Axes) -> Iterator[Rule]:
        """Yield the model's rules that these degrees break."""
        yield from ()

    def engine_rules(self, spec: RunSpec, tensor: int) -> Iterator[Rule]:
        """Yield the reasons why this project's engine cannot run this degree of tensor parallelism."""
        yield from ()

    @abstractmethod
    def engine_problems(self, spec: RunSpec) -> Iterator[Rule]:
        """Yield the parts of the architecture that this project's engine cannot train."""

    def warnings(self, spec: RunSpec, framework: Framework) -> Iterator[Reason]:
        """Yield costs of the model on a GPU that the user may not expect."""
        yield from ()

    @abstractmethod
    def assumptions(self, spec: RunSpec, framework: Framework, parameters: int) -> Iterator[Reason]:
        """Yield the sources of the figures for activations, FLOPs and data."""

    def matrix_widths(self, spec: RunSpec, tensor_parallel: int) -> dict[str, int]:
        """Return the widths of the matrices on one tensor rank, by name."""
        return {}
