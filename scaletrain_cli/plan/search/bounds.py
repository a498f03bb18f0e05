"""Lower bounds on the step time and memory of layouts, from a few layouts that are sized exactly.

A search over a large cluster cannot size every layout. The bounds follow from properties of the time and memory models:

* a larger micro-batch takes no more time per sequence;
* spreading experts over more ranks takes no more compute time;
* what happens once per step does not depend on the micro-batch;
* the first stage of a pipeline holds at least its share of states and activations; if blocks train different parts,
  some stage holds at least the mean of both;
* a stage of blocks that are alike holds their share of the states, and of the activations as many as are in flight;
* a micro-batch takes no less time than the traffic that ZeRO-2 and 3 add to it, however much of it is overlapped.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from scaletrain_cli.plan.axes import Axes
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.peak import outside_bytes_of_axes
from scaletrain_cli.plan.result import Layout, Memory, Network, Time
from scaletrain_cli.plan.search.layouts import build_layout, micro_batch_sizes
from scaletrain_cli.plan.stages import chunks_of_schedule
from scaletrain_cli.plan.workloads.base import FullStage
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.spec import RunSpec

# The models round, and overlap is not linear, so bounds are multiplied by this margin. A test compares them with the
# models.
_SLACK = 0.98
# Rounding of sums and products of a few floats.
_ROUNDING = 1 - 1e-12
# With this number of micro-batches per step, costs per step are negligible; with this number of sequences per
# micro-batch, the memory peak moves from the optimizer's step to the activations.
_MANY = 100_000


class Bounds:
    """Lower bounds for the layouts of one spec; sized layouts are cached."""

    def __init__(self, spec: RunSpec, device: Accelerator, checkpointing: str) -> None:
        """``checkpointing``: the mode of activation checkpointing that recomputes least, for the bounds on time."""
        self.spec, self.device, self.checkpointing = spec, device, checkpointing
        self._workload = workload_of(spec.model)
        self._layers, self._batch = self._workload.layers(spec), spec.training.global_batch_size
        self._stages, self._uniform = self._workload.stages_alike(spec)
        self._alike = self._workload.blocks_alike(spec)
        self._sizes = micro_batch_sizes(spec, Axes(1, 1, 1, 1, 1, 1, 1))
        self._known: dict[tuple[int | str, ...], Any] = {}  # by the bound's name and what it depends on
        self._times_known: dict[Layout, tuple[Time, Network]] = {}
        # For each micro-batch size of a group: from the widest, and then from the smallest too if that is known.
        self._group_seconds: dict[tuple[Axes, int, str, str, tuple[int, ...]], list[list[float]]] = {}

    def on_cluster(self, spec: RunSpec) -> "Bounds":
        """Return the bounds of the same run on another number of nodes. Both share the layouts that they have sized.

        These have one micro-batch and only the data-parallel ranks that their experts need, so nothing about them
        depends on the number of nodes.
        """
        bounds = copy.copy(self)
        bounds.spec = spec
        bounds._group_seconds, bounds._times_known = {}, {}  # these have the real number of ranks
        return bounds

    def time(self, layout: Layout) -> tuple[Time, Network]:
        """Return the exact time and traffic of a layout, which several searches on one cluster share."""
        if layout not in self._times_known:
            self._times_known[layout] = self._workload.time(self.spec, layout, self.device)
        return self._times_known[layout]

    def step_seconds(self, axes: Axes, micro_batches: Sequence[int], checkpointing: str | None = None) -> list[float]:
        """Return a lower bound on the step seconds of layouts with these degrees, for each micro-batch size.

        Under 1F1B with p stages of v chunks, a step lasts at least as long as m + (p - 1) / v micro-batches on the
        average stage (arXiv:2104.04473, section 2.2). One micro-batch takes no less time than one of the smallest size,
        and no less time per sequence than one of the largest size.
        """
        least = self._micro_batch(axes, self._sizes[0], self.checkpointing)
        pace = self._micro_batch(axes, self._sizes[-1], checkpointing or self.checkpointing) / self._sizes[-1]
        sequences, filling = self._batch / axes.data, (axes.pipeline - 1) / axes.virtual
        scale = _SLACK / axes.pipeline
        return [scale * (sequences / size + filling) * max(least, size * pace) for size in micro_batches]

    def least_step_seconds(self, axes: Axes) -> float:
        """Return the least that ``step_seconds`` can be for these degrees with any micro-batch size."""
        pace = self._micro_batch(axes, self._sizes[-1], self.checkpointing) / self._sizes[-1]
        filling, filled = (axes.pipeline - 1) / axes.virtual, 0.0
        if filling:
            filled = filling * max(self._micro_batch(axes, self._sizes[0], self.checkpointing), self._sizes[0] * pace)
        return _ROUNDING * _SLACK / axes.pipeline * (self._batch / axes.data * pace + filled)

    def group_seconds(
        self,
        axes: Axes,
        zero_stage: int,
        offload: str,
        micro_batches: Sequence[int],
        floors: Sequence[float],
        enough: float = math.inf,
        checkpointing: str | None = None,
    ) -> list[float]:
        """Return a tighter bound for layouts of one ZeRO stage; ``floors`` are the bounds of ``step_seconds``.

        Bounds above ``enough`` are not tightened further. ``checkpointing``: the mode that recomputes least of those to
        bound (default: of all).

        It times the largest micro-batch on the real number of ranks, with one and with two micro-batches per step,
        which separates the seconds per step (optimizer, exposed gradient reduction) from the seconds per micro-batch.
        As many micro-batches of the smallest size take no longer, which counts with ZeRO-3: each gathers all weights.
        """
        mode = checkpointing or self.checkpointing
        key = (axes, zero_stage, offload, mode, tuple(micro_batches))
        if key not in self._group_seconds:
            # from the largest micro-batch
            widest = micro_batches[-1]
            layout = build_layout(self.spec, axes, zero_stage, mode, widest, offload)
            one, two = self._times(layout, (1, 2))
            once = max(0.0, one.optimizer + 2 * one.exposed_communication - two.exposed_communication)
            further = max(0.0, two.step - one.step) / widest
            first = max(0.0, one.step - once) / widest - further
            sequences = self.spec.training.global_batch_size / axes.data
            closer = (_SLACK * (sequences * further + size * first) for size in micro_batches)
            self._group_seconds[key] = [[_SLACK * once + max(pair) for pair in zip(floors, closer, strict=True)]]
        known = self._group_seconds[key]
        if len(micro_batches) == 1 or zero_stage < 3 or min(known[0]) > enough:
            return known[0]
        if len(known) == 1:
            layout = build_layout(self.spec, axes, zero_stage, mode, micro_batches[0], offload)
            one, two = self._times(layout, (1, 2))
            sequences, further = self.spec.training.global_batch_size / axes.data, max(0.0, two.step - one.step)
            narrow = [_SLACK * (one.step + (sequences / size - 1) * further) for size in micro_batches]
            known.append([max(pair) for pair in zip(known[0], narrow, strict=True)])
        return known[1]

    def traffic_seconds(self, axes: Axes, zero_stage: int, micro_batches: Sequence[int]) -> list[float]:
        """Return a lower bound on the step seconds, for each micro-batch size, from the traffic of ZeRO-2 and 3.

        In each micro-batch these reduce gradients, and ZeRO-3 gathers all weights, whatever else happens meanwhile.
        """
        if axes.pipeline > 1 or zero_stage < 2 or axes.shards == 1:
            return [0.0] * len(micro_batches)
        layout = build_layout(self.spec, axes, zero_stage, self.checkpointing, micro_batches[0], "none")
        seconds = _SLACK * self._workload.data_seconds(self.spec, layout, self.device)
        return [seconds * self._batch / (axes.data * size) for size in micro_batches]

    def peak_bytes(
        self, axes: Axes, zero_stage: int, micro_batch: int, checkpointing: str, offload: str, enough: float = math.inf
    ) -> int:
        """Return a lower bound on the bytes of the fullest rank; that of its states alone if it exceeds ``enough``."""
        if axes.pipeline > 1 and not self._alike:
            return int(_SLACK * self._mean_bytes(axes, zero_stage, micro_batch, checkpointing, offload))
        held = self._held_bytes(axes, zero_stage, offload)
        # The first stage has at least this share of the blocks.
        blocks = max(1, self._layers // axes.pipeline)
        share = blocks / self._layers
        states_share = share if self._uniform else min(share, 1 / axes.pipeline)
        if _SLACK * held * states_share > enough:
            return int(_SLACK * held * states_share)
        micro_batches = self.spec.training.global_batch_size // (axes.data * micro_batch)
        in_flight = min(1.0, min(micro_batches, axes.pipeline) * share)
        if not self._uniform:  # some stage has at least the mean of states and activations together
            share = in_flight = min(share, 1 / axes.pipeline)
        if checkpointing == "selective" and axes.pipeline > 1:
            in_flight *= self._selective_share(blocks)
        activations = in_flight * self._activation_bytes(axes, micro_batch, checkpointing)
        if self._stages > 1:  # the largest states and the largest activations may be at different steps
            return int(_SLACK * max(held * share, activations))
        return int(_SLACK * (held * share + activations))

    def stage_bytes(
        self, axes: Axes, zero_stage: int, micro_batch: int, checkpointing: str, offload: str, enough: float = math.inf
    ) -> int:
        """Return a closer lower bound than ``peak_bytes`` for the ranks of a pipeline: that of one of its full stages.

        It has the blocks and the micro-batches in flight of that stage, and what is outside the allocator on all ranks.
        """
        outside = 0 if self.device.is_cpu else outside_bytes_of_axes(axes, self.spec.cluster.gpus_per_node)
        full_stage = None if self._stages > 1 or not self._uniform else self._full_stage(axes)
        if full_stage is None and axes.pipeline > 1 and not self._alike:
            return int(_SLACK * (outside + self._mean_bytes(axes, zero_stage, micro_batch, checkpointing, offload)))
        if full_stage is None:
            peak = self.peak_bytes(axes, zero_stage, micro_batch, checkpointing, offload, enough - _SLACK * outside)
            return int(_SLACK * outside) + peak
        stage, share, blocks = full_stage
        held = share * self._held_bytes(axes, zero_stage, offload) + outside
        if _SLACK * held > enough:
            return int(_SLACK * held)
        micro_batches = self._batch // (axes.data * micro_batch)
        in_flight = chunks_of_schedule(micro_batches, axes.pipeline, axes.virtual, stage.position) / axes.virtual
        kept = min(1.0, in_flight * stage.blocks / blocks)  # with what only one block's backward pass needs, not more
        if checkpointing == "selective":
            kept *= self._selective_share(stage.blocks)
        return int(_SLACK * (held + kept * micro_batch * self._block_bytes(axes, checkpointing)))

    def _mean_bytes(self, axes: Axes, zero_stage: int, micro_batch: int, checkpointing: str, offload: str) -> float:
        """Return a lower bound on the mean bytes of states and activations of a pipeline's stages.

        Each has a micro-batch in flight. Of blocks that are recomputed in turn, each stage counts anew, so that all of
        its blocks may be among them.
        """
        held = self._held_bytes(axes, zero_stage, offload) / axes.pipeline
        activations = 0 if checkpointing == "selective" else self._activation_bytes(axes, micro_batch, checkpointing)
        if self._stages > 1:  # the largest states and the largest activations may be at different steps
            return max(held, activations / axes.pipeline)
        return held + activations / axes.pipeline

    def _full_stage(self, axes: Axes) -> FullStage | None:
        key = ("full stage", axes.tensor, axes.expert, axes.pipeline)
        if key not in self._known:
            self._known[key] = self._workload.full_stage(self.spec, axes)
        stage: FullStage | None = self._known[key]
        return stage

    def _held_bytes(self, axes: Axes, zero_stage: int, offload: str) -> float:
        """Return the bytes of states on a rank that holds all pipeline stages."""
        key = ("states", axes.tensor, axes.expert, zero_stage, offload)
        states: Memory | None = self._known.get(key)
        if states is None:
            whole = axes._replace(sequence=1, context=1)
            layout = self._single_micro_batch(whole, zero_stage, _MANY, self.checkpointing, offload)
            states = self._known[key] = self._workload.memory(self.spec, layout, self.device)
        shared = axes.expert / axes.shards  # the states are those of as many ranks as share the experts
        held = states.parameters * (shared if zero_stage == 3 else 1)
        held += states.gradients * (shared if zero_stage >= 2 else 1)
        return held + states.optimizer_states * (shared if zero_stage >= 1 else 1)

    def _selective_share(self, blocks: int) -> float:
        """Return a lower bound on the activations of ``blocks`` consecutive blocks, as a share of the average."""
        framework = framework_of(self.spec)
        if framework.selective(self.spec) == "attention module":
            return 1.0
        every = framework.selective_every(self.spec)
        whole = 1 - 1 / every
        return max(0.0, (blocks - -(-blocks // every)) / (whole * blocks)) if every > 1 else 1.0

    def _micro_batch(self, axes: Axes, micro_batch: int, checkpointing: str) -> float:
        """Return a lower bound on the seconds per micro-batch of a rank that holds all stages.

        Experts spread over more ranks take no more compute and no less communication. Both differences depend only on
        the tokens of a rank, so they are taken from the cheapest way to shard the sequence (context parallelism).
        """
        key = (axes.tensor, axes.sequence, axes.context, axes.expert, micro_batch, checkpointing)
        seconds: float | None = self._known.get(key)
        if seconds is None:
            cut = axes._replace(sequence=1, context=axes.sequence * axes.context)
            spread, together, here = (
                self._parts(degrees, micro_batch, checkpointing)
                for degrees in (cut, cut._replace(expert=1), axes._replace(expert=1))
            )
            compute = max(0.0, here[0] + min(0.0, spread[0] - together[0]))
            seconds = compute + max(0.0, here[1] + max(0.0, spread[1] - together[1]))
            self._known[key] = seconds
        return seconds

    def _parts(self, axes: Axes, micro_batch: int, checkpointing: str) -> tuple[float, float]:
        """Return (compute, exposed communication) seconds per micro-batch of a rank that holds all stages."""
        key = ("parts", axes.tensor, axes.sequence, axes.context, axes.expert, micro_batch, checkpointing)
        seconds: tuple[float, float] | None = self._known.get(key)
        if seconds is None:
            (time,) = self._times(self._single_micro_batch(axes, 0, micro_batch, checkpointing, "none"), (_MANY,))
            seconds = self._known[key] = time.compute / _MANY, time.exposed_communication / _MANY
        return seconds

    def _times(self, layout: Layout, counts: Sequence[int]) -> list[Time]:
        """Return the times of steps of each of these numbers of micro-batches."""
        samples = layout.data_parallel * layout.micro_batch_size
        # A chunked loss is slower, and smaller micro-batches may not need it.
        layouts = [
            replace(layout, gradient_accumulation_steps=m, global_batch_size=m * samples, cross_entropy="whole")
            for m in counts
        ]
        return self._workload.least_times(self.spec, layouts, self.device)

    def _activation_bytes(self, axes: Axes, micro_batch: int, checkpointing: str) -> int:
        key = ("activations", axes.tensor, axes.sequence, axes.context, axes.expert, micro_batch, checkpointing)
        size: int | None = self._known.get(key)
        if size is None:
            layout = self._single_micro_batch(axes, 3, micro_batch, checkpointing, "none")
            size = self._known[key] = self._workload.activation_bytes(self.spec, layout, self.device)
        return size

    def _block_bytes(self, axes: Axes, checkpointing: str) -> float:
        """Return the bytes of activations per sequence, on a stage with all blocks of the kind of ``_full_stage``.

        They are those of many sequences, because what all of these share is then negligible; and without ZeRO, whose
        stage 3 would look for the moment at which gathered weights and activations of a whole model take most.
        """
        key = ("blocks", axes.tensor, axes.sequence, axes.context, checkpointing)
        size: float | None = self._known.get(key)
        if size is None:
            layout = self._single_micro_batch(axes._replace(expert=1), 0, _MANY, checkpointing, "none")
            per_sample = self._workload.block_bytes(self.spec, layout, self.device) / _MANY
            size = self._known[key] = per_sample * (1 + framework_of(self.spec).fragmentation)
        return size

    def _single_micro_batch(
        self, axes: Axes, zero_stage: int, micro_batch: int, checkpointing: str, offload: str
    ) -> Layout:
        """Return a layout of one micro-batch, without a pipeline, with only the data parallelism that experts need."""
        data = -(-axes.expert // axes.sequence)
        alone = axes._replace(data=data, pipeline=1, virtual=1)
        return replace(
            build_layout(self.spec, alone, zero_stage, checkpointing, micro_batch, offload),
            world_size=data * alone.model_parallel,
            gradient_accumulation_steps=1,
            global_batch_size=data * micro_batch,
            local_sgd_groups=1,
        )
