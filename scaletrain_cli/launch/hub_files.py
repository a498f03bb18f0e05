"""Files of the Hugging Face Hub at submission: commits of references, and the fetch to a cache that nodes share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from scaletrain_cli.hub.cache import HubSettings
from scaletrain_cli.hub.client import resolve
from scaletrain_cli.launch.hub_fetch import FetchProgress, fetch
from scaletrain_cli.launch.resource_checks.view import View
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.evaluation import ZERO_SHOT
from scaletrain_cli.spec.hub_files import hub_environment, hub_uses, with_local_files
from scaletrain_cli.spec.shared_paths import is_shared

# The variable for what ranks do instead of training, and its value for runs that only measure their nodes, which read
# no files.
ONLY, MEASURES_ONLY = "SCALETRAIN_ONLY", "preflight"
# The sections with the data of a run, for ``fetched_spec``.
DATA = ("data", ZERO_SHOT)


def environment_here(spec: RunSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for requests from this machine, with the variables of the hub in ``env`` of the spec."""
    return hub_environment(spec.env, spec.secret_env, environment, runs_here=spec.cluster.traits.runs_here)


def resolve_commits(
    spec: RunSpec, environment: Mapping[str, str], known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the commit of each reference of the spec; those in ``known`` stay as they are.

    A full commit hash needs no request. Raises HubError and MissingPackageError.
    """
    settings = HubSettings.from_environment(environment_here(spec, environment))
    commits = {}
    for use in hub_uses(spec):
        named, before = use.reference, (known or {}).get(use.text)
        commits[use.text] = before or (named.revision if named.is_pinned else resolve(named, settings).commit)
    return commits


def shared_cache(spec: RunSpec, environment: Mapping[str, str]) -> HubSettings | None:
    """Return the settings of the nodes' cache if it is on a file system that this machine shares with them.

    None where each node fetches for itself, and where the run is on this machine.
    """
    traits = spec.cluster.traits
    if traits.runs_here or not traits.shared_run_directory:
        return None
    # What the job's environment keeps of the submitter's, and the cache depends on.
    kept = {name: environment[name] for name in ("HOME", "USER") if name in environment}
    settings = HubSettings.from_environment({**kept, **spec.env})
    if not is_shared(PurePosixPath(settings.cache)):
        return None
    in_container = View(spec, Path.cwd(), environment).unseen(str(settings.cache))
    return None if in_container else settings


def fetch_to_shared_cache(
    spec: RunSpec,
    commits: Mapping[str, str],
    environment: Mapping[str, str],
    on_progress: Callable[[FetchProgress], None] = lambda progress: None,
) -> None:
    """Fetch the files of the spec before the job is submitted, if its nodes share their cache with this machine.

    The nodes then find everything, and no allocated device waits for a download. Raises HubError, FetchError and
    OSError.
    """
    settings = shared_cache(spec, environment)
    if settings is None or not commits or spec.env.get(ONLY) == MEASURES_ONLY:
        return
    here = environment_here(spec, environment) | {"HF_HUB_CACHE": str(settings.cache)}
    fetch(hub_uses(spec), commits, here, on_progress=on_progress)


def fetched_spec(
    spec: RunSpec,
    keys: str | Sequence[str],
    on_progress: Callable[[FetchProgress], None] = lambda progress: None,
    known: Mapping[str, str] | None = None,
    *,
    offline: bool = False,
) -> RunSpec:
    """Return the spec with local paths, after a fetch on this machine: for verbs that read files here.

    ``keys``: a key or a section, or several such as DATA. ``known``: commits that a run has recorded. ``offline``: send
    no request, and take what is in the cache.
    Raises HubError, FetchError and OSError.
    """
    sections = (keys,) if isinstance(keys, str) else keys
    uses = [use for use in hub_uses(spec) if any(f"{use.key}.".startswith(f"{section}.") for section in sections)]
    if not uses:
        return spec
    environment = environment_here(spec, os.environ) | ({"HF_HUB_OFFLINE": "1"} if offline else {})
    commits = resolve_commits(spec, environment, known)
    fetch(uses, commits, environment, on_progress=on_progress)
    wanted = {use.text: commits[use.text] for use in uses}
    return with_local_files(spec, wanted, HubSettings.from_environment(environment))
