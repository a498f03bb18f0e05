"""Send copies of the state in host memory from node to node: to a partner while training, and to new nodes in a resume.

The copies of a lost node are lost. So each rank sends its own to a rank of another node, which keeps them beside its
own; the next attempt sends each node what its ranks need and it does not have, as a new node or one with other ranks.
"""

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaletrain_cli.engine.process_group import RankConsensus
from scaletrain_cli.rundir.checkpoints import Checkpoint, FileDigest, parse_manifest
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
    found: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault(place, []).append(rank)
    return list(found.values())


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


def transfer_copies(path: Path, transfers: Sequence[Transfer], rank: int, consensus: RankConsensus) -> None:
    """Send and receive files of ``path``, the folder of a step here. Collective over the ranks of the ``transfers``.

    What its source lacks, or arrives other than its manifest states, is left without a manifest. Raises OSError if a
    file cannot be written, once all are received, and RuntimeError if another rank is lost.
    """
    of_ranks = Counter(rank for each in transfers for rank in (each.source, each.destination))
    chunk_bytes = min(_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, _BUFFER_BYTES // max(of_ranks.values(), default=1)))
    sent = {tag: read_manifest(path, each.owner) for tag, each in enumerate(transfers) if each.source == rank}
    sizes = {tag: torch.zeros(1, dtype=torch.int64) for tag, each in enumerate(transfers) if each.destination == rank}

    def exchange(outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        consensus.exchange(
            [(transfers[tag].destination, tag, values) for tag, values in outgoing.items()],
            [(transfers[tag].source, tag, values) for tag, values in incoming.items()],
        )

    exchange({tag: torch.tensor([len(manifest)]) for tag, manifest in sent.items()}, sizes)
    arrived = {tag: torch.zeros(int(size), dtype=torch.uint8) for tag, size in sizes.items() if size}
    stated = {tag: manifest for tag, manifest in sent.items() if manifest}
    exchange({tag: torch.frombuffer(bytearray(each), dtype=torch.uint8) for tag, each in stated.items()}, arrived)
    problems: list[OSError] = []
    outgoing = {tag: _read(path, manifest, chunk_bytes) for tag, manifest in stated.items()}
    incoming = {
        tag: _write(path, transfers[tag].owner, manifest.numpy().tobytes(), chunk_bytes, problems)
        for tag, manifest in arrived.items()
    }
    while outgoing or incoming:
        # Both ends take the chunks of a transfer in the same order, and one of each per exchange.
        chunks = {tag: chunk for tag, each in outgoing.items() if (chunk := next(each, None)) is not None}
        empty = {tag: chunk for tag, each in incoming.items() if (chunk := next(each, None)) is not None}
        exchange(chunks, empty)
        outgoing = {tag: outgoing[tag] for tag in chunks}
        incoming = {tag: incoming[tag] for tag in empty}
    if problems:
        raise problems[0]


def _files(path: Path, manifest: bytes) -> Mapping[str, FileDigest]:
    stated = parse_manifest(manifest, path)
    return dict(sorted(stated.files.items())) if isinstance(stated, Checkpoint) else {}


def _chunks(size: int, chunk_bytes: int) -> Iterator[Tensor]:
    for start in range(0, size, chunk_bytes):
        yield torch.zeros(min(chunk_bytes, size - start), dtype=torch.uint8)


def _read(path: Path, manifest: bytes, chunk_bytes: int) -> Iterator[Tensor]:
    """Yield the content of the files that a manifest states; zeros in place of what cannot be read."""
    for name, digest in _files(path, manifest).items():
        with contextlib.ExitStack() as opened:
            file: Any = None
            with contextlib.suppress(OSError):
                file = opened.enter_context(open_to_read(path / name))
            for chunk in _chunks(digest.size, chunk_bytes):
                if file is not None:
                    with contextlib.suppress(OSError):
                        file.readinto(chunk.numpy())
                yield chunk


def _write(path: Path, owner: int, manifest: bytes, chunk_bytes: int, problems: list[OSError]) -> Iterator[Tensor]:
    """Yield tensors to fill, and write them to the files that a manifest states, and it last if they are as stated.

    After an error, which is added to ``problems``, the rest is received and not written: its source sends it.
    """
    files, digests = _files(path, manifest), dict[str, FileDigest]()
    failed = False

    @contextlib.contextmanager
    def recording_error() -> Iterator[None]:
        nonlocal failed
        try:
            yield
        except OSError as error:
            failed = True
            problems.append(error)

    with recording_error():
        make_folder(path, mode=0o700)
    for name, digest in files.items():
        writer = None
        if not failed:
            with recording_error():
                writer = HashingWriter(path / name)
        for chunk in _chunks(digest.size, chunk_bytes):
            yield chunk
            if writer is not None and not failed:
                with recording_error():
                    writer.write(chunk.numpy().data)
        if writer is not None:
            with recording_error():
                digests[name] = writer.close()
    if files and digests == files and not failed:
        with recording_error():
            write_received_manifest(path, owner, manifest)
