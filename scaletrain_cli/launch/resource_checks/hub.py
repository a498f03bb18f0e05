"""Check references to the Hugging Face Hub at submission, without fetching weights or data.

Fetched are lists of files, configs, indices, tokenizers, and the headers of safetensors files. And check
that a mirror can be written.
"""

import contextlib
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from scaletrain_cli.errors import MissingPackageError, Problem, ScaletrainError
from scaletrain_cli.extras import install_command
from scaletrain_cli.hub.cache import TOKEN_VARIABLES, VARIABLES, HubFile, HubSettings, Listing, missing_files
from scaletrain_cli.hub.client import read_range, read_small_file, require_online, require_readable, resolve
from scaletrain_cli.hub.reference import HubError
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.hub_fetch import environment_here, shared_cache
from scaletrain_cli.launch.resource_checks.files import tokenizer_problem
from scaletrain_cli.launch.resource_checks.view import (
    LOOK_SECONDS,
    UNSEEN_REMOTE,
    CheckResults,
    View,
    notes_on_files,
    unwritable,
)
from scaletrain_cli.launch.resource_checks.weights import (
    adapter_config_problems,
    config_problems,
    damage_of,
    factor_problem,
    folder_problems,
    header_problems,
)
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec.corpus_files import TOKEN_FILES
from scaletrain_cli.spec.hub_files import CONFIG, HubUse, hub_uses, local_path, selected_files, source_files_of
from scaletrain_cli.spec.mirror import is_in_store
from scaletrain_cli.spec.weight_files import DamagedHeaderError, Header, header_bytes, parsed_headers, read_headers

_FIRST_BYTES = 1 << 17  # holds the header of most files
_REQUESTS = 8  # at a time
_MIRROR = "HF_ENDPOINT"
_OFFLINE = ("hub.offline-commit", "hub.offline-files")


def hub_problems(view: View) -> Iterator[Problem]:
    """Yield why a reference cannot be resolved, read or used; nothing on the nodes, which have the files."""
    if view.on_node:
        return
    settings = HubSettings.from_environment(environment_here(view.spec, view.environment))
    for use in hub_uses(view.spec):
        if use.purpose in ("weights", "adapter") and view.begun:
            continue
        try:
            for reason in _problems(view, use, settings):
                yield view.problem(use.key, reason, use.text)
        except HubError as error:
            if not _is_for_nodes_alone(view, settings, error.why):
                yield view.problem(use.key, error.why, use.text)
        except MissingPackageError as error:
            yield view.problem(use.key, Reason("hub.no-package", {"command": error.command}), use.text)
        except OSError as error:
            yield view.problem(use.key, Reason("hub.fetch-failed", {"said": str(error)}), use.text)


def _is_for_nodes_alone(view: View, settings: HubSettings, why: Reason) -> bool:
    """Return True if the nodes may have what is missing here: a cache of their own, or a mirror in their network."""
    if view.spec.cluster.traits.runs_here or shared_cache(view.spec, view.environment) is not None:
        return False
    return why.code in _OFFLINE if settings.offline else why.code == "hub.unreachable" and _MIRROR in view.spec.env


def _first_refusal(view: View, settings: HubSettings) -> Reason | None:
    """Return why the first reference cannot be resolved or, offline, read; None if all can."""
    for use in hub_uses(view.spec):
        try:
            resolve(use.reference, settings, view.hub.get(use.text))
            if settings.offline:  # sends no request
                list(_problems(view, use, settings))
        except HubError as error:
            return error.why
        except (MissingPackageError, OSError):
            return None  # a problem
    return None


def hub_notes(view: View) -> Iterator[Reason]:
    """Yield notes on files that are not read, on variables that decide on the hub here and not on the nodes, and on a
    cache that only the nodes see.
    """
    if not view.on_node:
        yield from _files_not_read(view)
    if view.on_node or view.spec.cluster.traits.runs_here or not hub_uses(view.spec):
        return
    differing = [name for name in VARIABLES if view.environment.get(name) and name not in view.spec.env]
    if differing:
        yield Reason("hub.variables-not-passed", {"names": differing})
    settings = HubSettings.from_environment(environment_here(view.spec, view.environment))
    if not settings.offline and _MIRROR not in view.spec.env:
        return
    why = _first_refusal(view, settings)
    if why is not None and _is_for_nodes_alone(view, settings, why):
        keys = [f"{use.key} = {use.text}" for use in hub_uses(view.spec)]
        yield Reason("hub.not-checked", {"keys": keys, "why": why})


def _files_not_read(view: View) -> Iterator[Reason]:
    """Yield the files of splits that are not read; nothing for what cannot be listed here, which is a problem."""
    settings = HubSettings.from_environment(environment_here(view.spec, view.environment))
    for use in hub_uses(view.spec):
        if use.purpose == "source":
            with contextlib.suppress(HubError, MissingPackageError, OSError):
                left_out = Counter[str]()
                source_files_of(use, resolve(use.reference, settings, view.hub.get(use.text)), left_out)
                yield from notes_on_files(use.key, use.text, left_out)


def _problems(view: View, use: HubUse, settings: HubSettings) -> Iterator[Reason]:
    listing = resolve(use.reference, settings, view.hub.get(use.text))
    files = selected_files(use, listing, lambda file: read_small_file(listing, file, settings))
    missing = missing_files(settings, listing, files)
    if missing:
        require_online(listing, tuple(missing), settings)
        require_readable(listing, missing[-1], settings)
    if use.purpose == "tokenizer":
        for file in (files[0], *(file for file in files if file.path.endswith((*TOKEN_FILES, CONFIG)))):
            read_small_file(listing, file, settings)
        if reason := tokenizer_problem(Path(local_path(use, settings, listing.commit)), view.spec):
            yield reason
    elif use.purpose == "adapter":
        read_small_file(listing, files[0], settings)
        folder = Path(local_path(use, settings, listing.commit))
        differing = list(adapter_config_problems(folder, getattr(view.spec.model, "adapter", None), use.reference.repo))
        yield from differing
        path = folder / "adapter_model.safetensors"
        read = (lambda: _headers(listing, files[1], settings)) if missing else (lambda: read_headers(path))
        if not differing and (reason := factor_problem(read, view.spec, files[1].path)):
            yield reason
    elif use.purpose == "weights":
        yield from _weights(view, use, listing, files, missing, settings)
    if listing.restricted and missing and not _nodes_may_read(view):
        hint = backend_for(view.spec.cluster.scheduler).secret_hint(TOKEN_VARIABLES[0])
        yield Reason("hub.no-token-on-nodes", {"repo": use.reference.repo, "hint": hint})


def _nodes_may_read(view: View) -> bool:
    """Return whether the nodes have a token, or find the files in a cache that is filled before the job starts."""
    spec, backend = view.spec, backend_for(view.spec.cluster.scheduler)
    if spec.cluster.traits.runs_here or shared_cache(spec, view.environment) is not None:
        return True
    return any(backend.passes_on(spec, name, view.environment) for name in TOKEN_VARIABLES)


def _weights(
    view: View, use: HubUse, listing: Listing, files: tuple[HubFile, ...], missing: list[HubFile], settings: HubSettings
) -> Iterator[Reason]:
    folder = Path(local_path(use, settings, listing.commit))
    weights = next(initial for initial in view.spec.initial_weights if initial.key == use.key)
    if not missing:
        yield from folder_problems(folder, weights)
        return
    for file in files:
        if file.path.rpartition("/")[2] == "config.json":
            read_small_file(listing, file, settings)
    differing = list(config_problems(folder, weights))
    yield from differing
    if not differing:
        shards = [file for file in files if file.path.endswith(".safetensors")]
        with ThreadPoolExecutor(_REQUESTS) as pool:
            try:
                of_shards = list(pool.map(lambda file: _headers(listing, file, settings), shards))
            except DamagedHeaderError as error:
                yield damage_of(error)
                return
        headers = {name: header for shard in of_shards for name, header in shard.items()}
        yield from header_problems(headers, folder, weights, use.reference.place)


def _headers(listing: Listing, file: HubFile, settings: HubSettings) -> dict[str, Header]:
    """Return the tensors of a safetensors file of the hub, by its header. Raises DamagedHeaderError."""
    size = file.size or 0
    data = read_range(listing, file, settings, 0, min(_FIRST_BYTES, size)) if size else b""
    if (length := header_bytes(data, size)) is None:
        raise DamagedHeaderError(file.path)
    if length > len(data) - 8:
        data += read_range(listing, file, settings, len(data), 8 + length - len(data))
    return parsed_headers(file.path, data[8 : 8 + length], size)


def check_mirror(view: View) -> CheckResults:
    """Return the results for checkpoint.mirror. Writes a small object to a store, and deletes it. Never raises."""
    to, runs_here = view.spec.checkpoint.mirror.to, view.spec.cluster.traits.runs_here
    problem: Reason | None = None
    unseen: Reason | None = None  # why the mirror could not be checked
    if to is None:
        return CheckResults()
    if not is_in_store(to):
        problem = _folder_problem(view, to)
    elif find_spec("obstore") is None:
        problem = Reason("mirror.no-library", {"command": install_command("remote")})
        unseen = None if runs_here else problem
    elif cause := _refused_write(view, to):
        problem = Reason("mirror.not-writable", {"cause": cause})
        unseen = cause if cause.code in UNSEEN_REMOTE and not runs_here else None
    if unseen is not None:
        return CheckResults(warnings=(Reason("mirror.not-checked", {"place": to, "cause": unseen}),))
    return CheckResults(() if problem is None else (view.problem("checkpoint.mirror.to", problem, to),))


def _refused_write(view: View, to: str) -> Reason | None:
    """Return why a small object cannot be written to a store, or deleted; None if it can."""
    from scaletrain_cli.mirror.object_store import store_variables

    try:
        with store_variables(view.spec.env):
            from scaletrain_cli.mirror.object_store import ObjectStore

            store, name = ObjectStore(to, LOOK_SECONDS), f".scaletrain-{secrets.token_hex(8)}"
            store.write(name, b"written to check a run spec")
            store.delete(name)
    except ScaletrainError as error:
        return error.reason or Reason("recorded.text", {"text": str(error)})
    return None


def _folder_problem(view: View, to: str) -> Reason | None:
    if view.unseen(to):
        return None
    folder = Path(os.path.realpath(expand_home(to)))
    if folder.is_relative_to(os.path.realpath(runs_root())):
        return Reason("mirror.inside-run", {"place": to})
    return unwritable(folder)
