"""Find the back end that a run names, and import its module only then."""

from __future__ import annotations

from importlib import import_module

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.backends.base import Backend

# Imported by name, so that no back end is loaded for a run of another one.
_BUILT_IN = {
    "local": "scaletrain_cli.launch.backends.local.backend:LocalBackend",
    "slurm": "scaletrain_cli.launch.backends.slurm.backend:SlurmBackend",
    "kubernetes": "scaletrain_cli.launch.backends.kubernetes.backend:KubernetesBackend",
}


def backend_for(name: str) -> Backend:
    """Return the back end that ``cluster.scheduler`` names. Raises SchedulerError for an unknown name."""
    if name not in _BUILT_IN:
        raise SchedulerError(f"cluster.scheduler = {name} is not in this version. Use local, slurm or kubernetes.")
    module, _, attribute = _BUILT_IN[name].partition(":")
    backend: Backend = getattr(import_module(module), attribute)()
    return backend
