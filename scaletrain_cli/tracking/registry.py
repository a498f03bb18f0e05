"""The trackers by name: the built-in ones, and those that installed packages register as entry points.

A package outside this project adds ``[project.entry-points."scaletrain.trackers"]`` with ``name = "module:Class"``.
"""

from __future__ import annotations

import functools
from typing import Any

from scaletrain_cli.tracking.base import Tracker, TrackerOptions

GROUP = "scaletrain.trackers"
BUILT_IN = ("jsonl", "mlflow", "tensorboard", "wandb")


def tracker_names() -> list[str]:
    """Return all known names, the built-in ones first. Reads the metadata of the installed packages."""
    return [*BUILT_IN, *sorted({entry.name for entry in _entry_points()} - set(BUILT_IN))]


def options_model(name: str) -> type[TrackerOptions]:
    """Return the model of a tracker's options. Raises LookupError for an unknown name, and what its package raises."""
    if name == "jsonl":
        from scaletrain_cli.tracking.jsonl import JsonlOptions

        return JsonlOptions
    return tracker_class(name).options_model


def tracker_class(name: str) -> type[Tracker[Any]]:
    """Return the class of a tracker. Raises LookupError for an unknown name, and what its package raises."""
    if name == "mlflow":
        from scaletrain_cli.tracking.mlflow import MlflowTracker

        return MlflowTracker
    if name == "tensorboard":
        from scaletrain_cli.tracking.tensorboard import TensorboardTracker

        return TensorboardTracker
    if name == "wandb":
        from scaletrain_cli.tracking.wandb import WandbTracker

        return WandbTracker
    return _from_package(name)


@functools.cache
def _from_package(name: str) -> type[Tracker[Any]]:
    entry = next((entry for entry in _entry_points() if entry.name == name), None)
    if entry is None:
        raise LookupError(f"no tracker is called {name!r}")
    found = entry.load()
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        raise TypeError(f"{entry.value} is not a subclass of scaletrain_cli.tracking.base.Tracker")
    if not issubclass(getattr(found, "options_model", object), TrackerOptions):
        raise TypeError(f"{entry.value} has no options_model that is a subclass of TrackerOptions")
    return found


def _entry_points() -> Any:
    from importlib.metadata import entry_points

    return entry_points(group=GROUP)
