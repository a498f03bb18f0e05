"""Optimizers and model families of other packages, found by entry points.

``[project.entry-points."scaletrain.optimizers"]`` and ``[project.entry-points."scaletrain.model_families"]`` name an
``OptimizerExtension`` or a ``ModelFamilyExtension`` each: ``lamb = "my_package:LAMB"``. The module of the entry point
is imported where specs are validated and planned, so it must not import torch; ``build`` is imported by the engine.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import PlainValidator, ValidationInfo
from pydantic_core import PydanticKnownError

from scaletrain_cli.plugins import MODEL_FAMILIES, OPTIMIZERS, PluginError, plugins
from scaletrain_cli.spec.section import plugin_broken
from scaletrain_cli.text import either

BUILT_IN_FAMILIES = ("llama", "gpt")  # of transformers


@dataclass(frozen=True)
class OptimizerTraits:
    """The properties of an optimizer that the spec, the planner and the diagnosis use.

    ``moment_bytes``: bytes of its fp32 states per parameter, without the fp32 master weight. ``unused``: keys of
    ``training.optimizer`` that have no effect on it. ``defaults``: default values of other keys, if they differ from
    those of AdamW. ``offload``: values of ``layout.offload_device`` that it supports. ``kind``: ``adam`` divides by a
    moment of the gradient, the update of ``sgd`` is proportional to the gradient. ``even_states``: every parameter has
    the same number of bytes of states. ``highest_usual_lr``: the diagnosis proposes no higher learning rate.
    """

    moment_bytes: int = 0
    unused: tuple[str, ...] = ("momentum",)
    defaults: Mapping[str, float] = field(default_factory=dict)
    offload: tuple[str, ...] = ()
    kind: Literal["adam", "sgd", ""] = ""
    even_states: bool = False
    highest_usual_lr: float = math.inf


# Adam adds weight decay to the gradient, as L2 regularization (arXiv:1711.05101). The states of an optimizer of
# bitsandbytes are updated on the device that has the gradients. 8-bit AdamW has one fp32 scale per block of 256 values
# beside its moments (functional.py quantize_blockwise). A momentum of 0.95 is torch.optim.Muon's default, K. Jordan's.
_ADAM = OptimizerTraits(8, offload=("cpu", "nvme"), kind="adam", even_states=True, highest_usual_lr=1e-3)
_NO_DECAY = {"weight_decay": 0.0}
BUILT_IN_OPTIMIZERS = {
    "adamw": _ADAM,
    "adam": replace(_ADAM, defaults=_NO_DECAY),
    "sgd": OptimizerTraits(
        0, ("betas", "eps", "momentum", "state_dtype"), _NO_DECAY, ("cpu",), "sgd", True, highest_usual_lr=0.1
    ),
    "momentum": OptimizerTraits(4, ("betas", "eps"), _NO_DECAY, ("cpu",), "sgd", True, highest_usual_lr=0.1),
    "adamw_8bit": OptimizerTraits(2, ("momentum", "state_dtype"), kind="adam", highest_usual_lr=1e-3),
    "lion": OptimizerTraits(4, ("eps", "momentum"), kind="adam", even_states=True, highest_usual_lr=1e-3),
    "muon": OptimizerTraits(4, (), {"momentum": 0.95}, ("cpu",), highest_usual_lr=2e-2),
}


def optimizers_that_read(key: str, reads: bool = True) -> list[str]:
    """Return the built-in optimizers that read a key of ``training.optimizer``, or those that do not."""
    return [name for name, traits in BUILT_IN_OPTIMIZERS.items() if (key not in traits.unused) == reads]


@dataclass(frozen=True)
class OptimizerExtension:
    """An element-wise optimizer: ZeRO passes it flat parts of matrices.

    ``moment_bytes``: bytes of its states per parameter, without the fp32 master weight. ``build``: ``module:name`` of
    a callable ``(groups, settings) -> torch.optim.Optimizer``; ``groups`` are torch parameter groups with their weight
    decay, ``settings`` is the section ``training.optimizer``. ``offload``: its step also runs on the CPU.
    """

    moment_bytes: int
    build: str
    offload: bool = False


@dataclass(frozen=True)
class ModelFamilyExtension:
    """A decoder-only transformer with the parameters and the costs of a built-in family, ``base``.

    ``build``: ``module:name`` of a callable ``(ModelSpec) -> CausalLM`` (scaletrain_cli.engine.model.base) whose
    modules have the names and shapes of those of ``base``, by which they are sharded, initialized and checkpointed.
    """

    base: Literal["llama", "gpt"]
    build: str


@functools.cache
def optimizer_extension(name: str) -> OptimizerExtension | None:
    """Return the optimizer of another package; None for an unknown name. Raises PluginError."""
    if (plugin := plugins(OPTIMIZERS).get(name)) is None:
        return None
    extension = plugin.load(OptimizerExtension)
    if not (isinstance(extension.moment_bytes, int) and extension.moment_bytes >= 0):
        raise plugin.invalid(f"has moment_bytes = {extension.moment_bytes}, which must be a whole number of at least 0")
    return extension


def optimizer_traits(name: str) -> OptimizerTraits | None:
    """Return the traits of an optimizer of this package or another; None for an unknown name. Raises PluginError."""
    if name in BUILT_IN_OPTIMIZERS or (extension := optimizer_extension(name)) is None:
        return BUILT_IN_OPTIMIZERS.get(name)
    return OptimizerTraits(extension.moment_bytes, offload=("cpu",) if extension.offload else ())


@functools.cache
def model_family_extension(name: str) -> ModelFamilyExtension | None:
    """Return the model family of another package; None for an unknown name. Raises PluginError."""
    if (plugin := plugins(MODEL_FAMILIES).get(name)) is None:
        return None
    extension = plugin.load(ModelFamilyExtension)
    if extension.base not in BUILT_IN_FAMILIES:
        raise plugin.invalid(f"has the base {extension.base}, which must be {either(BUILT_IN_FAMILIES)}")
    return extension


def base_family(family: str) -> str:
    """Return the built-in family with the same parameters: the family itself unless another package brings it."""
    try:
        extension = None if family in BUILT_IN_FAMILIES else model_family_extension(family)
    except PluginError:  # reported with the line of the spec that names it
        extension = None
    return family if extension is None else extension.base


def or_plugin(group: str, built_in: Collection[str], lookup: Callable[[str], object | None]) -> PlainValidator:
    """Return a validator of a name that is ``built_in`` or a plug-in's; packages are read only for other names.

    What was recorded is accepted as it is: a run can be listed where its plug-in is not installed.
    """

    def accept(value: Any, info: ValidationInfo) -> str:
        if not isinstance(value, str):
            raise PydanticKnownError("string_type")
        if value in built_in or (info.context or {}).get("recorded"):
            return value
        try:
            extension = lookup(value)
        except PluginError as error:
            raise plugin_broken(error) from error
        if extension is None:
            names = [repr(name) for name in (*built_in, *plugins(group, built_in))]
            raise PydanticKnownError("literal_error", {"expected": either(names)})
        return value

    return PlainValidator(accept)
