"""The base class of every section of the run spec: frozen, and strict about unknown keys.

Modules of the spec do without ``from __future__ import annotations``: pydantic would compile every annotation again.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from scaletrain_cli.plugins import PluginError


@dataclass(frozen=True)
class Condition:
    """A condition on the value at ``key`` (a key, or a property of a section): it is, or is not, one of ``values``."""

    key: str
    values: tuple[object, ...]
    negated: bool = False
    setting: str = ""  # the key to show if ``key`` is a property

    @property
    def shown_key(self) -> str:
        """Return the key to set in order to change the value."""
        return self.setting or self.key

    def holds(self, value: object) -> bool:
        """Return True if the condition holds for this value."""
        return (value in self.values) != self.negated


@dataclass(frozen=True)
class UsedWhen:
    """Metadata of a field, or of a section, that has an effect only if one of the conditions holds.

    Otherwise a value that differs from the default is an error (see spec.problems.unused_keys).
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


# Default of a section that is left out: an empty one, validated together with the spec.
LEFT_OUT: Any = Field(default={}, validate_default=True)


_PLUGINS_OFF = "PYDANTIC_DISABLE_PLUGINS"


@contextmanager
def without_pydantic_plugins() -> Iterator[None]:
    """Return a context in which a validator is built without the metadata of every installed package being read."""
    before = os.environ.get(_PLUGINS_OFF)
    os.environ[_PLUGINS_OFF] = "__all__"
    try:
        yield
    finally:
        os.environ.pop(_PLUGINS_OFF, None)
        if before is not None:
            os.environ[_PLUGINS_OFF] = before


class Section(BaseModel):
    """A frozen section of the spec that rejects unknown keys."""

    # Deferred, because the validator of a whole spec includes those of its sections, which are rarely used separately.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, value: Any) -> Any:
        """Treat null as an empty section, as when all lines of a section are commented out."""
        return {} if value is None else value

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """Yield (key of the section, message) for each setting that contradicts another one of the section."""
        yield from ()

    @classmethod
    def model_rebuild(cls, **options: Any) -> bool | None:
        with without_pydantic_plugins():
            return super().model_rebuild(**options)


class UnknownPlugin(BaseModel):
    """The recorded options of a plug-in that is not installed here."""

    model_config = ConfigDict(frozen=True, extra="allow", defer_build=True)


# Context of a validation of recorded specs, in which a plug-in that is not installed is not an error.
RECORDED: Mapping[str, bool] = {"recorded": True}

_PLUGINS = "plugins"


def _checked_plugins(value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    section: type[OpenSection] = value.pop("")  # see OpenSection._set_plugins_apart
    sections: dict[str, Any] = {}
    errors: list[InitErrorDetails] = []
    for name, given in value.items():
        recorded = (info.context or {}).get("recorded")
        try:
            model = section.plugin_model(name)
        except PluginError as error:
            if not recorded:
                errors.append(InitErrorDetails(type=plugin_broken(error), loc=(name,), input=given))
                continue
            model = None
        if model is None and recorded and isinstance(given, dict):
            sections[name] = UnknownPlugin(**given)
        elif model is None:
            errors.append(InitErrorDetails(type="extra_forbidden", loc=(name,), input=given))
        else:
            if not model.__pydantic_complete__:
                with without_pydantic_plugins():
                    model.model_rebuild(raise_errors=False)
            try:
                sections[name] = model.model_validate({} if given is None else given)
            except ValidationError as error:
                errors += [nested_error(name, detail) for detail in error.errors(include_url=False)]
    if errors:
        raise ValidationError.from_exception_data(section.__name__, errors)
    return sections


def plugin_broken(error: PluginError) -> PydanticCustomError:
    """Return the validation error for a plug-in that cannot be used."""
    return PydanticCustomError("plugin_broken", "{why}", {"why": str(error).removesuffix(".")})


def nested_error(name: str, detail: Any) -> InitErrorDetails:
    """Return an error of a model as one of the section with this model at ``name``."""
    kind: Any = detail["type"]
    if kind in ("value_error", "assertion_error"):
        kind = PydanticCustomError(kind, "{message}", {"message": detail["msg"].partition(", ")[2] or detail["msg"]})
    try:
        details = InitErrorDetails(
            type=kind, loc=(name, *detail["loc"]), input=detail["input"], ctx=detail.get("ctx", {})
        )
        ValidationError.from_exception_data("", [details])
        return details
    except (KeyError, TypeError):  # an error type of the plug-in
        kind = PydanticCustomError(detail["type"], "{message}", {"message": detail["msg"]})
        return InitErrorDetails(type=kind, loc=(name, *detail["loc"]), input=detail["input"])


class OpenSection(Section):
    """A section with nested sections of plug-ins, by name; each plug-in provides its model."""

    plugins: Annotated[dict[str, SerializeAsAny[BaseModel]], BeforeValidator(_checked_plugins)] = {}

    @classmethod
    def plugin_model(cls, name: str) -> type[BaseModel] | None:
        """Return the model of a plug-in's section; None for an unknown name."""
        raise NotImplementedError

    @classmethod
    def plugin_names(cls) -> list[str]:
        """Return the names of all available plug-ins."""
        raise NotImplementedError

    @model_validator(mode="before")
    @classmethod
    def _set_plugins_apart(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        own = {known for name, field in cls.model_fields.items() for known in (name, field.alias)} - {_PLUGINS}
        kept = {name: given for name, given in value.items() if name in own}
        return {**kept, _PLUGINS: {name: given for name, given in value.items() if name not in own} | {"": cls}}

    @model_serializer(mode="wrap")
    def _write_flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        plugins: dict[str, Any] = data.pop(_PLUGINS)
        return data | plugins

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        for name, section in self.plugins.items():
            if hasattr(section, "inconsistencies"):  # the options of a plug-in may be any pydantic model
                yield from ((f"{name}.{key}", message) for key, message in section.inconsistencies())


class BackendSection(Section):
    """Base of ``cluster.<name>``: the options of one back end. Each rule below may be overridden; by default none."""

    # The lines that `scaletrain init` writes for the section, indented as below ``cluster:``.
    starting_text: ClassVar[str] = ""
    # What `scaletrain init` asks the user to fill in.
    starting_note: ClassVar[str] = ""

    @property
    def summary(self) -> str:
        """Return the settings to name in a summary of the job, each after a comma: ``, partition gpu``."""
        return ""

    def unseen_place(self, folder: Path, path: str) -> str:
        """Return where the ranks look for ``path``, relative to ``folder``, if it is not visible from here; else ''."""
        return ""

    @property
    def host_memory_per_node(self) -> float | None:
        """Return the bytes of host memory requested on each node; None to request what the plan needs."""
        return None

    @property
    def gpu_kind(self) -> str:
        """Return the scheduler's word for the GPUs that the job requests; empty for GPUs of any kind."""
        return ""

    @property
    def cores_per_node(self) -> int | None:
        """Return the CPU cores that the section requests on each node; None to leave them to other settings."""
        return None

    def cluster_inconsistencies(self, *, grace_seconds: float) -> Iterator[tuple[str, str]]:
        """Yield (key of the section, message) for each setting that contradicts the rest of the cluster section."""
        yield from ()

    def run_inconsistencies(self, *, env: Collection[str], secret_env: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, message) for contradictions with the names in ``env`` and ``secret_env`` of the run."""
        yield from ()
