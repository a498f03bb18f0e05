"""Requests to the Hugging Face Hub: commits and files of a repository, the beginning of a file, and downloads.

Every failure becomes a HubError whose reason has a remedy; the text of a token appears in none.
"""

import contextlib
import io
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import MissingPackageError
from scaletrain_cli.extras import install_command
from scaletrain_cli.hub import cache
from scaletrain_cli.hub.cache import HubFile, HubSettings, Listing
from scaletrain_cli.hub.reference import HubError, HubReference, is_commit
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import locked, make_folder, open_to_append, process_umask
from scaletrain_cli.secret_text import hide_values

_TIMEOUT_SECONDS = 20.0
_DOWNLOADS = 3  # of one file whose content differs from its hash
_TRIES = 5  # without progress: a mirror that restarts, a signed address that has expired
_PAUSE_SECONDS = 1.0
_LONGEST_SAID = 300
_UNFINISHED = ".scaletrain-incomplete"


# Answers by endpoint, reference, cache and offline mode, and when they expire: all references of one submission agree,
# and a silent mirror is not waited for again for each use of a repository.
_answers: dict[tuple[str, HubReference, Path, bool], tuple[float, Listing | HubError]] = {}
_REMEMBERED_SECONDS = 600.0
_UNANSWERED_SECONDS = 30.0


def resolve(reference: HubReference, settings: HubSettings, commit: str | None = None) -> Listing:
    """Return the commit of a reference and the files of its repository; ``commit`` is one resolved earlier.

    One request, none if the commit and its files are in the cache or HF_HUB_OFFLINE is set. If the hub cannot be
    reached, the cache answers. Raises HubError and MissingPackageError.
    """
    pinned = replace(reference, revision=commit or reference.revision, path="")
    key = (settings.endpoint, pinned, settings.cache, settings.offline)
    expires, answer = _answers.get(key, (0.0, None))
    if answer is None or time.monotonic() > expires:
        try:
            answer, seconds = _resolve(pinned, settings), _REMEMBERED_SECONDS
        except HubError as error:
            if error.why.code != "hub.unreachable":
                raise
            answer, seconds = error, _UNANSWERED_SECONDS
        _answers[key] = time.monotonic() + seconds, answer
    if isinstance(answer, HubError):
        raise answer
    return replace(answer, reference=reference)


def _resolve(reference: HubReference, settings: HubSettings) -> Listing:
    commit = cache.cached_commit(settings, reference)
    cached = None if commit is None else cache.cached_listing(settings, reference, commit)
    if cached is not None and (settings.offline or (reference.is_pinned and cached.from_hub)):
        return cached
    if settings.offline:
        raise HubError(Reason("hub.offline-commit", {"cache": str(settings.cache), "place": reference.place}))
    try:
        listing = _ask(reference, settings)
    except HubError as error:
        if error.temporary and cached is not None:
            return cached
        raise
    with contextlib.suppress(OSError):  # a cache that cannot be written: asked again next time
        cache.keep_listing(settings, listing)
        cache.keep_commit(settings, reference, listing.commit, fetched=False)
    return listing


def _library() -> Any:
    """Return huggingface_hub, which sends every request. Raises MissingPackageError if it is not installed."""
    try:
        import huggingface_hub.errors
        import huggingface_hub.file_download
        import huggingface_hub.utils
    except ImportError as error:
        what = "References that begin with hf:// require huggingface_hub, which is not installed."
        raise MissingPackageError(what, install_command("hub")) from error
    return huggingface_hub


def _ask(reference: HubReference, settings: HubSettings) -> Listing:
    api = _library().HfApi(endpoint=settings.endpoint, token=settings.token or False)
    with _readable_errors(reference, settings):
        info: Any = api.repo_info(
            reference.repo,
            revision=reference.revision,
            repo_type=reference.kind,
            files_metadata=True,
            timeout=_TIMEOUT_SECONDS,
        )
        if not isinstance(info.sha, str) or not is_commit(info.sha):
            raise ValueError("an answer without a commit")
        files = []
        for entry in info.siblings or ():
            sha256 = entry.lfs.sha256 if entry.lfs else None
            files.append(HubFile(entry.rfilename, entry.size, sha256, None if sha256 else entry.blob_id))
    return Listing(reference, info.sha, tuple(files), restricted=bool(info.gated or info.private))


def require_readable(listing: Listing, file: HubFile, settings: HubSettings) -> None:
    """Send a request for the head of one file: the list of a gated repository is public, its files are not.

    Raises HubError, also for another commit or size than those of the listing, and MissingPackageError.
    """
    reference, library = listing.reference, _library()
    with _readable_errors(reference, settings, file.path):
        metadata = library.get_hf_file_metadata(
            _url(listing, file, settings),
            token=settings.token or False,
            timeout=_TIMEOUT_SECONDS,
            endpoint=settings.endpoint,
        )
        if metadata.commit_hash not in (None, listing.commit):
            raise ValueError(f"it serves commit {metadata.commit_hash} in place of {listing.commit}")
    if metadata.size is not None and file.size is not None and metadata.size != file.size:
        params = {"path": file.path, "place": reference.place, "bytes": metadata.size, "expected": file.size}
        raise HubError(Reason("hub.size-differs", params))


def _url(listing: Listing, file: HubFile, settings: HubSettings) -> str:
    of_repo = {"repo_type": listing.reference.kind, "revision": listing.commit, "endpoint": settings.endpoint}
    return str(_library().hf_hub_url(listing.reference.repo, file.path, **of_repo))


def read_small_file(listing: Listing, file: HubFile, settings: HubSettings) -> Path:
    """Return the path of one file in the cache, fetched if necessary. For configs, indices and tokenizers.

    Raises HubError and MissingPackageError.
    """
    if files_to_fetch(listing, (file,), settings):
        require_online(listing, (file,), settings)
        download(listing, file, settings)
        with contextlib.suppress(OSError):
            cache.keep_listing(settings, listing, (file,))
    return settings.snapshot(listing.reference, listing.commit) / file.path


def files_to_fetch(listing: Listing, files: tuple[HubFile, ...], settings: HubSettings) -> list[HubFile]:
    """Return the files that the cache lacks; those that another program has fetched are verified and noted."""
    missing = cache.missing_files(settings, listing, files)
    folder = settings.snapshot(listing.reference, listing.commit)
    fetched = tuple(file for file in missing if _is_whole(folder / file.path, file))
    if fetched:
        with contextlib.suppress(OSError):  # a cache that cannot be written: verified again next time
            cache.keep_listing(settings, listing, fetched)
    return [file for file in missing if file not in fetched]


def _is_whole(path: Path, file: HubFile) -> bool:
    """Return True if the file is there with the size and hash that the hub states."""
    try:
        size = path.stat().st_size
    except OSError:
        return False
    return (file.size is None or size == file.size) and cache.differing_hash(path, file) is None


def require_online(listing: Listing, files: tuple[HubFile, ...], settings: HubSettings) -> None:
    """Raise HubError if files are to be fetched while HF_HUB_OFFLINE is set."""
    if settings.offline:
        names = [file.path for file in files]
        shown = names[:3] + (["..."] if len(names) > 3 else [])
        params = {"cache": str(settings.cache), "place": listing.reference.place, "count": len(names), "files": shown}
        raise HubError(Reason("hub.offline-files", params))


def read_range(listing: Listing, file: HubFile, settings: HubSettings, first: int, length: int) -> bytes:
    """Return the ``length`` bytes of a file from ``first`` on, without fetching the rest.

    Raises HubError and MissingPackageError.
    """
    target, header = _AtMost(length), {"Range": f"bytes={first}-{first + length - 1}"}
    _get(listing, file, settings, target, header, expected_size=length)
    return target.getvalue()


def _get(
    listing: Listing, file: HubFile, settings: HubSettings, target: io.IOBase, headers: dict[str, str], **sizes: int
) -> None:
    library = _library()
    # The HTTP library sends the token to the hub alone, not to another host to which the hub redirects.
    headers |= library.utils.build_hf_headers(token=settings.token or False)
    headers["Accept-Encoding"] = "identity"  # a compressed answer could not be resumed
    with _readable_errors(listing.reference, settings, file.path), _no_bars():
        library.file_download.http_get(_url(listing, file, settings), target, headers=headers, **sizes)


class _AtMost(io.BytesIO):
    """A buffer for an answer of at most ``length`` bytes. Raises ValueError for a server that ignores the range."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._length:
            raise ValueError("it ignores the Range of a request")
        return super().write(data)


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Hide the progress bars of huggingface_hub: progress is shown by ScaleTrain."""
    utils = _library().utils
    hidden = utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            utils.enable_progress_bars()


@contextlib.contextmanager
def _readable_errors(reference: HubReference, settings: HubSettings, path: str = "") -> Iterator[None]:
    errors = _library().errors
    # Its HTTP library depends on its version: requests, whose errors are OSErrors, httpx or httpx2.
    libraries = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    of_http = [error for library in libraries for error in (library.HTTPError, library.InvalidURL)]
    try:
        yield
    except (OSError, ValueError, RuntimeError, *of_http) as error:
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
        named = {"repo": reference.repo, "revision": reference.revision}
        if isinstance(error, errors.RevisionNotFoundError):
            raise HubError(Reason("hub.no-revision", named)) from error
        if isinstance(error, errors.EntryNotFoundError):
            raise HubError(Reason("hub.no-file", named | {"path": path})) from error
        if status in (401, 403):
            raise HubError(Reason("hub.forbidden", place)) from error
        if status is not None:
            raise HubError(Reason("hub.busy", place), temporary=status == 429 or status >= 500) from error
        said = " ".join(hide_values(f"{type(error).__name__}: {error}", [settings.token or ""]).split())
        code = "not-a-hub" if isinstance(error, errors.FileMetadataError | ValueError) else "unreachable"
        params = {"endpoint": settings.endpoint, "said": said[:_LONGEST_SAID]}
        raise HubError(Reason(f"hub.{code}", params), temporary=code == "unreachable") from error


def download(
    listing: Listing,
    file: HubFile,
    settings: HubSettings,
    on_bytes: Callable[[int, int], None] = lambda size, count: None,
) -> None:
    """Fetch one file into the cache.

    Continues an interrupted download of this machine, and compares size and hash before the file appears under its
    name. ``on_bytes`` is called with the size of the file as it grows, and the number of bytes just received. Raises
    HubError, MissingPackageError and OSError.
    """
    name = file.sha256 or file.blob_id or f"{listing.commit}/{file.path}"
    blob = settings.repo_folder(listing.reference) / "blobs" / name.replace("/", "--")
    target = settings.snapshot(listing.reference, listing.commit) / file.path
    for folder in (blob.parent, target.parent):
        make_folder(folder, mode=cache.FOLDER_MODE)
    if _is_whole(target, file):  # fetched by another program
        return
    target.unlink(missing_ok=True)
    with _blob_locks.setdefault(blob, threading.Lock()):
        if not _is_whole(blob, file):
            blob.unlink(missing_ok=True)
            _fill(blob, listing, file, settings, on_bytes)
    # As huggingface_hub does: a relative link, a hard link if there are none.
    draft = target.with_name(f".{target.name}.{os.urandom(8).hex()}.tmp")
    try:
        draft.symlink_to(os.path.relpath(blob, target.parent))
    except OSError:
        os.link(blob, draft)
    os.replace(draft, target)


_blob_locks: dict[Path, threading.Lock] = {}  # among threads: two files may have the same content


def _fill(
    blob: Path, listing: Listing, file: HubFile, settings: HubSettings, on_bytes: Callable[[int, int], None]
) -> None:
    # Of this machine: on some shared file systems a lock of another node has no effect.
    part = blob.with_name(f"{blob.name}.{socket.gethostname()}{_UNFINISHED}")
    lock = part.with_name(f"{part.name}.lock")
    with locked(lock, wait_seconds=0, shared=True) as held:
        if not held:
            part = part.with_name(f"{part.name}.{os.getpid()}")  # of another process, whose lock was given up
        for number in range(1, _DOWNLOADS + 1):
            _receive(listing, file, settings, part, on_bytes)
            if (algorithm := cache.differing_hash(part, file)) is None:
                break
            part.unlink()
            if number == _DOWNLOADS:
                params = {"path": file.path, "place": listing.reference.place, "algorithm": algorithm}
                raise HubError(Reason("hub.hash-differs", params | {"attempts": number}), temporary=True)
        os.replace(part, blob)
        with contextlib.suppress(OSError):
            lock.unlink()


def _receive(
    listing: Listing, file: HubFile, settings: HubSettings, part: Path, on_bytes: Callable[[int, int], None]
) -> None:
    """Download to ``part`` from its present end on. Raises HubError after ``_TRIES`` without progress."""
    reached = tries = 0
    while True:
        try:
            require_readable(listing, file, settings)
            # open_to_append: never a link that another user has made.
            with _Part(io.FileIO(open_to_append(part), "ab"), on_bytes) as out:
                os.fchmod(out.fileno(), 0o666 & ~process_umask())
                if file.size is not None and out.tell() > file.size:
                    out.truncate(0)
                    out.seek(0)
                if file.size is None or out.tell() < file.size:
                    _get(listing, file, settings, out, {}, resume_size=out.tell())
            size = part.stat().st_size
            if file.size in (None, size):
                return
            params = {"path": file.path, "place": listing.reference.place, "bytes": size, "expected": file.size}
            raise HubError(Reason("hub.size-differs", params), temporary=True)
        except HubError as error:
            size = part.stat().st_size if part.exists() else 0
            tries = 1 if size > reached else tries + 1
            if not error.temporary or tries >= _TRIES:
                raise
            reached = size
            time.sleep(_PAUSE_SECONDS * 2 ** (tries - 1))


class _Part(io.BufferedWriter):
    def __init__(self, file: io.FileIO, on_bytes: Callable[[int, int], None]) -> None:
        super().__init__(file)
        self._on_bytes = on_bytes

    def write(self, data: Any) -> int:
        count = super().write(data)
        self._on_bytes(self.tell(), count)
        return count
