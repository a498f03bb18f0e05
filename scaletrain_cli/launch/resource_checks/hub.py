"""Check references to the Hugging Face Hub at submission, without fetching weights or data.

Fetched are lists of files, configs, indices, tokenizers, and the headers of safetensors files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import MissingPackageError, Problem, UsageError
from scaletrain_cli.hub.cache import VARIABLES, HubFile, HubSettings, Listing, missing_files
from scaletrain_cli.hub.reference import HubError
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.hub_files import environment_here, shared_cache
from scaletrain_cli.launch.resource_checks.files import (
    View,
    adapter_config_problems,
    config_problems,
    tokenizer_problem,
    weights_problem,
)
from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.hub_files import HubUse, hub_uses, local_path, selected_files

_FIRST_BYTES = 1 << 17  # holds the header of most files
_LARGEST_HEADER_BYTES = 100_000_000
_REQUESTS = 8  # at a time
_MOST_SHOWN = 3
_MIRROR = "HF_ENDPOINT"
_OFFLINE = ("hub.offline-commit", "hub.offline-files")
_NAMES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


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
    from scaletrain_cli.hub.client import resolve

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
    """Yield notes on variables that decide on the hub here and not on the nodes, and on a cache that only they see."""
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


def _problems(view: View, use: HubUse, settings: HubSettings) -> Iterator[Reason]:
    from scaletrain_cli.hub.client import read_small_file, require_online, require_readable, resolve

    listing = resolve(use.reference, settings, view.hub.get(use.text))
    files = selected_files(use, listing, lambda file: read_small_file(listing, file, settings))
    missing = missing_files(settings, listing, files)
    if missing:
        require_online(listing, tuple(missing), settings)
        require_readable(listing, missing[-1], settings)
    if use.purpose == "tokenizer":
        read_small_file(listing, files[0], settings)
        if reason := tokenizer_problem(Path(local_path(use, settings, listing.commit)), view.spec):
            yield reason
    elif use.purpose == "adapter":
        read_small_file(listing, files[0], settings)
        folder = Path(local_path(use, settings, listing.commit))
        yield from adapter_config_problems(folder, getattr(view.spec.model, "adapter", None))
    elif use.purpose == "weights":
        yield from _weights(view, use, listing, files, missing, settings)
    if listing.restricted and missing and not _nodes_may_read(view):
        hint = backend_for(view.spec.cluster.scheduler).secret_hint(_NAMES[0])
        yield Reason("hub.no-token-on-nodes", {"repo": use.reference.repo, "hint": hint})


def _nodes_may_read(view: View) -> bool:
    """Return whether the nodes have a token, or find the files in a cache that is filled before the job starts."""
    spec, backend = view.spec, backend_for(view.spec.cluster.scheduler)
    if spec.cluster.traits.runs_here or shared_cache(spec, view.environment) is not None:
        return True
    return any(backend.passes_on(spec, name, view.environment) for name in _NAMES)


def _weights(
    view: View, use: HubUse, listing: Listing, files: tuple[HubFile, ...], missing: list[HubFile], settings: HubSettings
) -> Iterator[Reason]:
    from scaletrain_cli.hub.client import read_small_file

    folder = Path(local_path(use, settings, listing.commit))
    if not missing:
        if reason := weights_problem(folder):
            yield reason
            return
    else:
        for file in files:
            if file.path.rpartition("/")[2] == "config.json":
                read_small_file(listing, file, settings)
    try:
        found = list(config_problems(folder, view.spec.transformer))
    except UsageError as error:
        yield Reason("checks.weights-config-unusable", {"why": error.message.rstrip(".")})
        return
    yield from found
    if not found and missing and isinstance(view.spec.model, ModelSpec):
        shards = [file for file in files if file.path.endswith(".safetensors")]
        with ThreadPoolExecutor(_REQUESTS) as pool:
            headers = list(pool.map(lambda file: _header(listing, file, settings), shards))
        yield from _shape_problems(view.spec.transformer, shards, headers)


def _header(listing: Listing, file: HubFile, settings: HubSettings) -> dict[str, Any] | None:
    """Return the header of a safetensors file (8 bytes of its length, then JSON); None for another kind of file.

    Source: github.com/huggingface/safetensors, section Format.
    """
    from scaletrain_cli.hub.client import read_range

    if file.size is None or file.size < 8:
        return None
    data = read_range(listing, file, settings, 0, min(_FIRST_BYTES, file.size))
    length = int.from_bytes(data[:8], "little")
    if length > min(_LARGEST_HEADER_BYTES, file.size - 8):
        return None
    if length > len(data) - 8:
        data += read_range(listing, file, settings, len(data), 8 + length - len(data))
    try:
        header = json.loads(data[8 : 8 + length])
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None
    return header if file.size == 8 + length + max(ends, default=0) else None


def _shape_problems(model: ModelSpec, files: list[HubFile], headers: list[dict[str, Any] | None]) -> Iterator[Reason]:
    """Yield files that are not complete safetensors, and tensors of the model that have another shape in the files.

    Names that differ between the files of an architecture and the engine are left to the ranks, which know them.
    """
    stored: dict[str, tuple[int, ...]] = {}
    for file, header in zip(files, headers, strict=True):
        if header is None:
            yield Reason("checks.weights-file", {"file": file.path})
            return
        stored |= {name: tuple(entry.get("shape", ())) for name, entry in header.items() if name != "__metadata__"}
    names = {
        name.partition(".")[2] if name.split(".")[0] in ("model", "transformer") else name: name for name in stored
    }
    differing, known = [], 0
    for parameter in model_parameters(model):
        base = parameter.name.partition(".")[2]
        name = parameter.name if parameter.name in stored else names.get(base)
        if name is None:
            continue
        known += 1
        if stored[name] != parameter.shape:
            differing.append(f"{name} is {_shape(stored[name])}, the spec has {_shape(parameter.shape)}")
    if not known:
        yield Reason("hub.other-model", {"files": len(files)})
    elif differing:
        yield Reason("hub.shapes-differ", {"count": len(differing), "shown": differing[:_MOST_SHOWN]})


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a number"
