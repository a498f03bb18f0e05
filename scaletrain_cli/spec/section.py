"""The base of every part of the run spec: frozen, and strict about unknown keys."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen part of the spec that rejects keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)
