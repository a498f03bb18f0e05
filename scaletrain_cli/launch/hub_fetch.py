"""Fetch the files of the Hugging Face Hub that a run reads into the cache, once per cache, in a process of its own.

``python -m scaletrain_cli.launch.hub_fetch --parent-pid PID`` reads a request from stdin and writes its progress, one
JSON object per line, to stdout. huggingface_hub reads its variables when it is imported, so the process is started with
the environment of the ranks; the process that starts it stays free of HTTP libraries, and can end it at any time: a
download goes on where it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import ExitCode, MissingPackageError, ScaletrainError
from scaletrain_cli.full_disk import is_full
from scaletrain_cli.hub.cache import (
    FOLDER_MODE,
    HubFile,
    HubSettings,
    Listing,
    keep_commit,
    keep_listing,
    missing_files,
)
from scaletrain_cli.hub.reference import HubError
from scaletrain_cli.launch.node.processes import die_with_parent
from scaletrain_cli.own_processes import absolute_paths, python_command
from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.safe_files import locked, make_folder
from scaletrain_cli.spec.hub_files import HubUse, selected_files

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
    if not uses or all(_is_complete(use, commits, settings) for use in uses):
        return FetchProgress("done", cache=str(settings.cache))
    request = {
        "uses": [dataclasses.asdict(use) for use in uses],
        "commits": {use.text: commits[use.text] for use in uses},
    }
    command = python_command("scaletrain_cli.launch.hub_fetch", "--parent-pid", str(os.getpid()))
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=absolute_paths({**environment, **quiet})
    ) as process:
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended already; its exit code is reported
                process.stdin.write(json.dumps(request).encode())
                process.stdin.close()
            last = _follow(process, on_progress, is_stopped)
        except BaseException:
            process.kill()
            raise
    return _result(last, process.returncode)


def _is_complete(use: HubUse, commits: Mapping[str, str], settings: HubSettings) -> bool:
    """Return whether the cache is known to hold the files; sends no request."""
    from scaletrain_cli.hub.cache import cached_listing

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
    process: subprocess.Popen[bytes],
    on_progress: Callable[[FetchProgress], None],
    is_stopped: Callable[[], bool],
) -> dict[str, Any]:
    """Return the last line of the process as a JSON object."""
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
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                return last
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                last = json.loads(line)
                if last["state"] != "failed":
                    on_progress(FetchProgress(**last))


def _result(last: Mapping[str, Any], exit_code: int) -> FetchProgress:
    state = last.get("state")
    if state == "done":
        return FetchProgress(**last)
    if state != "failed":
        said = f"the process that fetches ended with {exit_code}"
        raise FetchError(Reason("hub.fetch-failed", {"said": said}))
    reason = reason_from(last["reason"])
    if last.get("command") is not None:
        raise MissingPackageError(last["what"], last["command"])
    raise FetchError(reason) if last["temporary"] else HubError(reason)


# ---- the process itself ---------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch what the request on stdin names; return the exit code."""
    parser = argparse.ArgumentParser(prog="hub_fetch", description="Fetch files of the Hugging Face Hub.")
    parser.add_argument("--parent-pid", type=int, required=True)
    options = parser.parse_args(arguments)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the agent's mask is inherited
    if not die_with_parent(options.parent_pid, signal.SIGKILL):
        return ExitCode.CRASHED
    request = json.loads(sys.stdin.read())
    uses = [HubUse(**{**use, "kinds": tuple(use["kinds"])}) for use in request["uses"]]
    settings = HubSettings.from_environment(os.environ)
    if settings.endpoint != HubSettings(settings.cache).endpoint:
        os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # mirrors speak HTTP only
    try:
        done = Fetch(settings).run(uses, request["commits"])
    except MissingPackageError as error:
        found = {"reason": {"code": "", "text": str(error)}, "what": error.what, "command": error.command}
        _report({"state": "failed", "temporary": False, **found})
        return error.exit_code
    except HubError as error:
        _report({"state": "failed", "reason": error.why.to_document(), "temporary": error.temporary})
        return error.exit_code
    except OSError as error:
        reason = Reason("hub.fetch-failed", {"said": str(error)})
        if is_full(error):
            reason = Reason("hub.disk-full", {"cache": str(settings.cache), "said": os.strerror(error.errno or 0)})
        _report({"state": "failed", "reason": reason.to_document(), "temporary": not is_full(error)})
        return ExitCode.CRASHED
    _report(dataclasses.asdict(done))
    return ExitCode.DONE


def _report(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class Fetch:
    """One fetch into one cache. Reports its progress each second, and keeps its locks alive."""

    def __init__(self, settings: HubSettings, stale_seconds: float = STALE_SECONDS) -> None:
        self._settings, self._stale_seconds = settings, stale_seconds
        self._sizes: dict[tuple[str, str], int] = {}
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
                wanted = {use: self._wanted(use, commits[use.text], locks) for use in ordered}
                groups: dict[tuple[Path, str], tuple[Listing, dict[str, HubFile]]] = {}
                for use, (listing, files) in wanted.items():
                    key = (self._settings.repo_folder(use.reference), listing.commit)
                    groups.setdefault(key, (listing, {}))[1].update({file.path: file for file in files})
                self._fetch_missing([(listing, tuple(files.values())) for listing, files in groups.values()])
                for use, (listing, _) in wanted.items():
                    with contextlib.suppress(OSError):
                        keep_commit(self._settings, use.reference, listing.commit, fetched=True)
        finally:
            self._ended.set()
            reporter.join()
        return dataclasses.replace(self._progress(), state="done")

    def _wanted(self, use: HubUse, commit: str, locks: contextlib.ExitStack) -> tuple[Listing, tuple[HubFile, ...]]:
        from scaletrain_cli.hub.client import resolve

        reference = use.reference
        listing = resolve(reference, self._settings, commit)
        self._lock(use, commit, locks)
        return listing, selected_files(use, listing, lambda file: self._read(listing, file))

    def _read(self, listing: Listing, file: HubFile) -> Path:
        """Return the path of a small file in the cache, fetched if necessary. Raises HubError."""
        from scaletrain_cli.hub.client import read_small_file

        try:
            return read_small_file(listing, file, self._settings)
        except OSError as error:
            cache, said = str(self._settings.cache), error.strerror or str(error)
            if is_full(error):
                raise HubError(Reason("hub.disk-full", {"cache": cache, "said": said})) from error
            raise HubError(Reason("hub.not-writable", {"count": 1, "cache": cache, "said": said})) from error

    def _lock(self, use: HubUse, commit: str, locks: contextlib.ExitStack) -> None:
        """Take the lock of the repository, so that of several fetches one downloads and the others find the files.

        Gives up when the holder has given no sign of life for a while: two downloads of one file do no harm, as each
        has a file of its own, which is renamed when it is complete.
        """
        folder = self._settings.repo_folder(use.reference)
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

    def _fetch_missing(self, groups: Sequence[tuple[Listing, tuple[HubFile, ...]]]) -> None:
        from scaletrain_cli.hub.client import files_to_fetch, require_online

        todo = [(listing, file) for listing, files in groups for file in files_to_fetch(listing, files, self._settings)]
        if not todo:
            return
        for listing, _ in groups:
            if missing := tuple(file for other, file in todo if other is listing):
                require_online(listing, missing, self._settings)
        self._require_space(todo)
        self._total, self._files, self._state = sum(file.size or 0 for _, file in todo), len(todo), "fetching"
        _report(dataclasses.asdict(self._progress()))
        pool = ThreadPoolExecutor(_PARALLEL)
        futures = [pool.submit(self._download, listing, file) for listing, file in todo]
        finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
        # After a failure the other downloads end with the process, and the next fetch continues them.
        pool.shutdown(wait=False, cancel_futures=True)
        for future in finished:
            future.result()
        for listing, _ in groups:
            if fetched := tuple(file for other, file in todo if other is listing):
                keep_listing(self._settings, listing, fetched)

    def _download(self, listing: Listing, file: HubFile) -> None:
        from scaletrain_cli.hub.client import download

        key = (listing.commit, file.path)

        def note(size: int) -> None:
            self._sizes[key] = size

        received = download(listing, file, self._settings, note)
        with self._counting:
            self._received += received
        self._sizes[key] = file.size or 0

    def _require_space(self, todo: Sequence[tuple[Listing, HubFile]]) -> None:
        """Raise HubError unless the cache can be written and has space for the files."""
        cache = self._settings.cache
        needed = sum(file.size or 0 for _, file in todo)
        for folder in {self._settings.repo_folder(listing.reference) for listing, _ in todo}:
            try:
                make_folder(folder / "blobs", mode=FOLDER_MODE)
                parts = sum(path.stat().st_size for path in (folder / "blobs").glob("*.scaletrain-incomplete"))
            except OSError as error:
                if is_full(error):
                    raise
                params = {"count": len(todo), "cache": str(cache), "said": error.strerror or str(error)}
                raise HubError(Reason("hub.not-writable", params)) from error
            if not os.access(folder / "blobs", os.W_OK | os.X_OK):
                params = {"count": len(todo), "cache": str(cache), "said": f"{folder / 'blobs'} is read-only"}
                raise HubError(Reason("hub.not-writable", params))
            needed -= parts
        free = shutil.disk_usage(cache).free
        if needed + _RESERVE_BYTES > free:
            params = {"needed": needed, "cache": str(cache), "free": free}
            raise HubError(Reason("hub.no-space", params))

    def _progress(self) -> FetchProgress:
        done = sum(self._sizes.values())
        return FetchProgress(self._state, done, self._total, self._received, self._files, str(self._settings.cache))

    def _keep_reporting(self) -> None:
        while not self._ended.wait(_REPORT_SECONDS):
            for path in list(self._held):
                with contextlib.suppress(OSError):
                    os.utime(path)
            _report(dataclasses.asdict(self._progress()))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # downloads of other files may still run in threads
