"""The base of every part of the run spec: frozen, and strict about unknown keys.

Modules of the spec do without ``from __future__ import annotations``: pydantic would compile every annotation again.
"""

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
