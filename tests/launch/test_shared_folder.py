"""A folder on a drive of one machine is told from one on a shared file system, and a full one from a roomy one."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.shared_folder import disk_space_notes, file_system, unshared_notes
from tests.launch.conftest import make_plan, make_spec

MOUNTS = """/dev/vda / ext4 rw 0 0
proc /proc proc rw 0 0
server:/export /data nfs4 rw 0 0
tmpfs /data/scratch tmpfs rw 0 0
fs1 /my\\040data lustre rw 0 0
broken
/dev/sdb /late ext4 rw 0 0
server:/late /late nfs rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/home/ada/runs", "ext4"),
        ("/data", "nfs4"),
        ("/data/runs", "nfs4"),
        ("/database/runs", "ext4"),
        ("/data/scratch/runs", "tmpfs"),
        ("/my data/runs", "lustre"),
        ("/late/runs", "nfs"),
    ],
)
def test_the_innermost_mount_holds_a_folder(folder: str, kind: str) -> None:
    assert file_system(Path(folder), MOUNTS) == kind


def test_a_runs_root_of_this_machine_alone_is_told_where_there_are_other_nodes() -> None:
    (note,) = unshared_notes(Path("/home/ada/runs"), 2, MOUNTS)
    assert "/home/ada/runs is on ext4" in note
    assert "$SCALETRAIN_RUNS" in note
    assert unshared_notes(Path("/home/ada/runs"), 1, MOUNTS) == []
    assert unshared_notes(Path("/data/runs"), 2, MOUNTS) == []


def test_room_for_one_checkpoint_is_needed_and_for_those_kept_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1000, f_frsize=10**6))
    spec, plan = make_spec("checkpoint.keep=3"), make_plan(make_spec())

    def notes(checkpoint_bytes: int) -> list[str]:
        durability = dataclasses.replace(plan.durability, checkpoint_bytes=checkpoint_bytes)
        return disk_space_notes(
            spec, dataclasses.replace(plan, durability=durability), tmp_path / "not" / "there" / "yet"
        )

    assert notes(250 * 10**6) == []
    assert "has room for 1.0 GB, and 4 checkpoints" in notes(300 * 10**6)[0]
    with pytest.raises(SchedulerError, match=r"one checkpoint takes 1\.5 GB") as caught:
        notes(1500 * 10**6)
    assert caught.value.problems[0].key == "checkpoint.dir"
