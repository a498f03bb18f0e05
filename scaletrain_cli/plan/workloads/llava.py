"""LLaVA: an image tower, a projector and a language model, planned with data parallelism and ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scaletrain_cli.plan import architecture
from scaletrain_cli.plan.axes import Rule
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.frameworks.base import Framework
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.states import weight_bytes
from scaletrain_cli.plan.parameters import base_names, model_parameters
from scaletrain_cli.plan.result import Layout, Memory, ModelSize, Network, Time, TrainingStage
from scaletrain_cli.plan.vision import advice
from scaletrain_cli.plan.vision.llava import (
    language_spec,
    llava_flops,
    llava_stage_memory,
    llava_stage_time,
    plan_llava_memory,
    plan_llava_time,
)
from scaletrain_cli.plan.vision.networks import llava_tower
from scaletrain_cli.plan.vision.trained import stages_of_run, trained_count
from scaletrain_cli.plan.workloads.base import Workload
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import LlavaSpec, RunSpec
from scaletrain_cli.spec.run import AnyModel


class LlavaWorkload(Workload):
    """A vision-language model; samples are sequences with one image each."""

    def size(self, model: AnyModel) -> ModelSize:
        """Return parameters, and training FLOPs per sequence with an image."""
        assert isinstance(model, LlavaSpec)
        language, every = model.text_config, sum(each.numel for each in model_parameters(model))
        idle = architecture.parameter_count(language) - architecture.active_parameter_count(language)
        flops = language.seq_len * architecture.training_flops_per_token(language) + llava_tower(model).training_flops
        return ModelSize(every, every - idle, float(flops))

    def stored_parameters(self, spec: RunSpec) -> list[tuple[int, int]]:
        """Return the parameters in a checkpoint, (those that train, frozen ones), for each stage of the run."""
        left_out = base_names(spec)
        stored = sum(each.numel for each in model_parameters(spec.model) if each.name not in left_out)
        trained = [trained_count(spec, stage) for stage in stages_of_run(spec)]
        return [(count, stored - count) for count in trained]

    def training_size(self, spec: RunSpec) -> ModelSize:
        """Return the size, with the parameters of the stage that trains most, and the mean FLOPs over the steps."""
        stages = stages_of_run(spec)
        flops = 0.0
        for stage in stages:
            share = 1.0 if stage is None else (stage.last_step - stage.first_step + 1) / spec.total_steps
            flops += share * llava_flops(spec, stage)
        trained = max(trained_count(spec, stage) for stage in stages)
        return replace(self.size(spec.model), trainable_parameters=trained, flops_per_token=flops)

    def training_stages(self, spec: RunSpec, layout: Layout, device: Accelerator) -> tuple[TrainingStage, ...]:
        """Return memory and time of each stage of the run; empty if all steps train the same parameters."""
        stages = stages_of_run(spec)
        if len(stages) == 1:
            return ()
        return tuple(
            TrainingStage(
                stage.first_step,
                stage.last_step,
                trained_count(spec, stage),
                llava_stage_memory(spec, layout, device, stage).peak,
                llava_stage_time(spec, layout, device, stage)[0].step,
            )
            for stage in stages
            if stage is not None
        )

    def stages_alike(self, spec: RunSpec) -> tuple[int, bool]:
        """Return the number of stages of the run, and whether all blocks train alike."""
        stages = stages_of_run(spec)
        return len(stages), stages == (None,)

    def memory(self, spec: RunSpec, layout: Layout, device: Accelerator) -> Memory:
        """Return the memory of a data-parallel rank; all ranks are alike."""
        return plan_llava_memory(spec, layout, device)

    def time(self, spec: RunSpec, layout: Layout, device: Accelerator) -> tuple[Time, Network]:
        """Return the time of a step; pairs take the place of tokens."""
        return plan_llava_time(spec, layout, device)

    def least_time(self, spec: RunSpec, layout: Layout, device: Accelerator) -> Time:
        """Return the time without waiting for data."""
        return plan_llava_time(spec, layout, device, least=True)[0]

    def cross_entropy(
        self, spec: RunSpec, framework: Framework, tokens: int, tensor_parallel: int, device_bytes: int
    ) -> str:
        """Return how the loss of the language model is computed; ``tokens``: pairs of a micro-batch."""
        text = language_spec(spec)
        return framework.cross_entropy(text, tokens * text.units_per_sample, tensor_parallel, device_bytes)

    def engine_problems(self, spec: RunSpec) -> Iterator[Rule]:
        """Yield that the engine cannot train this family, and the settings that it has not for it."""
        yield Rule("model.family", spec.model.family, "engine-no-answers")
        if spec.training.precision == "fp8":
            yield Rule("training.precision", "fp8", "engine-vision-fp8")

    def layout_warnings(self, spec: RunSpec, layout: Layout, time: Time) -> Iterator[Reason]:
        """Yield warnings about the image loader."""
        return advice.loader_warnings(spec, layout, time)

    def feed_assumptions(self, spec: RunSpec, layout: Layout, time: Time) -> Iterator[Reason]:
        """Yield the images per second that the plan needs, and what they need of processors and storage."""
        return advice.feed_assumptions(spec, layout, time)

    def assumptions(self, spec: RunSpec, framework: Framework, parameters: int) -> Iterator[Reason]:
        """Yield where the figures for activations, logits, time, FLOPs and data come from."""
        samples = spec.total_steps * spec.training.global_batch_size
        yield Reason("plan.assumes-vision-activations", {"element_bytes": weight_bytes(spec.training.precision)})
        yield Reason("plan.assumes-logits", {"bytes_per_entry": framework_of(spec).logit_bytes})
        yield Reason("plan.assumes-llava", {"seq_len": language_spec(spec).transformer.seq_len})
        yield Reason("plan.assumes-vision-flops", {"unit": spec.unit})
        yield Reason("plan.assumes-samples", {"samples": samples, "unit": spec.unit})
