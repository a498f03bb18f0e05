"""A first step-time model: work over the device's rates, plus what communication leaves exposed. Knows no memory.

Against 67 published runs of GPT-like models on A100 and H100 it errs by 9 % on average and 33 % at worst, with the two
devices' shares of the peak and the width below fitted to them. Use it to rank layouts, not to promise dates.
"""

from __future__ import annotations

from scaletrain_cli.plan.activations import checkpointed_blocks
from scaletrain_cli.plan.architecture import (
    architecture,
    block_attention_flops,
    head_flops,
    training_flops_per_token,
)
from scaletrain_cli.plan.communication import OVERLAP, step_traffic
from scaletrain_cli.plan.hardware import Accelerator
from scaletrain_cli.plan.memory import local_tokens, stage_layers, stage_shard, zero_shards
from scaletrain_cli.plan.result import Layout, Network, Time
from scaletrain_cli.plan.states import weight_bytes
from scaletrain_cli.spec import RunSpec

# Share of the memory bandwidth that element-wise kernels reach; stated, not measured.
_MEMORY_EFFICIENCY = 0.8
# Narrow matrices do not fill a GPU: at this width they run at half the rate of wide ones (fitted, see above).
_HALF_RATE_WIDTH = 192
# Operations of one block, forward and backward, and what the host needs to issue one; between two micro-batches the
# queue runs dry while Python and DeepSpeed prepare the next. Orders of magnitude, stated, not measured.
_OPERATIONS_PER_BLOCK = {"llama": 120, "gpt": 40}
_ISSUE_SECONDS = 8e-6
_MICRO_BATCH_SECONDS = 2e-3
# Bytes that AdamW, clipping and the norm move per parameter of the partition: weights, gradient and two moments read,
# three written back, the gradient read and written again for the norm and the clip, all fp32; and the 16-bit copy.
_OPTIMIZER_BYTES = 4 * (4 + 3 + 3) + 2


def plan_time(spec: RunSpec, layout: Layout, device: Accelerator) -> tuple[Time, Network]:
    """Seconds per optimizer step by cause, and what follows; and the traffic of the busiest rank."""
    micro_batches, stages = layout.gradient_accumulation_steps, layout.pipeline_parallel
    compute = micro_batches * _micro_batch_seconds(spec, layout, device)
    # 1F1B idles (p - 1) / (m v) of the compute (arXiv:2104.04473, section 2.2).
    bubble = compute * (stages - 1) / (micro_batches * layout.virtual_pipeline)
    whole = architecture(spec.transformer, layout.tensor_parallel, layout.expert_parallel)
    shard = stage_shard(whole, layout, 0)
    traffic = step_traffic(spec, layout, device, shard, stage_layers(whole.layers, stages, 0))
    hidden = min(traffic.overlapping_seconds * OVERLAP, compute * OVERLAP)
    exposed = traffic.blocking_seconds + traffic.overlapping_seconds - hidden
    updated = shard.parameters if layout.zero_stage == 0 else -(-shard.parameters // zero_shards(layout))
    optimizer = updated * _OPTIMIZER_BYTES / (device.memory_bandwidth * _MEMORY_EFFICIENCY)
    # The corpus is memory-mapped tokens: reading one batch costs next to nothing beside a step.
    step = compute + bubble + exposed + optimizer
    tokens = layout.global_batch_size * spec.transformer.seq_len
    executed = tokens * (_dense_flops_per_token(spec, layout) + _attention_flops_per_token(spec, layout))
    needed = tokens * training_flops_per_token(spec.transformer)
    peak = layout.world_size * device.peak_flops(spec.training.precision)
    time = Time(
        step=step,
        compute=compute,
        exposed_communication=exposed,
        bubble=bubble,
        optimizer=optimizer,
        data_wait=0.0,
        tokens_per_second=tokens / step,
        tokens_per_second_per_gpu=tokens / step / layout.world_size,
        mfu=needed / step / peak,
        hfu=executed / step / peak,
        to_train=step * spec.total_steps,
    )
    return time, Network(traffic.sent)


def _micro_batch_seconds(spec: RunSpec, layout: Layout, device: Accelerator) -> float:
    """Forward and backward of one micro-batch on one rank: matrices at the device's rate, the rest at its memory's."""
    model, t = spec.transformer, layout.tensor_parallel
    tokens = local_tokens(spec, layout)
    share = tokens / t / layout.pipeline_parallel
    peak = device.peak_flops(spec.training.precision)
    dense_rate = peak * device.achievable_fraction
    if not device.is_cpu:
        dense_rate *= model.hidden_size / t / (model.hidden_size / t + _HALF_RATE_WIDTH)
    matrices = share * _dense_flops_per_token(spec, layout) / dense_rate
    # A causal kernel computes half of the scores.
    matrices += share * _attention_flops_per_token(spec, layout) / 2 / (peak * device.attention_fraction)
    element = weight_bytes(spec.training.precision)
    moved = share * _elementwise_bytes_per_token(spec, element) * _passes(spec, layout)
    elementwise = moved / (device.memory_bandwidth * _MEMORY_EFFICIENCY)
    if device.is_cpu:
        return matrices + elementwise
    blocks = stage_layers(model.num_hidden_layers, layout.pipeline_parallel, 0)
    issued = blocks * _OPERATIONS_PER_BLOCK[model.family] * _passes(spec, layout) / 3 * _ISSUE_SECONDS
    return max(matrices + elementwise, issued) + _MICRO_BATCH_SECONDS


def _passes(spec: RunSpec, layout: Layout) -> float:
    """Forwards' worth of work per step: 3, and up to 4 where blocks are computed twice (arXiv:2205.05198)."""
    layers = spec.transformer.num_hidden_layers
    return 3 + checkpointed_blocks(layers, layout.activation_checkpointing) / layers


def _dense_flops_per_token(spec: RunSpec, layout: Layout) -> float:
    """Forward, backward and recomputation of all matrix products but those of attention."""
    model = spec.transformer
    blocks = training_flops_per_token(model) / 3 - head_flops(model)
    blocks -= model.num_hidden_layers * block_attention_flops(model)
    return _passes(spec, layout) * blocks + 3 * head_flops(model)


def _attention_flops_per_token(spec: RunSpec, layout: Layout) -> float:
    """The same for scores and weighted sums, counted unmasked."""
    return _passes(spec, layout) * spec.transformer.num_hidden_layers * block_attention_flops(spec.transformer)


def _elementwise_bytes_per_token(spec: RunSpec, element: int) -> int:
    """Memory traffic of one forward pass outside matrix products.

    Eager, each operation of the engine's model reads and writes its tensors: RMSNorm and rotation compute in fp32 step
    by step, residual additions move 3 elements, SwiGLU 5, GELU and LayerNorm 2. Compiled, chains become one kernel.
    The loss moves 12 bytes per vocabulary entry forward, and twice that backward.
    """
    model, compiled = spec.transformer, spec.training.compile
    inner = model.intermediate_size
    if model.num_experts:
        inner = (model.moe_intermediate_size or inner) * model.num_experts_per_tok
    if model.family == "gpt":
        per_block = element * ((2 * 2 + 2 * 3) * model.hidden_size + 2 * inner)
    else:
        wide = element == 2  # conversions to fp32 and back
        norm = 2 * element if compiled else (36 if wide else 28)
        rotation = 2 * element if compiled else (58 if wide else 40)
        rotated = (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
        per_block = (2 * norm + 6 * element) * model.hidden_size + rotation * rotated
        per_block += (3 if compiled else 5) * element * inner
    return model.num_hidden_layers * per_block + 12 * model.vocab_size
