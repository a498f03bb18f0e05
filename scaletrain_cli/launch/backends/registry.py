"""The registry of back ends: finds them by name and imports their modules lazily."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator

from scaletrain_cli.errors import ScaletrainError, SchedulerError, UsageError
from scaletrain_cli.launch.backends.base import Backend
from scaletrain_cli.plugins import PluginError, load_reference
from scaletrain_cli.spec.backend_traits import (
    BUILT_IN,
    DEFAULT,
    BackendTraits,
    added_backends,
    backend_traits,
    installed_backends,
)

logger = logging.getLogger(__name__)


def backend_for(name: str) -> Backend:
    """Return the back end that ``cluster.scheduler`` names.

    Raises SchedulerError, with the names that are installed, for an unknown name or one that cannot be loaded.
    """
    try:
        traits = backend_traits(name)
    except UsageError as error:
        raise SchedulerError(f"cluster.scheduler = {name}: {error.message}", remedy=error.remedy) from error
    return _implementation(traits)


@contextlib.contextmanager
def failures_of_plugin(name: str) -> Iterator[None]:
    """Return a context that turns an unexpected exception of another package's back end into a SchedulerError."""
    try:
        yield
    except ScaletrainError:
        raise
    except Exception as error:
        if (plugin := added_backends().get(name)) is None:
            raise
        raise SchedulerError(plugin.failure(error)) from error


def all_backends() -> list[Backend]:
    """Return every installed back end that can be loaded, those of this package first."""
    backends = []
    for traits in installed_backends():
        try:
            backends.append(_implementation(traits))
        except SchedulerError:  # of another package; backend_for() reports the error
            continue
    return backends


def usual_backend() -> Backend:
    """Return the back end of the cluster that this machine belongs to, else the one that runs jobs on this machine."""
    return next(filter(_has_this_machine, all_backends()), backend_for(DEFAULT))


def _has_this_machine(backend: Backend) -> bool:
    if (plugin := added_backends().get(backend.name)) is None:
        return backend.has_this_machine()
    try:
        with plugin.errors():
            return backend.has_this_machine()
    except PluginError as error:
        logger.warning("%s", error)
        return False


def _implementation(traits: BackendTraits) -> Backend:
    if traits.name in BUILT_IN:
        built_in: Backend = load_reference(traits.implementation)()
        return built_in
    plugin = dataclasses.replace(added_backends()[traits.name], reference=traits.implementation)
    try:
        backend_class = plugin.load(type)
        if not issubclass(backend_class, Backend):
            raise plugin.invalid("must be a subclass of Backend")
        with plugin.errors():
            return backend_class()
    except PluginError as error:
        raise SchedulerError(error.reason or error.message) from error
