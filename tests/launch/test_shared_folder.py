"""Local file systems are distinguished from shared ones, and full ones from those with enough space."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.shared_folder import disk_space_notes, file_system, unshared_notes
from scaletrain_cli.reasons import Reason
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
        *(("/home/ada/runs", "ext4"), ("/data", "nfs4"), ("/data/runs", "nfs4"), ("/database/runs", "ext4")),
        *(("/data/scratch/runs", "tmpfs"), ("/my data/runs", "lustre"), ("/late/runs", "nfs")),
    ],
)
def test_a_folder_is_on_its_innermost_mount(folder: str, kind: str) -> None:
    assert file_system(Path(folder), MOUNTS) == kind


def test_a_local_runs_root_is_a_warning_for_a_job_of_several_nodes() -> None:
    (note,) = unshared_notes(Path("/home/ada/runs"), 2, MOUNTS)
    assert note == Reason("launch.runs-root-local", {"folder": "/home/ada/runs", "file_system": "ext4"})
    assert "$SCALETRAIN_RUNS" in note.remedies[0]
    assert unshared_notes(Path("/home/ada/runs"), 1, MOUNTS) == []
    assert unshared_notes(Path("/data/runs"), 2, MOUNTS) == []


def test_space_for_one_checkpoint_is_required_and_too_little_for_all_kept_ones_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1000, f_frsize=10**6))
    spec, plan = make_spec("checkpoint.keep=3"), make_plan(make_spec())

    def warnings(checkpoint_bytes: int, runs: int = 1) -> list[Reason]:
        durability = dataclasses.replace(plan.durability, checkpoint_bytes=checkpoint_bytes)
        return disk_space_notes(
            spec, dataclasses.replace(plan, durability=durability), tmp_path / "not" / "there" / "yet", runs
        )

    assert warnings(250 * 10**6) == []
    assert "has 1.00 GB free, and the next 4 checkpoints" in str(warnings(300 * 10**6)[0])
    assert "the next 4 checkpoints of each of 2 runs" in str(warnings(150 * 10**6, runs=2)[0])
    with pytest.raises(SchedulerError, match=r"one checkpoint takes 1\.50 GB") as caught:
        warnings(1500 * 10**6)
    assert caught.value.problems[0].key == "checkpoint.dir"
