"""The interface of a training framework: one object that owns its memory, time, pipeline and search rules.

To add a framework, write a subclass with its two profiles in a new file, override the rules in which it differs from
the defaults here, and add a line to registry.py. Memory, speed and search use the object and never its name.
"""

from collections.abc import Callable, Iterator
from typing import ClassVar

from scaletrain_cli.plan.axes import Axes, Capabilities, Rule
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.frameworks.profile import FrameworkProfile, MemoryProfile, Selective
from scaletrain_cli.plan.memory.framework_memory import framework_stage_memory
from scaletrain_cli.plan.memory.states import MasterWeights
from scaletrain_cli.plan.result import Layout, StageMemory
from scaletrain_cli.plan.stages import Stage, stages_of
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import ModelSpec, RunSpec


class Framework:
    """One training framework.

    Class attributes are its data, methods its rules; the defaults are the most common ones.
    """

    name: ClassVar[str]
    # Whether it is this project's engine: only its layouts may be submitted.
    is_engine: ClassVar[bool] = False

    # --- memory

    # Share of the device's memory that a process can fill, including its CUDA context.
    usable_memory: ClassVar[float]
    # Standard deviation of log(needed bytes / estimated bytes).
    estimate_spread: ClassVar[float]
    # Memory around a transformer's blocks. This project's engine has none: memory/engine_memory.py sizes it.
    memory_profile: ClassVar[MemoryProfile]
    # Which fp32 copy of the weights the optimizer updates.
    master_weights: ClassVar[MasterWeights] = MasterWeights.BESIDE_16_BIT
    # What selective activation checkpointing recomputes, if the spec does not decide.
    selective_mode: ClassVar[Selective]
    # Whether checkpoints have weights only as fp32 master weights, as in ZeRO stage 3, in every stage.
    stores_master_weights_alone: ClassVar[bool] = False
    # Whether attention with dropout stores the matrix of scores, because no fused kernel draws the framework's masks.
    keeps_dropped_scores: ClassVar[bool] = False

    # --- time

    profile: ClassVar[FrameworkProfile]
    # Whether ZeRO-1 and 2 all-reduce gradients although a reduce-scatter would suffice.
    reduces_whole_gradients: ClassVar[bool] = False
    # Whether gradients below ZeRO-2 are reduced only after the last backward pass, without overlap. For vision
    # networks; transformers have profile.reduce_overlap instead.
    reduces_after_backward: ClassVar[bool] = False
    # Whether ZeRO-2 gathers weights per micro-batch and keeps them from the forward to the backward pass.
    gathers_per_micro_batch: ClassVar[bool] = False
    # With a pipeline, ranks gather weights and reduce gradients once per step, at any stage.
    keeps_whole_in_pipeline: ClassVar[bool] = False
    # Whether every tensor rank sends the full activation to the next stage, unless norms are sharded; otherwise each
    # sends its share (arXiv:2104.04473, section 4.1).
    sends_whole_boundary: ClassVar[bool] = False
    # Whether tensor parallelism also shards norms and residuals (Megatron's sequence parallelism, arXiv:2205.05198)
    # unless layout.tensor_sequence_parallel is set.
    shards_norms_by_default: ClassVar[bool] = True
    # Whether ``training.compile: auto`` may compile its blocks.
    compiles_blocks: ClassVar[bool] = False

    # --- search

    capabilities: ClassVar[Capabilities]

    @property
    def fragmentation(self) -> float:
        """Share of the bytes allocated and freed in a step that the caching allocator cannot use."""
        return self.memory_profile.fragmentation

    @property
    def logit_bytes(self) -> int:
        """Bytes of logits and loss per token and vocabulary entry."""
        return self.memory_profile.logits

    def stage_memory(self, spec: RunSpec, layout: Layout, device: Accelerator) -> Callable[[Stage], StageMemory]:
        """Return a function from a pipeline stage of this layout to the bytes on one of its ranks."""
        return framework_stage_memory(
            spec,
            layout,
            device,
            self.memory_profile,
            self.profile,
            selective=self.selective(spec),
            shards_norms=self.shards_norms(spec, layout),
            master_weights=self.master_weights,
        )

    def memory_assumptions(self) -> Iterator[Reason]:
        """Yield the sources of the figures for states, buffers and fragmentation."""
        yield Reason("plan.assumes-counted-states", {"framework": self.name})
        yield Reason("plan.assumes-fragmentation", {"share": self.fragmentation})

    def selective(self, spec: RunSpec) -> Selective:
        """Return what selective activation checkpointing recomputes."""
        return self.selective_mode

    def selective_every(self, spec: RunSpec) -> int:
        """Return n, if selective activation checkpointing recomputes every n-th block."""
        return 2

    def cross_entropy(self, spec: RunSpec, micro_batch_tokens: int, tensor_parallel: int, device_bytes: int) -> str:
        """Return the implementation of a text model's loss: ``whole``, ``chunked`` or ``liger``."""
        return "whole"

    def shards_norms(self, spec: RunSpec, layout: Layout) -> bool:
        """Return whether norms and residuals are sharded over the tensor ranks too (arXiv:2205.05198)."""
        wanted = spec.layout.tensor_sequence_parallel
        if layout.tensor_parallel == 1:
            return False
        return self.shards_norms_by_default if wanted == "auto" else wanted

    def drops_scores(self, spec: RunSpec) -> bool:
        """Return whether attention stores its scores because of the framework's own dropout masks."""
        return self.keeps_dropped_scores and spec.transformer.attention_dropout > 0

    def written_alone_bytes(self, layout: Layout, checkpoint_bytes: int, weight_bytes: int) -> int:
        """Return the bytes of a checkpoint that data-parallel rank 0 writes alone; all nodes share the write of the
        rest.

        The default is 0: most frameworks also divide replicated state between the ranks (Megatron-LM:
        ``--ckpt-fully-parallel-save``).
        """
        return 0

    def reduce_overlap(self, layout: Layout, profile: FrameworkProfile) -> float:
        """Return the share of the traffic of weights and gradients that may overlap compute."""
        return profile.reduce_overlap

    def profile_on(self, device: Accelerator) -> FrameworkProfile:
        """Return the time profile on a device."""
        return self.profile

    def blocks_by_stage(self, model: ModelSpec, stages: int) -> tuple[int, ...]:
        """Return the number of blocks on each pipeline stage: divided evenly, with the remainder on the first ones."""
        blocks, left = divmod(model.num_hidden_layers, stages)
        return tuple(blocks + (index < left) for index in range(stages))

    def pipeline_stages(self, model: ModelSpec, stages: int, split: tuple[int, ...] = ()) -> tuple[Stage, ...]:
        """Return the stages to size: all of them, or the first, second and last of a very long pipeline.

        ``split``: the blocks on each; empty: as the framework divides them.
        """
        return stages_of(model, stages, self.blocks_by_stage, split)

    def rules(self, spec: RunSpec, axes: Axes) -> Iterator[Rule]:
        """Yield the framework's rules that these degrees break."""
        yield from ()

    def lowest_zero_stage(self, spec: RunSpec, pipelined: bool) -> int:
        """Return the lowest ZeRO stage that the framework supports."""
        return 0

    def highest_zero_stage(self, spec: RunSpec, pipelined: bool) -> int:
        """Return the highest ZeRO stage that the framework supports.

        With a pipeline that is 1, because every rank keeps full gradients until the last micro-batch.
        """
        return 1 if pipelined else 3

    def fewest_micro_batches(self, pipeline_parallel: int) -> int:
        """Return the fewest micro-batches per step that a pipeline of this length accepts."""
        return 0
