"""The registry of back ends: finds them by name and imports their modules lazily."""

from __future__ import annotations

from importlib import import_module

from scaletrain_cli.errors import SchedulerError, UsageError
from scaletrain_cli.launch.backends.base import Backend
from scaletrain_cli.spec.backend_traits import DEFAULT, BackendTraits, backend_names, backend_traits, installed_backends
from scaletrain_cli.text import listed


def backend_for(name: str) -> Backend:
    """Return the back end that ``cluster.scheduler`` names.

    Raises SchedulerError, with the names that are installed, for an unknown name or one that cannot be loaded.
    """
    try:
        traits = backend_traits(name)
    except UsageError as error:
        raise SchedulerError(f"cluster.scheduler = {name}: {error.message}") from error
    return _implementation(traits)


def all_backends() -> list[Backend]:
    """Return every installed back end that can be loaded, those of this package first."""
    found = []
    for traits in installed_backends():
        try:
            found.append(_implementation(traits))
        except SchedulerError:  # of another package; backend_for() reports the error
            continue
    return found


def usual_backend() -> Backend:
    """Return the back end of the cluster that this machine belongs to, else the one that runs jobs on this machine."""
    return next((backend for backend in all_backends() if backend.has_this_machine()), backend_for(DEFAULT))


def _implementation(traits: BackendTraits) -> Backend:
    module, _, attribute = traits.implementation.partition(":")
    try:
        backend = getattr(import_module(module), attribute)()
    except Exception as error:  # code of another package may raise any exception
        raise SchedulerError(
            f"the back end {traits.name} cannot be loaded ({traits.implementation}): {type(error).__name__}: {error}. "
            f"Installed: {listed(backend_names())}."
        ) from error
    if not isinstance(backend, Backend):
        raise SchedulerError(f"the back end {traits.name}: {traits.implementation} is not a Backend.")
    return backend
