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
from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.plan.result import Layout, ModelSize, Network, StageMemory, Time
from scaletrain_cli.plan.trained_parameters import Stage
from scaletrain_cli.plan.vision import advice
from scaletrain_cli.plan.vision.llava import language_spec, llava_flops, llava_stage_memory, llava_stage_time
from scaletrain_cli.plan.vision.networks import llava_tower
from scaletrain_cli.plan.workloads.text import TextWorkload
from scaletrain_cli.plan.workloads.vision import ImageWorkload
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import LlavaSpec, RunSpec
from scaletrain_cli.spec.run import AnyModel


class LlavaWorkload(ImageWorkload):
    """A vision-language model; samples are sequences with one image each."""

    def size(self, model: AnyModel) -> ModelSize:
        assert isinstance(model, LlavaSpec)
        language, every = model.text_config, sum(each.numel for each in model_parameters(model))
        idle = architecture.parameter_count(language) - architecture.active_parameter_count(language)
        flops = language.seq_len * architecture.training_flops_per_token(language) + llava_tower(model).training_flops
        return ModelSize(every, every - idle, float(flops))

    def stage_flops(self, spec: RunSpec, stage: Stage | None) -> float:
        return llava_flops(spec, stage)

    def stage_memory(self, spec: RunSpec, layout: Layout, device: Accelerator, stage: Stage | None) -> StageMemory:
        return llava_stage_memory(spec, layout, device, stage)

    def stage_time(
        self, spec: RunSpec, layout: Layout, device: Accelerator, stage: Stage | None, *, least: bool = False
    ) -> tuple[Time, Network]:
        return llava_stage_time(spec, layout, device, stage, least=least)

    def cross_entropy(
        self, spec: RunSpec, framework: Framework, tokens: int, tensor_parallel: int, device_bytes: int
    ) -> str:
        text = language_spec(spec)
        return framework.cross_entropy(text, tokens * text.units_per_sample, tensor_parallel, device_bytes)

    def engine_problems(self, spec: RunSpec) -> Iterator[Rule]:
        text = language_spec(spec)
        for rule in TextWorkload().engine_problems(text):
            key = rule.key
            yield replace(rule, key=f"model.text_config.{key[6:]}" if key.startswith("model.") else key)
        if spec.training.precision == "fp8":
            yield Rule("training.precision", "fp8", "engine-vision-fp8")
        if spec.planner.autocast:
            yield Rule("planner.autocast", "true", "engine-autocast")

    def layout_warnings(self, spec: RunSpec, layout: Layout, time: Time) -> Iterator[Reason]:
        return advice.loader_warnings(spec, layout, time)

    def assumptions(self, spec: RunSpec, framework: Framework, parameters: int) -> Iterator[Reason]:
        samples = spec.total_steps * spec.training.global_batch_size
        yield Reason("plan.assumes-vision-activations", {"element_bytes": weight_bytes(spec.training.precision)})
        yield Reason("plan.assumes-logits", {"bytes_per_entry": framework_of(spec).logit_bytes})
        yield Reason("plan.assumes-llava", {"seq_len": language_spec(spec).transformer.seq_len})
        yield Reason("plan.assumes-vision-flops", {"unit": spec.unit})
        yield Reason("plan.assumes-samples", {"samples": samples, "unit": spec.unit})
