"""Plug-ins: objects that installed packages register as entry points of the groups ``scaletrain.*``.

Every group is read here, so that a plug-in that cannot be used has the same error in each of them. Its package is
imported by Plugin.load() alone: where a spec, a command line or `scaletrain doctor` names it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, TypeVar

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.text import listed

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

BACKENDS = "scaletrain.backends"
TRACKERS = "scaletrain.trackers"
OPTIMIZERS = "scaletrain.optimizers"
MODEL_FAMILIES = "scaletrain.model_families"
VERBS = "scaletrain.verbs"
DRILLS = "scaletrain.drills"
# Each group with what it registers.
GROUPS: Mapping[str, str] = {
    BACKENDS: "back end",
    TRACKERS: "tracker",
    OPTIMIZERS: "optimizer",
    MODEL_FAMILIES: "model family",
    VERBS: "verb",
    DRILLS: "drill",
}
T = TypeVar("T")


class PluginError(UsageError):
    """A plug-in cannot be used. The message names it and its package."""


@dataclass(frozen=True)
class Plugin:
    """A plug-in as its package declares it. ``reference`` is ``module:attribute``; ``packages`` are more than one where
    several register the same name.
    """

    group: str
    name: str
    reference: str
    packages: tuple[str, ...]

    def load(self, kind: type[T]) -> T:
        """Import the package and return the object. Raises PluginError if that fails, or if it is no ``kind``."""
        if len(self.packages) > 1:
            raise PluginError(
                Reason("plugin.twice", {"kind": GROUPS[self.group], "name": self.name, "packages": list(self.packages)})
            )
        with self.errors():
            loaded = load_reference(self.reference)
        if not isinstance(loaded, kind):
            raise self.invalid(f"must be a {kind.__name__}, not a {type(loaded).__name__}")
        return loaded

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Return a context that turns what code of the package raises into a PluginError."""
        try:
            yield
        except PluginError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(Reason("plugin.not-loaded", {**self._params, "said": _one_line(error)})) from error

    def failure(self, error: Exception) -> Reason:
        """Return the reason for an unexpected exception of its code."""
        return Reason("plugin.failed", {**self._params, "said": _one_line(error)})

    def invalid(self, fault: str) -> PluginError:
        """Return the error for an object that is not as the interface requires: ``must be ...``."""
        return PluginError(Reason("plugin.invalid", {**self._params, "fault": fault}))

    @property
    def _params(self) -> dict[str, Any]:
        package = self.packages[0]
        return {"kind": GROUPS[self.group], "name": self.name, "package": package, "reference": self.reference}


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def plugins(group: str, built_in: Iterable[str] = ()) -> dict[str, Plugin]:
    """Return the plug-ins of a group by name, sorted; a built-in name cannot be taken. Imports none of them."""
    return {name: plugin for name, plugin in _all_plugins()[group].items() if name not in built_in}


def package_that_raised(error: BaseException) -> str | None:
    """Return the package of the plug-in whose code, or a library that it called, raised the error; else None."""
    import traceback

    packages = {
        plugin.reference.partition(":")[0].partition(".")[0]: listed(plugin.packages)
        for group in GROUPS
        for plugin in plugins(group).values()
    }
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        top = str(frame.f_globals.get("__name__")).partition(".")[0]
        if top == "scaletrain_cli":
            return None
        if top in packages:
            return packages[top]
    return None


def load_reference(reference: str) -> Any:
    """Import what ``module:attribute`` refers to; ``module`` alone is the module. Raises what its code raises.

    What the code prints goes to stderr: stdout is for the answer of a command.
    """
    module, _, attribute = reference.partition(":")
    with contextlib.redirect_stdout(sys.stderr):
        target = importlib.import_module(module)
        for name in filter(None, attribute.split(".")):
            target = getattr(target, name)
    return target


@cache
def _all_plugins() -> dict[str, dict[str, Plugin]]:
    """Return the plug-ins of every group, from one scan of the installed packages."""
    by_group: dict[str, dict[str, Plugin]] = {group: {} for group in GROUPS}
    for entry in sorted(_entry_points(), key=lambda entry: entry.name):
        reference = entry.value.partition("[")[0].strip()
        package = (entry.dist.name if entry.dist is not None else None) or reference.partition(":")[0]
        before = by_group[entry.group].get(entry.name)
        packages = (package,) if before is None else (*before.packages, package)
        by_group[entry.group][entry.name] = Plugin(entry.group, entry.name, reference, packages)
    return by_group


def _entry_points() -> list[EntryPoint]:
    """Return the entry points of our groups; a package whose metadata cannot be read is left out."""
    if not _may_have_plugins():
        return []
    from importlib.metadata import distributions, entry_points

    try:
        installed = entry_points()
        return [entry for group in GROUPS for entry in installed.select(group=group)]
    except Exception:  # does not say in which package; the search for it reads all of their metadata
        by_package: dict[str, list[EntryPoint]] = {}
        for package in distributions():
            with contextlib.suppress(Exception):
                by_package.setdefault(package.name, [entry for entry in package.entry_points if entry.group in GROUPS])
        return [entry for entries in by_package.values() for entry in entries]


def _may_have_plugins() -> bool:
    """Return whether an installed package may have an entry point of our groups: as a rule none has.

    Only a look for the name in their files: importlib.metadata takes a fifth of the CPU time of ``--help``.
    """
    if any(hasattr(finder, "find_distributions") for finder in sys.meta_path if finder is not PathFinder):
        return True
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except NotADirectoryError:  # packages in a zip file
            return True
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info", "EGG-INFO")):
                with contextlib.suppress(OSError), open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
                    if b"scaletrain." in file.read():
                        return True
    return False
