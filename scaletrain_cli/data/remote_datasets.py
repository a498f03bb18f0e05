"""Prepared data in an object store: uploaded from here, and read by the ranks through the cache of their node.

A remote dataset is attached before it is used: a local folder gets its description, its tokenizer and the hashes of
all chunks, and ``objects.json`` with the size and the ETag of every file. Only the tokens themselves stay remote.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from scaletrain_cli.data.block_cache import BLOCK_BYTES, BlockCache, CachedBlocks, block_cache
from scaletrain_cli.data.chunk_hashes import CHUNK_BYTES, CorruptDataError, compare_chunk, hashes_path, read_hashes
from scaletrain_cli.data.drafts import folder_written_whole
from scaletrain_cli.data.pipeline.shards import SCHEMA, SPLITS, seal_of, shard_folder
from scaletrain_cli.data.sources.places import RemoteFile, find_file, list_files, read_range, unless_missing, write_file
from scaletrain_cli.data.sources.stores import PlaceError, is_remote
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import parse_object, read_document
from scaletrain_cli.rundir.shared_datasets import place_of
from scaletrain_cli.safe_files import create_file, make_folder
from scaletrain_cli.spec.corpus_files import format_by_name

DESCRIPTION, OBJECTS = "dataset.json", "objects.json"
_DATA_SUFFIX = ".bin"
_AT_ONCE = 16  # requests of one process
_READS_OF_A_BLOCK = 4
_PAUSE_SECONDS = 0.2
_NAME = re.compile(r"(\d{6,}/)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LARGEST_BESIDE = 256 << 20  # of files beside the shards, such as tokenizer.json

Progress = Callable[[int, int], None]


class CachedFile(CachedBlocks):
    """A remote file of prepared data. ``local``: path of the data file whose hashes lie beside it.

    Each chunk is compared with its hash when it is fetched, and again when this process first reads it from the cache.
    ``read`` raises CorruptDataError, too.
    """

    def __init__(self, file: RemoteFile, local: Path, cache: BlockCache) -> None:
        super().__init__(file, cache)
        self._local, self._hashes, self._compared = local, b"", set[int]()

    @property
    def size(self) -> int:
        return self.file.size

    @property
    def path(self) -> str:
        return self.file.path

    def read_block(self, block: int, start: int, stop: int) -> bytes:
        first, last = start // CHUNK_BYTES * CHUNK_BYTES, min(-(-stop // CHUNK_BYTES) * CHUNK_BYTES, self.size)
        if self._compared.issuperset(range(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES))):
            first, last = start, stop
        for is_last in (False, True):
            try:
                content = super().read_block(block, first, last)
            except PlaceError as error:
                if error.means_other_content:
                    raise CorruptDataError(self.path, str(error.reason)) from None
                raise
            try:
                if len(content) != last - first:
                    raise CorruptDataError(self.path, f"its copy in {self.cache.folder} ends early")
                self._compare(first, content)
                break
            except CorruptDataError:  # a fault of the local disk
                if is_last:
                    raise
                self.forget(first, last)
        return content[start - first : stop - first]

    def fetch(self, block: int) -> bytes:
        """Return a whole block after comparing its chunks; read it again if one differs. Raises CorruptDataError."""
        reads = 0
        while True:
            reads += 1
            content = super().fetch(block)
            try:
                self._compare(block * BLOCK_BYTES, content, again=True)
                return content
            except CorruptDataError as error:
                if reads == _READS_OF_A_BLOCK:
                    where = f"{error.evidence['problem']}, in each of {reads} reads"
                    evidence = {name: value for name, value in error.evidence.items() if name.endswith("byte")}
                    raise CorruptDataError(self.path, where, **evidence) from None
            time.sleep(_PAUSE_SECONDS)

    def _compare(self, start: int, content: bytes, *, again: bool = False) -> None:
        """Compare the chunks of ``content``, which begins at ``start``, unless they were. Raises CorruptDataError."""
        self._hashes = self._hashes or read_hashes(self._local, self.size)
        for place in range(-start % CHUNK_BYTES, len(content), CHUNK_BYTES):
            chunk = (start + place) // CHUNK_BYTES
            if again or chunk not in self._compared:
                compare_chunk(self.path, self._hashes, chunk, content[place : place + CHUNK_BYTES])
                self._compared.add(chunk)


def find_description(path: str, seconds: float | None = None) -> RemoteFile | None:
    """Return dataset.json of a remote path; None if the path is no folder with prepared data.

    Raises PlaceError and UnavailableError.
    """
    is_file = format_by_name(path.rpartition("/")[2])[0] != ""
    if not is_remote(path) or path.startswith(("http:", "https:")) or is_file or set("*?[") & set(path):
        return None
    return unless_missing(lambda: find_file(f"{path.rstrip('/')}/{DESCRIPTION}", seconds))


def attached_folder(description: RemoteFile, datasets: Path) -> Path:
    """Return the local folder for a remote dataset in this state, whether or not it is there."""
    identity = f"{description.path}\n{description.etag}\n{description.size}"
    return place_of(datasets, f"remote-{hashlib.sha256(identity.encode()).hexdigest()[:32]}")


def is_attached(description: RemoteFile, datasets: Path) -> bool:
    """Return True if all but the tokens of a remote dataset are in its local folder."""
    return read_document(attached_folder(description, datasets) / DESCRIPTION) is not None


def attach_dataset(description: RemoteFile, datasets: Path) -> Path:
    """Return the local folder of a remote dataset, after reading all but its tokens.

    Raises PlaceError if it is incomplete or of another version, UnavailableError and OSError.
    """
    folder, root = attached_folder(description, datasets), _root(description)
    if is_attached(description, datasets):
        return folder
    content, files = _checked(description, None)
    with folder_written_whole(folder) as draft:
        others = (name for name in files if not name.endswith(_DATA_SUFFIX) and name not in (DESCRIPTION, OBJECTS))
        wanted = [name for name in others if _NAME.fullmatch(name) and files[name].size <= _LARGEST_BESIDE]
        for name in {name.partition("/")[0] for name in wanted if "/" in name}:
            make_folder(draft / name)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(lambda name: create_file(draft / name, _content(files[name])), wanted):
                pass
        _compare_with(parse_object(content), draft, files)
        objects = {name: [file.size, file.etag] for name, file in files.items() if name.endswith(_DATA_SUFFIX)}
        create_file(draft / OBJECTS, json.dumps({"path": root, "objects": objects}))
        create_file(draft / DESCRIPTION, content)
    return folder


def _compare_with(document: dict[str, Any], draft: Path, files: dict[str, RemoteFile]) -> None:
    """Compare what was read with dataset.json, and read again what differs. Raises PlaceError.

    The tokenizer and the hashes of the chunks are compared; the report is only for people.
    """
    groups: list[tuple[list[str], Callable[[], bool]]] = []
    if "digest" in document["tokenizer"]:
        tokenizer, digest = draft / "tokenizer.json", document["tokenizer"]["digest"]
        groups.append(([tokenizer.name], lambda: hashlib.sha256(tokenizer.read_bytes()).hexdigest() == digest))
    for number, shard in enumerate(document["shards"]):
        names = [hashes_path(Path(name)).as_posix() for name in data_names(number)]
        groups.append((names, partial(_has_digest, draft, names, shard)))
    for names, is_right in groups:
        reads = 1
        while not is_right():
            if reads == _READS_OF_A_BLOCK:
                raise _damaged(files[names[0]])
            reads += 1
            time.sleep(_PAUSE_SECONDS)
            for name in names:
                (draft / name).unlink()
                create_file(draft / name, _content(files[name]))


def _has_digest(draft: Path, names: list[str], shard: dict[str, Any]) -> bool:
    """Return whether the hashes of a shard are those that dataset.json states."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(hashlib.sha256((draft / name).read_bytes()).digest())
    return digest.hexdigest() == str(shard["digest"])


def remote_description(path: str, seconds: float | None = None) -> dict[str, Any] | None:
    """Return the content of dataset.json of a remote dataset whose files are all there; None as ``find_description``.

    Raises PlaceError and UnavailableError.
    """
    description = find_description(path, seconds)
    return None if description is None else parse_object(_checked(description, seconds)[0])


def _checked(description: RemoteFile, seconds: float | None) -> tuple[bytes, dict[str, RemoteFile]]:
    """Return dataset.json and all files by their names. Raises PlaceError for other versions and missing files."""
    root = _root(description)
    content = _stated(description, seconds)
    files = {file.path.removeprefix(f"{root}/"): file for file in list_files(f"{root}/", seconds)}
    _require_complete(root, parse_object(content), files)
    return content, files


def _stated(description: RemoteFile, seconds: float | None) -> bytes:
    """Return dataset.json, read again if it does not match its seal. Raises PlaceError."""
    for _ in range(_READS_OF_A_BLOCK):
        content = read_range(description, 0, description.size, seconds)
        document = parse_object(content)
        if document.get("schema") == SCHEMA and document.get("seal", "") in ("", seal_of(document)):
            return content
        time.sleep(_PAUSE_SECONDS)
    if document.get("schema") == SCHEMA:
        raise _damaged(description)
    return content  # of something else, which the caller refuses


def _damaged(file: RemoteFile) -> PlaceError:
    return PlaceError(Reason("remote.damaged", {"path": file.path, "reads": _READS_OF_A_BLOCK}), file=file.path)


def _root(description: RemoteFile) -> str:
    return description.path.removesuffix(f"/{DESCRIPTION}")


def _content(file: RemoteFile) -> bytes:
    return read_range(file, 0, file.size)


def _require_complete(root: str, description: dict[str, Any], files: dict[str, RemoteFile]) -> None:
    """Raise PlaceError if the data are of another version, or if files of the shards are missing."""
    shards = description.get("shards")
    if description.get("schema") != SCHEMA or not isinstance(shards, list):
        raise PlaceError(Reason("remote.not-prepared", {"path": root, "expected": SCHEMA}))
    names = [name for number in range(len(shards)) for name in data_names(number)]
    missing = [name for data in names for name in (data, hashes_path(Path(data)).as_posix()) if name not in files]
    if missing:
        raise PlaceError(Reason("remote.incomplete", {"path": root, "missing": len(missing), "first": missing[0]}))


def data_names(shard: int) -> list[str]:
    """Return the paths of the data files of a shard, relative to the dataset."""
    folder = shard_folder(Path(), shard).as_posix()
    return [f"{folder}/{split}{kind}" for split in SPLITS for kind in (".bin", ".ends.bin")]


def prepared_files(dataset: Path, cache: BlockCache | None) -> Callable[[list[Path]], list[Path] | list[CachedFile]]:
    """Return what turns local paths of data in a dataset into its files, which are remote for an attached dataset.

    It raises CorruptDataError if objects.json lacks a file.
    """
    if (document := read_document(dataset / OBJECTS)) is None:
        return lambda paths: paths
    used = cache or block_cache()

    def files(paths: list[Path]) -> list[CachedFile]:
        cached = []
        for path in paths:
            name = path.relative_to(dataset).as_posix()
            try:
                size, etag = document["objects"][name]
                cached.append(CachedFile(RemoteFile(f"{document['path']}/{name}", int(size), str(etag)), path, used))
            except (KeyError, TypeError, ValueError) as error:
                raise CorruptDataError(dataset / OBJECTS, f"it lacks {name}") from error
        return cached

    return files


def upload_dataset(dataset: Path, path: str, progress: Progress = lambda done, total: None) -> str:
    """Copy a prepared dataset below a remote folder, dataset.json last; return its path there.

    Files that are there with the same size are kept, so that an upload that was stopped is continued. Raises
    UsageError, PlaceError, UnavailableError and OSError.
    """
    description = read_document(dataset / DESCRIPTION)
    if description is None or description.get("schema") != SCHEMA or (dataset / OBJECTS).exists():
        raise UsageError(Reason("remote.not-prepared", {"path": str(dataset), "expected": SCHEMA}))
    root = f"{path.rstrip('/')}/{dataset.name}"
    there = {file.path: file.size for file in unless_missing(lambda: list_files(f"{root}/")) or ()}
    content = (dataset / DESCRIPTION).read_bytes()
    if f"{root}/{DESCRIPTION}" in there and _content(find_file(f"{root}/{DESCRIPTION}")) != content:
        raise PlaceError(Reason("remote.other-data-there", {"path": root}), file=root)
    names = [file.relative_to(dataset).as_posix() for file in sorted(dataset.rglob("*")) if file.is_file()]
    wanted = [name for name in names if _NAME.fullmatch(name) and name != DESCRIPTION]
    missing = [name for name in wanted if there.get(f"{root}/{name}") != (dataset / name).stat().st_size]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        writes = pool.map(lambda name: write_file(f"{root}/{name}", dataset / name), missing)
        for done, _ in enumerate(writes, start=len(wanted) - len(missing) + 1):
            progress(done, len(wanted))
    write_file(f"{root}/{DESCRIPTION}", content)
    return root
