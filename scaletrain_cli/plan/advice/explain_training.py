"""Explain what trains in a run, what that keeps in memory, and the pass that computes the reference of dpo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from scaletrain_cli.plan.advice.explanation import Question, Row
from scaletrain_cli.plan.block_graph import backward_products
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.engine_states import trained_bytes
from scaletrain_cli.plan.memory.parameter_groups import stage_tensors
from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.plan.stages import stages_in, zero_shards
from scaletrain_cli.plan.trained_parameters import names_what_trains, training_stages
from scaletrain_cli.plan.trained_stages import TrainedStage, trained_count, trained_stages
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec

_MOST_GROUPS = 8  # groups of one learning rate and weight decay that are shown


def training_questions(spec: RunSpec, plan: RunPlan) -> Iterator[Question]:
    """Yield the questions about what trains, for runs that do not train everything alike, and about the reference."""
    if workload_of(spec.model).counts_tokens and framework_of(spec).is_engine and names_what_trains(spec):
        yield _what_trains(spec, plan)
    if plan.time.reference:
        yield _reference(plan)


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
    found: dict[tuple[float, float], _Group] = {}
    for stage in training_stages(spec):
        for phase in stage.phases:
            counted: dict[tuple[float, float], int] = {}
            for name, settings in phase.settings.items():
                key = (settings.lr_factor, settings.weight_decay)
                counted[key] = counted.get(key, 0) + sizes[name]
            for key, count in counted.items():
                known = found.get(key, _Group(0, phase.first_step, phase.last_step))
                found[key] = _Group(max(known.parameters, count), known.first_step, phase.last_step)
    if len(found) < 2:
        return
    largest = sorted(found.items(), key=lambda item: -item[1].parameters)[:_MOST_GROUPS]
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


def _reference(plan: RunPlan) -> Question:
    time = plan.time
    params = {"pairs": time.reference_pairs, "share": time.reference / time.to_train}
    rows = (
        Row("reference pass", seconds=time.reference),
        Row("all steps", seconds=time.to_train - time.reference),
    )
    return Question("reference", Reason("plan.ask-reference"), rows, None, (Reason("plan.reference-once", params),))
