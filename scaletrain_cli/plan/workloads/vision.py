"""Vision networks: ResNet, ConvNeXt, ViT and CLIP, planned with data parallelism and ZeRO."""

from __future__ import annotations

from collections.abc import Iterator

from scaletrain_cli.plan.axes import Rule
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.frameworks.base import Framework
from scaletrain_cli.plan.memory.states import weight_bytes
from scaletrain_cli.plan.result import Layout, Memory, ModelSize, Network, Time
from scaletrain_cli.plan.vision.memory import plan_vision_memory
from scaletrain_cli.plan.vision.networks import vision_size
from scaletrain_cli.plan.vision.step_time import plan_vision_time
from scaletrain_cli.plan.workloads.base import Workload
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import ClipSpec, ModelSpec, RunSpec
from scaletrain_cli.spec.run import AnyModel


class VisionWorkload(Workload):
    """A vision network; samples are images, or pairs of image and text."""

    def size(self, model: AnyModel) -> ModelSize:
        """Return parameters, and training FLOPs per image or pair."""
        assert not isinstance(model, ModelSpec)
        return vision_size(model)

    def memory(self, spec: RunSpec, layout: Layout, device: Accelerator) -> Memory:
        """Return the memory of a data-parallel rank; all ranks are alike."""
        return plan_vision_memory(spec, layout, device)

    def time(self, spec: RunSpec, layout: Layout, device: Accelerator) -> tuple[Time, Network]:
        """Return the time of a step; samples take the place of tokens."""
        return plan_vision_time(spec, layout, device)

    def contrastive(self, spec: RunSpec) -> bool:
        """Return whether the model is CLIP, whose loss compares samples with each other."""
        return isinstance(spec.model, ClipSpec)

    def engine_problems(self, spec: RunSpec) -> Iterator[Rule]:
        """Yield that the engine cannot train vision networks."""
        yield Rule("model.family", spec.model.family, "engine-text-only")

    def assumptions(self, spec: RunSpec, framework: Framework, parameters: int) -> Iterator[Reason]:
        """Yield where the figures for activations, time, FLOPs and data come from."""
        samples = spec.total_steps * spec.training.global_batch_size
        yield Reason("plan.assumes-vision-activations", {"element_bytes": weight_bytes(spec.training.precision)})
        yield Reason("plan.assumes-vision-time")
        yield Reason("plan.assumes-vision-flops", {"unit": spec.unit})
        yield Reason("plan.assumes-vision-data", {"samples": samples, "unit": spec.unit})
