"""Peak bytes of a data-parallel rank that trains a vision network. Knows no time and no search.

Unlike a transformer, whose blocks are alike, a convolutional network keeps most where its images are large, early on;
so the peak of the backward pass is looked for block by block.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from scaletrain_cli.plan.hardware import Accelerator
from scaletrain_cli.plan.rank_states import rank_states
from scaletrain_cli.plan.result import Layout, Memory, StageMemory
from scaletrain_cli.plan.stages import Shard, zero_shards
from scaletrain_cli.plan.states import gradient_bytes, second_gradient_bytes, step_temporary_bytes, weight_bytes
from scaletrain_cli.plan.vision.network import planned_network
from scaletrain_cli.plan.vision.operations import Block, Network
from scaletrain_cli.plan.zero_buffers import communication_buffer_bytes
from scaletrain_cli.spec import RunSpec

# Per logit, as for text: the log-probability and the gradients of two losses in fp32, alive at once.
_LOGIT_BYTES = 12
# As of a transformer (plan/memory.py): the context with its libraries, and what the allocator loses.
_GPU_FRAMEWORK_BYTES = 1_500_000_000
_CPU_FRAMEWORK_BYTES = 500_000_000
_FRAGMENTATION_DIVISOR = 20


class Activations(NamedTuple):
    """Bytes of one micro-batch: all that is kept when the loss is reached, and the most that backward holds."""

    kept: int
    backward: int


def plan_vision_memory(spec: RunSpec, layout: Layout, device: Accelerator) -> Memory:
    """Memory of a rank against the device; all ranks are alike."""
    whole = planned_network(spec, device)
    element = weight_bytes(spec.training.precision)
    held = activation_bytes(whole, layout.micro_batch_size, element, layout.activation_checkpointing)
    logits = loss_bytes(whole, layout.micro_batch_size, layout.data_parallel, element)
    shard = Shard(whole.parameters, 0, max(block.parameters for block in whole.blocks))
    rank = _rank_memory(spec, layout, device, shard, held, logits)
    fits = rank.peak <= device.memory_bytes
    return Memory(
        **vars(rank),
        capacity=device.memory_bytes,
        fits=fits,
        by_stage=(rank,),
        verdict="fits" if fits else "does not fit",
        out_of_memory_probability=0.0 if fits else 1.0,
    )


def _rank_memory(
    spec: RunSpec, layout: Layout, device: Accelerator, shard: Shard, held: Activations, logits: int
) -> StageMemory:
    """The parts at the worst of three moments: the loss, the backward pass, and the optimizer's step."""
    precision, grad_dtype, shards = spec.training.precision, spec.training.grad_dtype, zero_shards(layout)
    stage, count = layout.zero_stage, shard.parameters
    states = rank_states(spec, layout, shard)
    element, grads = weight_bytes(precision), gradient_bytes(precision, grad_dtype)
    buffers = communication_buffer_bytes(count, shard.largest_block, stage, element, grads, shards)
    buffers += second_gradient_bytes(count, precision, grad_dtype, stage, shards, layout.gradient_accumulation_steps)
    step = step_temporary_bytes(count, precision, grad_dtype, stage, shards) if layout.offload == "none" else 0
    moments = ((held.kept, logits, buffers, 0), (held.backward, 0, buffers, 0), (0, 0, 0, step))
    activations, logits, buffers, step = max(moments, key=sum)
    parts = {
        "parameters": states.parameters,
        "gradients": states.gradients,
        "optimizer_states": states.optimizer_states + step,
        "activations": activations,
        "logits": logits,
        "communication_buffers": buffers,
        "framework": _CPU_FRAMEWORK_BYTES if device.is_cpu else _GPU_FRAMEWORK_BYTES,
        "fragmentation": (activations + logits + buffers + step) // _FRAGMENTATION_DIVISOR,
    }
    peak = sum(parts.values())
    reserved = peak - parts["framework"]
    return StageMemory(**parts, peak=peak, allocated=reserved - parts["fragmentation"], reserved=reserved)


@lru_cache(maxsize=4096)
def activation_bytes(whole: Network, samples: int, element: int, checkpointing: str) -> Activations:
    """What autograd keeps, and what is alive while one block after another runs backward.

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
    """Bytes that one block keeps for its backward pass."""
    per_sample = sum(element * operation.kept + operation.kept_bytes for operation in block.operations)
    return samples * per_sample + sum(operation.kept_once_bytes for operation in block.operations)


def loss_bytes(whole: Network, samples: int, ranks: int, element: int) -> int:
    """The logits of a micro-batch: over the classes, or of its images and texts against those of all ranks.

    Contrastive learning gathers the features of all ranks and compares both ways, and keeps only the rows of the
    rank's own samples (OpenCLIP, ``local_loss``); each gathered feature has its gradient.
    """
    if not whole.features:
        return samples * whole.classes * _LOGIT_BYTES
    everyone = samples * ranks
    return 2 * samples * everyone * _LOGIT_BYTES + 2 * everyone * whole.features * element
