"""Requests to the Hugging Face Hub: commits and files of a repository, the beginning of a file, and downloads.

Every failure becomes a HubError whose reason has a remedy; the text of a token appears in none.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import urlsplit

from scaletrain_cli.errors import MissingPackageError
from scaletrain_cli.extras import install_command
from scaletrain_cli.hub.cache import (
    FOLDER_MODE,
    HubFile,
    HubSettings,
    Listing,
    cached_commit,
    cached_listing,
    differing_hash,
    keep_commit,
    keep_listing,
    missing_files,
)
from scaletrain_cli.hub.reference import HubError, HubReference, is_commit
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import closing_descriptor, locked, make_folder, open_to_append, process_umask
from scaletrain_cli.secret_text import hide_values

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_TIMEOUT_SECONDS = 20.0
_DOWNLOADS = 3  # of one file whose content differs from its hash
_TRIES = 5  # without progress: a mirror that restarts, a signed address that has expired
_PAUSE_SECONDS = 1.0
_LONGEST_SAID = 300
_UNFINISHED = ".scaletrain-incomplete"


# Answers of the last minutes by endpoint, reference and cache, so that all references of one submission agree.
_listings: dict[tuple[str, HubReference, Path, bool], tuple[float, Listing]] = {}
_REMEMBERED_SECONDS = 600.0
# Requests without an answer, by what was asked: a silent mirror is not waited for again for each use of a repository.
_unanswered: dict[tuple[HubReference, HubSettings], tuple[float, HubError]] = {}
_UNANSWERED_SECONDS = 30.0


def resolve(reference: HubReference, settings: HubSettings, commit: str | None = None) -> Listing:
    """Return the commit of a reference and the files of its repository; ``commit`` is one resolved earlier.

    One request, none if the commit and its files are in the cache or HF_HUB_OFFLINE is set. If the hub cannot be
    reached, the cache answers. Raises HubError and MissingPackageError.
    """
    pinned = replace(reference, revision=commit or reference.revision, path="")
    key = (settings.endpoint, pinned, settings.cache, settings.offline)
    asked, listing = _listings.get(key, (float("-inf"), None))
    if listing is None or time.monotonic() - asked > _REMEMBERED_SECONDS:
        listing = _resolve(pinned, settings)
        _listings[key] = time.monotonic(), listing
    return replace(listing, reference=reference)


def _resolve(reference: HubReference, settings: HubSettings) -> Listing:
    commit = cached_commit(settings, reference)
    cached = None if commit is None else cached_listing(settings, reference, commit)
    if cached is not None and (settings.offline or (reference.is_pinned and cached.from_hub)):
        return cached
    if settings.offline:
        params = {"cache": str(settings.cache), "place": reference.place}
        raise HubError(Reason("hub.offline-commit", params))
    try:
        listing = _ask_once(reference, settings)
    except HubError as error:
        if error.temporary and cached is not None:
            return cached
        raise
    with contextlib.suppress(OSError):  # a cache that cannot be written: asked again next time
        keep_listing(settings, listing)
        keep_commit(settings, reference, listing.commit, fetched=False)
    return listing


def _ask_once(reference: HubReference, settings: HubSettings) -> Listing:
    """Return the answer of the hub; a hub that could not be reached a short time ago is not asked again."""
    tried, before = _unanswered.get((reference, settings), (float("-inf"), None))
    if before is not None and time.monotonic() - tried < _UNANSWERED_SECONDS:
        raise HubError(before.why, temporary=before.temporary) from before
    try:
        return _ask(reference, settings)
    except HubError as error:
        if error.why.code == "hub.unreachable":
            _unanswered[reference, settings] = time.monotonic(), error
        raise


def _ask(reference: HubReference, settings: HubSettings) -> Listing:
    api = _api(settings)
    with _readable_errors(reference, settings):
        info: Any = api.repo_info(
            reference.repo,
            revision=reference.revision,
            repo_type=reference.kind,
            files_metadata=True,
            timeout=_TIMEOUT_SECONDS,
        )
    files = []
    for entry in info.siblings or ():
        large = getattr(entry, "lfs", None)
        digest = large.get("sha256") if isinstance(large, dict) else getattr(large, "sha256", None)
        try:
            files.append(HubFile(entry.rfilename, entry.size, digest, None if digest else entry.blob_id))
        except ValueError as error:
            raise HubError(Reason("hub.not-a-hub", {"endpoint": settings.endpoint, "said": str(error)})) from error
    restricted = bool(getattr(info, "gated", False) or getattr(info, "private", False))
    if not isinstance(info.sha, str) or not is_commit(info.sha):
        raise HubError(Reason("hub.not-a-hub", {"endpoint": settings.endpoint, "said": "an answer without a commit"}))
    return Listing(reference, info.sha, tuple(files), restricted=restricted)


def require_readable(listing: Listing, file: HubFile, settings: HubSettings) -> None:
    """Send a request for the head of one file: the list of a gated repository is public, its files are not.

    Raises HubError and MissingPackageError.
    """
    _metadata(listing, file, settings)


def read_small_file(listing: Listing, file: HubFile, settings: HubSettings) -> Path:
    """Return the path of one file in the cache, fetched if necessary. For configs, indices and tokenizers.

    Raises HubError and MissingPackageError.
    """
    if files_to_fetch(listing, (file,), settings):
        require_online(listing, (file,), settings)
        download(listing, file, settings)
        with contextlib.suppress(OSError):
            keep_listing(settings, listing, (file,))
    return settings.snapshot(listing.reference, listing.commit) / file.path


def files_to_fetch(listing: Listing, files: tuple[HubFile, ...], settings: HubSettings) -> list[HubFile]:
    """Return the files that the cache lacks; those that another program has fetched are verified and noted."""
    missing = missing_files(settings, listing, files)
    folder = settings.snapshot(listing.reference, listing.commit)
    found = tuple(file for file in missing if _is_whole(folder / file.path, file))
    if found:
        with contextlib.suppress(OSError):  # a cache that cannot be written: verified again next time
            keep_listing(settings, listing, found)
    return [file for file in missing if file not in found]


def _is_whole(path: Path, file: HubFile) -> bool:
    """Return True if the file is there with the size and hash that the hub states."""
    try:
        size = path.stat().st_size
    except OSError:
        return False
    return (file.size is None or size == file.size) and differing_hash(path, file) is None


def require_online(listing: Listing, files: tuple[HubFile, ...], settings: HubSettings) -> None:
    """Raise HubError if files are to be fetched while HF_HUB_OFFLINE is set."""
    if settings.offline:
        names = [file.path for file in files]
        shown = names[:3] + (["..."] if len(names) > 3 else [])
        params = {"cache": str(settings.cache), "place": listing.reference.place, "count": len(names), "files": shown}
        raise HubError(Reason("hub.offline-files", params))


def read_range(listing: Listing, file: HubFile, settings: HubSettings, first: int, length: int) -> bytes:
    """Return the ``length`` bytes of a file from ``first`` on, without fetching the rest. Raises HubError."""
    require_library()
    from huggingface_hub.file_download import http_get

    found = _metadata(listing, file, settings)
    target = _AtMost(length)
    headers = {**_headers(settings, found.url, found.location), "Range": f"bytes={first}-{first + length - 1}"}
    with _readable_errors(listing.reference, settings, file.path), _no_bars():
        http_get(found.location, cast(BinaryIO, target), headers=headers, expected_size=length)
    return target.getvalue()


class _AtMost(io.BytesIO):
    """A buffer for an answer of at most ``length`` bytes. Raises ValueError for a server that ignores the range."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def write(self, data: Any) -> int:
        """Append the data."""
        if self.tell() + len(data) > self._length:
            raise ValueError("it ignores the Range of a request")
        return super().write(data)


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Hide the progress bars of huggingface_hub: progress is shown by ScaleTrain."""
    from huggingface_hub import utils

    bars: Any = utils
    hidden = bars.are_progress_bars_disabled()
    bars.disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            bars.enable_progress_bars()


@dataclass(frozen=True)
class _Location:
    url: str  # at the hub
    location: str  # where the content is: the same, or a content delivery network
    etag: str


def _metadata(listing: Listing, file: HubFile, settings: HubSettings) -> _Location:
    require_library()
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    reference = listing.reference
    url = hf_hub_url(
        reference.repo, file.path, repo_type=reference.kind, revision=listing.commit, endpoint=settings.endpoint
    )
    with _readable_errors(reference, settings, file.path):
        found = get_hf_file_metadata(
            url, token=settings.token or False, timeout=_TIMEOUT_SECONDS, endpoint=settings.endpoint
        )
    if found.commit_hash not in (None, listing.commit):
        said = f"it serves commit {found.commit_hash} in place of {listing.commit}"
        raise HubError(Reason("hub.not-a-hub", {"endpoint": settings.endpoint, "said": said}))
    if found.size is not None and file.size is not None and found.size != file.size:
        params = {"path": file.path, "place": reference.place, "bytes": found.size, "expected": file.size}
        raise HubError(Reason("hub.size-differs", params))
    return _Location(url, found.location, found.etag or "")


def _headers(settings: HubSettings, url: str, location: str) -> dict[str, str]:
    """Return the headers of a download. Only the hub gets the token, not another host that has the content."""
    from huggingface_hub.utils._headers import build_hf_headers

    own = urlsplit(url)[:2] == urlsplit(location)[:2]
    headers: dict[str, str] = build_hf_headers(token=(settings.token or False) if own else False)
    return {**headers, "Accept-Encoding": "identity"}  # a compressed answer could not be resumed


def require_library() -> None:
    """Raise MissingPackageError if huggingface_hub, which sends every request, is not installed."""
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        what = "References that begin with hf:// require huggingface_hub, which is not installed."
        raise MissingPackageError(what, install_command("hub")) from error


def _api(settings: HubSettings) -> HfApi:
    require_library()
    from huggingface_hub import HfApi

    return HfApi(endpoint=settings.endpoint, token=settings.token or False)


@contextlib.contextmanager
def _readable_errors(reference: HubReference, settings: HubSettings, path: str = "") -> Iterator[None]:
    """Turn the errors of huggingface_hub and of its HTTP library into HubError."""
    from huggingface_hub import errors

    expected: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, *_http_errors())
    try:
        yield
    except expected as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
            raise  # of the local file system
        status = getattr(getattr(error, "response", None), "status_code", None)
        who = "the account of the token" if settings.token else "a reader without a token"
        place = {"repo": reference.repo, "endpoint": settings.endpoint, "who": who, "status": status}
        if isinstance(error, errors.GatedRepoError):
            url = f"{settings.endpoint}/{'datasets/' if reference.kind == 'dataset' else ''}{reference.repo}"
            raise HubError(Reason("hub.gated", place | {"url": url})) from error
        if status == 401 and settings.token:
            raise HubError(Reason("hub.token-refused", place)) from error
        if isinstance(error, errors.RepositoryNotFoundError):
            raise HubError(Reason("hub.no-repository", place)) from error
        if isinstance(error, errors.RevisionNotFoundError):
            params = {"repo": reference.repo, "revision": reference.revision}
            raise HubError(Reason("hub.no-revision", params)) from error
        if isinstance(error, errors.EntryNotFoundError):
            params = {"repo": reference.repo, "revision": reference.revision, "path": path}
            raise HubError(Reason("hub.no-file", params)) from error
        if status in (401, 403):
            raise HubError(Reason("hub.forbidden", place)) from error
        if status is not None:
            raise HubError(Reason("hub.busy", place), temporary=status == 429 or status >= 500) from error
        said = " ".join(hide_values(f"{type(error).__name__}: {error}", [settings.token or ""]).split())
        code = "not-a-hub" if isinstance(error, errors.FileMetadataError | ValueError) else "unreachable"
        params = {"endpoint": settings.endpoint, "said": said[:_LONGEST_SAID]}
        raise HubError(Reason(f"hub.{code}", params), temporary=code == "unreachable") from error


def _http_errors() -> tuple[type[Exception], ...]:
    """Return the base errors of the HTTP library of huggingface_hub; which one it is depends on its version."""
    names = {"httpx2": ("HTTPError", "InvalidURL"), "httpx": ("HTTPError", "InvalidURL")}
    return tuple(
        getattr(sys.modules[module], name) for module, found in names.items() if module in sys.modules for name in found
    )


def download(
    listing: Listing, file: HubFile, settings: HubSettings, on_bytes: Callable[[int], None] = lambda count: None
) -> int:
    """Fetch one file into the cache, and return the number of bytes that were received over the network.

    Continues an interrupted download of this machine, and compares size and hash before the file appears under its
    name. ``on_bytes`` is called with the size of the file as it grows. Raises HubError and OSError.
    """
    folder, snapshot = settings.repo_folder(listing.reference), settings.snapshot(listing.reference, listing.commit)
    make_folder(folder / "blobs", mode=FOLDER_MODE)
    name = file.sha256 or file.blob_id or _metadata(listing, file, settings).etag.strip('"') or file.path
    blob = folder / "blobs" / name.replace("/", "--")
    target = snapshot / file.path
    make_folder(target.parent, mode=FOLDER_MODE)
    if _is_good(target, file):  # fetched by another program
        return 0
    with _blob_locks.setdefault(blob, threading.Lock()):  # two files may have the same content
        received = 0 if _is_good(blob, file) else _fill(blob, listing, file, settings, on_bytes)
    _link(blob, target)
    return received


def _fill(blob: Path, listing: Listing, file: HubFile, settings: HubSettings, on_bytes: Callable[[int], None]) -> int:
    """Download the content to ``blob``, and return the bytes received. Raises HubError and OSError."""
    # Of this machine: on some shared file systems a lock of another node has no effect.
    part = blob.with_name(f"{blob.name}.{socket.gethostname()}{_UNFINISHED}")
    received = 0
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(locked(blob.with_name(f"{part.name}.lock"), wait_seconds=0, shared=True)):
            part = part.with_name(f"{part.name}.{os.getpid()}")  # of another process, whose lock was given up
        for number in range(1, _DOWNLOADS + 1):
            received += _receive(listing, file, settings, part, on_bytes)
            algorithm = differing_hash(part, file)
            if algorithm is None:
                break
            part.unlink()
            if number == _DOWNLOADS:
                params = {"path": file.path, "place": listing.reference.place, "algorithm": algorithm}
                raise HubError(Reason("hub.hash-differs", params | {"attempts": number}), temporary=True)
        with closing_descriptor(open_to_append(part)) as descriptor:  # never a link that another user has made
            os.fchmod(descriptor, 0o666 & ~process_umask())
        os.replace(part, blob)
        with contextlib.suppress(OSError):
            blob.with_name(f"{blob.name}.{socket.gethostname()}{_UNFINISHED}.lock").unlink()
    return received


_blob_locks: dict[Path, threading.Lock] = {}


def _is_good(path: Path, file: HubFile) -> bool:
    """Return whether the complete file is there; remove one whose content is wrong."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return False
    if (file.size is None or size == file.size) and differing_hash(path, file) is None:
        return True
    path.unlink()
    return False


def _receive(
    listing: Listing, file: HubFile, settings: HubSettings, part: Path, on_bytes: Callable[[int], None]
) -> int:
    """Download to ``part`` from its present end on, and return the bytes received. Raises HubError."""
    require_library()
    from huggingface_hub.file_download import http_get

    first = received = part.stat().st_size if part.exists() else 0
    total, tries = 0, 0
    while True:
        try:
            # Asked again each time: the address of a content delivery network expires.
            found = _metadata(listing, file, settings)
            headers = _headers(settings, found.url, found.location)
            with os.fdopen(open_to_append(part), "r+b") as out, _no_bars():
                out.seek(0, os.SEEK_END)
                first = out.tell()
                if file.size is not None and first > file.size:
                    out.truncate(first := 0)
                    out.seek(0)
                if file.size is None or first < file.size:
                    with _readable_errors(listing.reference, settings, file.path):
                        http_get(
                            found.location, cast(BinaryIO, _Growing(out, on_bytes)), resume_size=first, headers=headers
                        )
            size = part.stat().st_size
            total += max(0, size - first)
            if file.size is None or size == file.size:
                return total
            params = {"path": file.path, "place": listing.reference.place, "bytes": size, "expected": file.size}
            raise HubError(Reason("hub.size-differs", params), temporary=True)
        except HubError as error:
            size = part.stat().st_size if part.exists() else 0
            tries = 1 if size > received else tries + 1
            if error.why.code != "hub.size-differs":
                total += max(0, size - first)
            received = size
            if not error.temporary or tries >= _TRIES:
                raise
            time.sleep(_PAUSE_SECONDS * 2 ** (tries - 1))


class _Growing(io.RawIOBase):
    """A file that reports its size as it grows."""

    def __init__(self, file: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        self._file, self._on_bytes = file, on_bytes

    def write(self, data: Any) -> int:
        """Write, and report the size of the file."""
        count = self._file.write(data)
        self._on_bytes(self._file.tell())
        return count

    def tell(self) -> int:
        """Return the position."""
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Change the position."""
        return self._file.seek(offset, whence)

    def truncate(self, size: int | None = None) -> int:
        """Cut the file."""
        return self._file.truncate(size)


def _link(blob: Path, target: Path) -> None:
    """Make ``target`` the name of the blob, as huggingface_hub does: a relative link, a hard link if there are none."""
    draft = target.with_name(f".{target.name}.{os.urandom(8).hex()}.tmp")
    try:
        draft.symlink_to(os.path.relpath(blob, target.parent))
    except OSError:
        os.link(blob, draft)
    os.replace(draft, target)
