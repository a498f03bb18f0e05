"""Export a run with adapters: as a PEFT folder, or merged into the weights of the base model."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from scaletrain_cli.engine.model.peft_files import (
    has_stacked_experts,
    is_mlp,
    merged,
    module_of_weight,
    peft_config,
    peft_tensors,
)
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.parameters import base_shapes, modules_with_adapter
from scaletrain_cli.plan.trained_parameters import trained_ever
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.adapter import Adapted, is_adapter_parameter

_HEAD = "lm_head.weight"


class Weights(Protocol):
    """The weights of a checkpoint, by name and whole shape, in fp32."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor: ...


class Base(NamedTuple):
    """The base model as PEFT finds it: a folder, or a name on the hub with its revision."""

    name: str
    revision: str | None = None


def exported_model(model: ModelSpec) -> ModelSpec:
    """Return the model that merged weights are of: without adapters, and untied if its embedding or head has one.

    An adapter changes only one of two tied weights, so that they differ once it is merged.
    """
    changes: dict[str, Any] = {"adapter": None}
    table = _table(model)
    if model.tie_word_embeddings and {table, _HEAD} & module_of_weight(modules_with_adapter(model)).keys():
        changes["tie_word_embeddings"] = False
    return model.model_copy(update=changes)


def _table(model: ModelSpec) -> str:
    """Return the name of the token embedding's weight, which comes first."""
    return next(iter(base_shapes(model)))


@dataclass(frozen=True)
class MergedWeights:
    """The weights of a model with its adapters added, each computed in fp32. ``saved``: weights and factors apart."""

    saved: Weights
    model: ModelSpec

    @cached_property
    def modules(self) -> dict[str, Adapted]:
        return module_of_weight(modules_with_adapter(self.model))

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a weight in fp32."""
        adapter = self.model.adapter
        assert adapter is not None
        tied = name == _HEAD and self.model.tie_word_embeddings
        weight = self.saved.read(_table(self.model) if tied else name, shape)
        module = self.modules.get(name)
        return weight if module is None else merged(adapter, module, name, weight, self.saved.read)


def peft_files(spec: RunSpec, saved: Weights, base: Base | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return adapter_config.json and the tensors of adapter_model.safetensors, in fp32.

    Base modules that were trained, too, are in ``modules_to_save``. ``base``: None for the folder of the weights.
    Raises UsageError if PEFT has no form for the run.
    """
    model = spec.transformer
    if model.adapter is None:
        raise UsageError(Reason("engine.peft-without-adapter"))
    if model.weights is None:
        raise UsageError(Reason("engine.peft-without-base"))
    modules = modules_with_adapter(model)
    beside = next((module.name for module in modules if is_mlp(module)), None)
    if model.adapter.dora and beside is not None and has_stacked_experts(model):
        raise UsageError(Reason("engine.peft-dora-beside-experts", {"module": beside}))
    shapes = base_shapes(model)
    trained = sorted({_module(name) for name in trained_ever(spec) if not is_adapter_parameter(name)})
    # PEFT cannot keep every trained module whole beside an adapter.
    adapted = {module.name for module in modules}
    for module in trained:
        tied = model.tie_word_embeddings and module == _module(_table(model))
        if tied or ".experts." in module or module in adapted:
            raise UsageError(Reason("engine.peft-module-trained", {"module": module}))
    tensors = dict(peft_tensors(model.adapter, modules, saved.read))
    for name, shape in shapes.items():
        if _module(name) in trained:
            tensors[f"base_model.model.{name}"] = saved.read(name, shape)
    base = base or Base(str(expand_home(model.weights).absolute()))
    config = peft_config(model.adapter, modules, base.name, base.revision, trained, mixture=has_stacked_experts(model))
    return config, tensors


def _module(name: str) -> str:
    return name.rpartition(".")[0]
