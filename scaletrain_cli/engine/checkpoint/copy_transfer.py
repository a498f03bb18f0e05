"""Send copies of the state in host memory from node to node: to a partner while training, and to new nodes in a resume.

The copies of a lost node are lost. So each rank sends its own to a rank of another node, which keeps them beside its
own; the next attempt sends each node what its ranks need and it does not have, as a new node or one with other ranks.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaletrain_cli.engine.checkpoint.shard_file import shard_name
from scaletrain_cli.engine.process_group import RankConsensus
from scaletrain_cli.rundir.checkpoints import STATE_FILE, Checkpoint, FileDigest, parse_manifest
from scaletrain_cli.safe_files import make_folder, open_to_read
from scaletrain_cli.worker.checkpoint_commit import HashingWriter
from scaletrain_cli.worker.memory_copies import read_manifest, write_received_manifest

# Of a chunk, and of all chunks that a rank sends and receives at a time.
_CHUNK_BYTES, _LEAST_CHUNK_BYTES, _BUFFER_BYTES = 16 << 20, 64 << 10, 512 << 20


class Transfer(NamedTuple):
    """The rank ``source`` sends the files of the copy that ``owner`` has made to the rank ``destination``."""

    source: int
    destination: int
    owner: int


def ranks_at(places: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each place; ``places``: that of each rank's copies."""
    by_place: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        by_place.setdefault(place, []).append(rank)
    return list(by_place.values())


def transfers_to_partners(places: Sequence[str]) -> list[Transfer]:
    """Return by which transfers each copy gets to a second place; none if there is only one.

    The partner is half the job away, because neighbours share a rack.
    """
    groups = ranks_at(places)
    shift = len(groups) // 2
    return [
        Transfer(rank, partners[number % len(partners)], rank)
        for here, partners in zip(groups, groups[shift:] + groups[:shift], strict=True)
        for number, rank in enumerate(here)
        if shift
    ]


def needed_at(here: Collection[int], needs: Mapping[int, Sequence[int]]) -> set[int]:
    """Return the ranks whose files the ranks of a place need; ``needs``: those of each rank beside its own."""
    return {*here, *(other for rank in here for other in needs[rank])}


def transfers_to_resume(
    places: Sequence[str], held: Sequence[Collection[int]], needs: Mapping[int, Sequence[int]]
) -> list[Transfer]:
    """Return by which transfers each place gets the files that its ranks need.

    ``held``: the ranks whose copies are at the place of each rank; each rank is among them somewhere.
    """
    transfers, groups = list[Transfer](), ranks_at(places)
    sources: dict[int, list[int]] = {}
    for here in groups:
        for owner in held[here[0]]:
            sources.setdefault(owner, []).extend(here)
    for number, here in enumerate(groups):
        for owner in sorted(needed_at(here, needs) - {*held[here[0]]}):
            source = sources[owner][(owner + number) % len(sources[owner])]  # in turn, by all ranks that can
            transfers.append(Transfer(source, owner if owner in here else here[owner % len(here)], owner))
    return transfers


class Content(NamedTuple):
    """The files of a copy that a rank sends, with their sizes in bytes by name.

    ``parts``: the bytes of all files, in the order of ``sizes``. ``manifest``: called after all parts are sent. It may
    wait until the manifest is written, and returns no bytes if this rank could not write its files.
    """

    sizes: Mapping[str, int]
    parts: Iterable[memoryview]
    manifest: Callable[[], bytes]


def transfer_copies(
    path: Path, transfers: Sequence[Transfer], rank: int, consensus: RankConsensus, own: Content | None = None
) -> None:
    """Send and receive files of ``path``, the folder of a step here. Collective over the ranks of the ``transfers``.

    ``own``: what this rank sends of its own copy, while it is written; None if it is complete. What its source lacks,
    or arrives other than its manifest states, is left without a manifest. Raises OSError if a file cannot be written,
    once all are received, and RuntimeError if another rank is lost.
    """
    of_ranks = Counter(rank for transfer in transfers for rank in (transfer.source, transfer.destination))
    # Each has a chunk that is sent or received, and one that is read or written meanwhile.
    chunk_bytes = min(_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, _BUFFER_BYTES // (2 * max(of_ranks.values(), default=1))))
    sent = {
        tag: own if own is not None and transfer.owner == rank else _stored(path, transfer.owner, chunk_bytes)
        for tag, transfer in enumerate(transfers)
        if transfer.source == rank
    }
    received = [tag for tag, transfer in enumerate(transfers) if transfer.destination == rank]

    def exchange(outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        consensus.exchange(
            [(transfers[tag].destination, tag, values) for tag, values in outgoing.items()],
            [(transfers[tag].source, tag, values) for tag, values in incoming.items()],
        )

    def exchange_texts(texts: Mapping[int, bytes]) -> dict[int, bytes]:
        sizes = {tag: torch.zeros(1, dtype=torch.int64) for tag in received}
        exchange({tag: torch.tensor([len(text)]) for tag, text in texts.items()}, sizes)
        arrived = {tag: torch.zeros(int(size), dtype=torch.uint8) for tag, size in sizes.items() if size}
        stated = {tag: torch.frombuffer(bytearray(text), dtype=torch.uint8) for tag, text in texts.items() if text}
        exchange(stated, arrived)
        return {tag: arrived[tag].numpy().tobytes() if tag in arrived else b"" for tag in received}

    sizes = exchange_texts({tag: json.dumps(dict(content.sizes)).encode() for tag, content in sent.items()})
    # Hashing takes as long as receiving, so that both are done at a time.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="received-copies") as thread:
        writers = {tag: _Received(path, transfers[tag].owner, text, thread) for tag, text in sizes.items()}
        outgoing = {tag: _cut(content, chunk_bytes) for tag, content in sent.items()}
        incoming = {tag: writer.chunks(chunk_bytes) for tag, writer in writers.items()}
        while outgoing or incoming:
            # Both ends take the chunks of a transfer in the same order, and one of each per exchange.
            chunks = {tag: chunk for tag, stream in outgoing.items() if (chunk := next(stream, None)) is not None}
            empty = {tag: chunk for tag, stream in incoming.items() if (chunk := next(stream, None)) is not None}
            exchange(chunks, empty)
            outgoing = {tag: outgoing[tag] for tag in chunks}
            incoming = {tag: incoming[tag] for tag in empty}
        manifests = exchange_texts({tag: content.manifest() for tag, content in sent.items()})
        problems = [problem for tag, writer in writers.items() if (problem := writer.close(manifests[tag])) is not None]
    if problems:
        raise problems[0]


def _stored(path: Path, owner: int, chunk_bytes: int) -> Content:
    """Return the files of a copy; zeros in place of what cannot be read."""
    manifest = read_manifest(path, owner)
    sizes = {name: digest.size for name, digest in _files(path, manifest).items()}
    parts = (part for name, size in sizes.items() for part in _read(path / name, size, chunk_bytes))
    return Content(sizes, parts, lambda: manifest)


def _files(path: Path, manifest: bytes) -> Mapping[str, FileDigest]:
    stated = parse_manifest(manifest, path)
    return dict(sorted(stated.files.items())) if isinstance(stated, Checkpoint) else {}


def _read(path: Path, size: int, chunk_bytes: int) -> Iterator[memoryview]:
    with contextlib.ExitStack() as opened:
        file: Any = None
        with contextlib.suppress(OSError):
            file = opened.enter_context(open_to_read(path))
        for start in range(0, size, chunk_bytes):
            part = bytearray(min(chunk_bytes, size - start))
            if file is not None:
                with contextlib.suppress(OSError):
                    file.readinto(part)
            yield memoryview(part)


def _chunk_sizes(sizes: Mapping[str, int], chunk_bytes: int) -> Iterator[tuple[str, int]]:
    return ((name, min(chunk_bytes, size - at)) for name, size in sizes.items() for at in range(0, size, chunk_bytes))


def _cut(content: Content, chunk_bytes: int) -> Iterator[Tensor]:
    """Yield the parts as the chunks of each file that the other end expects."""
    parts, left = iter(content.parts), memoryview(b"")
    for _, size in _chunk_sizes(content.sizes, chunk_bytes):
        chunk, filled = torch.empty(size, dtype=torch.uint8), 0
        while filled < size:
            left = left or next(parts)
            taken = left[: size - filled]
            chunk.numpy().data[filled : filled + len(taken)] = taken
            left, filled = left[len(taken) :], filled + len(taken)
        yield chunk


class _Received:
    """The files of one copy that arrive here; what is written is hashed in ``thread``.

    After an error the rest is received and not written: its source sends it.
    """

    def __init__(self, path: Path, owner: int, sizes: bytes, thread: ThreadPoolExecutor) -> None:
        """``sizes``: of the files by name, as JSON. Raises RuntimeError for those of no copy."""
        self._path, self._owner, self._thread = path, owner, thread
        self._sizes: dict[str, int] = json.loads(sizes)
        files = {shard_name(owner), STATE_FILE}
        if self._sizes.keys() - files or any(type(size) is not int or size < 0 for size in self._sizes.values()):
            raise RuntimeError(f"rank {owner} states other files than those of a copy: {self._sizes}")
        self._writers: dict[str, HashingWriter] = {}
        self._problem: OSError | None = None
        self._writing: Future[None] | None = None

    def chunks(self, chunk_bytes: int) -> Iterator[Tensor]:
        """Yield tensors to fill, one after the other."""
        for name in self._sizes:
            self._do(partial(self._open, name))
        for name, size in _chunk_sizes(self._sizes, chunk_bytes):
            chunk = torch.empty(size, dtype=torch.uint8)
            yield chunk
            if self._writing is not None:
                self._writing.result()
            self._writing = self._thread.submit(self._do, partial(self._write, name, chunk))

    def close(self, manifest: bytes) -> OSError | None:
        """Write the manifest if all files are as it states; return what failed here."""
        if self._writing is not None:
            self._writing.result()
        digests: dict[str, FileDigest] = {}
        for name, writer in self._writers.items():
            try:
                digests[name] = writer.close()
            except OSError as error:
                self._problem = self._problem or error
        if digests and digests == _files(self._path, manifest):
            self._do(lambda: write_received_manifest(self._path, self._owner, manifest))
        return self._problem

    def _do(self, work: Callable[[], object]) -> None:
        if self._problem is None:
            try:
                work()
            except OSError as error:
                self._problem = error

    def _open(self, name: str) -> None:
        make_folder(self._path, mode=0o700)
        self._writers[name] = HashingWriter(self._path / name)

    def _write(self, name: str, chunk: Tensor) -> None:
        self._writers[name].write(chunk.numpy().data)
