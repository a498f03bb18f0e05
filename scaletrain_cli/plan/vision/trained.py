"""The part of a vision network that a stage of a run trains: blocks that save activations and run backward."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.plan.trained_parameters import SameObject, Stage, training_stages, trains_everything
from scaletrain_cli.plan.vision.operations import Block, VisionNetwork
from scaletrain_cli.plan.vision.parameters import vision_parameters
from scaletrain_cli.spec import LlavaSpec, RunSpec
from scaletrain_cli.spec.vision_model import VisionSpec

# Tower, place and number of a block, as Parameter has them; tokens and positions are in one block.
_Key = tuple[str, str, int]


def stages_of_run(spec: RunSpec) -> tuple[Stage | None, ...]:
    """Return the stages of a run in order; (None,) if everything trains in all steps with one learning rate."""
    return (None,) if trains_everything(spec) else training_stages(spec)


def trained_count(spec: RunSpec, stage: Stage | None) -> int:
    """Return the number of parameters that train in a stage."""
    every = model_parameters(spec.model)
    return sum(each.numel for each in every if (each.trains if stage is None else each.name in stage.since))


def trained_network(whole: VisionNetwork, model: VisionSpec | LlavaSpec, stage: Stage | None) -> VisionNetwork:
    """Return the network with the training of each block in a stage.

    A block of which any parameter trains counts as trained. In each tower, blocks before the first trained one are
    frozen, and through those after it gradients pass.
    """
    return whole if stage is None else _trained(whole, model, SameObject(stage))


@lru_cache(maxsize=64)
def _trained(whole: VisionNetwork, model: VisionSpec | LlavaSpec, key: SameObject[Stage]) -> VisionNetwork:
    trains: dict[_Key, bool] = {}
    for parameter in vision_parameters(model):
        place = "opening" if parameter.place == "embedding" else parameter.place
        at = parameter.tower, place, parameter.block or 0
        trains[at] = trains.get(at, False) or parameter.name in key.value.since
    blocks: list[Block] = []
    reached: set[str] = set()
    for run in whole.blocks:
        for index in range(run.count):
            blocks.append(
                replace(run, count=1, first=run.first + index, training=_training(run, index, trains, reached))
            )
    # Equal neighbors are one run, which is timed and sized once.
    found: list[Block] = []
    for block in blocks:
        last = found[-1] if found else None
        alike = last is not None and last.operations is block.operations and last.training == block.training
        if last is not None and alike and last.first + last.count == block.first and block.place == "block":
            found[-1] = replace(last, count=last.count + 1)
        else:
            found.append(block)
    return replace(whole, blocks=tuple(found))


def _training(run: Block, index: int, trains: Mapping[_Key, bool], reached: set[str]) -> str:
    number = run.first + index if run.place == "block" else 0
    if trains.get((run.tower, run.place, number), False):
        reached.add(run.tower)
        return "trained"
    return "passed" if run.tower in reached else "frozen"
