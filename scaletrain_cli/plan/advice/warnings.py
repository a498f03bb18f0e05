"""Warnings about a plan, and the assumptions that its numbers rest on, as sentences. Plans nothing itself."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.memory.engine_memory import drops_scores
from scaletrain_cli.plan.memory.framework_memory import FRAMEWORK_MEMORY
from scaletrain_cli.plan.memory.states import weight_bytes
from scaletrain_cli.plan.reliability.durability import SPOT_HOURS_BETWEEN_PREEMPTIONS, gpu_hours_between_failures
from scaletrain_cli.plan.result import Durability, Layout, Memory, Time
from scaletrain_cli.plan.search.engine_support import unsupported
from scaletrain_cli.plan.search.layouts import is_contrastive
from scaletrain_cli.spec import ModelSpec, RunSpec

_TIGHT_SHARE = 0.95


def warnings(
    spec: RunSpec, layout: Layout, memory: Memory, time: Time, durability: Durability, device: Accelerator
) -> tuple[str, ...]:
    """What the user should know before submitting, most important first."""
    return (
        *(f"this engine version cannot run this: {line}" for line in unsupported(spec, layout)),
        *_about_layout(spec, layout, memory, device),
        *_about_host_memory(spec, layout, memory, durability),
        *_about_device(spec, device),
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
    if spec.training.compile is True and layout.zero_stage == 3 and spec.planner.framework == "deepspeed":
        yield (
            "training.compile gains little under ZeRO-3: DeepSpeed gathers weights in hooks, which break the graph at "
            "each layer. The times here count it as whole."
        )
    if is_contrastive(spec) and layout.gradient_accumulation_steps > 1:
        seen = layout.global_batch_size // layout.gradient_accumulation_steps
        yield (
            f"accumulating {layout.gradient_accumulation_steps} micro-batches changes a contrastive loss: a pair meets "
            f"the negatives of {seen:,} pairs, not of {layout.global_batch_size:,}. Use more GPUs, or OpenCLIP's "
            "accumulation over cached features, which computes each forward pass twice."
        )
    if layout.tensor_parallel > spec.cluster.gpus_per_node:
        yield (
            f"layout.tensor_parallel = {layout.tensor_parallel} reaches over nodes of {spec.cluster.gpus_per_node} "
            "GPUs; its traffic then runs at network speed."
        )


def _about_host_memory(spec: RunSpec, layout: Layout, memory: Memory, durability: Durability) -> Iterator[str]:
    offloaded = memory.host * min(spec.cluster.gpus_per_node, layout.world_size)
    copied = durability.copy_bytes_per_node
    asked = spec.cluster.section.host_memory_per_node
    key = f"cluster.{spec.cluster.scheduler}.memory_per_node"
    needs = (
        f"offloading takes {offloaded / 1e9:,.1f} GB of each node's memory and the copy that checkpoints are written "
        f"from {copied / 1e9:,.1f} GB"
    )
    if asked is not None and offloaded + copied > asked:
        yield f"{needs}: more than {key} = {asked / 1e9:,.1f} GB. The kernel would end the job."
    elif offloaded:
        yield f"{needs}; no node is checked for it."


def _about_device(spec: RunSpec, device: Accelerator) -> Iterator[str]:
    precision = spec.training.precision
    if device.is_cpu:
        return
    if precision not in device.flops:
        yield f"{device.name} has no {precision} units: it would be emulated, slowly. Times assume fp32 speed."
    if isinstance(spec.model, ModelSpec) and spec.model.head_dim > 256:
        head = spec.model.head_dim
        yield f"model.head_dim = {head}: no fused attention above 256; memory grows with seq_len squared."
    if isinstance(spec.model, ModelSpec) and drops_scores(spec):
        yield (
            f"model.attention_dropout = {spec.model.attention_dropout:g}: no fused attention draws the same masks in "
            "every layout, so its scores are kept; memory grows with seq_len squared. Models of today leave it out."
        )


def _about_durability(spec: RunSpec, durability: Durability, time: Time) -> Iterator[str]:
    if spec.cluster.spot and spec.cluster.mean_time_between_interruptions is None:
        yield (
            "spot without cluster.mean_time_between_interruptions: preemptions are taken to come every "
            f"{SPOT_HOURS_BETWEEN_PREEMPTIONS:g} hours, as on AWS in 2022 and 2023; state yours, or plan with a trace."
        )
    if not durability.grace_ok and (spec.cluster.spot or not spec.cluster.traits.runs_here):
        needed = durability.save_seconds + time.step
        behind = math.ceil((durability.save_seconds - durability.blocked_seconds) / time.step)
        yield (
            f"one step and a checkpoint take {needed:,.0f} s, more than cluster.grace_seconds = "
            f"{spec.cluster.grace_seconds:g}: a preemption can lose up to {durability.interval_steps + behind} steps."
        )


def assumptions(spec: RunSpec, layout: Layout, device: Accelerator, parameters: int) -> tuple[str, ...]:
    """Where the numbers come from, one sentence each."""
    framework = spec.planner.framework
    return (
        f"device {device.name}: {device.source}",
        *_about_time(spec, layout, device),
        *_about_memory(spec, device),
        *(_about_text(spec, parameters) if isinstance(spec.model, ModelSpec) else _about_images(spec)),
        "checkpoints: 1.2 GB/s per node to shared storage unless the spec says, as BLOOM's chronicle reports; "
        "restarts: 180 s and loading; interval by Young 1974, goodput by Daly 2006",
        *_about_interruptions(spec, device),
        *([] if framework == "deepspeed" else [f"planner.framework = {framework}: for comparison; not for submission"]),
    )


def _about_time(spec: RunSpec, layout: Layout, device: Accelerator) -> Iterator[str]:
    yield (
        "kernels: shares of the device's rates by size and GPU generation, in kernel_rates.json; host work and overlap "
        f"as {spec.planner.framework} has them, in framework_time.py; `make bench-planner` prints how far they miss"
    )
    if layout.compile:
        yield (
            "compiled blocks: one kernel for each chain of element-wise operations, held to torchtitan's and "
            "build-nanogpt's figures, not to a GPU run of this engine; ZeRO-3's hooks, which break the graph, are not "
            "counted. Memory is that of eager blocks where training.compile is auto"
        )
    network = spec.cluster.network or device.network
    yield (
        f"network between nodes: {network}; bus bandwidths by number of nodes, measured or estimated, in networks.json"
    )


def _about_memory(spec: RunSpec, device: Accelerator) -> Iterator[str]:
    framework = spec.planner.framework
    habits = FRAMEWORK_MEMORY.get(framework)
    if habits is None:
        yield "model states and buffers: what DeepSpeed 0.19 allocates, read in its source; ZeRO, arXiv:1910.02054"
        yield "gradients are reduced between ranks in the weights' type, whatever grad_dtype they are accumulated in"
        yield "fragmentation: 5 % of what comes and goes"
    else:
        yield f"model states and buffers: as {framework} keeps them, counted in its source, in framework_memory.py"
        yield f"fragmentation: {100 * habits.fragmentation:.0f} % of what comes and goes"
    yield (
        "outside the allocator: 0.5 GB of process"
        if device.is_cpu
        else "outside the allocator: CUDA context 0.7 GB, NCCL 0.4 GB per axis and 0.5 GB per peer of an all-to-all"
    )
    yield (
        "chance of running out: log-normal errors of the estimate, as wide as the crashes of the Ultra-Scale sweep of "
        "nanotron say, device_memory.py; nothing comparable is published for other frameworks"
    )


def _about_text(spec: RunSpec, parameters: int) -> Iterator[str]:
    """Activations, logits, FLOPs and data of a transformer of text."""
    habits = FRAMEWORK_MEMORY.get(spec.planner.framework)
    yield (
        f"activations: operation by operation, {weight_bytes(spec.training.precision)} bytes per element, with "
        "attention as the device and planner.attention have it; Korthikanti et al., arXiv:2205.05198"
    )
    yield f"logits and loss: {habits.logits if habits else 12} bytes per token and vocabulary entry"
    yield "FLOPs per token: 6 N + 12 l s a d, attention counted unmasked; PaLM, arXiv:2204.02311, appendix B"
    tokens = spec.total_steps * spec.training.global_batch_size * spec.units_per_sample
    yield f"data: {tokens:.3g} tokens, {tokens / max(1, parameters):.3g} per parameter, read while training"


def _about_images(spec: RunSpec) -> Iterator[str]:
    """Activations, time, FLOPs and data of a vision network."""
    samples = spec.total_steps * spec.training.global_batch_size
    yield (
        f"activations: what autograd keeps of each operation, {weight_bytes(spec.training.precision)} bytes per "
        "element; no dropout"
    )
    yield (
        "time of each operation: its products or its memory traffic, whichever is longer; off by 6 to 8 % on "
        "average against the results of timm, NVIDIA's examples and MLPerf"
    )
    yield (
        f"FLOPs of one of the {spec.unit}: 6 per multiplication with addition of a forward pass; tokens_per_second "
        f"counts {spec.unit}"
    )
    yield f"data: {samples:.3g} {spec.unit}; reading and decoding them is taken to keep up"


def _about_interruptions(spec: RunSpec, device: Accelerator) -> Iterator[str]:
    cluster = spec.cluster
    stated = cluster.mean_time_between_interruptions is not None
    if stated and not cluster.spot:
        yield "interruptions: as the spec says, of the whole job and for any cause"
        return
    if cluster.per_node_mtbf is None:
        hours, who = gpu_hours_between_failures(device)
        yield f"failures: one per {hours:,.0f} GPU hours, as {who}"
    if stated:
        yield "preemptions: as the spec says, of the whole job; failures of hardware add to them"
    elif cluster.spot:
        yield (
            f"preemptions: one per {SPOT_HOURS_BETWEEN_PREEMPTIONS:g} hours of the job, as 21 traces of AWS instances "
            "in 2022 and 2023 show (skypilot-org/spot-traces); waiting for capacity is not counted"
        )
