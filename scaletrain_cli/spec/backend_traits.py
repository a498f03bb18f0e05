"""The traits of a back end that spec, planner, engine and run directory need, without importing the back end.

A back end declares one ``BackendTraits``. Those of this package are defined here; another package registers its own
through the entry-point group ``scaletrain.backends`` (docs/extending.md). No module but this one and launch/backends/
names a scheduler: everything else asks for a trait, or for a method of the back end.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.spec.kubernetes import KubernetesSpec
from scaletrain_cli.spec.section import BackendSection
from scaletrain_cli.spec.slurm import SlurmSpec
from scaletrain_cli.text import did_you_mean, listed

ENTRY_POINTS = "scaletrain.backends"


@dataclass(frozen=True)
class BackendTraits:
    """One back end, as data.

    ``implementation`` is ``module:class`` of a ``launch.backends.base.Backend``; it is imported only to render, submit
    or query a job. ``section`` validates ``cluster.<name>`` of the spec. ``max_nodes`` is the largest job in nodes,
    None for no limit.
    """

    name: str  # the value of cluster.scheduler, and the key of the section
    display_name: str  # its name in sentences: "Slurm", "this machine"
    implementation: str
    rendered_as: str = "a job"  # text for the object handed to the scheduler
    section: type[BackendSection] = BackendSection
    max_nodes: int | None = None
    # Ranks are processes of the submitting machine: they see its files and inherit its environment, nothing preempts
    # them, and no other node could take their place.
    runs_here: bool = False
    # The nodes read and write the run directory that the submitting machine sees.
    shared_run_directory: bool = True
    # The values of secret_env come from the submitter's environment, and the run directory keeps them until the run
    # ends. False: the scheduler has secrets of its own, and no value leaves this machine.
    secrets_from_submitter: bool = True


BUILT_IN: dict[str, BackendTraits] = {
    traits.name: traits
    for traits in (
        BackendTraits(
            "local",
            "this machine",
            "scaletrain_cli.launch.backends.local.backend:LocalBackend",
            "a process",
            max_nodes=1,
            runs_here=True,
        ),
        BackendTraits(
            "slurm",
            "Slurm",
            "scaletrain_cli.launch.backends.slurm.backend:SlurmBackend",
            "a batch script for sbatch",
            SlurmSpec,
        ),
        BackendTraits(
            "kubernetes",
            "Kubernetes",
            "scaletrain_cli.launch.backends.kubernetes.backend:KubernetesBackend",
            "objects for the API server",
            KubernetesSpec,
            shared_run_directory=False,
            secrets_from_submitter=False,
        ),
    )
}
DEFAULT = "local"


def backend_traits(name: str) -> BackendTraits:
    """Return the traits of the back end that ``cluster.scheduler`` names.

    Raises UsageError, with the installed names, for an unknown name and for a package whose entry cannot be loaded.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    entry = _entries().get(name)
    if entry is None:
        known = backend_names()
        raise UsageError(f"no back end is named {name}. {did_you_mean(name, known)}Installed: {', '.join(known)}.")
    return _load(name)


def display_name(name: str) -> str:
    """Return the name of the back end for sentences; ``name`` itself if the back end is not installed."""
    try:
        return backend_traits(name).display_name
    except UsageError:
        return name


def backend_names() -> list[str]:
    """Return the names of all installed back ends, those of this package first. Imports none of them."""
    return [*BUILT_IN, *sorted(_entries().keys() - BUILT_IN.keys())]


def installed_backends() -> list[BackendTraits]:
    """Return the traits of every installed back end; back ends that cannot be loaded are left out."""
    found = list(BUILT_IN.values())
    for name in backend_names()[len(BUILT_IN) :]:
        try:
            found.append(_load(name))
        except UsageError:  # reported when a spec names it
            continue
    return found


@cache
def _entries() -> dict[str, Any]:
    """Return the entry points of other packages by name: one cached scan of all installed packages."""
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


@cache
def _load(name: str) -> BackendTraits:
    entry = _entries()[name]
    package = entry.dist.name if entry.dist is not None else "an installed package"
    try:
        traits = entry.load()
    except Exception as error:  # any, since the module is another package's
        raise UsageError(
            f"the back end {name} of {package} cannot be loaded ({entry.value}): {type(error).__name__}: {error}. "
            f"Installed: {listed(backend_names())}."
        ) from error
    if not isinstance(traits, BackendTraits) or traits.name != name:
        raise UsageError(
            f"the back end {name} of {package} is not declared correctly: {entry.value} must be BackendTraits with the "
            f"name {name}. Installed: {listed(backend_names())}."
        )
    return traits
