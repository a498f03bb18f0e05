"""Models of images, planned with data parallelism and ZeRO: ResNet, ConvNeXt, ViT, CLIP, and LLaVA."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

from scaletrain_cli.plan import architecture
from scaletrain_cli.plan.axes import Rule
from scaletrain_cli.plan.catalogue.hardware import Accelerator, rank_cores
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.device_memory import against_device
from scaletrain_cli.plan.memory.states import weight_bytes
from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.plan.result import Layout, Memory, ModelSize, Network, StageMemory, Time, TrainingStage
from scaletrain_cli.plan.speed.step_time import mean_of_stages
from scaletrain_cli.plan.trained_parameters import Stage, count_trained, stages_of_run, steps_of
from scaletrain_cli.plan.vision.image_feed import (
    IMAGE_BYTES,
    allowed_workers,
    image_feed,
    image_readers,
)
from scaletrain_cli.plan.vision.llava import language_spec, llava_flops, llava_stage_memory, llava_stage_time
from scaletrain_cli.plan.vision.losses import caches_gradients, is_contrastive, views
from scaletrain_cli.plan.vision.memory import stage_memory
from scaletrain_cli.plan.vision.networks import llava_tower, network, vision_model, vision_size
from scaletrain_cli.plan.vision.parameters import vision_buffers
from scaletrain_cli.plan.vision.states import trained_network
from scaletrain_cli.plan.vision.step_time import synchronizes_batch_norm, vision_stage_time
from scaletrain_cli.plan.workloads.base import Workload
from scaletrain_cli.plan.workloads.text import TextWorkload
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import ClipSpec, LlavaSpec, ModelSpec, RunSpec
from scaletrain_cli.spec.loader_processes import cores_per_rank, decodes_beside_gpus, decodes_images, set_cores
from scaletrain_cli.spec.run import AnyModel
from scaletrain_cli.spec.sources import MOST_WORKERS

# BatchNorm's error grows below this number of images (arXiv:1803.08494, figure 5).
_FEW_IMAGES = 16


def loader_warnings(spec: RunSpec, layout: Layout, time: Time) -> Iterator[Reason]:
    """Yield warnings about storage, workers and cores that do not keep up with the step."""
    if not decodes_images(spec):
        return
    feed = image_feed(spec, layout, time.step - time.data_wait)
    if feed.read_rate > feed.storage:
        given = {"given": feed.storage, "image_bytes": IMAGE_BYTES}
        rates = {"needed": feed.read_rate, "images": feed.node_rate, **given}
        yield Reason("plan.images-exceed-storage", {**rates, "wait": time.data_wait})
    workers, cores, automatic = image_readers(spec), rank_cores(spec), spec.data.loader.workers == "auto"
    needs = {"given": workers, "needed": feed.workers, "rate": feed.rank_rate, "core_rate": feed.core_rate}
    wait = {"wait": time.data_wait, "share": time.data_wait / time.step}
    if workers < (allowed := allowed_workers(spec, feed)) and time.data_wait:
        yield Reason("plan.too-few-image-workers", {**needs, **wait, "needed": allowed})
    if feed.workers > MOST_WORKERS and time.data_wait:
        yield Reason("plan.image-workers-beyond-limit", {**needs, **wait, "most": MOST_WORKERS})
    if cores < feed.workers + automatic:  # one core is left to the training loop
        needs |= {"needed": min(feed.workers, MOST_WORKERS) + automatic, "cores": cores}
        if set_cores(spec) is not None:
            yield Reason("plan.too-few-cores-for-images", needs)
        elif time.data_wait:
            yield Reason("plan.images-need-cores", {**needs, **wait})
    elif set_cores(spec) is None and decodes_beside_gpus(spec) and cores_per_rank(spec) < feed.workers + automatic:
        needs |= {"needed": feed.workers + automatic, "cores": cores, "requested": cores_per_rank(spec)}
        yield Reason("plan.job-requests-few-cores", needs)


def _about_batch_norm(spec: RunSpec, layout: Layout) -> Iterator[Reason]:
    if not framework_of(spec).is_engine or not vision_buffers(vision_model(spec)):
        return
    images, together = layout.micro_batch_size * views(spec), synchronizes_batch_norm(spec, layout)
    seen = images * (layout.data_parallel if together else 1)
    if seen < _FEW_IMAGES:
        code = "plan.few-images-of-all-ranks" if together or layout.data_parallel == 1 else "plan.few-images-per-rank"
        yield Reason(code, {"images": seen, "ranks": layout.data_parallel})
    if layout.gradient_accumulation_steps > 1:
        steps = layout.gradient_accumulation_steps
        yield Reason("plan.accumulates-with-batch-norm", {"accumulation": steps, "images": seen})


class ImageWorkload(Workload):
    """A model of images. A stage of its run may train only parts of it."""

    @abstractmethod
    def stage_flops(self, spec: RunSpec, stage: Stage | None) -> float:
        """Return the training FLOPs per sample in a stage of the run; None: everything trains."""

    @abstractmethod
    def stage_memory(self, spec: RunSpec, layout: Layout, device: Accelerator, stage: Stage | None) -> StageMemory:
        """Return the memory of a rank in a stage of the run; all ranks are alike."""

    @abstractmethod
    def stage_time(
        self, spec: RunSpec, layout: Layout, device: Accelerator, stage: Stage | None, *, least: bool = False
    ) -> tuple[Time, Network]:
        """Return ``time`` in a stage of the run; ``least``: as for ``least_times``."""

    def memory(self, spec: RunSpec, layout: Layout, device: Accelerator) -> Memory:
        """Return the memory in the stage of the run that needs most; all ranks are alike."""
        ranks = [self.stage_memory(spec, layout, device, stage) for stage in stages_of_run(spec)]
        fullest = max(ranks, key=lambda rank: rank.peak)
        return against_device(fullest, (fullest,), framework_of(spec), device)

    def time(self, spec: RunSpec, layout: Layout, device: Accelerator, *, least: bool = False) -> tuple[Time, Network]:
        """Return the time of a step, in which samples take the place of tokens: the mean over the steps of the run."""
        stages = stages_of_run(spec)
        times = [self.stage_time(spec, layout, device, stage, least=least) for stage in stages]
        return mean_of_stages(spec, [steps_of(spec, stage) for stage in stages], times)

    def least_times(self, spec: RunSpec, layouts: Sequence[Layout], device: Accelerator) -> list[Time]:
        """Return the times without contrastive losses, second forward passes, and waiting for data."""
        return [self.time(spec, layout, device, least=True)[0] for layout in layouts]

    def training_size(self, spec: RunSpec) -> ModelSize:
        stages = stages_of_run(spec)
        flops = sum(steps_of(spec, stage) / spec.total_steps * self.stage_flops(spec, stage) for stage in stages)
        trained = max(count_trained(spec, stage) for stage in stages)
        return replace(self.size(spec.model), trainable_parameters=trained, flops_per_token=flops)

    def training_stages(self, spec: RunSpec, layout: Layout, device: Accelerator) -> tuple[TrainingStage, ...]:
        stages = stages_of_run(spec)
        if len(stages) == 1:
            return ()
        return tuple(
            TrainingStage(
                stage.first_step,
                stage.last_step,
                count_trained(spec, stage),
                self.stage_memory(spec, layout, device, stage).peak,
                self.stage_time(spec, layout, device, stage)[0].step,
            )
            for stage in stages
            if stage is not None
        )

    def stages_alike(self, spec: RunSpec) -> tuple[int, bool]:
        stages = stages_of_run(spec)
        return len(stages), stages == (None,)

    def feed_assumptions(self, spec: RunSpec, layout: Layout, time: Time) -> Iterator[Reason]:
        """Yield the images per second that the plan needs, and what they need of processors and storage."""
        if not decodes_images(spec):
            return
        feed = image_feed(spec, layout, time.step - time.data_wait)
        rates = {"rank": feed.rank_rate, "node": feed.node_rate, "cores": feed.cores, "core_rate": feed.core_rate}
        yield Reason("plan.assumes-image-rate", rates)
        if spec.data.loader.workers == "auto" and decodes_beside_gpus(spec):
            readers = {"workers": image_readers(spec), "cores": rank_cores(spec)}
            yield Reason("plan.assumes-image-readers", readers)
        yield Reason("plan.assumes-image-bytes", {"read": feed.read_rate, "image_bytes": IMAGE_BYTES})

    def engine_problems(self, spec: RunSpec) -> Iterator[Rule]:
        if spec.training.precision == "fp8":
            yield Rule("training.precision", "fp8", "engine-vision-fp8")
        if spec.planner.autocast:
            yield Rule("planner.autocast", "true", "engine-autocast")


class VisionWorkload(ImageWorkload):
    """A vision network; samples are images, or pairs of image and text."""

    def stage_flops(self, spec: RunSpec, stage: Stage | None) -> float:
        model = vision_model(spec)
        return trained_network(network(model), model, stage).training_flops

    stage_memory = staticmethod(stage_memory)
    stage_time = staticmethod(vision_stage_time)

    def size(self, model: AnyModel) -> ModelSize:
        assert not isinstance(model, ModelSpec)
        return vision_size(model)

    def contrastive(self, spec: RunSpec) -> bool:
        return is_contrastive(spec)

    def accumulation_changes_loss(self, spec: RunSpec) -> bool:
        """Return whether a contrastive loss accumulates; the engine's loss is of the whole batch (GradCache)."""
        return is_contrastive(spec) and not framework_of(spec).is_engine

    def micro_batch_multiple(self, spec: RunSpec) -> int:
        """Return 2 if images are mixed in pairs."""
        return 2 if spec.data.images.augment.mixes else 1

    def engine_layout_rules(self, spec: RunSpec, layout: Layout) -> Iterator[Rule]:
        if spec.data.images.augment.mixes and layout.micro_batch_size % 2:
            yield Rule("training.micro_batch_size", layout.micro_batch_size, "engine-mixed-pairs")
        if caches_gradients(spec, layout) and vision_buffers(vision_model(spec)):
            per_rank = layout.micro_batch_size * layout.gradient_accumulation_steps
            given, fix = layout.micro_batch_size, {"per_rank": per_rank}
            yield Rule("training.micro_batch_size", given, "engine-cached-batch-norm", fix=fix)

    def engine_problems(self, spec: RunSpec) -> Iterator[Rule]:
        if isinstance(spec.model, ClipSpec) and spec.data.tokenizer.kind != "file":
            yield Rule("data.tokenizer.kind", spec.data.tokenizer.kind, "engine-captions-tokenizer")
        yield from super().engine_problems(spec)

    def layout_warnings(self, spec: RunSpec, layout: Layout, time: Time) -> Iterator[Reason]:
        """Yield warnings about small batches of BatchNorm, a second forward pass, and a loader that is too slow."""
        yield from _about_batch_norm(spec, layout)
        if caches_gradients(spec, layout):
            share = time.recompute / time.step
            yield Reason("plan.caches-gradients", {"accumulation": layout.gradient_accumulation_steps, "share": share})
        yield from loader_warnings(spec, layout, time)

    def assumptions(self, spec: RunSpec, parameters: int) -> Iterator[Reason]:
        samples = spec.total_steps * spec.training.global_batch_size
        yield Reason("plan.assumes-vision-activations", {"element_bytes": weight_bytes(spec.training.precision)})
        yield Reason("plan.assumes-vision-time")
        yield Reason("plan.assumes-vision-flops", {"unit": spec.unit})
        code = "plan.assumes-samples" if decodes_images(spec) else "plan.assumes-vision-data"
        yield Reason(code, {"samples": samples, "unit": spec.unit})


class LlavaWorkload(ImageWorkload):
    """A vision-language model; samples are sequences with one image each."""

    def size(self, model: AnyModel) -> ModelSize:
        assert isinstance(model, LlavaSpec)
        language, every = model.text_config, sum(parameter.numel for parameter in model_parameters(model))
        idle = architecture.parameter_count(language) - architecture.active_parameter_count(language)
        flops = language.seq_len * architecture.training_flops_per_token(language) + llava_tower(model).training_flops
        return ModelSize(every, every - idle, float(flops))

    stage_flops = staticmethod(llava_flops)
    stage_memory = staticmethod(llava_stage_memory)
    stage_time = staticmethod(llava_stage_time)
    layout_warnings = staticmethod(loader_warnings)

    def cross_entropy(self, spec: RunSpec, tokens: int, tensor_parallel: int, device_bytes: int) -> str:
        text = language_spec(spec)
        tokens *= text.units_per_sample
        return framework_of(spec).cross_entropy(text, tokens, tensor_parallel, device_bytes)

    def engine_problems(self, spec: RunSpec) -> Iterator[Rule]:
        for rule in TextWorkload().engine_problems(language_spec(spec)):
            key = rule.key
            yield replace(rule, key=f"model.text_config.{key[6:]}" if key.startswith("model.") else key)
        yield from super().engine_problems(spec)

    def assumptions(self, spec: RunSpec, parameters: int) -> Iterator[Reason]:
        samples = spec.total_steps * spec.training.global_batch_size
        yield Reason("plan.assumes-vision-activations", {"element_bytes": weight_bytes(spec.training.precision)})
        yield Reason("plan.assumes-logits", {"bytes_per_entry": framework_of(spec).logit_bytes})
        yield Reason("plan.assumes-llava", {"seq_len": language_spec(spec).transformer.seq_len})
        yield Reason("plan.assumes-vision-flops", {"unit": spec.unit})
        yield Reason("plan.assumes-samples", {"samples": samples, "unit": spec.unit})
