"""Weights, gradients and optimizer states of one rank under its layout, on the device and on the host."""

from __future__ import annotations

from scaletrain_cli.plan.memory.states import MasterWeights, ModelStates, model_state_bytes
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.stages import Shard, zero_shards
from scaletrain_cli.spec import RunSpec

# Beside what leaves the device, an offloaded optimizer keeps the fp32 gradients of its partition and a pinned 16-bit
# copy of the weights on the host (DeepSpeed zero/stage_1_and_2.py, ops/adam/cpu_adam.py).
_HOST_COPIES = 6
# What passes through pinned memory on its way to NVMe: five buffers of 1e8 fp32 elements (DeepSpeed
# zero/offload_config.py, buffer_count and buffer_size).
_NVME_BUFFERS = 5 * 4 * 10**8


def rank_states(spec: RunSpec, layout: Layout, shard: Shard, master: MasterWeights) -> ModelStates:
    """Return weights, gradients and optimizer states on one rank's device, offloaded parts left out."""
    return device_and_host_states(spec, layout, shard, master)[0]


def expert_tensor_parallel(spec: RunSpec, layout: Layout) -> int:
    """Return the ranks that share the width of an expert: as of other matrices, unless pinned."""
    wanted = spec.layout.expert_tensor_parallel
    return layout.tensor_parallel if wanted == "auto" else wanted


def expert_shards(spec: RunSpec, layout: Layout) -> int:
    """Return the ranks that ZeRO shares the parameters of experts over."""
    ranks = zero_shards(layout) * layout.tensor_parallel
    return max(1, ranks // (layout.expert_parallel * expert_tensor_parallel(spec, layout)))


def device_and_host_states(
    spec: RunSpec, layout: Layout, shard: Shard, master: MasterWeights
) -> tuple[ModelStates, int]:
    """Return the same, and the bytes that are offloaded to the node's memory."""
    training, optimizer = spec.training, spec.training.optimizer.name
    zero = layout.zero_stage
    groups = [
        model_state_bytes(count, training.precision, training.grad_dtype, zero, ranks, optimizer, master)
        for count, ranks in ((shard.dense, zero_shards(layout)), (shard.experts, expert_shards(spec, layout)))
        if count
    ]
    states = ModelStates(
        sum(group.parameters for group in groups),
        sum(group.gradients for group in groups),
        sum(group.optimizer_states for group in groups),
    )
    return _offloaded(spec, layout, states, shard.parameters)


def _offloaded(spec: RunSpec, layout: Layout, states: ModelStates, elements: int) -> tuple[ModelStates, int]:
    """Return what remains on the device of a rank with so many parameters, and the bytes in its node's memory
    instead.
    """
    if layout.offload == "none":
        return states, 0
    parameters, gradients, optimizer_states = states
    stage = layout.zero_stage
    # zero/stage_1_and_2.py and stage3.py move the optimizer's partition and its gradients to the host.
    host = optimizer_states + _HOST_COPIES * -(-elements // (zero_shards(layout) if stage else 1))
    gradients = 0 if stage >= 2 else gradients
    if layout.offload == "optimizer+params":
        host += parameters
        parameters = 0
    if spec.layout.offload_device == "nvme":
        host = min(host, _NVME_BUFFERS)
    return ModelStates(parameters, gradients, 0), host
