"""Warnings about a plan, and the assumptions that its numbers rest on, as sentences. Plans nothing itself."""

from __future__ import annotations

from collections.abc import Iterator

from scaletrain_cli.plan.engine_support import unsupported
from scaletrain_cli.plan.hardware import Accelerator
from scaletrain_cli.plan.result import Durability, Layout, Memory, Time
from scaletrain_cli.plan.states import weight_bytes
from scaletrain_cli.spec import RunSpec

# Tensor cores work on tiles; other widths are padded (NVIDIA, Matrix Multiplication Background User's Guide).
_TILE = 64
_TIGHT_SHARE = 0.95


def warnings(
    spec: RunSpec, layout: Layout, memory: Memory, time: Time, durability: Durability, device: Accelerator
) -> tuple[str, ...]:
    """What the user should know before submitting, most important first."""
    return (
        *(f"this engine version cannot run this: {line}" for line in unsupported(spec, layout)),
        *_about_layout(spec, layout, memory, device),
        *_about_device(spec, layout, device),
        *_about_durability(spec, durability, time),
    )


def _about_layout(spec: RunSpec, layout: Layout, memory: Memory, device: Accelerator) -> Iterator[str]:
    if spec.layout.zero_stage == 0 and layout.zero_stage == 1:
        yield (
            f"layout.zero_stage = 0 with {spec.training.precision} runs as ZeRO-1: DeepSpeed's stage 0 cannot "
            "accumulate gradients in fp32 there, or cannot run a pipeline correctly."
        )
    if memory.fits and memory.peak > _TIGHT_SHARE * memory.capacity:
        share = 100 * memory.peak / memory.capacity
        yield f"the plan fills {share:.0f} % of the device; the memory model errs by a few percent."
    if layout.tensor_parallel > spec.cluster.gpus_per_node:
        yield (
            f"layout.tensor_parallel = {layout.tensor_parallel} reaches over nodes of {spec.cluster.gpus_per_node} "
            "GPUs; its traffic then runs at network speed."
        )
    if layout.offload != "none":
        yield "offloaded states need host memory that this plan does not count."


def _about_device(spec: RunSpec, layout: Layout, device: Accelerator) -> Iterator[str]:
    precision = spec.training.precision
    if device.is_cpu:
        return
    if precision not in device.flops:
        yield f"{device.name} has no {precision} units: it would be emulated, slowly. Times assume fp32 speed."
    model, t = spec.transformer, layout.tensor_parallel
    widths = {
        "hidden_size": model.hidden_size,
        "intermediate_size per tensor rank": model.intermediate_size // t or 1,
        "vocab_size per tensor rank": model.vocab_size // t or 1,
    }
    odd = [f"{name} = {width}" for name, width in widths.items() if width % _TILE]
    if odd:
        yield f"not a multiple of {_TILE}, so tensor cores work on padding: {', '.join(odd)}."
    if model.head_dim > 256:
        yield f"model.head_dim = {model.head_dim}: no fused attention above 256; memory grows with seq_len squared."


def _about_durability(spec: RunSpec, durability: Durability, time: Time) -> Iterator[str]:
    if spec.cluster.spot and spec.cluster.mean_time_between_interruptions is None:
        yield "spot without cluster.mean_time_between_interruptions: only hardware failures are counted."
    if not durability.grace_ok and (spec.cluster.spot or spec.cluster.scheduler == "slurm"):
        needed = durability.save_seconds + time.step
        yield (
            f"one step and a checkpoint take {needed:,.0f} s, more than cluster.grace_seconds = "
            f"{spec.cluster.grace_seconds:g}: a preemption can lose up to {durability.interval_steps} steps."
        )


def assumptions(spec: RunSpec, layout: Layout, device: Accelerator, parameters: int) -> tuple[str, ...]:
    """Where the numbers come from, one sentence each."""
    tokens = spec.total_steps * spec.training.global_batch_size * spec.transformer.seq_len
    lines = [
        f"device {device.name}: {device.source}",
        "matrix products, attention and memory-bound kernels: shares of the device's rates by size and GPU generation, "
        "in kernel_rates.json; step times err by about 10 % where that was measured",
        "model states: what DeepSpeed 0.19 allocates, read in its source; ZeRO, arXiv:1910.02054",
        f"activations: per operation, {weight_bytes(spec.training.precision)} bytes per element, fused attention, no "
        "dropout; Korthikanti et al., arXiv:2205.05198",
        "logits and loss: 12 bytes per token and vocabulary entry",
        "framework: CUDA context, kernels and workspaces 1.5 GB (CPU rank: 0.5 GB); fragmentation: 5 % of what comes "
        "and goes",
        "FLOPs per token: 6 N + 12 l s a d, attention counted unmasked; PaLM, arXiv:2204.02311, appendix B",
        "gradients are reduced between ranks in the weights' type, whatever grad_dtype they are accumulated in",
        f"network between nodes: {spec.cluster.network or device.network}; bus bandwidths by number of nodes as measured "
        "or estimated in networks.json; tensor and pipeline traffic blocks, gradients overlap as the framework lets them",
        "checkpoints: 1 GB/s per node to shared storage; interval by Young 1974, goodput by Daly 2006",
        f"data: {tokens:.3g} tokens, {tokens / max(1, parameters):.3g} per parameter (about 20 is compute-optimal, "
        "arXiv:2203.15556)",
    ]
    if spec.cluster.mean_time_between_interruptions is None:
        lines.append("interruptions: one per 50,676 GPU hours, as Llama 3 reports (arXiv:2407.21783, section 3.3.4)")
    if spec.planner.framework != "deepspeed":
        lines.append(f"planner.framework = {spec.planner.framework}: for comparison; this engine cannot run it")
    return tuple(lines)
