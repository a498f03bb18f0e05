"""Explain the layout of a plan step by step, with the numbers of this run; ``explain`` is the entry.

The order is: what trains, one GPU, data parallelism with ZeRO, tensor parallelism within a node,
pipeline stages across nodes; then (explain_speed.py) each axis, recomputation, compilation, batch, bubble,
communication, the next best layouts, and the image loader.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from scaletrain_cli.plan.advice.explain_speed import speed_questions
from scaletrain_cli.plan.advice.explanation import (
    Question,
    Row,
    at_best_micro_batch,
    distinct,
    row,
    sized,
    varied,
)
from scaletrain_cli.plan.block_graph import backward_products
from scaletrain_cli.plan.catalogue.hardware import Accelerator, find_accelerator, near_ranks
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.engine_states import trained_bytes
from scaletrain_cli.plan.memory.parameter_groups import stage_tensors
from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.plan.result import Layout, RunPlan
from scaletrain_cli.plan.search.layout_search import Candidate
from scaletrain_cli.plan.stages import stages_in, zero_shards
from scaletrain_cli.plan.trained_parameters import names_what_trains, training_stages
from scaletrain_cli.plan.trained_stages import TrainedStage, trained_count, trained_stages
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec

_LONGEST_SERIES = 6  # degrees shown of one axis


def explain(spec: RunSpec, plan: RunPlan) -> tuple[Question, ...]:
    """Return the questions that lead to the plan's layout, each with numbers and an answer. The plan need not fit."""
    return tuple(_questions(spec, plan, find_accelerator(spec.cluster)))


def _questions(spec: RunSpec, plan: RunPlan, device: Accelerator) -> Iterator[Question]:
    base = replace(
        plan.layout,
        tensor_parallel=1,
        pipeline_parallel=1,
        virtual_pipeline=1,
        sequence_parallel=1,
        context_parallel=1,
        micro_batch_size=1,
        offload="none",
    )
    if workload_of(spec.model).counts_tokens and framework_of(spec).is_engine and names_what_trains(spec):
        yield _what_trains(spec, plan)
    if plan.time.reference:
        time = plan.time
        params = {"pairs": time.reference_pairs, "share": time.reference / time.to_train}
        rows = (Row("reference pass", seconds=time.reference), Row("all steps", seconds=time.to_train - time.reference))
        yield Question("reference", Reason("plan.ask-reference"), rows, None, (Reason("plan.reference-once", params),))
    yield from _states(spec, plan, base, device)
    if alone := _checkpointing_modes_on_one_rank(spec, base, device):
        yield _one_rank(spec, alone, device)
    if spec.world_size > 1:
        kinds = [
            {"zero_stage": stage, "activation_checkpointing": mode}
            for stage in _stages(spec)
            for mode in workload_of(spec.model).checkpointing
        ]
        sharded = [candidate for kind in kinds if (candidate := at_best_micro_batch(spec, base, device, **kind))]
        sharding_fits = any(candidate.memory.fits for candidate in sharded)
        yield _sharding(spec, plan, sharded, device)
        if not sharding_fits or plan.layout.tensor_parallel > 1:
            yield from _tensor(spec, plan, base, device, needed=not sharding_fits)
        if plan.layout.pipeline_parallel > 1 or not sharding_fits:
            yield from _pipeline(spec, plan, base, device)
    if plan.memory.fits:
        yield from speed_questions(spec, plan, device)


def _stages(spec: RunSpec) -> list[int]:
    """Return the ZeRO stages above 0 that the framework supports, lowest first."""
    return [stage for stage in framework_of(spec).capabilities.zero_stages if stage]


def _checkpointing_modes_on_one_rank(
    spec: RunSpec, base: Layout, device: Accelerator, **changes: int
) -> list[Candidate]:
    """Return the run on one rank, with each mode of activation checkpointing."""
    one = spec.with_changes("cluster", nodes=1, gpus_per_node=1)
    stage = 0 if spec.training.precision in ("fp32", "tf32") else _stages(spec)[0]
    candidates = (
        sized(one, base, device, zero_stage=stage, expert_parallel=1, activation_checkpointing=mode, **changes)
        for mode in workload_of(spec.model).checkpointing
    )
    return [candidate for candidate in candidates if candidate]


def _states(spec: RunSpec, plan: RunPlan, base: Layout, device: Accelerator) -> Iterator[Question]:
    """Yield the question about model states.

    They are sized with the full batch in one micro-batch, so that the peak is in the backward pass and not in the
    optimizer's update.
    """
    candidates = _checkpointing_modes_on_one_rank(spec, base, device, micro_batch_size=base.global_batch_size)
    if not candidates:
        return
    memory, count = candidates[0].memory, max(1, plan.model.parameters)
    parts = {"weights": memory.parameters, "gradients": memory.gradients, "optimizer states": memory.optimizer_states}
    total = sum(parts.values())
    rows = [Row(name, size, note=_per_parameter(size, count)) for name, size in parts.items()]
    rows.append(Row("total", total, share=total / memory.capacity, note=_per_parameter(total, count)))
    yield Question(
        "states",
        Reason("plan.ask-states"),
        tuple(rows),
        None,
        (Reason("plan.states-total", {"bytes_per_parameter": total / count, "parameters": count}),),
        (Reason("plan.states-of-device", {"share": total / memory.capacity, "device": _noun(device)}),),
    )


def _one_rank(spec: RunSpec, alone: list[Candidate], device: Accelerator) -> Question:
    best = min(alone, key=lambda candidate: candidate.memory.peak)
    fitting = [candidate.layout.activation_checkpointing for candidate in alone if candidate.memory.fits]
    share, world = best.memory.peak / best.memory.capacity, spec.world_size
    if not fitting:
        verdict = Reason("plan.one-rank-too-small", {"times": share})
        follows = Reason("plan.spread-states") if world > 1 else None
    else:
        mode = fitting[0]
        verdict = Reason("plan.yes") if mode == "none" else Reason("plan.yes-recomputing", {"mode": mode})
        follows = Reason("plan.data-parallel-is-enough", {"ranks": world}) if world > 1 else None
    return Question(
        "one_rank",
        Reason("plan.ask-one-rank", {"device": _noun(device)}),
        distinct([row(f"recompute {c.layout.activation_checkpointing}", c) for c in alone]),
        bool(fitting),
        (verdict,),
        () if follows is None else (follows,),
    )


def _sharding(spec: RunSpec, plan: RunPlan, sharded: list[Candidate], device: Accelerator) -> Question:
    """Return the question whether the run fits with data parallelism and ZeRO alone; ``sharded``: its layouts."""
    world, batch = spec.world_size, spec.training.global_batch_size
    question = Reason("plan.ask-sharding", {"ranks": world})
    if not sharded:
        verdict = Reason("plan.batch-does-not-divide", {"batch": batch, "samples": spec.samples, "ranks": world})
        return Question("sharding", question, (), False, (verdict,), (Reason("plan.share-sequences"),))
    fitting = [candidate for candidate in sharded if candidate.memory.fits]
    rows = tuple(varied(f"ZeRO-{c.layout.zero_stage}", c) for c in sharded)
    if not fitting:
        memory = min(sharded, key=lambda candidate: candidate.memory.peak).memory
        states = memory.parameters + memory.gradients + memory.optimizer_states
        what = "activations" if memory.activations + memory.logits > states else "states"
        verdict = Reason("plan.sharding-too-small", {"device": _noun(device), "what": what})
        return Question("sharding", question, rows, False, (verdict,), (Reason("plan.cut-layers"),))
    fastest = min(fitting, key=lambda candidate: candidate.time.step)
    layout, chosen = fastest.layout, plan.layout
    share = fastest.memory.peak / fastest.memory.capacity
    params = {"zero_stage": layout.zero_stage, "mode": layout.activation_checkpointing, "share": share}
    cut = chosen.tensor_parallel * chosen.pipeline_parallel > 1
    follows = Reason("plan.cut-for-speed" if cut else "plan.no-cut-needed")
    return Question("sharding", question, rows, True, (Reason("plan.sharding-fits", params),), (follows,))


def _tensor(spec: RunSpec, plan: RunPlan, base: Layout, device: Accelerator, *, needed: bool) -> Iterator[Question]:
    """Yield the question about tensor parallelism within a node. ``needed``: the run does not fit without it."""
    candidates: list[Candidate] = []
    for degree in _within_node(spec):
        for mode in dict.fromkeys((base.activation_checkpointing, "full")):
            changes = {"tensor_parallel": degree, "zero_stage": _stages(spec)[0], "activation_checkpointing": mode}
            if candidate := at_best_micro_batch(spec, base, device, **changes):
                candidates.append(candidate)
    if not candidates:
        return
    fits = any(candidate.memory.fits for candidate in candidates)
    rows = distinct([varied(f"tensor {c.layout.tensor_parallel}", c) for c in candidates])
    verdict = Reason("plan.yes") if fits else Reason("plan.node-too-small", {"gpus": spec.cluster.gpus_per_node})
    follows = [] if fits else [Reason("plan.cut-into-stages")]
    if not needed:
        follows = [Reason("plan.tensor-degree", {"degree": plan.layout.tensor_parallel})]
    question = Reason("plan.ask-tensor", {"zero_stage": _stages(spec)[0]})
    yield Question("tensor", question, rows, fits, (verdict,), tuple(follows))


def _pipeline(spec: RunSpec, plan: RunPlan, base: Layout, device: Accelerator) -> Iterator[Question]:
    """Yield the question about pipeline stages across nodes."""
    chosen = plan.layout
    tensor = chosen.tensor_parallel
    if not plan.memory.fits:
        tensor = max([tensor, *_within_node(spec)])
    most = min(workload_of(spec.model).layers(spec), spec.world_size // tensor)
    degrees = sorted({*(1 << power for power in range(1, most.bit_length())), chosen.pipeline_parallel} - {1})
    near = [d for d in degrees if d <= max(2 * chosen.pipeline_parallel, 4)][-_LONGEST_SERIES:]
    changes = {"tensor_parallel": tensor, "micro_batch_size": chosen.micro_batch_size, "zero_stage": _stages(spec)[0]}
    candidates = [c for d in near if (c := sized(spec, base, device, **changes, pipeline_parallel=d))]
    if not candidates:
        return
    fits = any(candidate.memory.fits for candidate in candidates)
    rows = tuple(row(f"pipeline {c.layout.pipeline_parallel}", c) for c in candidates)
    verdict = Reason("plan.no")
    if fits:
        stages = next(c for c in candidates if c.memory.fits).layout.pipeline_parallel
        verdict = Reason("plan.yes-from-stages", {"stages": stages})
    follows = Reason("plan.stages-cost-a-bubble")
    if not fits and chosen.sequence_parallel * chosen.context_parallel > 1 and plan.memory.fits:
        cut = {"sequence": chosen.sequence_parallel, "context": chosen.context_parallel}
        follows = Reason("plan.sequences-are-cut", cut)
    question = Reason("plan.ask-pipeline", {"tensor": tensor})
    yield Question("pipeline", question, rows, fits, (verdict,), (follows,))


def _per_parameter(size: int, count: int) -> Reason:
    return Reason("plan.bytes-per-parameter", {"bytes_per_parameter": size / count})


def _within_node(spec: RunSpec) -> list[int]:
    """Return the degrees of tensor parallelism above 1 that fit within a node and divide the heads."""
    per_node, heads = min(near_ranks(spec.cluster), spec.world_size), workload_of(spec.model).heads(spec)
    powers = (1 << power for power in range(1, per_node.bit_length()))
    return [degree for degree in powers if per_node % degree == 0 and heads % degree == 0]


def _noun(device: Accelerator) -> str:
    return "CPU process" if device.is_cpu else device.name


_MOST_GROUPS = 8  # groups of one learning rate and weight decay that are shown


def _what_trains(spec: RunSpec, plan: RunPlan) -> Question:
    stages = trained_stages(spec)
    fullest = 0
    if plan.training_stages:
        fullest = max(range(len(stages)), key=lambda index: plan.training_stages[index].peak)
    trained = stages[fullest]
    count, parameters = trained_count(spec, trained), plan.model.parameters
    rows = [*_memory_rows(spec, plan, trained), *_group_rows(spec), *_stage_rows(plan)]
    share = Reason("plan.trains-share", {"trained": count, "parameters": parameters, "share": count / parameters})
    return Question("training", Reason("plan.ask-training"), tuple(rows), None, (share, _backward_end(spec, trained)))


def _memory_rows(spec: RunSpec, plan: RunPlan, trained: TrainedStage) -> Iterator[Row]:
    """Yield the bytes on the fullest rank: of frozen and of trained weights, of gradients and of optimizer states."""
    layout, memory = plan.layout, plan.memory
    fullest = max(range(len(memory.by_stage)), key=lambda index: memory.by_stage[index].peak)
    stage = stages_in(spec, layout)[fullest]
    elements = sum(group.elements for group, *_ in stage_tensors(spec, layout, stage, trained).trained)
    learned = elements * trained_bytes(spec)[0] // (zero_shards(layout) if layout.zero_stage == 3 else 1)
    adapter = spec.transformer.adapter is not None
    sizes = {
        "frozen weights": max(0, memory.parameters - learned),
        "adapter" if adapter else "trained weights": learned,
        "gradients": memory.gradients,
        "optimizer states": memory.optimizer_states,
    }
    yield from (Row(name, size, share=size / memory.capacity) for name, size in sizes.items())


class _Group(NamedTuple):
    """Parameters with one learning rate and weight decay, and the steps in which any of them trains so."""

    parameters: int
    first_step: int
    last_step: int


def _group_rows(spec: RunSpec) -> Iterator[Row]:
    """Yield the learning rates and weight decays, with the parameters that have them in any step."""
    sizes = {parameter.name: parameter.numel for parameter in model_parameters(spec.transformer)}
    groups: dict[tuple[float, float], _Group] = {}
    for stage in training_stages(spec):
        for phase in stage.phases:
            counted: dict[tuple[float, float], int] = {}
            for name, settings in phase.settings.items():
                key = (settings.lr_factor, settings.weight_decay)
                counted[key] = counted.get(key, 0) + sizes[name]
            for key, count in counted.items():
                known = groups.get(key, _Group(0, phase.first_step, phase.last_step))
                groups[key] = _Group(max(known.parameters, count), known.first_step, phase.last_step)
    if len(groups) < 2:
        return
    largest = sorted(groups.items(), key=lambda item: -item[1].parameters)[:_MOST_GROUPS]
    for (factor, decay), group in sorted(largest, key=lambda item: (item[1].first_step, -item[0][0], -item[0][1])):
        rate = factor * spec.training.optimizer.lr
        yield Row(f"lr {rate:.3g}, decay {decay:g}", note=Reason("plan.group-trains", group._asdict()))


def _stage_rows(plan: RunPlan) -> Iterator[Row]:
    for stage in plan.training_stages:
        note = Reason("plan.stage-trains", {"parameters": stage.trainable_parameters})
        share = stage.peak / plan.memory.capacity
        yield Row(f"steps {stage.first_step} to {stage.last_step}", stage.peak, stage.step_seconds, share, note=note)


def _backward_end(spec: RunSpec, trained: TrainedStage) -> Reason:
    """Return the lowest block that the backward pass reaches."""
    model = spec.transformer
    if any(group is not None for group in trained.opening.groups):
        return Reason("plan.backward-to-embedding")
    for run in trained.runs:
        if backward_products(model, run.training, run.experts).reached:
            if run.start == 0:
                return Reason("plan.backward-to-first-block")
            return Reason("plan.backward-to-block", {"block": run.start, "last": model.num_hidden_layers - 1})
    return Reason("plan.backward-in-head")
