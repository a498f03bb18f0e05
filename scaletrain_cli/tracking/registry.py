"""The trackers by name: the built-in ones, and those that installed packages register as entry points.

A package outside this project adds ``[project.entry-points."scaletrain.trackers"]`` with ``name = "module:Class"``.
"""

import functools
import importlib
from typing import Any

from scaletrain_cli.plugins import TRACKERS, plugins
from scaletrain_cli.text import listed
from scaletrain_cli.tracking.base import Tracker, TrackerOptions

# The classes of the built-in trackers, in the modules of these names; jsonl is none.
_CLASSES = {
    "mlflow": "MlflowTracker",
    "prometheus": "PrometheusTracker",
    "tensorboard": "TensorboardTracker",
    "wandb": "WandbTracker",
}
BUILT_IN = ("jsonl", *_CLASSES)


def tracker_names() -> list[str]:
    """Return all known names, the built-in ones first. Reads the metadata of the installed packages."""
    return [*BUILT_IN, *plugins(TRACKERS, BUILT_IN)]


def options_model(name: str) -> type[TrackerOptions]:
    """Return the model of a tracker's options. Raises LookupError for an unknown name, and PluginError."""
    if name == "jsonl":
        from scaletrain_cli.tracking.jsonl import JsonlOptions

        return JsonlOptions
    return tracker_class(name).options_model


def tracker_class(name: str) -> type[Tracker[Any]]:
    """Return the class of a tracker. Raises LookupError for an unknown name, and PluginError."""
    if name not in _CLASSES:
        return _from_package(name)
    tracker: type[Tracker[Any]] = getattr(importlib.import_module(f"scaletrain_cli.tracking.{name}"), _CLASSES[name])
    return tracker


@functools.cache
def _from_package(name: str) -> type[Tracker[Any]]:
    if (plugin := plugins(TRACKERS).get(name)) is None:
        raise LookupError(f"no tracker is called {name!r}")
    tracker = plugin.load(type)
    if not issubclass(tracker, Tracker):
        raise plugin.invalid("must be a subclass of scaletrain_cli.tracking.base.Tracker")
    model = getattr(tracker, "options_model", None)
    if not (isinstance(model, type) and issubclass(model, TrackerOptions)):
        raise plugin.invalid("has no options_model that is a subclass of TrackerOptions")
    if missing := sorted(tracker.__abstractmethods__):
        raise plugin.invalid(f"does not define {listed(missing)}")
    return tracker
