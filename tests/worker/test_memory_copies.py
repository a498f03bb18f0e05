"""The folder of copies in host memory: which copies count, and what is removed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from scaletrain_cli.rundir.checkpoints import FileDigest, checkpoint_path
from scaletrain_cli.rundir.paths import RunDir, copies_folder
from scaletrain_cli.worker.memory_copies import (
    complete_copy,
    drop_copies,
    open_copies,
    place_of,
    read_copies,
    remove_abandoned,
    remove_copies,
)

HOUR = 3600.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copies_folder(RunDir(tmp_path / "run"), tmp_path / "memory")


def copy(folder: Path, step: int, rank: int, key: str = "key") -> Path:
    place = checkpoint_path(folder, step)
    place.mkdir(exist_ok=True)
    (place / f"rank-{rank:05d}.safetensors").write_bytes(b"weights")
    complete_copy(folder, step, rank, {"file": FileDigest(7, "0" * 64)}, key=key, world_size=2, attempt=1)
    return place


def steps(folder: Path, rank: int, key: str = "key") -> list[int]:
    return sorted(step for step, ranks in read_copies(folder, key).items() if rank in ranks)


def test_runs_of_one_name_below_two_roots_have_two_folders_that_name_the_user(tmp_path: Path) -> None:
    here, there = (copies_folder(RunDir(tmp_path / root / "run")) for root in ("a", "b"))
    assert here != there
    assert here.name.startswith(f"scaletrain-{os.geteuid()}-run-")


def test_a_copy_counts_for_the_ranks_that_have_completed_it_and_with_its_key_alone(folder: Path) -> None:
    os.close(open_copies(folder))
    copy(folder, 4, 0)
    copy(folder, 5, 1, key="another layout")
    checkpoint_path(folder, 6).mkdir()  # a rank was killed while it wrote
    (checkpoint_path(folder, 6) / "rank-00000.safetensors").write_bytes(b"wei")
    assert (steps(folder, 0), steps(folder, 1), steps(folder, 1, "another layout")) == ([4], [], [5])


def test_a_damaged_manifest_is_no_copy(folder: Path) -> None:
    os.close(open_copies(folder))
    place = copy(folder, 4, 0) / "rank-00000.json"
    place.write_text(place.read_text().replace('"step": 4', '"step": 5'))
    assert steps(folder, 0) == []
    place.write_bytes(b"\0" * 10)
    assert steps(folder, 0) == []


def test_a_folder_that_others_may_write_to_is_not_used(folder: Path) -> None:
    os.close(open_copies(folder))
    copy(folder, 4, 0)
    folder.chmod(0o777)
    assert steps(folder, 0) == []
    with pytest.raises(PermissionError, match="not private"):
        open_copies(folder)


def test_a_link_in_the_place_of_the_folder_is_neither_used_nor_removed(folder: Path, tmp_path: Path) -> None:
    folder.parent.mkdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="not private"):
        open_copies(folder)
    assert steps(folder, 0) == []
    remove_copies(folder)
    remove_abandoned(folder.with_name("own"), time.time() + 2 * HOUR)
    assert (tmp_path / "elsewhere").is_dir()


def test_dropped_steps_are_removed_with_the_files_of_all_ranks(folder: Path) -> None:
    os.close(open_copies(folder))
    for step in (3, 4, 5):
        copy(folder, step, 0)
        copy(folder, step, 1)
    drop_copies(folder, before=4)
    assert not checkpoint_path(folder, 3).exists()
    drop_copies(folder, after=4)
    assert (steps(folder, 0), steps(folder, 1)) == ([4], [4])


def test_a_place_is_that_of_one_folder_however_it_is_reached(folder: Path, tmp_path: Path) -> None:
    other = copies_folder(RunDir(tmp_path / "other"), tmp_path / "memory")
    (tmp_path / "link").symlink_to(folder.parent)
    assert place_of(folder) == place_of(tmp_path / "link" / folder.name) != place_of(other)
    other.chmod(0o777)
    assert place_of(other) == ""


def test_folders_that_no_process_has_used_for_an_hour_are_removed_except_the_own_one(folder: Path) -> None:
    names = ("own", "left", "used")
    made = {name: folder.with_name(f"scaletrain-{os.geteuid()}-{name}") for name in names}
    descriptors = {name: open_copies(path) for name, path in made.items()}
    os.close(descriptors["left"])
    remove_abandoned(made["own"])
    assert made["left"].is_dir()
    remove_abandoned(made["own"], time.time() + 2 * HOUR)
    assert [path.is_dir() for path in made.values()] == [True, False, True]
    os.close(descriptors["own"])
    os.close(descriptors["used"])
