"""The base of every part of the run spec: frozen, and strict about unknown keys."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """A frozen part of the spec that rejects keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, value: Any) -> Any:
        """A section whose every line is commented out is null in YAML; it means the same as no section."""
        return {} if value is None else value
