"""The layers of a model in its telemetry: embedding, blocks and head, with the parameters and activations of each."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from scaletrain_cli.engine.model.base import TrainedModel
from scaletrain_cli.engine.model.causal_lm import CausalLM
from scaletrain_cli.engine.model.materialization import matrices_of
from scaletrain_cli.spec import RunSpec

EMBEDDING, HEAD = "embedding", "head"
# Modules of a block whose inputs are the activations of its MLP's hidden units, by family.
_SECOND_LINEARS = ("mlp.down_proj", "mlp.c_proj", "mlp.fc2", "output.dense", "pwconv2")
# Modules whose inputs are the last hidden states of a model.
_HEADS = ("lm_head", "classifier")


@dataclass
class ModelLayers:
    """The layers of one rank's part of a model.

    ``of_matrix``: the layer of each matrix, by its name in a checkpoint. ``activations``: layer, module, and whether
    its ``input`` or its ``output`` is observed.
    """

    blocks: dict[str, nn.Module]
    of_matrix: dict[str, str] = field(default_factory=dict)
    activations: list[tuple[str, nn.Module, str]] = field(default_factory=list)


def block_layer(key: str) -> str:
    """Return the name of the layer of a block, given its key in ``TrainedModel.blocks``."""
    return f"block {key}"


def layers_of_model(model: TrainedModel) -> ModelLayers:
    """Return the layers of this rank's part of a model.

    Parameters outside of the blocks belong to ``embedding`` before the first block, to ``head`` after the last one, and
    in between to the next block. Where several parts of a model have blocks, as both towers of CLIP, their embeddings
    and heads are named by the part; a part without blocks is a layer of its own. A tied weight is of the embedding.
    """
    layers = ModelLayers({block_layer(key): block for key, block in model.blocks.items()})
    block_of = {id(each): name for name, block in layers.blocks.items() for each in block.parameters()}
    names = [(name, parameter) for name, parameter in model.named_parameters()]
    with_blocks = list(dict.fromkeys(_part(name) for name, each in names if id(each) in block_of))
    matrices = {id(parameter): found for parameter, found in matrices_of(model).items()}
    for index, (_, parameter) in enumerate(names):
        layer = block_of.get(id(parameter))
        if layer is None:
            layer = _outside(index, names, block_of, with_blocks)
        layers.of_matrix |= dict.fromkeys((matrix.name for matrix in matrices[id(parameter)]), layer)
    towers = _towers(layers, names, block_of)
    for tower, blocks in towers.items():
        first = layers.blocks[blocks[0]]
        begins = tower if len(with_blocks) > 1 else ""
        embedding = f"{begins} {EMBEDDING}".strip()
        if not isinstance(model, CausalLM) or "0" in model.blocks:  # not on later pipeline stages
            layers.activations.append((embedding, first, "input"))
    layers.activations += [(name, block, "output") for name, block in layers.blocks.items()]
    for path in _HEADS:
        if isinstance(head := getattr(model, path, None), nn.Module):
            layers.activations.append((HEAD, head, "input"))
    return layers


def layers_of_run(spec: RunSpec, model: TrainedModel, pipeline_stages: int) -> list[str]:
    """Return the names of all layers of the run in order, the same on every rank."""
    if pipeline_stages > 1:
        blocks = [block_layer(str(number)) for number in range(spec.transformer.num_hidden_layers)]
        return [EMBEDDING, *blocks, HEAD]
    own = layers_of_model(model)
    return list(dict.fromkeys([*own.of_matrix.values(), *(name for name, _, _ in own.activations)]))


def units_of_block(block: nn.Module) -> tuple[nn.Module | None, str]:
    """Return the module whose input or output has the hidden units of a block, [..., units]; None if it has none.

    Of a block of convolutions the units are the channels of its output, [images, channels, height, width].
    """
    modules = dict(block.named_modules())
    for path in _SECOND_LINEARS:
        if path in modules:
            return modules[path], "input"
    convolves = any(isinstance(module, nn.Conv2d) for module in modules.values())
    return (block, "output") if convolves else (None, "")


def _part(name: str) -> str:
    return name.partition(".")[0]


def _outside(
    index: int, names: list[tuple[str, nn.Parameter]], block_of: dict[int, str], with_blocks: list[str]
) -> str:
    """Return the layer of a parameter outside of the blocks."""
    part = _part(names[index][0])
    several = len(with_blocks) > 1
    if several and part not in with_blocks:
        return part
    of_part = [number for number, (name, _) in enumerate(names) if not several or _part(name) == part]
    in_blocks = [number for number in of_part if id(names[number][1]) in block_of]
    prefix = f"{part} " if several else ""
    if not in_blocks or index > in_blocks[-1]:
        return prefix + HEAD
    if index < in_blocks[0]:
        return prefix + EMBEDDING
    return block_of[id(names[next(number for number in in_blocks if number > index)][1])]


def _towers(
    layers: ModelLayers, names: list[tuple[str, nn.Parameter]], block_of: dict[int, str]
) -> dict[str, list[str]]:
    """Return the layers of the blocks of each part of the model that has some, in order."""
    found: dict[str, list[str]] = {}
    for name, parameter in names:
        if (layer := block_of.get(id(parameter))) is not None:
            found.setdefault(_part(name), []).append(layer)
    return {part: list(dict.fromkeys(own)) for part, own in found.items()}
