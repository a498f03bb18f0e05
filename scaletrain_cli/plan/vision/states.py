"""Exact bytes of weights, buffers, gradients and optimizer states of a vision network on one rank of the engine."""

from functools import lru_cache

from scaletrain_cli.plan.memory.engine_states import states_of_tensors
from scaletrain_cli.plan.memory.parameter_groups import Group, SharedGroup, StageTensors
from scaletrain_cli.plan.memory.states import MASTER_BYTES, ModelStates
from scaletrain_cli.plan.parameter import Parameter
from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.trained_parameters import SameObject, Stage, decays, training_stages, trains_everything
from scaletrain_cli.plan.vision.parameters import vision_buffers
from scaletrain_cli.plan.vision.trained import trained_count
from scaletrain_cli.spec import ClipSpec, ModelSpec, RunSpec
from scaletrain_cli.spec.run import AnyModel
from scaletrain_cli.spec.training import OptimizerSpec


def vision_states(spec: RunSpec, layout: Layout, stage: Stage | None = None, replica: int | None = None) -> ModelStates:
    """Return the bytes of states on the device of one rank.

    ``stage``: what trains, by default the stage that trains most; ``replica``: a data-parallel rank, by default the
    fullest. Buffers count as weights: BatchNorm's statistics are whole on every rank, in fp32, in every ZeRO stage.
    """
    tensors = trained_tensors(spec, stage)
    states = states_of_tensors(spec, layout, tensors, replica)[0]
    assert not isinstance(spec.model, ModelSpec)
    buffers = vision_buffers(spec.model)
    # Running statistics are averaged as the weights are; counters are not.
    statistics = sum(buffer.size_bytes for buffer in buffers if buffer.element_bytes == MASTER_BYTES)
    averaged = 0 if spec.training.averaging.name == "none" else statistics
    return states._replace(
        parameters=states.parameters + sum(buffer.size_bytes for buffer in buffers),
        optimizer_states=states.optimizer_states + averaged,
    )


def trained_tensors(spec: RunSpec, stage: Stage | None = None) -> StageTensors:
    """Return the optimizer's parameter groups, and what is frozen, in a stage of the run."""
    if trains_everything(spec):
        return _everything(spec.model, spec.training.optimizer)
    if stage is None:
        stage = max(training_stages(spec), key=lambda each: trained_count(spec, each))
    return _named(spec.model, SameObject(stage))


@lru_cache(maxsize=64)
def _everything(model: AnyModel, optimizer: OptimizerSpec) -> StageTensors:
    """Return the groups of parameters with weight decay, of those without, and of one whose values are limited."""
    decayed, others, limited, unused = (list[Parameter]() for _ in range(4))
    for parameter in model_parameters(model):
        kind = decayed if decays(parameter, optimizer) else others
        kind = unused if not parameter.trains else limited if _has_limits(model, parameter) else kind
        kind.append(parameter)
    trained = tuple(_group(members) for members in (decayed, others, limited) if members)
    return StageTensors(trained, (_group(unused),) if unused else ())


def _has_limits(model: AnyModel, parameter: Parameter) -> bool:
    """Return whether each update is followed by a clamp of the parameter, so that it has a group of its own."""
    return isinstance(model, ClipSpec) and model.max_logit_scale is not None and parameter.name == "logit_scale"


@lru_cache(maxsize=64)
def _named(model: AnyModel, found: SameObject[Stage]) -> StageTensors:
    """Return a group for each learning rate, weight decay and number of trained steps; what is frozen is one group."""
    stage = found.value
    groups: dict[object, list[Parameter]] = {}
    frozen: list[Parameter] = []
    for parameter in model_parameters(model):
        if parameter.name in stage.since:
            settings = tuple(phase.settings[parameter.name] for phase in stage.phases)
            key = stage.since[parameter.name], settings, _has_limits(model, parameter)
            groups.setdefault(key, []).append(parameter)
        else:
            frozen.append(parameter)
    trained = tuple(_group(members) for members in groups.values())
    return StageTensors(trained, (_group(frozen),) if frozen else ())


def _group(members: list[Parameter]) -> SharedGroup:
    return SharedGroup(Group(((tuple(parameter.numel for parameter in members), 1),)))
