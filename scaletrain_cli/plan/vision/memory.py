"""Peak bytes of a data-parallel rank that trains a vision network; ``stage_memory`` is the entry.

The blocks of a convolutional network differ: the first ones have the largest images and save most activations. So the
peak of the backward pass is the maximum over all blocks.
"""

from functools import lru_cache
from typing import NamedTuple

from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.buffers import communication_buffer_bytes, second_gradient_bytes, step_temporary_bytes
from scaletrain_cli.plan.memory.peak import PhaseMemory, outside_allocator_bytes, peak_memory
from scaletrain_cli.plan.memory.states import (
    ModelStates,
    device_and_host_states,
    gradient_bytes,
    uses_bf16_optimizer,
    weight_bytes,
)
from scaletrain_cli.plan.result import Layout, StageMemory
from scaletrain_cli.plan.stages import Shard, zero_shards
from scaletrain_cli.plan.trained_parameters import Stage, count_trained, trained_at
from scaletrain_cli.plan.vision.losses import loss_bytes, views
from scaletrain_cli.plan.vision.networks import autocasts, planned_network, vision_model
from scaletrain_cli.plan.vision.operations import VisionNetwork
from scaletrain_cli.plan.vision.parameters import parameter_counts
from scaletrain_cli.plan.vision.states import trained_network, vision_states
from scaletrain_cli.spec import RunSpec


class Activations(NamedTuple):
    """Bytes of one micro-batch: saved when the loss is computed, and the maximum during the backward pass."""

    kept: int
    backward: int


def saved_vision_bytes(spec: RunSpec, layout: Layout, device: Accelerator, step: int = 1) -> int:
    """Return the bytes that autograd saves for one micro-batch of a rank in a step, without the loss."""
    whole = trained_network(planned_network(spec, device), vision_model(spec), trained_at(spec, step))
    element, images = weight_bytes(spec.training.precision), layout.micro_batch_size * views(spec)
    return activation_bytes(whole, images, element, layout.activation_checkpointing).kept


def stage_memory(spec: RunSpec, layout: Layout, device: Accelerator, stage: Stage | None) -> StageMemory:
    """Return the bytes of a rank while the run trains what ``stage`` states (None: everything); all ranks are alike."""
    whole = trained_network(planned_network(spec, device), vision_model(spec), stage)
    element, (every, largest) = weight_bytes(spec.training.precision), parameter_counts(vision_model(spec))
    held = activation_bytes(whole, layout.micro_batch_size * views(spec), element, layout.activation_checkpointing)
    logits = loss_bytes(spec, whole, layout, element)
    if autocasts(spec):
        # Weights are fp32; autocast caches their 16-bit copies from forward to backward (torch/amp, weight cache).
        held = Activations(*(size + element * every for size in held))
        spec = spec.with_changes("training", precision="fp32", grad_dtype="fp32")
    count = every if stage is None else count_trained(spec, stage)
    framework = framework_of(spec)
    if framework.is_engine and not autocasts(spec):
        states = vision_states(spec, layout, stage)
    else:
        states = device_and_host_states(spec, layout, Shard(count, 0, largest), framework.master_weights)[0]
    after = held.backward - held.kept
    return memory_of_phases(spec, layout, device, states, (count, largest, every), logits, (*held, after))


def memory_of_phases(
    spec: RunSpec,
    layout: Layout,
    device: Accelerator,
    states: ModelStates,
    parameters: tuple[int, int, int],
    loss: int,
    activations: tuple[int, int, int],
) -> StageMemory:
    """Return the bytes in the fullest of the phases: the loss, the backward pass, the optimizer's update.

    ``parameters``: those that train, those of the largest block, and all. ``activations``: bytes that are saved, at
    the peak of the backward pass, and at that of the last one, when gradients are added to those before.
    """
    training, shards, zero, framework = spec.training, zero_shards(layout), layout.zero_stage, framework_of(spec)
    precision, grad_dtype = training.precision, training.grad_dtype
    (count, largest, every), (kept, backward, after) = parameters, activations
    element, grads = weight_bytes(precision), gradient_bytes(precision, grad_dtype)
    flat = uses_bf16_optimizer(precision, grad_dtype, zero)
    buffers = communication_buffer_bytes(
        count, largest, zero, element, grads, shards, pipeline=False, gathered=every, bf16_optimizer=flat
    )
    second = second_gradient_bytes(count, precision, grad_dtype, zero, shards, layout.gradient_accumulation_steps)
    optimizer = training.optimizer.name
    step = step_temporary_bytes(count, precision, grad_dtype, zero, shards, optimizer, foreach=device.is_cpu)
    phases = (
        PhaseMemory(kept, loss, buffers.loss, 0),
        PhaseMemory(backward, 0, buffers.backward, 0),
        PhaseMemory(after, 0, buffers.backward + second, 0),
        PhaseMemory(0, 0, buffers.step, step),
    )
    worst = max(phases, key=sum)
    fragmentation = int(framework.fragmentation * sum(worst))
    outside = outside_allocator_bytes(layout, spec.cluster.gpus_per_node, device.is_cpu)
    return peak_memory(states, worst, fragmentation, outside, host=0)


@lru_cache(maxsize=4096)
def activation_bytes(whole: VisionNetwork, samples: int, element: int, checkpointing: str) -> Activations:
    """Return the bytes that autograd saves for a micro-batch, and the maximum over the blocks' backward passes.

    While a block runs backward, the activations of later blocks are freed and those of earlier ones are still saved. In
    addition there are gradients of the output and input of one operation, and of the block's residual connection. A
    checkpointed block first recomputes its activations; it saves its input, which may be an output that the block
    before it saves anyway. Frozen and checkpointed blocks do not save their last output, but the next block may.
    ``samples``: images per micro-batch; ``element``: bytes per element.
    """
    full = checkpointing == "full"
    kept, most = 0, 0
    entering = saved = 0  # bytes of the last output: which the next block has to save, or is saved already
    for block in whole.blocks:
        last = samples * element * block.operations[-1].kept
        if block.training == "frozen":
            entering, saved = last, 0
            continue
        passed = block.training == "passed"
        per_sample = sum(
            element * (operation.kept - (operation.kept_for_weights if passed else 0)) + operation.kept_bytes
            for operation in block.operations
        )
        inside = samples * per_sample + sum(operation.kept_once_bytes for operation in block.operations)
        repeated = full and block.input > 0
        per_block = samples * element * block.input if repeated else inside
        kept += block.count * per_block
        if repeated:
            kept -= min(saved, per_block)
        elif block.operations[0].reads_input:
            kept += entering
        entering, saved = (last, 0) if repeated else (0, last)
        skipped = block.operations[-1].outputs
        gradients = samples * element * (skipped + max(operation.moved for operation in block.operations))
        most = max(most, kept + gradients + (inside if repeated else 0))
    return Activations(kept, most)
