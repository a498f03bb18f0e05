"""The interface of a workload, one kind of network: its size, memory, time, rules, warnings and assumptions."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from scaletrain_cli.plan.axes import Axes, Rule
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.result import Layout, Memory, ModelSize, Network, Time, TrainingStage
from scaletrain_cli.plan.stages import Stage
from scaletrain_cli.plan.trained_parameters import stored_parameters
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.run import AnyModel


class Degrees(NamedTuple):
    """Degrees of one axis: those that divide, ascending; the largest useful one; the reason against larger ones."""

    dividing: list[int]
    largest: int
    reason: Reason


class FullStage(NamedTuple):
    """A pipeline stage that needs about as much memory as the fullest one, for lower bounds; its blocks are alike.

    ``share``: at least this share of a rank's states with all stages is on it; ``alike``: number of blocks of the model
    that are like its own.
    """

    stage: Stage
    share: float
    alike: int


class Workload(ABC):
    """One kind of network. The defaults are those of a network without attention heads, layers to divide or tokens."""

    # Whether training consumes text tokens; recipe and data checks are only for these.
    counts_tokens: ClassVar[bool] = False
    # Modes of activation checkpointing, fastest first.
    checkpointing: ClassVar[tuple[str, ...]] = ("none", "full")
    # Whether the planner models the time of offloading.
    offloads: ClassVar[bool] = False
    # Whether the planner models torch.compile of its blocks.
    compiles: ClassVar[bool] = False

    @abstractmethod
    def size(self, model: AnyModel) -> ModelSize:
        """Return parameters, and training FLOPs per unit: token, image, or pair of image and text."""

    def parameter_count(self, model: AnyModel) -> int:
        """Return the number of trainable parameters; a tied head is not counted again."""
        return self.size(model).parameters

    def stored_parameters(self, spec: RunSpec) -> list[tuple[int, int]]:
        """Return the parameters in a checkpoint, (those that train, frozen ones), for each stage of the run."""
        return stored_parameters(spec)

    @abstractmethod
    def training_size(self, spec: RunSpec) -> ModelSize:
        """Return the size with the parameters that train, and the FLOPs that training them takes."""

    @abstractmethod
    def training_stages(self, spec: RunSpec, layout: Layout, device: Accelerator) -> tuple[TrainingStage, ...]:
        """Return memory and time of each stage of the run; empty if all steps train the same parameters."""

    @abstractmethod
    def memory(self, spec: RunSpec, layout: Layout, device: Accelerator) -> Memory:
        """Return the memory of the fullest rank compared with the device, and of each pipeline stage."""

    def fullest_memory(self, spec: RunSpec, layout: Layout, device: Accelerator) -> Memory:
        """Return the same as ``memory`` for a search, perhaps without pipeline stages that cannot be the fullest."""
        return self.memory(spec, layout, device)

    def activation_bytes(self, spec: RunSpec, layout: Layout, device: Accelerator) -> int:
        """Return ``activations`` of the memory of a layout without a pipeline."""
        return self.memory(spec, layout, device).activations

    @abstractmethod
    def time(self, spec: RunSpec, layout: Layout, device: Accelerator) -> tuple[Time, Network]:
        """Return the seconds per optimizer step by cause, and the bytes that a rank of the slowest stage sends."""

    @abstractmethod
    def least_times(self, spec: RunSpec, layouts: Sequence[Layout], device: Accelerator) -> list[Time]:
        """Return the times of layouts that differ only in the number of micro-batches per step, for lower bounds.

        They are without what grows with the global batch more than linearly, and may be without rates.
        """

    def data_seconds(self, spec: RunSpec, layout: Layout, device: Accelerator) -> float:
        """Return the least that ZeRO's traffic adds up to in one micro-batch without a pipeline, overlapped or not."""
        return 0.0

    @abstractmethod
    def stages_alike(self, spec: RunSpec) -> tuple[int, bool]:
        """Return the number of stages of the run, and whether all blocks of a kind train alike in each."""

    def blocks_alike(self, spec: RunSpec) -> bool:
        """Return whether all blocks have as many parameters."""
        return True

    def full_stage(self, spec: RunSpec, axes: Axes) -> FullStage | None:
        """Return a pipeline stage for bounds on the memory of layouts with these degrees; None if none is known."""
        return None

    def block_bytes(self, spec: RunSpec, layout: Layout, device: Accelerator) -> int:
        """Return the bytes of activations of one micro-batch, of all blocks like those of ``full_stage``."""
        return 0

    def layers(self, spec: RunSpec) -> int:
        """Return the number of blocks that a pipeline can divide into stages."""
        return 1

    def heads(self, spec: RunSpec) -> int:
        """Return the number of attention heads that tensor parallelism can shard."""
        return 1

    def contrastive(self, spec: RunSpec) -> bool:
        """Return whether the loss compares each sample with all others of a micro-batch."""
        return False

    def unmeasured_part(self, model: AnyModel) -> str:
        """Return a part of the model that no published run has, whose time and memory are only computed; "" if none."""
        return ""

    def accumulation_changes_loss(self, spec: RunSpec) -> bool:
        """Return whether the loss compares only samples of a micro-batch, so that gradient accumulation changes it."""
        return self.contrastive(spec)

    def micro_batch_multiple(self, spec: RunSpec) -> int:
        """Return the number that must divide a micro-batch."""
        return 1

    def cross_entropy(self, spec: RunSpec, tokens: int, tensor_parallel: int, device_bytes: int) -> str:
        """Return how the loss is computed (``whole``, ``chunked``, ``liger``); ``tokens``: per micro-batch and rank."""
        return "whole"

    def compiled_by_default(self, spec: RunSpec) -> bool:
        """Return whether ``training.compile: auto`` may compile this model."""
        return False

    def degrees(self, spec: RunSpec, axis: str) -> Degrees | None:
        """Return the degrees of one axis to try; None if only 1 is possible."""
        return None

    def rules(self, spec: RunSpec, axes: Axes) -> Iterator[Rule]:
        """Yield the model's rules that these degrees break."""
        yield from ()

    def engine_rules(self, spec: RunSpec, tensor: int, context: int = 1) -> Iterator[Rule]:
        """Yield the rules of this project's engine that these degrees of parallelism break."""
        yield from ()

    def engine_layout_rules(self, spec: RunSpec, layout: Layout) -> Iterator[Rule]:
        """Yield the rules of this project's engine that the batch of a layout breaks."""
        yield from ()

    @abstractmethod
    def engine_problems(self, spec: RunSpec) -> Iterator[Rule]:
        """Yield a rule for each part of the architecture that this project's engine cannot train."""

    def warnings(self, spec: RunSpec) -> Iterator[Reason]:
        """Yield warnings about unexpected costs of the model on a GPU."""
        yield from ()

    def layout_warnings(self, spec: RunSpec, layout: Layout, time: Time) -> Iterator[Reason]:
        """Yield warnings about the chosen layout."""
        yield from ()

    def feed_assumptions(self, spec: RunSpec, layout: Layout, time: Time) -> Iterator[Reason]:
        """Yield what storage and processors have to deliver for the plan's speed."""
        yield from ()

    @abstractmethod
    def assumptions(self, spec: RunSpec, parameters: int) -> Iterator[Reason]:
        """Yield where the figures for activations, FLOPs and data come from."""

    def matrix_widths(self, spec: RunSpec, tensor_parallel: int) -> dict[str, int]:
        """Return the widths of the matrices on one tensor rank, by name."""
        return {}
