"""The section ``checkpoint.mirror``: a second place for checkpoints and the history of a run."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, model_validator

from scaletrain_cli.spec.quantities import BytesPerSecond, Text, Whole
from scaletrain_cli.spec.section import Section, used_when, where_not

SCHEMES = ("s3", "gs", "az")
_MIRRORED = used_when(where_not("checkpoint.mirror.to", None))


class MirrorSpec(Section):
    """A copy of the run in an object store or another file system. A plain string is ``to``.

    Credentials of a store come from the environment of the node; the spec holds none.
    """

    to: Text | None = Field(
        default=None, description="s3://BUCKET/PATH, gs://, az://, or a folder of another file system; null: no mirror"
    )
    bandwidth: Annotated[BytesPerSecond, _MIRRORED] = Field(
        default=500e6, description="most bytes per second that are written to the mirror"
    )
    every: Annotated[Whole | None, _MIRRORED] = Field(
        default=None, description="fewest steps between two mirrored checkpoints; null: each one, as bandwidth permits"
    )
    keep: Annotated[Whole, _MIRRORED] = Field(default=2, description="number of recent checkpoints in the mirror")
    keep_every: Annotated[Whole | None, _MIRRORED] = Field(
        default=None, description="also keep mirrored checkpoints whose step is a multiple of this"
    )

    @model_validator(mode="before")
    @classmethod
    def _place_alone(cls, value: Any) -> Any:
        return {"to": value} if isinstance(value, str) else value

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """Yield (key, message) if ``to`` is no place that can be written to, or could hold a secret."""
        if self.to is not None and (problem := place_problem(self.to)):
            yield "to", problem


def is_in_store(place: str) -> bool:
    """Return whether a place is in an object store; otherwise it is a folder."""
    return "://" in place


def place_problem(place: str) -> str:
    """Return why a mirror cannot be at ``place``, with what to write; empty if it may be. Sends no request."""
    usage = "Write s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH, or an absolute path."
    if not is_in_store(place):
        absolute = place.startswith(("/", "~"))
        return "" if absolute else f"must be an absolute path or the address of an object store. {usage}"
    scheme, _, rest = place.partition("://")
    if scheme not in SCHEMES:
        return f"must be in a store that can be written to. {usage}"
    bucket = rest.partition("/")[0]
    if "@" in bucket or "?" in rest or "#" in rest:
        return f"must not contain a user name, a password or a signature: set credentials in the environment. {usage}"
    if not bucket or any(letter in rest for letter in "*[]"):
        return f"must name one bucket, without wildcards. {usage}"
    return ""
