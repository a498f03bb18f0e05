"""Exact bytes of weights, buffers, gradients and optimizer states of a vision network on one rank of the engine."""

from __future__ import annotations

from functools import lru_cache

from scaletrain_cli.plan.memory.engine_states import (
    Group,
    SharedGroup,
    StageTensors,
    states_of_tensors,
)
from scaletrain_cli.plan.memory.states import ModelStates
from scaletrain_cli.plan.parameters import (
    Parameter,
    Stage,
    decays,
    model_parameters,
    training_stages,
    trains_everything,
)
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.vision.parameters import vision_buffers
from scaletrain_cli.plan.vision.trained import SameStage, trained_count
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.run import AnyModel
from scaletrain_cli.spec.training import OptimizerSpec


def vision_states(spec: RunSpec, layout: Layout, stage: Stage | None = None, replica: int | None = None) -> ModelStates:
    """Return the bytes of states on the device of one rank.

    ``stage``: what trains, by default the stage that trains most; ``replica``: a data-parallel rank, by default the
    fullest. Buffers count as weights: BatchNorm's statistics are whole on every rank, in fp32, in every ZeRO stage.
    """
    tensors = trained_tensors(spec, stage)
    states = states_of_tensors(spec, layout, tensors, replica)[0]
    return states._replace(parameters=states.parameters + buffer_bytes(spec))


def buffer_bytes(spec: RunSpec) -> int:
    """Return the bytes of the buffers that are saved."""
    assert not isinstance(spec.model, ModelSpec)
    return sum(buffer.size_bytes for buffer in vision_buffers(spec.model))


def trained_tensors(spec: RunSpec, stage: Stage | None = None) -> StageTensors:
    """Return the optimizer's parameter groups, and what is frozen, in a stage of the run."""
    if trains_everything(spec):
        return _everything(spec.model, spec.training.optimizer)
    if stage is None:
        stage = max(training_stages(spec), key=lambda each: trained_count(spec, each))
    return _named(spec.model, SameStage(stage))


@lru_cache(maxsize=64)
def _everything(model: AnyModel, optimizer: OptimizerSpec) -> StageTensors:
    """Return two groups: parameters with weight decay, and those without."""
    decayed, others, unused = (list[Parameter]() for _ in range(3))
    for parameter in model_parameters(model):
        kind = unused if not parameter.trains else decayed if decays(parameter, optimizer) else others
        kind.append(parameter)
    trained = tuple(_group(members) for members in (decayed, others) if members)
    return StageTensors(trained, (_group(unused),) if unused else ())


@lru_cache(maxsize=64)
def _named(model: AnyModel, key: SameStage) -> StageTensors:
    """Return a group for each learning rate, weight decay and number of trained steps; what is frozen is one group."""
    stage = key.stage
    groups: dict[object, list[Parameter]] = {}
    frozen: list[Parameter] = []
    for parameter in model_parameters(model):
        if parameter.name in stage.since:
            settings = tuple(phase.settings[parameter.name] for phase in stage.phases)
            groups.setdefault((stage.since[parameter.name], settings), []).append(parameter)
        else:
            frozen.append(parameter)
    trained = tuple(_group(members) for members in groups.values())
    return StageTensors(trained, (_group(frozen),) if frozen else ())


def _group(members: list[Parameter]) -> SharedGroup:
    return SharedGroup(Group(((tuple(parameter.numel for parameter in members), 1),)))
