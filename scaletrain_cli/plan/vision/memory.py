"""Peak bytes of a data-parallel rank that trains a vision network; ``plan_vision_memory`` is the entry.

The blocks of a convolutional network differ: the first ones have the largest images and save most activations. So the
peak of the backward pass is the maximum over all blocks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.device_memory import against_device
from scaletrain_cli.plan.memory.peak import PhaseMemory, outside_allocator_bytes, peak_memory
from scaletrain_cli.plan.memory.states import (
    communication_buffer_bytes,
    gradient_bytes,
    rank_states,
    second_gradient_bytes,
    step_temporary_bytes,
    weight_bytes,
)
from scaletrain_cli.plan.result import Layout, Memory, StageMemory
from scaletrain_cli.plan.stages import Shard, zero_shards
from scaletrain_cli.plan.vision.networks import autocasts, planned_network
from scaletrain_cli.plan.vision.operations import Block, VisionNetwork
from scaletrain_cli.spec import RunSpec

# Bytes per logit, as for text: three fp32 values alive at once (log-probability and two gradients).
_LOGIT_BYTES = 12


class Activations(NamedTuple):
    """Bytes of one micro-batch: saved when the loss is computed, and the maximum during the backward pass."""

    kept: int
    backward: int


def plan_vision_memory(spec: RunSpec, layout: Layout, device: Accelerator) -> Memory:
    """Return the memory of a rank compared with the device; all ranks are alike."""
    whole = planned_network(spec, device)
    element = weight_bytes(spec.training.precision)
    held = activation_bytes(whole, layout.micro_batch_size, element, layout.activation_checkpointing)
    if autocasts(spec):
        # Weights are fp32; autocast caches their 16-bit copies from forward to backward (torch/amp, weight cache).
        held = Activations(*(size + element * whole.parameters for size in held))
        training = spec.training.model_copy(update={"precision": "fp32", "grad_dtype": "fp32"})
        spec = spec.model_copy(update={"training": training})
    logits = loss_bytes(whole, layout.micro_batch_size, layout.data_parallel, element)
    rank = _rank_memory(spec, layout, device, whole, held, logits)
    return against_device(rank, (rank,), framework_of(spec), device)


def saved_vision_bytes(spec: RunSpec, layout: Layout, device: Accelerator) -> int:
    """Return the bytes that autograd saves for one micro-batch of a rank, without the loss."""
    whole, element = planned_network(spec, device), weight_bytes(spec.training.precision)
    return activation_bytes(whole, layout.micro_batch_size, element, layout.activation_checkpointing).kept


def _rank_memory(
    spec: RunSpec, layout: Layout, device: Accelerator, whole: VisionNetwork, held: Activations, logits: int
) -> StageMemory:
    """Return the bytes in the fullest of three phases: the loss, the backward pass, the optimizer's update."""
    training, shards, stage, count = spec.training, zero_shards(layout), layout.zero_stage, whole.parameters
    precision, grad_dtype = training.precision, training.grad_dtype
    shard = Shard(count, 0, max(block.parameters for block in whole.blocks))
    framework = framework_of(spec)
    states = rank_states(spec, layout, shard, framework.master_weights)
    element, grads = weight_bytes(precision), gradient_bytes(precision, grad_dtype)
    buffers = communication_buffer_bytes(count, shard.largest_block, stage, element, grads, shards, pipeline=False)
    buffers += second_gradient_bytes(count, precision, grad_dtype, stage, shards, layout.gradient_accumulation_steps)
    step = step_temporary_bytes(count, precision, grad_dtype, stage, shards, training.optimizer.name)
    phases = (
        PhaseMemory(held.kept, logits, buffers, 0),
        PhaseMemory(held.backward, 0, buffers, 0),
        PhaseMemory(0, 0, 0, step),
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
    checkpointed block first recomputes its activations. ``samples``: per micro-batch; ``element``: bytes per element.
    """
    full = checkpointing == "full"
    kept, most = 0, 0
    for block in whole.blocks:
        inside = _kept(block, samples, element)
        repeated = full and block.input > 0
        each = samples * element * block.input if repeated else inside
        kept += block.count * each
        skipped = block.operations[-1].outputs
        gradients = samples * element * (skipped + max(operation.gradients for operation in block.operations))
        most = max(most, kept + gradients + (inside if repeated else 0))
    return Activations(kept, most)


def _kept(block: Block, samples: int, element: int) -> int:
    """Return the bytes that one block saves for its backward pass."""
    per_sample = sum(element * operation.kept + operation.kept_bytes for operation in block.operations)
    return samples * per_sample + sum(operation.kept_once_bytes for operation in block.operations)


def loss_bytes(whole: VisionNetwork, samples: int, ranks: int, element: int) -> int:
    """Return the bytes of a micro-batch's logits: samples x classes, or for CLIP samples x samples of all ranks, twice.

    A contrastive loss gathers the features of all ranks and compares images with texts and texts with images. A rank
    computes only the rows of its own samples (OpenCLIP, ``local_loss``). Each gathered feature has a gradient.
    """
    if not whole.features:
        return samples * whole.classes * _LOGIT_BYTES
    everyone = samples * ranks
    return 2 * samples * everyone * _LOGIT_BYTES + 2 * everyone * whole.features * element
