"""Fetch the files of the Hugging Face Hub that a run reads into the cache, once per cache, in a process of its own.

``python -m scaletrain_cli.launch.hub_fetch`` reads a request from stdin and writes its progress, one JSON object per
line, to stdout. huggingface_hub reads its variables when it is imported, so the process is started with
the environment of the ranks; the process that starts it stays free of HTTP libraries, and can end it at any time: a
download goes on where it ended.
"""

import contextlib
import dataclasses
import functools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from scaletrain_cli.errors import ExitCode, MissingPackageError, ScaletrainError
from scaletrain_cli.full_disk import is_full
from scaletrain_cli.hub.cache import (
    FOLDER_MODE,
    HubFile,
    HubSettings,
    Listing,
    cached_listing,
    keep_commit,
    keep_listing,
    missing_files,
)
from scaletrain_cli.hub.client import download, files_to_fetch, read_small_file, require_online, resolve
from scaletrain_cli.hub.reference import HubError
from scaletrain_cli.launch.node.processes import die_with_parent
from scaletrain_cli.launch.resource_checks.view import View
from scaletrain_cli.own_processes import absolute_paths, python_command
from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.safe_files import locked, make_folder
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.evaluation import ZERO_SHOT
from scaletrain_cli.spec.hub_files import HubUse, hub_environment, hub_uses, selected_files, with_local_files
from scaletrain_cli.spec.shared_paths import is_shared

_REPORT_SECONDS = 1.0
# After this time without a sign of life from its holder a lock is ignored; the holder gives one each second.
STALE_SECONDS = 120.0
_PARALLEL = 4  # downloads at a time
_RESERVE_BYTES = 1 << 28  # kept free on the file system of the cache
_LOCK_NAME = ".scaletrain.lock"


@dataclass(frozen=True)
class FetchProgress:
    """``state``: checking, waiting (for another fetch of the same files), fetching or done.

    ``done_bytes`` of ``total_bytes`` are there; ``received_bytes`` of them came over the network.
    """

    state: str
    done_bytes: int = 0
    total_bytes: int = 0
    received_bytes: int = 0
    files: int = 0
    cache: str = ""


class FetchError(ScaletrainError):
    """The files could not be fetched now; a later attempt may succeed (exit 1)."""

    code = "hub"


class FetchStopped(Exception):
    """The caller ended the fetch."""


def fetch(
    uses: Sequence[HubUse],
    commits: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    on_progress: Callable[[FetchProgress], None] = lambda progress: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> FetchProgress:
    """Fetch what the cache lacks, and return the last progress.

    ``environment`` is that of the ranks: it decides on the cache, the endpoint and the token. ``is_stopped`` is
    called several times a second, and ends the fetch by returning True. Raises HubError for what a retry cannot cure,
    FetchError for what one may, MissingPackageError and FetchStopped.
    """
    settings = HubSettings.from_environment(environment)
    if all(_is_complete(use, commits, settings) for use in uses):
        return FetchProgress("done", cache=str(settings.cache))
    request = {"uses": [dataclasses.asdict(use) for use in uses], "commits": dict(commits), "parent_pid": os.getpid()}
    command = python_command("scaletrain_cli.launch.hub_fetch")
    variables = absolute_paths({**environment, "HF_HUB_DISABLE_TELEMETRY": "1"})
    pipe = subprocess.PIPE
    # A session of its own: Ctrl-C is for this process, which then ends that one.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=variables, start_new_session=True) as process:
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended already; its exit code is reported
                process.stdin.write(json.dumps(request).encode())
                process.stdin.close()
            last = _follow(process, on_progress, is_stopped)
        except BaseException:
            process.kill()
            raise
    if last.get("state") == "done":
        return FetchProgress(**last)
    if last.get("state") != "failed":
        said = f"the process that fetches ended with {process.returncode}"
        raise FetchError(Reason("hub.fetch-failed", {"said": said}))
    if "command" in last:
        raise MissingPackageError(last["what"], last["command"])
    reason = reason_from(last["reason"])
    raise FetchError(reason) if last["temporary"] else HubError(reason)


def _is_complete(use: HubUse, commits: Mapping[str, str], settings: HubSettings) -> bool:
    """Return whether the cache is known to hold the files; sends no request."""
    reference, commit = use.reference, commits[use.text]
    listing = cached_listing(settings, reference, commit)
    if listing is None or not listing.from_hub:
        return False
    try:
        files = selected_files(use, listing, lambda file: settings.snapshot(reference, commit) / file.path)
    except HubError:
        return False  # its index is not there yet
    return not missing_files(settings, listing, files)


def _follow(
    process: subprocess.Popen[bytes], on_progress: Callable[[FetchProgress], None], is_stopped: Callable[[], bool]
) -> dict[str, Any]:
    assert process.stdout is not None
    last: dict[str, Any] = {}
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if is_stopped():
                raise FetchStopped
            if not selector.select(0.2):
                continue
            if not (data := os.read(process.stdout.fileno(), 1 << 16)):
                return last
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                last = json.loads(line)
                if last["state"] != "failed":
                    on_progress(FetchProgress(**last))


# ---- the process itself ---------------------------------------------------------------------------------------------


def main() -> int:
    """Fetch what the request on stdin names; return the exit code."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the agent's mask is inherited
    request = json.loads(sys.stdin.read())
    if not die_with_parent(request["parent_pid"], signal.SIGKILL):
        return ExitCode.CRASHED
    uses = [HubUse(**{**use, "kinds": tuple(use["kinds"])}) for use in request["uses"]]
    settings = HubSettings.from_environment(os.environ)
    failure: dict[str, Any]
    try:
        done = Fetch(settings).run(uses, request["commits"])
    except MissingPackageError as error:
        failure = {"what": error.what, "command": error.command}
    except HubError as error:
        failure = {"reason": error.why.to_document(), "temporary": error.temporary}
    except OSError as error:
        reason = _disk_full(settings, error) if is_full(error) else Reason("hub.fetch-failed", {"said": str(error)})
        failure = {"reason": reason.to_document(), "temporary": not is_full(error)}
    else:
        _report(dataclasses.asdict(done))
        return ExitCode.DONE
    _report({"state": "failed", **failure})
    return ExitCode.CRASHED


def _report(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _disk_full(settings: HubSettings, error: OSError) -> Reason:
    return Reason("hub.disk-full", {"cache": str(settings.cache), "said": os.strerror(error.errno or 0)})


@contextlib.contextmanager
def _errors_of_cache(settings: HubSettings, count: int = 1) -> Iterator[None]:
    """Turn the error of a cache that has no space or cannot be written, for ``count`` files, into HubError."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise HubError(_disk_full(settings, error)) from error
        params = {"count": count, "cache": str(settings.cache), "said": error.strerror or str(error)}
        raise HubError(Reason("hub.not-writable", params)) from error


class Fetch:
    """One fetch into one cache. Reports its progress each second, and keeps its locks alive."""

    def __init__(self, settings: HubSettings, stale_seconds: float = STALE_SECONDS) -> None:
        self._settings, self._stale_seconds = settings, stale_seconds
        self._sizes: dict[Path, int] = {}
        self._received = self._total = self._files = 0
        self._held: list[Path] = []
        self._state = "checking"
        self._ended = threading.Event()
        self._counting = threading.Lock()

    def run(self, uses: Sequence[HubUse], commits: Mapping[str, str]) -> FetchProgress:
        """Fetch all files that are missing. Raises HubError, MissingPackageError and OSError."""
        reporter = threading.Thread(target=self._keep_reporting, daemon=True)
        reporter.start()
        try:
            with contextlib.ExitStack() as locks:
                # In one order, so that two fetches cannot each hold the lock that the other waits for.
                ordered = sorted(uses, key=lambda use: str(self._settings.repo_folder(use.reference)))
                by_snapshot: dict[Path, tuple[Listing, dict[str, HubFile]]] = {}
                for use in ordered:
                    listing = resolve(use.reference, self._settings, commits[use.text])
                    self._lock(self._settings.repo_folder(use.reference), locks)
                    with _errors_of_cache(self._settings):
                        read = functools.partial(read_small_file, listing, settings=self._settings)
                        files = selected_files(use, listing, read)
                    snapshot = self._settings.snapshot(use.reference, listing.commit)
                    by_snapshot.setdefault(snapshot, (listing, {}))[1].update({file.path: file for file in files})
                self._fetch_missing(by_snapshot.values())
                for use in ordered:
                    with contextlib.suppress(OSError):
                        keep_commit(self._settings, use.reference, commits[use.text], fetched=True)
        finally:
            self._ended.set()
            reporter.join()
        return dataclasses.replace(self._progress(), state="done")

    def _lock(self, folder: Path, locks: contextlib.ExitStack) -> None:
        """Take the lock of a repository, so that of several fetches one downloads and the others find the files.

        Gives up when the holder has given no sign of life for a while: two downloads of one file do no harm, as each
        has a file of its own, which is renamed when it is complete.
        """
        path = folder / _LOCK_NAME
        if path in self._held:
            return
        try:
            make_folder(folder, mode=FOLDER_MODE)
            seen, since = 0.0, time.monotonic()
            while True:
                with contextlib.ExitStack() as attempt:
                    held = attempt.enter_context(locked(path, wait_seconds=_REPORT_SECONDS, shared=True))
                    if held or time.monotonic() - since > self._stale_seconds:
                        locks.push(attempt.pop_all())
                        self._held.append(path)
                        return
                self._state = "waiting"
                if (changed := path.stat().st_mtime) != seen:
                    seen, since = changed, time.monotonic()
        except OSError as error:
            if is_full(error):
                raise
            return  # a cache that cannot be written: sufficient if it is complete

    def _fetch_missing(self, selected: Iterable[tuple[Listing, dict[str, HubFile]]]) -> None:
        missing = []
        for listing, files in selected:
            if lacking := tuple(files_to_fetch(listing, tuple(files.values()), self._settings)):
                require_online(listing, lacking, self._settings)
                missing.append((listing, lacking))
        if not missing:
            return
        todo = [(listing, file) for listing, files in missing for file in files]
        self._total, self._files = sum(file.size or 0 for _, file in todo), len(todo)
        needed = self._total
        for blobs in (
            folder / "blobs" for folder in ({self._settings.repo_folder(listing.reference) for listing, _ in missing})
        ):
            with _errors_of_cache(self._settings, self._files):
                make_folder(blobs, mode=FOLDER_MODE)
                needed -= sum(path.stat().st_size for path in blobs.glob("*.scaletrain-incomplete"))
                if not os.access(blobs, os.W_OK | os.X_OK):
                    raise PermissionError(f"{blobs} is read-only")
        free = shutil.disk_usage(self._settings.cache).free
        if needed + _RESERVE_BYTES > free:
            params = {"needed": needed, "cache": str(self._settings.cache), "free": free}
            raise HubError(Reason("hub.no-space", params))
        self._state = "fetching"
        _report(dataclasses.asdict(self._progress()))
        pool = ThreadPoolExecutor(_PARALLEL)
        futures = [pool.submit(self._download, listing, file) for listing, file in todo]
        finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
        # After a failure the other downloads end with the process, and the next fetch continues them.
        pool.shutdown(wait=False, cancel_futures=True)
        for future in finished:
            future.result()
        for listing, fetched in missing:
            keep_listing(self._settings, listing, fetched)

    def _download(self, listing: Listing, file: HubFile) -> None:
        path = self._settings.snapshot(listing.reference, listing.commit) / file.path

        def note(size: int, received: int) -> None:
            self._sizes[path] = size
            with self._counting:
                self._received += received

        download(listing, file, self._settings, note)
        self._sizes[path] = file.size or 0

    def _progress(self) -> FetchProgress:
        done = sum(self._sizes.values())
        return FetchProgress(self._state, done, self._total, self._received, self._files, str(self._settings.cache))

    def _keep_reporting(self) -> None:
        while not self._ended.wait(_REPORT_SECONDS):
            for path in list(self._held):
                with contextlib.suppress(OSError):
                    os.utime(path)
            _report(dataclasses.asdict(self._progress()))


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


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # downloads of other files may still run in threads
