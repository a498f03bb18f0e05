"""Why the chosen layout is fast: what each axis buys, batch, recomputation, bubble, communication, the runners-up.

The second half of ``explain``; knows layouts that fit, and sizes their neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from scaletrain_cli.plan.advice.explanation import Question, Row, modes, percent, row, samples, sized
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.result import Layout, RunPlan, Time
from scaletrain_cli.plan.search.layout_search import Candidate, evaluate
from scaletrain_cli.plan.search.layouts import CHECKPOINTING
from scaletrain_cli.plan.search.rejections import divisors
from scaletrain_cli.spec import ModelSpec, RunSpec

_AXES = {
    "tensor_parallel": "tensor",
    "pipeline_parallel": "pipeline",
    "sequence_parallel": "sequence",
    "context_parallel": "context",
    "expert_parallel": "expert",
    "virtual_pipeline": "virtual pipeline",
}
_RUNNERS_UP = 3
_CHOSEN = "chosen"


def speed_questions(spec: RunSpec, plan: RunPlan, device: Accelerator) -> Iterator[Question]:
    """What each choice of a plan that fits buys, against the same layout without it."""
    yield from _axes(spec, plan, device)
    yield from _recomputation(spec, plan, device)
    yield from _compiled(spec, plan, device)
    yield from _micro_batch(spec, plan, device)
    yield from _bubble(plan)
    yield _communication(plan)
    yield _winner(spec, plan)


def _axes(spec: RunSpec, plan: RunPlan, device: Accelerator) -> Iterator[Question]:
    used = {field: name for field, name in _AXES.items() if getattr(plan.layout, field) > 1}
    if not used:
        return
    rows, found = [_chosen(plan)], []
    for field, name in used.items():
        without = sized(spec, plan.layout, device, **{field: 1})
        if without is None:
            rows.append(Row(f"without {name}", note="the batch or the ranks do not divide"))
            continue
        asked = without.memory.fits and getattr(spec.layout, field) != "auto"
        note = "but the spec asks for it" if asked else ""
        rows.append(row(f"without {name}", without, note))
        if not without.memory.fits:
            found.append(f"without {name} it does not fit")
        else:
            found.append(f"without {name} a step is {_longer(without.time.step, plan.time.step)}")
    verdict = "; ".join(found) or "each is needed for the ranks and the batch to divide"
    yield Question(
        "axes", "What does each axis of the layout buy?", tuple(rows), None, f"{verdict[0].upper()}{verdict[1:]}."
    )


def _recomputation(spec: RunSpec, plan: RunPlan, device: Accelerator) -> Iterator[Question]:
    mode = plan.layout.activation_checkpointing
    found = _series(spec, plan, device, "activation_checkpointing", list(modes(spec)))
    if len(found) < 2:
        return
    rows = tuple(row(f"recompute {value}", candidate, _CHOSEN if value == mode else "") for value, candidate in found)
    less = [value for value, candidate in found if CHECKPOINTING.index(value) < CHECKPOINTING.index(mode)]
    fitting = [value for value, candidate in found if candidate.memory.fits]
    if not less:
        verdict, follows = "No: all activations have room.", ""
    elif not set(less) & set(fitting):
        verdict, follows = f"Yes: without it they do not fit, so {mode} recomputation pays with time.", ""
    else:
        verdict, follows = f"Taken: {mode}; less of it would leave too little room, or no gain.", ""
    yield Question("recomputation", "Must activations be computed again?", rows, bool(less), verdict, follows)


def _compiled(spec: RunSpec, plan: RunPlan, device: Accelerator) -> Iterator[Question]:
    """Compare the step with and without torch.compile, for the engine's own transformers on GPUs."""
    if device.is_cpu or not isinstance(spec.model, ModelSpec) or spec.planner.framework != "deepspeed":
        return
    on = plan.layout.compile
    other = evaluate(spec, replace(plan.layout, compile=not on), device)
    chosen = Row("compiled" if on else "eager", plan.memory.peak, plan.time.step, note=_CHOSEN)
    rows = (chosen, row("eager" if on else "compiled", other))
    gain = 100 * (max(other.time.step, plan.time.step) / min(other.time.step, plan.time.step) - 1)
    if on:
        verdict = f"Yes: by the model an eager step takes {gain:.0f} % longer. training.compile: false turns it off."
    elif spec.training.compile is False:
        verdict = f"No, as the spec asks; by the model compiled blocks would make a step {gain:.0f} % faster."
    else:
        verdict = "No: auto is off for experts, fp8, short runs and older GPUs. training.compile: true turns it on."
    yield Question("compile", "Are the blocks compiled?", rows, on, verdict)


def _micro_batch(spec: RunSpec, plan: RunPlan, device: Accelerator) -> Iterator[Question]:
    layout = plan.layout
    sizes = divisors(layout.global_batch_size // layout.data_parallel)
    if layout.micro_batch_size not in sizes:
        return
    here = sizes.index(layout.micro_batch_size)
    found = _series(spec, plan, device, "micro_batch_size", sizes[max(0, here - 1) : here + 3])
    rows = tuple(row(_cut(size, c), c, _CHOSEN if size == sizes[here] else "") for size, c in found)
    larger = [candidate for size, candidate in found if size > layout.micro_batch_size]
    if not larger:
        why = "a rank has no more of the batch."
    elif not larger[0].memory.fits:
        why = "a larger one does not fit."
    elif larger[0].time.step >= plan.time.step / 1.02:
        why = "a larger one is no faster."
    else:
        why = "a larger one leaves too little room for the error of the memory model."
    yield Question(
        "micro_batch",
        f"How are the {layout.global_batch_size:,} {samples(spec)} of a step cut?",
        rows,
        None,
        f"{layout.global_batch_size:,} = micro-batch {layout.micro_batch_size} x accumulation "
        f"{layout.gradient_accumulation_steps} x data {layout.data_parallel}; {why}",
    )


def _cut(size: int, candidate: Candidate) -> str:
    return f"micro-batch {size} x accumulation {candidate.layout.gradient_accumulation_steps}"


def _bubble(plan: RunPlan) -> Iterator[Question]:
    layout, time = plan.layout, plan.time
    stages, micro_batches, chunks = (
        layout.pipeline_parallel,
        layout.gradient_accumulation_steps,
        layout.virtual_pipeline,
    )
    if stages == 1:
        return
    share = (stages - 1) / (micro_batches * chunks)
    rows = (
        Row("ideal bubble, of the compute", share=share, note=f"({stages} - 1) / ({micro_batches} x {chunks})"),
        Row("bubble of this plan, of the step", seconds=time.bubble, share=time.bubble / time.step),
    )
    verdict = f"{percent(time.bubble / time.step)} of the step: stages wait while the pipeline fills and drains."
    follows = "" if share < 0.1 else "More micro-batches, or virtual stages, would shrink it."
    yield Question("bubble", "How long do pipeline stages wait?", rows, None, verdict, follows)


def _communication(plan: RunPlan) -> Question:
    time = plan.time
    sent = {name: size for name, size in vars(plan.network.per_step_bytes).items() if size}
    rows = [Row(f"sent for {name} parallelism", size) for name, size in sent.items()]
    rows.append(Row("not hidden behind compute", seconds=time.exposed_communication, share=_exposed(time)))
    if not sent:
        return Question("communication", "What does communication cost?", (), None, "Nothing: there is one rank.")
    verdict = f"{percent(_exposed(time))} of the step is spent waiting for it."
    heaviest = max(sent, key=lambda name: sent[name])
    return Question(
        "communication",
        "What does communication cost?",
        tuple(rows),
        None,
        verdict,
        f"Most bytes go into {heaviest} parallelism." if len(sent) > 1 else "",
    )


def _winner(spec: RunSpec, plan: RunPlan) -> Question:
    rows = [_chosen(plan)]
    for other in plan.alternatives[:_RUNNERS_UP]:
        share = other.peak_bytes / plan.memory.capacity
        name = _difference(plan.layout, other.layout)
        rows.append(Row(name, other.peak_bytes, other.step_seconds, share, other.fits, other.why))
    if plan.considered > 1:
        verdict = (
            f"Of {plan.considered:,} layouts it is the fastest that fits with room to spare, or as fast and simpler."
        )
    else:
        verdict = "It is the only layout that the spec allows."
    pinned = [f"{key} = {value}" for key, value in spec.layout if value != getattr(type(spec.layout)(), key)]
    follows = f"The spec itself sets {', '.join(pinned)}." if pinned else ""
    return Question("winner", "Why this one and not the next best?", tuple(rows), None, verdict, follows)


def _series(
    spec: RunSpec, plan: RunPlan, device: Accelerator, field: str, values: list[Any]
) -> list[tuple[Any, Candidate]]:
    """The chosen layout with other values of one field, as far as they divide."""
    pairs = ((value, sized(spec, plan.layout, device, **{field: value})) for value in values)
    return [(value, candidate) for value, candidate in pairs if candidate]


def _difference(chosen: Layout, other: Layout) -> str:
    """The fields in which a layout differs from the chosen one, in a few words."""
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


def _exposed(time: Time) -> float:
    return time.exposed_communication / time.step


def _longer(other: float, this: float) -> str:
    """``12 % longer`` or ``3 % shorter``."""
    return f"{percent(abs(other / this - 1))} {'longer' if other >= this else 'shorter'}"
