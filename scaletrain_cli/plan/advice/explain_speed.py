"""Explain the speed of a layout that fits: axes, recomputation, batch, communication, next best, image loader.

The second half of explain.py. It sizes variants of the chosen layout that differ in one setting.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from scaletrain_cli.plan.advice.explanation import Question, Row, row, sized
from scaletrain_cli.plan.axes import CHECKPOINTING, divisors
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.result import Layout, RunPlan
from scaletrain_cli.plan.search.layout_search import Candidate, evaluate
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.loader_processes import decodes_images

_AXES = {
    "tensor_parallel": "tensor",
    "pipeline_parallel": "pipeline",
    "sequence_parallel": "sequence",
    "context_parallel": "context",
    "expert_parallel": "expert",
    "virtual_pipeline": "virtual pipeline",
}
_RUNNERS_UP = 3
_CHOSEN = Reason("plan.chosen")


def speed_questions(spec: RunSpec, plan: RunPlan, device: Accelerator) -> Iterator[Question]:
    """Yield the questions about the speed of a plan that fits; most compare the layout with variants of it."""
    yield from _axes(spec, plan, device)
    yield from _recomputation(spec, plan, device)
    yield from _compiled(spec, plan, device)
    yield from _micro_batch(spec, plan, device)
    yield from _bubble(plan)
    yield _communication(plan)
    yield _winner(spec, plan)
    yield from _image_loader(spec, plan)


def _axes(spec: RunSpec, plan: RunPlan, device: Accelerator) -> Iterator[Question]:
    used = {field: name for field, name in _AXES.items() if getattr(plan.layout, field) > 1}
    if not used:
        return
    rows: list[Row] = [_chosen(plan)]
    reasons: list[Reason] = []
    for field, name in used.items():
        if (without := sized(spec, plan.layout, device, **{field: 1})) is None:
            rows.append(Row(f"without {name}", note=Reason("plan.ranks-do-not-divide")))
            continue
        asked = without.memory.fits and getattr(spec.layout, field) != "auto"
        rows.append(row(f"without {name}", without, Reason("plan.the-spec-asks") if asked else None))
        if not without.memory.fits:
            reasons.append(Reason("plan.axis-needed-to-fit", {"axis": name}))
        else:
            ratio = without.time.step / plan.time.step
            code = "plan.slower-without-axis" if ratio >= 1 else "plan.faster-without-axis"
            reasons.append(Reason(code, {"axis": name, "share": abs(ratio - 1)}))
    yield Question("axes", Reason("plan.ask-axes"), tuple(rows), None, tuple(reasons) or (Reason("plan.axes-divide"),))


def _recomputation(spec: RunSpec, plan: RunPlan, device: Accelerator) -> Iterator[Question]:
    """Yield the question whether activations must be recomputed, with every mode of checkpointing."""
    mode = plan.layout.activation_checkpointing
    tried = _series(spec, plan, device, "activation_checkpointing", list(workload_of(spec.model).checkpointing))
    if len(tried) < 2:
        return
    rows = tuple(row(f"recompute {value}", candidate, _CHOSEN if value == mode else None) for value, candidate in tried)
    less = [value for value, candidate in tried if CHECKPOINTING.index(value) < CHECKPOINTING.index(mode)]
    fitting = [value for value, candidate in tried if candidate.memory.fits]
    if not less:
        verdict = Reason("plan.no-recomputation")
    elif not set(less) & set(fitting):
        verdict = Reason("plan.recomputation-to-fit", {"mode": mode})
    else:
        verdict = Reason("plan.recomputation-chosen", {"mode": mode})
    yield Question("recomputation", Reason("plan.ask-recomputation"), rows, bool(less), (verdict,))


def _compiled(spec: RunSpec, plan: RunPlan, device: Accelerator) -> Iterator[Question]:
    """Compare the step with and without torch.compile, for the engine's own transformers on GPUs."""
    if device.is_cpu or not workload_of(spec.model).compiles or not framework_of(spec).compiles_blocks:
        return
    on = plan.layout.compile
    other = evaluate(spec, replace(plan.layout, compile=not on), device)
    chosen = Row("compiled" if on else "eager", plan.memory.peak, plan.time.step, note=_CHOSEN)
    rows = (chosen, row("eager" if on else "compiled", other))
    gain = {"gain": max(other.time.step, plan.time.step) / min(other.time.step, plan.time.step) - 1}
    if on:
        verdict = Reason("plan.compiled", gain)
    elif spec.training.compile is False:
        verdict = Reason("plan.not-compiled-as-asked", gain)
    else:
        verdict = Reason("plan.not-compiled")
    yield Question("compile", Reason("plan.ask-compile"), rows, on, (verdict,))


def _micro_batch(spec: RunSpec, plan: RunPlan, device: Accelerator) -> Iterator[Question]:
    """Yield the question about the micro-batch size, with the next smaller and larger sizes."""
    layout = plan.layout
    sizes = divisors(layout.global_batch_size // layout.data_parallel)
    if layout.micro_batch_size not in sizes:
        return
    here = sizes.index(layout.micro_batch_size)
    series = _series(spec, plan, device, "micro_batch_size", sizes[max(0, here - 1) : here + 3])
    rows = tuple(
        row(f"micro-batch {size} x accumulation {c.layout.gradient_accumulation_steps}", c, note)
        for size, c in series
        for note in [_CHOSEN if size == sizes[here] else None]
    )
    larger = [candidate for size, candidate in series if size > layout.micro_batch_size]
    if not larger:
        code = "plan.micro-batch-takes-all"
    elif not larger[0].memory.fits:
        code = "plan.larger-micro-batch-does-not-fit"
    elif larger[0].time.step >= plan.time.step / 1.02:
        code = "plan.larger-micro-batch-not-faster"
    else:
        code = "plan.larger-micro-batch-too-risky"
    parts = {
        "batch": layout.global_batch_size,
        "micro_batch": layout.micro_batch_size,
        "accumulation": layout.gradient_accumulation_steps,
        "data": layout.data_parallel,
    }
    question = Reason("plan.ask-micro-batch", {"batch": layout.global_batch_size, "samples": spec.samples})
    yield Question("micro_batch", question, rows, None, (Reason("plan.batch-parts", parts), Reason(code)))


def _bubble(plan: RunPlan) -> Iterator[Question]:
    """Yield the question about the pipeline bubble, if there are pipeline stages."""
    layout, time = plan.layout, plan.time
    stages, micro_batches = layout.pipeline_parallel, layout.gradient_accumulation_steps
    if stages == 1:
        return
    chunks = layout.virtual_pipeline
    share = (stages - 1) / (micro_batches * chunks)
    formula = Reason("plan.bubble-formula", {"stages": stages, "micro_batches": micro_batches, "chunks": chunks})
    rows = (
        Row("ideal bubble, of the compute", share=share, note=formula),
        Row("bubble of this plan, of the step", seconds=time.bubble, share=time.bubble / time.step),
    )
    verdict = Reason("plan.bubble-share", {"share": time.bubble / time.step})
    follows = () if share < 0.1 else (Reason("plan.shrink-the-bubble"),)
    yield Question("bubble", Reason("plan.ask-bubble"), rows, None, (verdict,), follows)


def _communication(plan: RunPlan) -> Question:
    """Return the question about communication: bytes by axis, and exposed seconds."""
    time = plan.time
    sent = {name: size for name, size in vars(plan.network.per_step_bytes).items() if size}
    rows = [Row(f"sent for {name} parallelism", size) for name, size in sent.items()]
    share = time.exposed_communication / time.step
    rows.append(Row("exposed (not overlapped)", seconds=time.exposed_communication, share=share))
    question = Reason("plan.ask-communication")
    if not sent:
        return Question("communication", question, (), None, (Reason("plan.no-communication"),))
    verdict = Reason("plan.communication-share", {"share": share})
    heaviest = max(sent, key=lambda name: sent[name])
    follows = (Reason("plan.most-traffic", {"axis": heaviest}),) if len(sent) > 1 else ()
    return Question("communication", question, tuple(rows), None, (verdict,), follows)


def _winner(spec: RunSpec, plan: RunPlan) -> Question:
    """Return the question about the next best layouts and the reasons against them."""
    rows = [_chosen(plan)]
    for other in plan.alternatives[:_RUNNERS_UP]:
        share = other.peak_bytes / plan.memory.capacity
        name = _difference(plan.layout, other.layout)
        rows.append(Row(name, other.peak_bytes, other.step_seconds, share, other.fits, other.why))
    verdict = Reason("plan.only-layout")
    if plan.considered > 1:
        verdict = Reason("plan.fastest-layout", {"considered": plan.considered})
    pinned = [f"{key} = {value}" for key, value in spec.layout if value != getattr(type(spec.layout)(), key)]
    follows = (Reason("plan.pinned-by-spec", {"settings": ", ".join(pinned)}),) if pinned else ()
    return Question("winner", Reason("plan.ask-winner"), tuple(rows), None, (verdict,), follows)


def _image_loader(spec: RunSpec, plan: RunPlan) -> Iterator[Question]:
    """Yield the question whether reading and decoding keep up with the step, for runs that read images."""
    if not decodes_images(spec):
        return
    from scaletrain_cli.plan.vision.image_feed import (  # only for images
        allowed_workers,
        image_feed,
        image_readers,
    )

    time, layout = plan.time, plan.layout
    busy = time.step - time.data_wait
    feed = image_feed(spec, layout, busy)
    images = layout.global_batch_size / layout.data_parallel
    per_core = Reason("plan.images-by-core", {"core_rate": feed.core_rate})
    per_node = Reason("plan.images-by-node", {"node_rate": feed.node_rate, "cores": feed.cores})
    rows = (
        Row("images of a rank, decoded by one core", seconds=images / feed.core_rate, note=per_core),
        Row("step without waiting", seconds=busy, note=per_node),
        Row("read by a node, of the step", round(feed.read_rate * busy)),
        Row("waiting for data", seconds=time.data_wait, share=time.data_wait / time.step),
    )
    given = {"workers": image_readers(spec), "needed": allowed_workers(spec, feed)}
    if feed.read_rate > feed.storage:
        verdict = Reason("plan.storage-is-too-slow", {"needed": feed.read_rate})
    elif time.data_wait and given["workers"] >= given["needed"]:
        cores = {"needed": feed.workers, "rate": feed.rank_rate, "core_rate": feed.core_rate}
        verdict = Reason("plan.cores-are-too-few", cores)
    elif time.data_wait:
        verdict = Reason("plan.workers-are-too-few", given)
    else:
        verdict = Reason("plan.loader-keeps-up", given)
    yield Question("loader", Reason("plan.ask-loader"), rows, not time.data_wait, (verdict,))


def _series(
    spec: RunSpec, plan: RunPlan, device: Accelerator, field: str, values: list[Any]
) -> list[tuple[Any, Candidate]]:
    """Return the chosen layout with each of these values of one field; values that do not divide are left out."""
    pairs = ((value, sized(spec, plan.layout, device, **{field: value})) for value in values)
    return [(value, candidate) for value, candidate in pairs if candidate]


def _difference(chosen: Layout, other: Layout) -> str:
    """Return the fields in which a layout differs from the chosen one, as short text."""
    short = {"data_parallel": "data", **_AXES, "micro_batch_size": "micro", "offload": "offload"}
    parts = [
        f"{name} {getattr(other, field)}"
        for field, name in short.items()
        if getattr(other, field) != getattr(chosen, field)
    ]
    if other.zero_stage != chosen.zero_stage:
        parts.append(f"ZeRO-{other.zero_stage}")
    if other.activation_checkpointing != chosen.activation_checkpointing:
        parts.append(f"recompute {other.activation_checkpointing}")
    return ", ".join(parts) or "as chosen"


def _chosen(plan: RunPlan) -> Row:
    memory = plan.memory
    return Row("as chosen", memory.peak, plan.time.step, memory.peak / memory.capacity, memory.fits, _CHOSEN)
