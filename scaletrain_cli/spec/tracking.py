"""The section ``tracking``: logging interval, and the trackers that mirror the metrics."""

from typing import Any

from pydantic import BaseModel, model_validator
from pydantic_core import PydanticCustomError

from scaletrain_cli.spec.quantities import Whole
from scaletrain_cli.spec.section import OpenSection
from scaletrain_cli.spec.source import Key, Source

_FORM = "must be a list of trackers, each a name, `name: {option: value}` or `{kind: name, option: value}`"


class TrackingSpec(OpenSection):
    """Experiment trackers that mirror metrics.jsonl, by name or as a list; one run in each over all attempts."""

    log_every: Whole = 1

    @classmethod
    def plugin_model(cls, name: str) -> type[BaseModel] | None:
        from scaletrain_cli.tracking.registry import options_model

        try:
            return options_model(name)
        except LookupError:
            return None

    @classmethod
    def plugin_names(cls) -> list[str]:
        from scaletrain_cli.tracking.registry import tracker_names

        return tracker_names()

    @model_validator(mode="before")
    @classmethod
    def _list_is_mapping(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        named: dict[str, Any] = {}
        for item in value:
            if (tracker := _item(item)) is None:
                raise PydanticCustomError("tracker_form", _FORM)
            if tracker[0] in named:
                raise PydanticCustomError(
                    "tracker_twice", "must name each tracker once, not {name} twice", {"name": tracker[0]}
                )
            named[tracker[0]] = tracker[1]
        return named

    @property
    def trackers(self) -> dict[str, Any]:
        """Return the options of each enabled tracker, by name."""
        return {name: options for name, options in self.plugins.items() if getattr(options, "enabled", True)}


def _item(item: Any) -> tuple[str, dict[str, Any]] | None:
    """Return name and options of an item of the list; None if it has another form."""
    if isinstance(item, str):
        return item, {}
    if isinstance(item, dict) and isinstance(item.get("kind"), str):
        return item["kind"], {key: value for key, value in item.items() if key != "kind"}
    if isinstance(item, dict) and len(item) == 1:
        ((name, options),) = item.items()
        if options is None or isinstance(options, dict):
            return str(name), options or {}
    return None


def name_trackers(raw: dict[str, Any], source: Source) -> None:
    """Turn a list of trackers in plain data into the mapping by name, with the lines of its keys in ``source``.

    A list of another form is left as it is and rejected by validation.
    """
    items = raw.get("tracking")
    if not isinstance(items, list):
        return
    trackers = [_item(item) for item in items]
    names = [tracker[0] for tracker in trackers if tracker is not None]
    if len(set(names)) < len(items):
        return
    places: dict[Key, str] = {}
    for index, (item, name) in enumerate(zip(items, names, strict=True)):
        old: Key = ("tracking", index)
        inner: Key = (*old, name) if isinstance(item, dict) and "kind" not in item else old
        if old in source.places:
            places["tracking", name] = source.places[old]
        below = ((key[len(inner) :], place) for key, place in source.places.items() if key[: len(inner)] == inner)
        places |= {("tracking", name, *rest): place for rest, place in below if rest}
    others = {key: place for key, place in source.places.items() if key[0:1] != ("tracking",) or len(key) == 1}
    source.places = others | places
    raw["tracking"] = {tracker[0]: tracker[1] for tracker in trackers if tracker is not None}
