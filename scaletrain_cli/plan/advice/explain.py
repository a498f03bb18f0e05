"""Why a plan is as it is: the decision walked again with the numbers of this run. Sizes layouts, chooses none.

The order is the one that people reason in: one GPU, then data parallelism with ZeRO, then tensor parallelism within a
node, then pipeline stages across nodes; then batch, bubble and communication, and what the runners-up lacked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scaletrain_cli.plan.advice.explain_speed import speed_questions
from scaletrain_cli.plan.advice.explanation import (
    Question,
    Row,
    distinct,
    modes,
    on_one_rank,
    percent,
    row,
    samples,
    sized,
    times,
)
from scaletrain_cli.plan.catalogue.hardware import Accelerator, find_accelerator
from scaletrain_cli.plan.result import Layout, RunPlan
from scaletrain_cli.plan.search.engine_support import ENGINE, capabilities
from scaletrain_cli.plan.search.layout_search import Candidate
from scaletrain_cli.spec import RunSpec

_LONGEST_SERIES = 6  # degrees shown of one axis


def explain(spec: RunSpec, plan: RunPlan) -> tuple[Question, ...]:
    """The questions that lead to the plan's layout, each with its arithmetic; for plans that do not fit too."""
    return tuple(_questions(spec, plan, find_accelerator(spec.cluster)))


def _questions(spec: RunSpec, plan: RunPlan, device: Accelerator) -> Iterator[Question]:
    base = _plain(plan.layout)
    yield from _states(spec, plan, base, device)
    if alone := _alone(spec, base, device):
        yield _one_rank(spec, alone, device)
    if spec.world_size > 1:
        sharded = list(_sharded(spec, base, device))
        sharding_fits = any(candidate.memory.fits for candidate in sharded)
        yield _sharding(spec, plan, sharded, device)
        if not sharding_fits or plan.layout.tensor_parallel > 1:
            yield from _tensor(spec, plan, base, device, needed=not sharding_fits)
        if plan.layout.pipeline_parallel > 1 or not sharding_fits:
            yield from _pipeline(spec, plan, base, device)
    if plan.memory.fits:
        yield from speed_questions(spec, plan, device)


def _plain(layout: Layout) -> Layout:
    """The chosen layout with every axis but the data-parallel one folded away, one sequence at a time."""
    return replace(
        layout,
        tensor_parallel=1,
        pipeline_parallel=1,
        virtual_pipeline=1,
        sequence_parallel=1,
        context_parallel=1,
        micro_batch_size=1,
        offload="none",
    )


def _stages(spec: RunSpec) -> list[int]:
    """ZeRO stages of the framework that share something, lowest first."""
    everything = spec.planner.model_copy(update={"search": "everything"})
    return [stage for stage in capabilities(spec.model_copy(update={"planner": everything})).zero_stages if stage]


def _lowest(spec: RunSpec) -> int:
    return _stages(spec)[0]


def _alone(spec: RunSpec, base: Layout, device: Accelerator, **changes: int) -> list[Candidate]:
    """The run on one rank, with each kind of recomputation."""
    one = on_one_rank(spec)
    stage = 0 if spec.training.precision in ("fp32", "tf32") else _lowest(spec)
    found = (
        sized(one, base, device, zero_stage=stage, expert_parallel=1, activation_checkpointing=mode, **changes)
        for mode in modes(spec)
    )
    return [candidate for candidate in found if candidate]


def _states(spec: RunSpec, plan: RunPlan, base: Layout, device: Accelerator) -> Iterator[Question]:
    """Counted with the whole batch at once: then the peak is not the optimizer step, with copies of its own."""
    found = _alone(spec, base, device, micro_batch_size=base.global_batch_size)
    if not found:
        return
    memory, count = found[0].memory, max(1, plan.model.parameters)
    parts = {
        "weights": memory.parameters,
        "gradients": memory.gradients,
        "optimizer states": memory.optimizer_states,
    }
    total = sum(parts.values())
    rows = [Row(name, size, note=f"{size / count:.3g} bytes per parameter") for name, size in parts.items()]
    rows.append(Row("together", total, share=total / memory.capacity, note=f"{total / count:.3g} bytes per parameter"))
    yield Question(
        "states",
        "What must be kept for every parameter, before any activation?",
        tuple(rows),
        None,
        f"{total / count:.3g} bytes, for {count:,} parameters.",
        f"That alone is {times(total / memory.capacity)} what one {_noun(device)} holds.",
    )


def _one_rank(spec: RunSpec, alone: list[Candidate], device: Accelerator) -> Question:
    best = min(alone, key=lambda candidate: candidate.memory.peak)
    fitting = [candidate.layout.activation_checkpointing for candidate in alone if candidate.memory.fits]
    share, world = best.memory.peak / best.memory.capacity, spec.world_size
    if not fitting:
        needed = f"{share:,.0f}" if share >= 10 else f"{share:.2f}"
        verdict = f"No: even with every activation computed again it takes {needed} times what one has."
        follows = "The states have to be spread over several." if world > 1 else ""
    else:
        verdict = "Yes." if fitting[0] == "none" else f"Yes, with recompute {fitting[0]}."
        follows = f"Data parallelism over the {world:,} is enough; nothing has to be cut to fit." if world > 1 else ""
    return Question(
        "one_rank",
        f"Does the run fit on one {_noun(device)}, with a micro-batch of 1?",
        distinct([row(f"recompute {c.layout.activation_checkpointing}", c) for c in alone]),
        bool(fitting),
        verdict,
        follows,
    )


def _sharded(spec: RunSpec, base: Layout, device: Accelerator) -> Iterator[Candidate]:
    for stage in _stages(spec):
        for mode in modes(spec):
            candidate = sized(spec, base, device, zero_stage=stage, activation_checkpointing=mode)
            if candidate:
                yield candidate


def _sharding(spec: RunSpec, plan: RunPlan, sharded: list[Candidate], device: Accelerator) -> Question:
    world, batch = spec.world_size, spec.training.global_batch_size
    question = f"Is data parallelism over all {world:,} enough, the states shared with ZeRO?"
    if not sharded:
        verdict = f"No: a batch of {batch:,} {samples(spec)} does not divide over {world:,} data-parallel ranks."
        return Question("sharding", question, (), False, verdict, "Some ranks must share a sequence.")
    fitting = [candidate for candidate in sharded if candidate.memory.fits]
    rows = tuple(row(f"ZeRO-{c.layout.zero_stage}, recompute {c.layout.activation_checkpointing}", c) for c in sharded)
    if not fitting:
        least = min(sharded, key=lambda candidate: candidate.memory.peak)
        what = "activations" if _transient(least) > _kept(least) else "states"
        verdict = f"No: what remains on one {_noun(device)} is mostly {what}."
        return Question("sharding", question, rows, False, verdict, "The layers themselves must be cut.")
    fastest = min(fitting, key=lambda candidate: candidate.time.step)
    layout = fastest.layout
    verdict = (
        f"Yes: ZeRO-{layout.zero_stage} with recompute {layout.activation_checkpointing} takes "
        f"{percent(fastest.memory.peak / fastest.memory.capacity)} of the memory."
    )
    chosen = plan.layout
    follows = "No layer has to be cut."
    if chosen.tensor_parallel * chosen.pipeline_parallel > 1:
        follows = "Layers need not be cut to fit, but may be cut to be faster."
    return Question("sharding", question, rows, True, verdict, follows)


def _tensor(spec: RunSpec, plan: RunPlan, base: Layout, device: Accelerator, *, needed: bool) -> Iterator[Question]:
    degrees = _within_node(spec)
    pairs = [(d, sized(spec, base, device, tensor_parallel=d, zero_stage=_lowest(spec))) for d in degrees]
    pairs += [
        (d, sized(spec, base, device, tensor_parallel=d, zero_stage=_lowest(spec), activation_checkpointing="full"))
        for d in degrees
        if base.activation_checkpointing != "full"
    ]
    found = [candidate for _, candidate in sorted(pairs, key=lambda pair: pair[0]) if candidate]
    if not found:
        return
    fits = any(candidate.memory.fits for candidate in found)
    rows = distinct(
        [row(f"tensor {c.layout.tensor_parallel}, recompute {c.layout.activation_checkpointing}", c) for c in found]
    )
    verdict = "Yes." if fits else f"No: even over all {spec.cluster.gpus_per_node} of a node it does not fit."
    follows = "" if fits else "Stages across nodes must share the layers."
    zero = f"tensor parallelism, with ZeRO-{_lowest(spec)}"
    question = f"Does it fit when the GPUs of a node share every layer ({zero})?"
    if not needed:
        follows = f"The plan takes tensor {plan.layout.tensor_parallel}; the fast link of the node carries its traffic."
    yield Question("tensor", question, rows, fits, verdict, follows + _not_yet(spec, "tensor_parallel"))


def _pipeline(spec: RunSpec, plan: RunPlan, base: Layout, device: Accelerator) -> Iterator[Question]:
    chosen = plan.layout
    tensor = chosen.tensor_parallel
    if not plan.memory.fits:
        tensor = max([tensor, *_within_node(spec)])
    layers = getattr(spec.model, "num_hidden_layers", 0)
    most = min(layers, spec.world_size // tensor)
    degrees = sorted({*(1 << power for power in range(1, most.bit_length())), chosen.pipeline_parallel} - {1})
    near = [d for d in degrees if d <= max(2 * chosen.pipeline_parallel, 4)][-_LONGEST_SERIES:]
    changes = {"tensor_parallel": tensor, "micro_batch_size": chosen.micro_batch_size, "zero_stage": _lowest(spec)}
    found = [c for d in near if (c := sized(spec, base, device, **changes, pipeline_parallel=d))]
    if not found:
        return
    fits = any(candidate.memory.fits for candidate in found)
    rows = tuple(row(f"pipeline {c.layout.pipeline_parallel}", c) for c in found)
    verdict = (
        f"Yes, from {next(c for c in found if c.memory.fits).layout.pipeline_parallel} stages on." if fits else "No."
    )
    follows = "Stages send only activations, which a network between nodes can carry; the price is a bubble."
    if not fits and chosen.sequence_parallel * chosen.context_parallel > 1 and plan.memory.fits:
        follows = f"Sequences are cut too: sequence {chosen.sequence_parallel}, context {chosen.context_parallel}."
    question = f"Does it fit in pipeline stages, tensor {tensor} within each?"
    yield Question("pipeline", question, rows, fits, verdict, follows + _not_yet(spec, "pipeline_parallel"))


def _not_yet(spec: RunSpec, axis: str) -> str:
    """Said of what our own engine cannot run, so that nobody takes the arithmetic for an offer."""
    own = spec.planner.framework == "deepspeed"
    return " This engine version cannot run it yet." if own and axis not in ENGINE.axes else ""


def _kept(candidate: Candidate) -> int:
    memory = candidate.memory
    return memory.parameters + memory.gradients + memory.optimizer_states


def _transient(candidate: Candidate) -> int:
    return candidate.memory.activations + candidate.memory.logits


def _within_node(spec: RunSpec) -> list[int]:
    """Degrees of tensor parallelism above 1 that a node and the heads allow."""
    per_node, heads = spec.cluster.gpus_per_node, getattr(spec.model, "num_attention_heads", 1)
    powers = (1 << power for power in range(1, per_node.bit_length()))
    return [degree for degree in powers if per_node % degree == 0 and heads % degree == 0]


def _noun(device: Accelerator) -> str:
    return "CPU process" if device.is_cpu else device.name
