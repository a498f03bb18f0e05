"""The base of every part of the run spec: frozen, and strict about unknown keys.

Modules of the spec do without ``from __future__ import annotations``: pydantic would compile every annotation again.
"""

import os
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


@dataclass(frozen=True)
class Condition:
    """Holds where the value at ``key``, which may be a property of a section, is (or is not) one of ``values``."""

    key: str
    values: tuple[object, ...]
    negated: bool = False
    setting: str = ""  # the key to show where ``key`` is a property

    @property
    def shown_key(self) -> str:
        """The key that a person sets to change it."""
        return self.setting or self.key

    def holds(self, value: object) -> bool:
        """Return whether the condition holds for the value at the key."""
        return (value in self.values) != self.negated


@dataclass(frozen=True)
class UsedWhen:
    """Metadata of a field, or of a whole section, that has an effect only where one of the conditions holds.

    Given to another value than its default where none does, it is an error (see spec.unused).
    """

    conditions: tuple[Condition, ...]


def used_when(*conditions: Condition) -> UsedWhen:
    """Return metadata for ``Annotated``: the field has an effect where one of ``conditions`` holds."""
    return UsedWhen(conditions)


def where(key: str, *values: object, setting: str = "") -> Condition:
    """Return the condition that the value at a dotted key is one of ``values``."""
    return Condition(key, values, setting=setting)


def where_not(key: str, *values: object, setting: str = "") -> Condition:
    """Return the condition that the value at a dotted key is none of ``values``."""
    return Condition(key, values, negated=True, setting=setting)


# What a section is that is left out: an empty one, checked with the spec that it is missing from.
LEFT_OUT: Any = Field(default={}, validate_default=True)


_PLUGINS_OFF = "PYDANTIC_DISABLE_PLUGINS"


class Section(BaseModel):
    """A frozen part of the spec that rejects keys it does not know."""

    # Deferred, because the validator of a whole spec holds those of its sections, which are seldom used alone.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, value: Any) -> Any:
        """A section whose every line is commented out is null in YAML; it means the same as no section."""
        return {} if value is None else value

    @classmethod
    def model_rebuild(cls, **options: Any) -> bool | None:
        """Build the validator, without plugins: pydantic reads the metadata of every installed package for them."""
        before = os.environ.get(_PLUGINS_OFF)
        os.environ[_PLUGINS_OFF] = "__all__"
        try:
            return super().model_rebuild(**options)
        finally:
            del os.environ[_PLUGINS_OFF]
            if before is not None:
                os.environ[_PLUGINS_OFF] = before
