"""Optimizers and model families of other packages, found by entry points.

``[project.entry-points."scaletrain.optimizers"]`` and ``[project.entry-points."scaletrain.model_families"]`` name an
``OptimizerExtension`` or a ``ModelFamilyExtension`` each: ``lamb = "my_package:LAMB"``. The module of the entry point
is imported where specs are validated and planned, so it must not import torch; ``build`` is imported by the engine.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError, ValidationError

OPTIMIZERS = "scaletrain.optimizers"
MODEL_FAMILIES = "scaletrain.model_families"
T = TypeVar("T")


@dataclass(frozen=True)
class OptimizerExtension:
    """An optimizer that updates each element of a weight by itself: ZeRO hands it flat parts of matrices.

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

    ``build``: ``module:name`` of a callable ``(ModelSpec) -> CausalLM`` (scaletrain_cli.engine.model.causal_lm) whose
    modules have the names and shapes of those of ``base``, by which they are sharded, initialized and checkpointed.
    """

    base: Literal["llama", "gpt"]
    build: str


@functools.cache
def optimizer_extension(name: str) -> OptimizerExtension | None:
    """Return the optimizer of another package; None for an unknown name. Raises what its package raises."""
    return _extension(OPTIMIZERS, name, OptimizerExtension)


@functools.cache
def model_family_extension(name: str) -> ModelFamilyExtension | None:
    """Return the model family of another package; None for an unknown name. Raises what its package raises."""
    return _extension(MODEL_FAMILIES, name, ModelFamilyExtension)


def base_family(family: str) -> str:
    """Return the built-in family with the same parameters: the family itself unless another package brings it."""
    found = None if family in ("llama", "gpt") else model_family_extension(family)
    return family if found is None else found.base


def load_callable(reference: str) -> Callable[..., Any]:
    """Import what ``module:name`` refers to. Raises ImportError and AttributeError."""
    module, _, name = reference.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def or_extension(lookup: Callable[[str], object | None]) -> WrapValidator:
    """Return a validator that also accepts names of extensions, which are looked up only for unknown names."""

    def accept(value: Any, built_in: ValidatorFunctionWrapHandler) -> Any:
        try:
            return built_in(value)
        except ValidationError:
            if not isinstance(value, str):
                raise
            try:
                found = lookup(value)
            except Exception as error:
                why = {"why": f"{type(error).__name__}: {error}"}
                kind = "plugin_broken"
                raise PydanticCustomError(kind, "cannot be used, its package failed to load ({why})", why) from error
            if found is None:
                raise
            return value

    return WrapValidator(accept)


def _extension(group: str, name: str, kind: type[T]) -> T | None:
    from importlib.metadata import entry_points

    entry = next(iter(entry_points(group=group, name=name)), None)
    if entry is None:
        return None
    found = entry.load()
    if not isinstance(found, kind):
        raise TypeError(f"{entry.value} is no {kind.__name__}")
    return found
