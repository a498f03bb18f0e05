"""The local cache of the Hugging Face Hub: where it is, which commits and files it holds, and which were verified.

The layout is that of huggingface_hub, so that other programs find the files: ``models--org--name/`` with ``blobs/``,
``refs/<revision>`` and ``snapshots/<commit>/``. Beside them, ``.scaletrain/<commit>.json`` keeps the list of the
repository's files and which of them were compared with their hashes. Needs no request and no library.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scaletrain_cli.hub.reference import HubReference, is_commit
from scaletrain_cli.safe_files import make_folder, open_to_read, replace_file

DEFAULT_ENDPOINT = "https://huggingface.co"
_TRUE = ("1", "ON", "YES", "TRUE")
_NOTES = ".scaletrain"
_CHUNK_BYTES = 1 << 22
_IN_SNAPSHOT = re.compile(r"/((?:models|datasets|spaces)--[^/]+/snapshots/[0-9a-f]{40}(?:/.*)?)$", re.DOTALL)
FOLDER_MODE = 0o777  # less the umask, as huggingface_hub creates its folders: a cache is often shared
# The variables that this module reads; spec.env passes them on to the nodes.
VARIABLES = ("HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HUGGINGFACE_HUB_CACHE")
CACHE_VARIABLES = frozenset({"HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"})
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
TOKEN_PATH = "HF_TOKEN_PATH"
NO_TOKEN = "HF_HUB_DISABLE_IMPLICIT_TOKEN"  # if true, no token is read or sent


@dataclass(frozen=True)
class HubSettings:
    """Cache, endpoint, offline mode and token, from environment variables. The token is not in the repr."""

    cache: Path
    endpoint: str = DEFAULT_ENDPOINT
    offline: bool = False
    token: str | None = field(default=None, repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "HubSettings":
        """Return the settings by the rules of huggingface_hub, which reads its variables when it is imported."""
        return cls(
            cache=cache_folder(environment),
            endpoint=endpoint_of(environment),
            offline=is_offline(environment),
            token=_token(environment, _home(environment)),
        )

    def repo_folder(self, reference: HubReference) -> Path:
        """Return the folder of a repository in the cache."""
        return self.cache / "--".join([f"{reference.kind}s", *reference.repo.split("/")])

    def snapshot(self, reference: HubReference, commit: str) -> Path:
        """Return the folder that holds the files of a commit under their own names."""
        return self.repo_folder(reference) / "snapshots" / commit


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the cache. Reads no file."""
    cache = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    return _expanded(cache, environment) if cache else _home(environment) / "hub"


def path_in_cache(path: str) -> str:
    """Return the part of a path below the cache that holds it; empty for one that is not in a snapshot of the hub."""
    match = _IN_SNAPSHOT.search(path)
    return "" if match is None else match[1]


def endpoint_of(environment: Mapping[str, str]) -> str:
    """Return the address of the hub, without a slash at its end."""
    return (environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def is_offline(environment: Mapping[str, str]) -> bool:
    """Return whether no request may be sent."""
    return (environment.get("HF_HUB_OFFLINE") or environment.get("TRANSFORMERS_OFFLINE") or "").upper() in _TRUE


def _home(environment: Mapping[str, str]) -> Path:
    if given := environment.get("HF_HOME"):
        return _expanded(given, environment)
    base = environment.get("XDG_CACHE_HOME")
    return (_expanded(base, environment) if base else _expanded("~/.cache", environment)) / "huggingface"


def _expanded(path: str, environment: Mapping[str, str]) -> Path:
    """Return the path with ``~`` and ``$NAME`` of this environment replaced."""
    if path == "~" or path.startswith("~/"):
        path = (environment.get("HOME") or os.path.expanduser("~")) + path[1:]
    for name in ("HOME", "USER"):
        path = path.replace(f"${{{name}}}", environment.get(name, "")).replace(f"${name}", environment.get(name, ""))
    return Path(path).absolute()


def _token(environment: Mapping[str, str], home: Path) -> str | None:
    if environment.get(NO_TOKEN, "").upper() in _TRUE:
        return None
    for name in TOKEN_VARIABLES:
        if value := environment.get(name, "").strip():
            return value
    given = environment.get(TOKEN_PATH)
    path = _expanded(given, environment) if given else home / "token"
    with contextlib.suppress(OSError, ValueError), open_to_read(path) as file:
        return file.read().decode().strip() or None
    return None


@dataclass(frozen=True)
class HubFile:
    """One file of a repository. ``sha256`` is known for large files (LFS), ``blob_id`` (git's hash) for all others."""

    path: str
    size: int | None
    sha256: str | None = None
    blob_id: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a path that leads out of its folder; neither a hub nor a shared cache is trusted."""
        if "\0" in self.path or any(part in ("", ".", "..") for part in self.path.split("/")):
            raise ValueError(f"{self.path!r} is not the path of a file in a repository")


@dataclass(frozen=True)
class Listing:
    """The files of a repository at a commit.

    ``from_hub``: as the hub states them, now or when they were fetched; otherwise only those found in the cache, which
    may be a part. ``restricted``: the repository is private or gated, so that reading a file requires a token.
    """

    reference: HubReference
    commit: str
    files: tuple[HubFile, ...]
    from_hub: bool = True
    restricted: bool = False

    def find(self, path: str) -> HubFile | None:
        """Return the file with exactly this path."""
        return next((file for file in self.files if file.path == path), None)


def cached_commit(settings: HubSettings, reference: HubReference) -> str | None:
    """Return the commit of the reference as the cache knows it; None if it does not."""
    if reference.is_pinned:
        return reference.revision
    path = settings.repo_folder(reference) / "refs" / reference.revision
    with contextlib.suppress(OSError, UnicodeDecodeError):
        commit = path.read_text(encoding="utf-8").strip()
        return commit if is_commit(commit) else None
    return None


def cached_listing(settings: HubSettings, reference: HubReference, commit: str) -> Listing | None:
    """Return the list of files that was kept with an earlier answer of the hub, else the files found in the cache."""
    listing, _ = _read_notes(settings, reference, commit)
    if listing is not None:
        return listing
    folder = settings.snapshot(reference, commit)
    files = []
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):
            if path.is_file():
                files.append(HubFile(path.relative_to(folder).as_posix(), path.stat().st_size))
    return Listing(reference, commit, tuple(files), from_hub=False) if files else None


def missing_files(settings: HubSettings, listing: Listing, files: tuple[HubFile, ...]) -> list[HubFile]:
    """Return the files that the cache lacks, has in another size, or has never compared with their hash.

    Files of a listing without hashes only have to exist.
    """
    folder = settings.snapshot(listing.reference, listing.commit)
    _, verified = _read_notes(settings, listing.reference, listing.commit)

    def is_missing(file: HubFile) -> bool:
        try:
            state = (folder / file.path).stat()
        except OSError:
            return True
        wrong_size = file.size is not None and state.st_size != file.size
        has_hash = file.sha256 is not None or file.blob_id is not None
        return wrong_size or (has_hash and verified.get(file.path) != [state.st_size, state.st_mtime_ns])

    return [file for file in files if is_missing(file)]


def _notes_path(settings: HubSettings, reference: HubReference, commit: str) -> Path:
    return settings.repo_folder(reference) / _NOTES / f"{commit}.json"


def _read_notes(
    settings: HubSettings, reference: HubReference, commit: str
) -> tuple[Listing | None, dict[str, list[int]]]:
    """Return the list of files, and the size and time of modification of the verified ones by path."""
    try:
        data: Any = json.loads(_notes_path(settings, reference, commit).read_bytes())
        files = tuple(HubFile(**file) for file in data["files"])
        verified = {str(path): [int(size), int(time)] for path, (size, time) in data["verified"].items()}
        return Listing(reference, commit, files, restricted=bool(data["restricted"])), verified
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, {}  # not there, or of another version: asked for again


def keep_listing(settings: HubSettings, listing: Listing, verified: tuple[HubFile, ...] = ()) -> None:
    """Keep the hub's list of files, with ``verified`` added to the verified ones. Raises OSError."""
    _, known = _read_notes(settings, listing.reference, listing.commit)
    folder = settings.snapshot(listing.reference, listing.commit)
    for file in verified:
        state = (folder / file.path).stat()
        known[file.path] = [state.st_size, state.st_mtime_ns]
    path = _notes_path(settings, listing.reference, listing.commit)
    make_folder(path.parent, mode=FOLDER_MODE)
    data = {"files": [asdict(file) for file in listing.files], "restricted": listing.restricted, "verified": known}
    replace_file(path, json.dumps(data), public=True)


def keep_commit(settings: HubSettings, reference: HubReference, commit: str, *, fetched: bool) -> None:
    """Note the commit of a branch or tag, as huggingface_hub does. Raises OSError.

    Unless files were ``fetched``, a commit whose files are in the cache is not replaced by one whose files are not:
    programs that work offline would no longer find them.
    """
    if reference.is_pinned:
        return
    before = cached_commit(settings, reference)
    has_files = before is not None and settings.snapshot(reference, before).is_dir()
    if before == commit or (has_files and not fetched and not settings.snapshot(reference, commit).is_dir()):
        return
    path = settings.repo_folder(reference) / "refs" / reference.revision
    make_folder(path.parent, mode=FOLDER_MODE)
    replace_file(path, commit, public=True)


def differing_hash(path: Path, file: HubFile) -> str | None:
    """Return the name of the hash in which the content differs from what the hub states; None if it agrees.

    SHA-256 for large files (LFS), git's hash for all others. Raises OSError.
    """
    if file.sha256 is not None:
        name, expected, digest = "SHA-256", file.sha256, hashlib.sha256()
    elif file.blob_id is not None and len(file.blob_id) == 40:
        name, expected = "git hash", file.blob_id
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    else:
        return None
    with path.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    return None if digest.hexdigest() == expected.lower() else name
