"""Size, memory and time of LLaVA: an image tower, a projector and a language model, of which parts may be frozen.

The language model is planned as if it were trained alone, on sequences that contain the tokens of the images.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from scaletrain_cli.plan import architecture
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.identity_cache import cached_by_identity
from scaletrain_cli.plan.memory.engine_memory import activation_phases
from scaletrain_cli.plan.memory.states import weight_bytes
from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.plan.result import Layout, Network, PerStepBytes, StageMemory, Time
from scaletrain_cli.plan.speed.step_time import trained_stage_time
from scaletrain_cli.plan.trained_parameters import Stage, count_trained, stages_of_run, trained_at
from scaletrain_cli.plan.trained_stages import TrainedStage, stage_flops_per_token, trained_stage
from scaletrain_cli.plan.vision.memory import activation_bytes, memory_of_phases
from scaletrain_cli.plan.vision.networks import llava_tower
from scaletrain_cli.plan.vision.operations import VisionNetwork
from scaletrain_cli.plan.vision.states import trained_network, vision_states
from scaletrain_cli.plan.vision.step_time import NetworkSeconds, network_seconds, time_of_samples
from scaletrain_cli.spec import LlavaSpec, RunSpec

_PATH = "language_model."
Value = TypeVar("Value")


class LlavaParts(NamedTuple):
    """The parts of the model in a stage of the run: the tower with the projector, and the language model."""

    images: VisionNetwork
    language: TrainedStage


def llava_model(spec: RunSpec) -> LlavaSpec:
    """Return the model section of a spec with family llava."""
    assert isinstance(spec.model, LlavaSpec)
    return spec.model


def language_spec(spec: RunSpec) -> RunSpec:
    """Return the run as one of the language model alone, of which everything trains."""
    return spec.with_changes("training", trainable=()).model_copy(update={"model": llava_model(spec).text_config})


def llava_parts(spec: RunSpec, stage: Stage | None) -> LlavaParts:
    """Return what a stage of the run trains (None: everything)."""
    whole = llava_tower(llava_model(spec))
    if stage is None:
        return LlavaParts(whole, TrainedStage(1, spec.total_steps))
    return _parts(llava_model(spec), whole, stage)


@cached_by_identity
def _parts(model: LlavaSpec, whole: VisionNetwork, stage: Stage) -> LlavaParts:
    images = trained_network(whole, model, stage)
    phases = tuple(phase._replace(settings=_of_language(phase.settings)) for phase in stage.phases)
    own = stage._replace(phases=phases, since=_of_language(stage.since))
    reached = any(block.training != "frozen" for block in images.blocks)
    return LlavaParts(images, trained_stage(model.text_config, own, reached=reached))


def _of_language(named: Mapping[str, Value]) -> dict[str, Value]:
    return {name.removeprefix(_PATH): value for name, value in named.items() if name.startswith(_PATH)}


def llava_flops(spec: RunSpec, stage: Stage | None) -> float:
    """Return the FLOPs of one sequence with one image, forward and backward, without recomputation."""
    model, parts = llava_model(spec).text_config, llava_parts(spec, stage)
    return float(model.seq_len * stage_flops_per_token(model, parts.language) + parts.images.training_flops)


def language_share(spec: RunSpec) -> float:
    """Return the share of the language model in the FLOPs of a sequence of ``seq_len`` tokens with one image.

    Over the run, in which stages may train different parts.
    """
    language = whole = 0.0
    for stage in stages_of_run(spec):
        steps = 1 if stage is None else stage.last_step - stage.first_step + 1
        every = llava_flops(spec, stage)
        whole += steps * every
        language += steps * (every - llava_parts(spec, stage).images.training_flops)
    return language / whole


def llava_stage_memory(spec: RunSpec, layout: Layout, device: Accelerator, stage: Stage | None) -> StageMemory:
    """Return the bytes of a rank while the run trains what ``stage`` states (None: everything)."""
    parts, model, text = llava_parts(spec, stage), llava_model(spec), language_spec(spec)
    element = weight_bytes(spec.training.precision)
    seen = activation_bytes(parts.images, layout.micro_batch_size, element, layout.activation_checkpointing)
    read = activation_phases(text, layout, device, parts.language)
    saved = seen.kept + read.saved
    activations = (saved, max(saved + read.backward, seen.backward), max(read.backward, seen.backward - seen.kept))
    block = architecture.architecture(model.text_config).block.parameters
    parameters = count_trained(spec, stage), block, sum(parameter.numel for parameter in model_parameters(model))
    states = vision_states(spec, layout, stage)
    return memory_of_phases(spec, layout, device, states, parameters, read.loss, activations)


def saved_llava_bytes(spec: RunSpec, layout: Layout, device: Accelerator, step: int = 1) -> int:
    """Return the bytes that autograd saves for one micro-batch of a rank in a step, without the loss."""
    parts, text = llava_parts(spec, trained_at(spec, step)), language_spec(spec)
    element = weight_bytes(spec.training.precision)
    seen = activation_bytes(parts.images, layout.micro_batch_size, element, layout.activation_checkpointing)
    return seen.kept + activation_phases(text, layout, device, parts.language).saved


def llava_stage_time(
    spec: RunSpec, layout: Layout, device: Accelerator, stage: Stage | None, *, least: bool = False
) -> tuple[Time, Network]:
    """Return the seconds per optimizer step by cause while the run trains what ``stage`` states; rates count pairs.

    These are the language model's time and that of the images. ``least``: without waiting for data, for lower bounds.
    """
    parts, text = llava_parts(spec, stage), language_spec(spec)
    read, network = trained_stage_time(text, layout, device, parts.language)
    trained = count_trained(spec, stage) - sum(
        parameter.numel
        for parameter in model_parameters(spec.model)
        if parameter.name.startswith(_PATH) and (stage is None or parameter.name in stage.since)
    )
    seen = network_seconds(spec, layout, device, parts.images, trained, least=least)
    peak = layout.world_size * device.peak_flops(spec.training.precision)
    both = NetworkSeconds(
        compute=read.compute + seen.compute,
        exposed=read.exposed_communication + seen.exposed,
        optimizer=read.optimizer + seen.optimizer,
        recompute=read.recompute + seen.recompute,
        by_stage=read.by_stage,
        sent=network.per_step_bytes.data + seen.sent,
        repeated_flops=seen.repeated_flops + (read.hfu - read.mfu) * read.step * peak / layout.global_batch_size,
    )
    time = time_of_samples(spec, layout, device, both, llava_flops(spec, stage), least=least)
    return time, Network(PerStepBytes(tensor=0, pipeline=0, data=both.sent, sequence=0, expert=0))
