"""Copies in host memory that real ranks send each other: to a second node, and back to the node that has none."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

from scaletrain_cli.engine.checkpoint import copy_transfer, resume_point
from scaletrain_cli.engine.checkpoint.copy_transfer import (
    Content,
    Transfer,
    transfer_copies,
    transfers_to_partners,
    transfers_to_resume,
)
from scaletrain_cli.engine.checkpoint.shard_file import shard_name
from scaletrain_cli.engine.process_group import RankConsensus, Ranks
from scaletrain_cli.rundir.checkpoints import STATE_FILE, Checkpoint, Defect, checkpoint_path, verify
from scaletrain_cli.worker.checkpoint_commit import HashingWriter
from scaletrain_cli.worker.memory_copies import complete_copy, open_copies, read_copies, read_manifest
from tests.engine.ranks import on_ranks

KEY, STEP = "key", 7
CHUNK = 1000  # bytes, so that a file has several
ALONE: dict[int, tuple[int, ...]] = dict.fromkeys(range(4), ())  # no rank needs the files of another one


def pairs(places: str) -> list[tuple[int, int]]:
    transfers = transfers_to_partners(list(places))
    assert all(each.source == each.owner for each in transfers)
    return [(each.source, each.destination) for each in transfers]


def test_the_partner_of_a_rank_is_on_the_node_half_the_job_away() -> None:
    assert pairs("aabb") == [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert pairs("abcd") == [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert pairs("aab") == [(0, 2), (1, 2), (2, 0)]
    assert pairs("aa") == []


def test_a_node_receives_what_its_ranks_need_and_it_does_not_hold_in_turn_from_all_that_do() -> None:
    everything, first, second = (0, 1, 2, 3), (0, 1), (2, 3)
    lost = [everything, everything, (), ()]
    assert transfers_to_resume("aabb", lost, ALONE) == [Transfer(1, 2, 2), Transfer(0, 3, 3)]
    assert transfers_to_resume("aabb", [first, first, second, second], ALONE) == []
    exchanged = transfers_to_resume("aabb", [second, second, first, first], ALONE)
    assert [(each.destination, each.owner) for each in exchanged] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [each.source // 2 for each in exchanged] == [1, 1, 0, 0]
    replicas = transfers_to_resume("aabb", [first, first, second, second], {**ALONE, 0: (2,), 1: (2, 3)})
    assert [(each.source // 2, each.destination // 2, each.owner) for each in replicas] == [(1, 0, 2), (1, 0, 3)]


def content(rank: int, size: int) -> bytes:
    return (f"state of rank {rank} ".encode() * (size // 10))[:size]


def place(root: Path, rank: int) -> Path:
    return root / f"node {rank // 2}"


def write_own(root: Path, rank: int) -> None:
    """Write what MemoryCopies does for a rank; the sizes are below, at and above a multiple of a chunk, and zero."""
    folder = place(root, rank)
    os.close(open_copies(folder))
    path = checkpoint_path(folder, STEP)
    path.mkdir(exist_ok=True)
    digests = {}
    for name in (f"rank-{rank:05d}.safetensors", *([STATE_FILE] if rank == 0 else [])):
        writer = HashingWriter(path / name)
        writer.write(content(rank, [CHUNK - 1, 5 * CHUNK, 2 * CHUNK + 1, 0][rank]))
        digests[name] = writer.close()
    complete_copy(folder, STEP, rank, digests, key=KEY, world_size=4, attempt=1)


def be_rank(root: Path, transfers: list[Transfer], hurt: str = "") -> str:
    """Take part in the transfers; return the error."""
    rank, consensus = int(os.environ["RANK"]), RankConsensus(600.0)
    copy_transfer._CHUNK_BYTES = CHUNK
    if hurt == "full" and rank == 2:
        write = HashingWriter.write

        def fill(writer: Any, data: Any) -> int:
            fill.left -= 1  # type: ignore[attr-defined]
            if fill.left < 0:  # type: ignore[attr-defined]
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(writer, data)

        fill.left = 1  # type: ignore[attr-defined]
        HashingWriter.write = fill  # type: ignore[method-assign,assignment]
    try:
        transfer_copies(checkpoint_path(place(root, rank), STEP), transfers, rank, consensus)
    except OSError as error:
        return os.strerror(error.errno or 0)
    return ""


def held(root: Path, node: int) -> list[int]:
    """Return the ranks whose copies a node has, each verified."""
    copies = read_copies(root / f"node {node}", KEY).get(STEP, {})
    assert [verify(copy) for copy in copies.values()] == [[]] * len(copies)
    return sorted(copies)


TO_PARTNERS = transfers_to_partners(["a", "a", "b", "b"])


def test_what_a_lost_node_held_comes_back_from_its_partner(tmp_path: Path) -> None:
    for rank in range(4):
        write_own(tmp_path, rank)
    on_ranks(4, be_rank, tmp_path, TO_PARTNERS)
    assert (held(tmp_path, 0), held(tmp_path, 1)) == ([0, 1, 2, 3], [0, 1, 2, 3])
    before = {path.name: path.read_bytes() for path in checkpoint_path(tmp_path / "node 0", STEP).iterdir()}
    shutil.rmtree(tmp_path / "node 0")
    (tmp_path / "node 0").mkdir(mode=0o700)
    on_ranks(
        4,
        be_rank,
        tmp_path,
        transfers_to_resume("aabb", [[], [], held(tmp_path, 1), held(tmp_path, 1)], dict.fromkeys(range(4), ())),
    )
    assert held(tmp_path, 0) == [0, 1]
    after = {path.name: path.read_bytes() for path in checkpoint_path(tmp_path / "node 0", STEP).iterdir()}
    assert after.keys() < before.keys()
    assert all(before[name] == after[name] for name in after)


def test_a_copy_that_is_damaged_or_missing_at_its_source_does_not_count_at_its_destination(tmp_path: Path) -> None:
    for rank in (0, 1, 2):  # rank 3 could not write its own
        write_own(tmp_path, rank)
    file = checkpoint_path(tmp_path / "node 0", STEP) / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-CHUNK] + bytes(CHUNK))
    (checkpoint_path(tmp_path / "node 1", STEP) / "rank-00002.safetensors").unlink()
    assert on_ranks(4, be_rank, tmp_path, TO_PARTNERS) == [""] * 4
    copies = [read_copies(tmp_path / f"node {node}", KEY)[STEP] for node in range(2)]
    assert [sorted(each) for each in copies] == [[0, 1], [0, 2]], "each node's own, and rank 0's"


def test_a_full_memory_is_an_error_of_its_rank_alone_and_the_others_receive_theirs(tmp_path: Path) -> None:
    for rank in range(4):
        write_own(tmp_path, rank)
    errors = on_ranks(4, be_rank, tmp_path, TO_PARTNERS, "full")
    assert errors == ["", "", os.strerror(errno.ENOSPC), ""]
    assert (held(tmp_path, 0), held(tmp_path, 1)) == ([0, 1, 2, 3], [1, 2, 3])


def be_writing_rank(root: Path) -> None:
    """Send the own copy, which is written only once all of it is sent; rank 3 cannot write its own."""
    rank, path = int(os.environ["RANK"]), checkpoint_path(place(root, int(os.environ["RANK"])), STEP)
    copy_transfer._CHUNK_BYTES = CHUNK
    parts = [memoryview(content(rank, size)) for size in (CHUNK - 1, 0, 3 * CHUNK)]

    def manifest() -> bytes:
        if rank != 3:
            path.mkdir(exist_ok=True)
            writer = HashingWriter(path / shard_name(rank))
            for part in parts:
                writer.write(part)
            complete_copy(path.parent, STEP, rank, {shard_name(rank): writer.close()}, key=KEY, world_size=4, attempt=1)
        return read_manifest(path, rank)

    os.close(open_copies(path.parent))
    own = Content({shard_name(rank): sum(map(len, parts))}, parts, manifest)
    transfer_copies(path, TO_PARTNERS, rank, RankConsensus(600.0), own)


def test_a_copy_is_sent_while_it_is_written_and_counts_once_it_is_whole_at_both_ends(tmp_path: Path) -> None:
    on_ranks(4, be_writing_rank, tmp_path)
    assert (held(tmp_path, 0), held(tmp_path, 1)) == ([0, 1, 2], [0, 1, 2])


def be_resuming_rank(root: Path, blind: int = -1) -> tuple[int, list[str]]:
    """Return the step that the rank resumes from, and the files that it reads to verify them."""
    rank, read = int(os.environ["RANK"]), list[str]()

    def find_defects(checkpoint: Checkpoint) -> dict[str, Defect]:
        read.extend(checkpoint.files)
        return verified(checkpoint)

    def read_nothing_at_first(folder: Path, key: str) -> dict[int, Any]:
        resume_point.read_copies = read_copies
        return {}

    verified, resume_point.find_defects = resume_point.find_defects, find_defects  # type: ignore[assignment]
    if rank == blind:
        resume_point.read_copies = read_nothing_at_first
    resume_point.place_of = lambda folder: folder.name
    copy, _ = resume_point._find_copy(place(root, rank), KEY, 0, Ranks(rank, 4, rank % 2), RankConsensus(600.0))
    return 0 if copy is None else copy.step, read


def test_what_a_new_node_receives_is_verified_while_it_arrives_and_not_read_again(tmp_path: Path) -> None:
    for rank in range(4):
        write_own(tmp_path, rank)
    on_ranks(4, be_rank, tmp_path, TO_PARTNERS)
    shutil.rmtree(tmp_path / "node 0")
    (tmp_path / "node 0").mkdir(mode=0o700)
    found = on_ranks(4, be_resuming_rank, tmp_path)
    assert found == [(STEP, []), (STEP, []), (STEP, [shard_name(2)]), (STEP, [shard_name(3)])]
    assert (held(tmp_path, 0), held(tmp_path, 1)) == ([0, 1], [0, 1, 2, 3])


def test_a_rank_that_could_not_read_its_manifest_verifies_its_copy_all_the_same(tmp_path: Path) -> None:
    for rank in range(4):
        write_own(tmp_path, rank)
    found = on_ranks(4, be_resuming_rank, tmp_path, 3)
    assert found[3] == (STEP, [shard_name(3)])


def be_rank_of_a_liar(root: Path) -> str:
    """Send a file of another place; return the error."""
    rank, path = int(os.environ["RANK"]), checkpoint_path(place(root, int(os.environ["RANK"])), STEP)
    own = Content({"../../escaped": 5}, [memoryview(b"taken")], lambda: b"")
    try:
        transfer_copies(path, TO_PARTNERS, rank, RankConsensus(600.0), own)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_cannot_name_files_outside_the_folder_of_the_copies(tmp_path: Path) -> None:
    errors = on_ranks(4, be_rank_of_a_liar, tmp_path)
    assert all("states other files than those of a copy" in error for error in errors)
    assert not list(tmp_path.rglob("escaped"))
