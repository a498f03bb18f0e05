"""Memory that is free for the program but not yet for the allocator, because the host runs ahead of the GPU.

A tensor that a collective on another stream uses is freed by the host long before the GPU has finished with it; until
then the allocator cannot reuse it (torch, ``record_stream``). That matters where tensor-parallel collectives run beside
the products and the GPU, not the host, sets the pace: then the launch queue is full, and about as many tensors wait as
its thousand kernels use. The allocator could wait for them when memory runs short; the published runs that came so far
crashed or crawled, so they count.
"""

from __future__ import annotations

from scaletrain_cli.plan.architecture import attention_matmul_flops, mlp_matmul_flops
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.memory.framework_memory import FrameworkMemory
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.speed.framework_time import HABITS
from scaletrain_cli.spec import RunSpec

# Rough rates, for which of host and GPU is faster: share of the peak in products, and bytes/s that a rank's
# collectives reach within a node and, hierarchical, across nodes.
_PRODUCTS = 0.45
_WITHIN_NODE = 300e9
_ACROSS_NODES = 250e9
# Calibrated on the Ultra-Scale sweep: the queue begins to fill when the GPU needs half of the host's time; without a
# pipeline, where nothing waits for another stage, from the start. Filling a longer pipeline takes several
# forward passes in a row, which fill the queue too, but for the widest tensor parallelism.
_EMPTY, _FULL = 0.5, 1.0
_ACROSS = 0.8
_FILLING = 0.85
_FILLING_STAGES = 4
_WIDEST = 32
_LEAST = 0.05
# A step of a single micro-batch ends before the queue is full.
_SINGLE = 0.4


def backlog_bytes(
    spec: RunSpec, layout: Layout, device: Accelerator, habits: FrameworkMemory, tokens: int, element: int
) -> int:
    """Bytes of whole tensors that wait for collectives, of one rank."""
    if not habits.backlog or layout.tensor_parallel == 1:
        return 0
    share = _share(spec, layout, device, tokens, element)
    if layout.gradient_accumulation_steps == 1:
        share *= _SINGLE
    # Each collective holds a whole tensor and one rank's share of it.
    pairs = share * habits.backlog * (1 + 1 / layout.tensor_parallel)
    return int(pairs * element * spec.transformer.hidden_size * tokens)


def _share(spec: RunSpec, layout: Layout, device: Accelerator, tokens: int, element: int) -> float:
    """How full the launch queue is."""
    model, tensor = spec.transformer, layout.tensor_parallel
    across = tensor > spec.cluster.gpus_per_node
    pipelined = layout.pipeline_parallel > 1
    if not pipelined and across:
        return _ACROSS
    if pipelined and tensor >= _WIDEST:
        return _LEAST
    if layout.pipeline_parallel >= _FILLING_STAGES:
        return _FILLING
    flops = 3 * tokens * (attention_matmul_flops(model) + mlp_matmul_flops(model, experts=False)) / tensor
    moved = 6 * element * tokens * model.hidden_size * (tensor - 1) / tensor
    gpu = flops / (_PRODUCTS * device.peak_flops(spec.training.precision))
    gpu += moved / (_ACROSS_NODES if across else _WITHIN_NODE)
    times = HABITS[spec.planner.framework]
    host = times.forward_host + times.backward_host + times.tensor_host
    if not pipelined:
        return min(1.0, gpu / host)
    if layout.world_size > spec.cluster.gpus_per_node:
        host += times.stage_stall * tensor
    return max(_LEAST, min(1.0, (gpu / host - _EMPTY) / (_FULL - _EMPTY)))
