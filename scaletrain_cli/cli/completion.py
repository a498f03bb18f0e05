"""Shell completion: runs, recipes, presets, accelerators, clusters, and keys and values of the spec.

Each function takes the typed prefix and returns its completions. Errors are suppressed.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any


def completer(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a completion function over ``names``; it returns no completions if reading the names fails."""

    def complete(incomplete: str) -> list[str]:
        try:
            return list(dict.fromkeys(name for name in names() if name.startswith(incomplete)))
        except Exception:  # a traceback would garble the command line
            return []

    return complete


def _runs() -> Iterator[str]:
    from scaletrain_cli.launch.login_node.sent_runs import sent_runs
    from scaletrain_cli.rundir.paths import list_runs

    yield from (run.run_id for run in list_runs())
    yield from (run.run_id for run in sent_runs())


def _names_in(module: str, function: str, *more: str) -> Callable[[str], list[str]]:
    """Return a completion function over ``more`` and the names that a function of a module returns."""
    return completer(lambda: [*more, *getattr(import_module(f"scaletrain_cli.{module}"), function)()])


def _settings() -> Iterator[str]:
    """Yield ``key=`` for each key of the spec, and ``key=value`` for keys with a fixed set of values."""
    from scaletrain_cli.plan.catalogue.hardware import accelerator_names
    from scaletrain_cli.spec import presets, vision_presets
    from scaletrain_cli.spec.presets import hub_presets
    from scaletrain_cli.spec.problems import spec_keys

    named = {
        "model.preset": [*presets(), *hub_presets(), *vision_presets()],
        "cluster.gpu": ["cpu", *accelerator_names()],
    }
    for key, annotation in spec_keys():
        yield f"{key}="
        for value in named.get(key, _choices(annotation)):
            yield f"{key}={value}"


def _choices(annotation: Any) -> list[str]:
    """Return the values of a field with a fixed set of values: literals, or true and false."""
    if annotation is bool:
        return ["true", "false"]
    if typing.get_origin(annotation) is typing.Literal:
        return [str(value) for value in typing.get_args(annotation)]
    return [word for inner in typing.get_args(annotation) for word in _choices(inner)]


complete_run = completer(_runs)
complete_recipe = _names_in("project_files", "recipes")
complete_preset = _names_in("spec.presets", "presets")
complete_gpu = _names_in("plan.catalogue.hardware", "accelerator_names", "cpu")
complete_cluster = _names_in("spec.clusters_file", "cluster_names")
_all_settings = completer(_settings)


def complete_setting(incomplete: str) -> list[str]:
    """Return keys that begin with the prefix, or the values of a key after ``key=``."""
    found = _all_settings(incomplete)
    return found if "=" in incomplete else [setting for setting in found if setting.endswith("=")]
