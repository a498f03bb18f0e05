"""The history of a run in its mirror: its small files, by content.

``history/0001-00000012.json`` lists the files by name, each with its blobs; a blob is ``blobs/<SHA-256>``. Blobs are
written before the list that names them, and deleted after it, so that a list is whole whenever the writer is killed.
Files that only grow are cut into blobs of 4 MiB, of which all but the last one are stored once.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from scaletrain_cli.mirror.claims import Claim
from scaletrain_cli.mirror.stores import MirrorError, MirrorStore, Throttle
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import parse_json
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import is_private, make_folder, open_to_read, replace_file

SCHEMA = "scaletrain.mirror-history/v1"
_FOLDER, _BLOBS = "history", "blobs"
_NAME = re.compile(rf"{_FOLDER}/(\d{{4,}})-(\d{{8,}})\.json")
_BLOB_BYTES = 4 << 20
_KEPT = 3  # lists, the newest ones
# The files that a run needs elsewhere, or that show what it did. Not: secrets, requests to stop, job ids of this
# scheduler, logs, telemetry, profiles, and what can be computed again.
_FILES = (
    *("run.json", "spec-lines.json", "sizes.json", "revisions/*.json", "sweep.json", "rehearsal.json"),
    *("notify.json", "events.jsonl", "metrics.jsonl", "code/*", "preparation/datasets.json", "evaluations/*.json"),
    "reference/*",  # of the first weights, which later ones cannot compute
    *("attempts/*/attempt.json", "attempts/*/ledger.json", "attempts/*/measured.json"),
    *("attempts/*/nodes/*.json", "attempts/*/failures/*.json"),
)


@dataclass(frozen=True)
class Index:
    """One list: the generation that wrote it, its number, and per file its size, its SHA-256 and its blobs."""

    generation: int
    number: int
    files: dict[str, dict[str, Any]]

    @property
    def name(self) -> str:
        return f"{_FOLDER}/{self.generation:04d}-{self.number:08d}.json"


class HistoryWriter:
    """Writes the history of one owner. ``known``: blobs that are stored, None before the first look."""

    def __init__(self, store: MirrorStore, run: RunDir, generation: int, throttle: Throttle) -> None:
        self._store, self._run, self._throttle = store, run, throttle
        self._known: set[str] | None = None
        self._last, self._content = Index(generation, 0, {}), b""  # the list of the last call

    def write(self) -> None:
        """Store what has changed since the last call.

        Raises MirrorError, before anything is written, if the list of the last call is no longer there: a volume was
        mounted over the folder or is mounted no more, and has other blobs. Raises errors of the store.
        """
        last = self._last
        if self._known is None:
            self._known = {PurePosixPath(name).name for name in self._store.list(_BLOBS)}
            numbers = _numbers(self._store.list(_FOLDER))
            newest = max((number for generation, number in numbers if generation == last.generation), default=0)
            last = self._last = Index(last.generation, newest, {})
        elif self._store.read(last.name) != self._content:
            raise MirrorError(Reason("mirror.other-volume", {"place": self._store.place}))
        files: dict[str, dict[str, Any]] = {}
        for path in _files_of(self._run):
            blobs, whole, size = [], hashlib.sha256(), 0
            try:
                with open_to_read(path) as file:
                    private = is_private(file.fileno())
                    while content := file.read(_BLOB_BYTES):
                        blob = hashlib.sha256(content).hexdigest()
                        whole.update(content)
                        size += len(content)
                        blobs.append(blob)
                        if blob not in self._known:
                            self._throttle.take(len(content))
                            self._store.write(f"{_BLOBS}/{blob}", content, private=private)
                            self._known.add(blob)
            except FileNotFoundError:  # replaced or deleted meanwhile
                continue
            name = path.relative_to(self._run.path).as_posix()
            files[name] = {"size": size, "sha256": whole.hexdigest(), "blobs": blobs, "private": private}
        if files != last.files:
            index = Index(last.generation, last.number + 1, files)
            document = {"schema": SCHEMA, "time": round(time.time(), 3), "files": files}
            self._content = json.dumps(document).encode()
            self._store.write(index.name, self._content)
            self._last = index

    def clean(self) -> None:
        """Delete lists but for the newest ones, and blobs that no list names."""
        lists = _numbers(self._store.list(_FOLDER))
        kept = lists[-_KEPT:]
        for generation, number in lists[:-_KEPT]:
            self._store.delete(Index(generation, number, {}).name)
        needed = {blob for pair in kept for file in _read(self._store, *pair).files.values() for blob in file["blobs"]}
        for name in self._store.list(_BLOBS):
            if PurePosixPath(name).name not in needed:
                self._store.delete(name)
        self._known = needed


def newest_index(store: MirrorStore, claims: Iterable[Claim]) -> Index | None:
    """Return the newest list of the owners' line; None if there is none. Raises MirrorError if it is damaged.

    Lists that an owner wrote after another place had continued the run are left out.
    """
    for generation, number in reversed(_numbers(store.list(_FOLDER))):
        later = [claim.from_history for claim in claims if claim.generation > generation]
        limits = _numbers(name for name in later if name is not None)
        if not limits or (generation, number) <= limits[0]:
            return _read(store, generation, number)
    return None


def restore_history(store: MirrorStore, index: Index, folder: Path, *, keep_existing: bool = False) -> None:
    """Write the files of a list below ``folder``, each verified. Raises MirrorError if a blob is missing or damaged.

    ``keep_existing``: files that are there remain as they are.
    """
    for name, stated in index.files.items():
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or not any(map(parts.match, _FILES)):
            raise MirrorError(Reason("mirror.history-damaged", {"file": name, "list": index.name}))
        target = folder / name
        if keep_existing and target.exists():
            continue
        content = b"".join(_blob(store, blob) for blob in stated["blobs"])
        if hashlib.sha256(content).hexdigest() != stated["sha256"]:
            raise MirrorError(Reason("mirror.history-damaged", {"file": name, "list": index.name}))
        make_folder(target.parent)
        replace_file(target, content, private=bool(stated.get("private")))


def _blob(store: MirrorStore, blob: str) -> bytes:
    content = store.read(f"{_BLOBS}/{blob}")
    if content is None or hashlib.sha256(content).hexdigest() != blob:
        raise MirrorError(Reason("mirror.damaged", {"file": f"{store.place}/{_BLOBS}/{blob}", "reads": 1}))
    return content


def _files_of(run: RunDir) -> Iterator[Path]:
    for pattern in _FILES:
        for path in sorted(run.path.glob(pattern)):
            if path.is_file() and not path.is_symlink() and not path.name.startswith("."):
                yield path


def _numbers(names: Iterable[str]) -> list[tuple[int, int]]:
    """Return generation and number of each list, the oldest first."""
    return sorted((int(match[1]), int(match[2])) for name in names if (match := _NAME.fullmatch(name)))


def _read(store: MirrorStore, generation: int, number: int) -> Index:
    index = Index(generation, number, {})
    try:
        data = parse_json(store.read(index.name) or b"")
        if data["schema"] != SCHEMA:
            raise ValueError(data["schema"])
        return Index(generation, number, {str(name): dict(file) for name, file in data["files"].items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MirrorError(Reason("mirror.history-damaged", {"file": index.name, "list": index.name})) from error
