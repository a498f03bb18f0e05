"""Warnings of a plan, and the assumptions behind its numbers."""

import math
from collections.abc import Iterator

from scaletrain_cli.plan.axes import Rule
from scaletrain_cli.plan.catalogue.hardware import Accelerator, near_ranks
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.reliability.durability import (
    MEMORY_SHARE,
    SPOT_HOURS_BETWEEN_PREEMPTIONS,
    gpu_hours_between_failures,
    may_have_partners,
    memory_copies_lack_room,
    memory_copy_bytes,
    spare_nodes_pay_from,
)
from scaletrain_cli.plan.result import Durability, Layout, Memory, Time
from scaletrain_cli.plan.search.engine_support import unsupported
from scaletrain_cli.plan.speed.stage_time import launches_block
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec

_TIGHT_SHARE = 0.95


def warnings(
    spec: RunSpec, layout: Layout, memory: Memory, time: Time, durability: Durability, device: Accelerator
) -> tuple[Reason, ...]:
    """Return the warnings to read before submitting, most important first."""
    return (
        *map(_cannot_run, unsupported(spec, layout)),
        *about_config_keys(spec),
        *_about_layout(spec, layout, memory),
        *_about_host_memory(spec, layout, memory, durability),
        *_about_kernels(spec, layout, memory, time, device),
        *workload_of(spec.model).layout_warnings(spec, layout, time),
        *_about_durability(spec, durability, time),
    )


def about_config_keys(spec: RunSpec) -> Iterator[Reason]:
    """Yield the keys of the model's config.json that have no effect."""
    if spec.ignored_config_keys:
        yield Reason("plan.config-keys-ignored", {"keys": list(spec.ignored_config_keys)})


def _cannot_run(rule: Rule) -> Reason:
    """Return the warning that the engine cannot run a setting; ``cause`` is the code of the broken rule."""
    params = {"key": rule.key, "given": rule.given, "cause": rule.reason.code}
    return Reason("plan.cannot-run", {**params, "what": f"{rule.message} {rule.hint}".strip().removesuffix(".")})


def _about_layout(spec: RunSpec, layout: Layout, memory: Memory) -> Iterator[Reason]:
    framework = framework_of(spec)
    if spec.layout.zero_stage == 0 and layout.zero_stage == 1:
        yield Reason("plan.zero-0-runs-as-1", {"precision": spec.training.precision})
    if memory.fits and memory.peak > _TIGHT_SHARE * memory.capacity:
        yield Reason("plan.nearly-full", {"share": memory.peak / memory.capacity})
    if spec.training.compile is True and layout.zero_stage == 3 and framework.is_engine:
        yield Reason("plan.compile-under-zero-3")
    if workload_of(spec.model).accumulation_changes_loss(spec) and layout.gradient_accumulation_steps > 1:
        accumulation, batch = layout.gradient_accumulation_steps, layout.global_batch_size
        seen = {"accumulation": accumulation, "seen": batch // accumulation, "batch": batch}
        yield Reason("plan.accumulation-changes-loss", seen)
    if layout.tensor_parallel > near_ranks(spec.cluster):
        degrees = {"tensor_parallel": layout.tensor_parallel, "gpus_per_node": near_ranks(spec.cluster)}
        yield Reason("plan.tensor-parallel-across-nodes", degrees)
    if launches_block(spec):
        yield Reason("plan.launches-block")


# The largest share of the time for which training waits for copies in host memory without a warning.
_MOST_COPY_COST = 0.05


def _about_host_memory(spec: RunSpec, layout: Layout, memory: Memory, durability: Durability) -> Iterator[Reason]:
    if spec.checkpoint.in_memory != "off" and durability.memory_copy_steps is None:
        every, share = durability.interval_steps, MEMORY_SHARE
        if memory_copies_lack_room(spec, needed := memory_copy_bytes(spec, durability.checkpoint_bytes)):
            yield Reason("plan.memory-copies-too-large", {"needed": needed, "share": share})
        else:
            yield Reason("plan.memory-copies-too-rare", {"every": every})
    elif durability.memory_copy_steps is not None and may_have_partners(spec) != durability.memory_copies_on_partners:
        yield Reason("plan.memory-copies-on-one-node", {"share": MEMORY_SHARE})
    if durability.memory_copy_cost > _MOST_COPY_COST:
        slow = {"every": durability.memory_copy_steps, "cost": durability.memory_copy_cost}
        yield Reason("plan.memory-copies-slow", slow)
    offloaded = memory.host * min(spec.cluster.gpus_per_node, layout.world_size)
    copied = durability.copy_bytes_per_node
    given = spec.cluster.section.host_memory_per_node
    needs = {"offloaded": offloaded, "copied": copied}
    if given is not None and offloaded + copied > given:
        key = f"cluster.{spec.cluster.scheduler}.memory_per_node"
        yield Reason("plan.too-little-host-memory", {**needs, "key": key, "given": given})
    elif offloaded:
        yield Reason("plan.host-memory-unchecked", needs)


def _about_kernels(spec: RunSpec, layout: Layout, memory: Memory, time: Time, device: Accelerator) -> Iterator[Reason]:
    """Yield what the GPU has no kernel for; last what a cap of attention scores costs this layout."""
    workload, framework = workload_of(spec.model), framework_of(spec)
    if device.is_cpu:
        return
    if spec.training.precision not in device.flops:
        yield Reason("plan.emulated-precision", {"device": device.name, "precision": spec.training.precision})
    yield from workload.warnings(spec)
    if not workload.counts_tokens or not framework.is_engine:
        return
    model = spec.transformer
    if model.attn_logit_softcapping is None or model.attention_dropout:
        return
    fused = spec.with_changes("model", attn_logit_softcapping=None)
    peak, step = workload.memory(fused, layout, device).peak, workload.time(fused, layout, device)[0].step
    costs = {"seq_len": model.seq_len, "times": time.step / step, "bytes": max(0, memory.peak - peak)}
    yield Reason("plan.capped-attention", costs)


def _about_durability(spec: RunSpec, durability: Durability, time: Time) -> Iterator[Reason]:
    if spec.cluster.spot and spec.cluster.mean_time_between_interruptions is None:
        yield Reason("plan.assumed-preemptions", {"hours": SPOT_HOURS_BETWEEN_PREEMPTIONS})
    if not durability.grace_ok and (spec.cluster.spot or not spec.cluster.traits.runs_here):
        behind = math.ceil((durability.save_seconds - durability.blocked_seconds) / time.step)
        params = {"needed": durability.save_seconds + time.step, "grace_seconds": spec.cluster.grace_seconds}
        yield Reason("plan.grace-too-short", {**params, "steps": durability.interval_steps + behind})


def assumptions(spec: RunSpec, layout: Layout, device: Accelerator, parameters: int) -> tuple[Reason, ...]:
    """Return where the plan's numbers come from."""
    framework = framework_of(spec)
    return (
        Reason("plan.assumes-device", {"device": device.name, "source": device.source}),
        Reason("plan.assumes-kernels", {"framework": spec.planner.framework}),
        *([Reason("plan.assumes-compiled")] if layout.compile else []),
        Reason("plan.assumes-network", {"network": spec.cluster.network or device.network}),
        *framework.memory_assumptions(),
        Reason("plan.assumes-cpu-process" if device.is_cpu else "plan.assumes-outside-allocator"),
        Reason("plan.assumes-out-of-memory"),
        *workload_of(spec.model).assumptions(spec, parameters),
        Reason("plan.assumes-storage"),
        *_about_interruptions(spec, device),
        *([] if framework.is_engine else [Reason("plan.assumes-comparison", {"framework": framework.name})]),
    )


def _about_interruptions(spec: RunSpec, device: Accelerator) -> Iterator[Reason]:
    cluster = spec.cluster
    if cluster.spare_nodes:
        share = cluster.spare_nodes / cluster.allocated_nodes
        params = {"spare": cluster.spare_nodes, "share": share, "seconds": spare_nodes_pay_from(spec, device)}
        yield Reason("plan.assumes-spare-nodes", params)
    stated = cluster.mean_time_between_interruptions is not None
    if stated and not cluster.spot:
        yield Reason("plan.assumes-stated-interruptions")
        return
    if cluster.per_node_mtbf is None:
        hours, reporter = gpu_hours_between_failures(device)
        yield Reason("plan.assumes-failures", {"gpu_hours": hours, "reporter": reporter})
    if stated:
        yield Reason("plan.assumes-stated-preemptions")
    elif cluster.spot:
        yield Reason("plan.assumes-traced-preemptions", {"hours": SPOT_HOURS_BETWEEN_PREEMPTIONS})
