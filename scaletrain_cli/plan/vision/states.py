"""What a stage of a run trains of a vision network, and its exact bytes of state on one rank of the engine.

States: weights, buffers, gradients and the optimizer's. Trained blocks save activations and run backward.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from scaletrain_cli.plan.identity_cache import cached_by_identity
from scaletrain_cli.plan.memory.engine_states import states_of_tensors
from scaletrain_cli.plan.memory.parameter_groups import Group, SharedGroup, StageTensors
from scaletrain_cli.plan.memory.states import MASTER_BYTES, ModelStates
from scaletrain_cli.plan.parameter import Parameter
from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.trained_parameters import Stage, count_trained, decays, training_stages, trains_everything
from scaletrain_cli.plan.vision.operations import Block, VisionNetwork
from scaletrain_cli.plan.vision.parameters import vision_buffers, vision_parameters
from scaletrain_cli.spec import ClipSpec, LlavaSpec, ModelSpec, RunSpec
from scaletrain_cli.spec.run import AnyModel
from scaletrain_cli.spec.training import OptimizerSpec
from scaletrain_cli.spec.vision_model import VisionSpec

# Tower, place and number of a block, as Parameter has them; tokens and positions are in one block.
_Key = tuple[str, str, int]


@cached_by_identity
def trained_network(whole: VisionNetwork, model: VisionSpec | LlavaSpec, stage: Stage | None) -> VisionNetwork:
    """Return the network with the training of each block in a stage.

    A block of which any parameter trains counts as trained. In each tower, blocks before the first trained one are
    frozen, and through those after it gradients pass.
    """
    if stage is None:
        return whole
    trains: dict[_Key, bool] = {}
    for parameter in vision_parameters(model):
        place = "opening" if parameter.place == "embedding" else parameter.place
        at = parameter.tower, place, parameter.block or 0
        trains[at] = trains.get(at, False) or parameter.name in stage.since
    blocks: list[Block] = []
    reached: set[str] = set()
    for run in whole.blocks:
        for index in range(run.count):
            blocks.append(
                replace(run, count=1, first=run.first + index, training=_training(run, index, trains, reached))
            )
    # Equal neighbors are one run, which is timed and sized once.
    merged: list[Block] = []
    for block in blocks:
        last = merged[-1] if merged else None
        alike = last is not None and last.operations is block.operations and last.training == block.training
        if last is not None and alike and last.first + last.count == block.first and block.place == "block":
            merged[-1] = replace(last, count=last.count + 1)
        else:
            merged.append(block)
    return replace(whole, blocks=tuple(merged))


def _training(run: Block, index: int, trains: Mapping[_Key, bool], reached: set[str]) -> str:
    number = run.first + index if run.place == "block" else 0
    if trains.get((run.tower, run.place, number), False):
        reached.add(run.tower)
        return "trained"
    return "passed" if run.tower in reached else "frozen"


def vision_states(spec: RunSpec, layout: Layout, stage: Stage | None = None, replica: int | None = None) -> ModelStates:
    """Return the bytes of states on the device of one rank.

    ``stage``: what trains, by default the stage that trains most; ``replica``: a data-parallel rank, by default the
    fullest. Buffers count as weights: BatchNorm's statistics are whole on every rank, in fp32, in every ZeRO stage.
    """
    states = states_of_tensors(spec, layout, trained_tensors(spec, stage), replica)[0]
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
        stage = max(training_stages(spec), key=lambda candidate: count_trained(spec, candidate))
    return _named(spec.model, stage)


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


@cached_by_identity
def _named(model: AnyModel, stage: Stage) -> StageTensors:
    """Return a group for each learning rate, weight decay and number of trained steps; what is frozen is one group."""
    groups: dict[object, list[Parameter]] = {}
    frozen: list[Parameter] = []
    for parameter in model_parameters(model):
        if parameter.name in stage.since:
            settings = tuple(phase.settings[parameter.name] for phase in stage.phases)
            key = stage.since[parameter.name], settings, _has_limits(model, parameter)
            groups.setdefault(key, []).append(parameter)
        else:
            frozen.append(parameter)
    return StageTensors(tuple(_group(members) for members in groups.values()), (_group(frozen),) if frozen else ())


def _group(members: list[Parameter]) -> SharedGroup:
    return SharedGroup(Group(((tuple(parameter.numel for parameter in members), 1),)))
