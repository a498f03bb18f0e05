"""Peak bytes of a data-parallel rank that trains a vision network.

Unlike a transformer, whose blocks are alike, a convolutional network keeps most where its images are large, early on;
so the peak of the backward pass is looked for block by block.
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

# Per logit, as for text: the log-probability and the gradients of two losses in fp32, alive at once.
_LOGIT_BYTES = 12


class Activations(NamedTuple):
    """Bytes of one micro-batch: kept when the loss is reached, and the maximum during backward."""

    kept: int
    backward: int


def plan_vision_memory(spec: RunSpec, layout: Layout, device: Accelerator) -> Memory:
    """Return the memory of a rank against the device; all ranks are alike."""
    whole = planned_network(spec, device)
    element = weight_bytes(spec.training.precision)
    held = activation_bytes(whole, layout.micro_batch_size, element, layout.activation_checkpointing)
    if autocasts(spec):
        # The weights are fp32; their 16-bit copies live from forward to backward (torch/amp, weight cache).
        held = Activations(*(size + element * whole.parameters for size in held))
        training = spec.training.model_copy(update={"precision": "fp32", "grad_dtype": "fp32"})
        spec = spec.model_copy(update={"training": training})
    logits = loss_bytes(whole, layout.micro_batch_size, layout.data_parallel, element)
    rank = _rank_memory(spec, layout, device, whole, held, logits)
    return against_device(rank, (rank,), framework_of(spec), device)


def _rank_memory(
    spec: RunSpec, layout: Layout, device: Accelerator, whole: VisionNetwork, held: Activations, logits: int
) -> StageMemory:
    """Return the parts at the peak of three phases: the loss, the backward pass, and the optimizer step."""
    training, shards, stage, count = spec.training, zero_shards(layout), layout.zero_stage, whole.parameters
    precision, grad_dtype = training.precision, training.grad_dtype
    shard = Shard(count, 0, max(block.parameters for block in whole.blocks))
    framework = framework_of(spec)
    states = rank_states(spec, layout, shard, framework.master_weights)
    element, grads = weight_bytes(precision), gradient_bytes(precision, grad_dtype)
    buffers = communication_buffer_bytes(count, shard.largest_block, stage, element, grads, shards, pipeline=False)
    buffers += second_gradient_bytes(count, precision, grad_dtype, stage, shards, layout.gradient_accumulation_steps)
    step = step_temporary_bytes(count, precision, grad_dtype, stage, shards, training.optimizer.name)
    moments = (
        PhaseMemory(held.kept, logits, buffers, 0),
        PhaseMemory(held.backward, 0, buffers, 0),
        PhaseMemory(0, 0, 0, step),
    )
    worst = max(moments, key=sum)
    fragmentation = int(framework.fragmentation * sum(worst))
    outside = outside_allocator_bytes(layout, spec.cluster.gpus_per_node, device.is_cpu)
    return peak_memory(states, worst, fragmentation, outside, host=0)


@lru_cache(maxsize=4096)
def activation_bytes(whole: VisionNetwork, samples: int, element: int, checkpointing: str) -> Activations:
    """Return the bytes that autograd keeps, and the peak of the backward pass over the blocks.

    Then the blocks behind it are gone, those before it are kept, and there are gradients: of the output and the input
    of one operation, and of what skips it. A checkpointed block brings its activations back first.
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
    """Return the bytes that one block keeps for its backward pass."""
    per_sample = sum(element * operation.kept + operation.kept_bytes for operation in block.operations)
    return samples * per_sample + sum(operation.kept_once_bytes for operation in block.operations)


def loss_bytes(whole: VisionNetwork, samples: int, ranks: int, element: int) -> int:
    """Return the bytes of a micro-batch's logits: over the classes, or of its images and texts against all ranks'.

    Contrastive learning gathers the features of all ranks and compares both ways, and keeps only the rows of the
    rank's own samples (OpenCLIP, ``local_loss``); each gathered feature has its gradient.
    """
    if not whole.features:
        return samples * whole.classes * _LOGIT_BYTES
    everyone = samples * ranks
    return 2 * samples * everyone * _LOGIT_BYTES + 2 * everyone * whole.features * element
