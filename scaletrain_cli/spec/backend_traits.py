"""The traits of a back end that spec, planner, engine and run directory need, without importing the back end.

A back end declares one ``BackendTraits``. Those of this package are defined here; another package registers its own
through the entry-point group ``scaletrain.backends`` (docs/extending.md). No module but this one and launch/backends/
names a scheduler: all other code uses a trait, or a method of the back end.
"""

from dataclasses import dataclass
from functools import cache

from scaletrain_cli.errors import UsageError
from scaletrain_cli.plugins import BACKENDS, Plugin, plugins
from scaletrain_cli.spec.kubernetes import KubernetesSpec
from scaletrain_cli.spec.section import BackendSection
from scaletrain_cli.spec.slurm import SlurmSpec
from scaletrain_cli.text import did_you_mean


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
    # A job may submit other jobs from its nodes, as evaluations of its checkpoints.
    submits_from_nodes: bool = False
    # The job may start with any number of nodes of a range (``cluster.nodes: {min: 2, max: 8}``); if not, the reason as
    # a clause.
    takes_node_range: bool = False
    no_node_range_because: str = ""
    # The job may hold nodes beyond those of an attempt (``cluster.spare_nodes``), and replace one that fails.
    takes_spare_nodes: bool = False
    # The extras of this package, with commas, that a login node needs to submit to it.
    extras: str = "train"


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
            submits_from_nodes=True,
            takes_node_range=True,
            takes_spare_nodes=True,
            extras="train,slurm",  # its nodes use the same environment
        ),
        BackendTraits(
            "kubernetes",
            "Kubernetes",
            "scaletrain_cli.launch.backends.kubernetes.backend:KubernetesBackend",
            "objects for the API server",
            KubernetesSpec,
            shared_run_directory=False,
            secrets_from_submitter=False,
            extras="k8s",
            no_node_range_because=(
                "because partial admission of Kueue exists only for batch/Job, and not for a JobSet or a TrainJob"
            ),
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
    if name not in added_backends():
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
    return [*BUILT_IN, *added_backends()]


def installed_backends() -> list[BackendTraits]:
    """Return the traits of every installed back end; back ends that cannot be loaded are left out."""
    backends = list(BUILT_IN.values())
    for name in added_backends():
        try:
            backends.append(_load(name))
        except UsageError:  # reported when a spec names it
            continue
    return backends


def added_backends() -> dict[str, Plugin]:
    """Return the back ends of other packages by name. Imports none of them."""
    return plugins(BACKENDS, BUILT_IN)


@cache
def _load(name: str) -> BackendTraits:
    plugin = added_backends()[name]
    traits = plugin.load(BackendTraits)
    if traits.name != name:
        raise plugin.invalid(f"has the name {traits.name}, not that of its entry point")
    if not (isinstance(traits.section, type) and issubclass(traits.section, BackendSection)):
        raise plugin.invalid("has a section that is not a subclass of BackendSection")
    with plugin.errors():
        required = [key for key, field in traits.section.model_fields.items() if field.is_required()]
    if required:
        raise plugin.invalid(f"has a section whose key {required[0]} has no default")
    return traits
