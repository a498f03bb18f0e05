"""The commit protocol: a checkpoint is complete or does not exist, and damage is detected."""

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

from scaletrain_cli.rundir.checkpoints import (
    Checkpoint,
    Defect,
    checkpoints_to_prune,
    find_defects,
    latest_valid,
    list_checkpoints,
    manifest_hash,
    read_checkpoint,
    verify,
)
from scaletrain_cli.worker import checkpoint_commit
from scaletrain_cli.worker.checkpoint_commit import (
    HashingWriter,
    SupersededAttemptError,
    close_attempt,
    commit_checkpoint,
    delete_checkpoint,
    mark_clean,
    open_attempt,
    remove_checkpoint,
    set_aside_newer,
    stage_checkpoint,
    staging_path,
)

PROJECT = Path(__file__).parent.parent.parent
ATTEMPT = 3
Shards = dict[str, bytes]
SHARDS = {"rank-00000.pt": b"a" * 3000, "sub/rank-00001.pt": b"b" * 2000}


def save(folder: Path, step: int, clean: bool = True, shards: Shards = SHARDS, attempt: int = ATTEMPT) -> Path:
    open_attempt(folder, attempt)
    return save_in_open_attempt(folder, step, clean, shards, attempt)


def save_in_open_attempt(
    folder: Path, step: int, clean: bool = True, shards: dict[str, bytes] = SHARDS, attempt: int = ATTEMPT
) -> Path:
    staging = stage_checkpoint(folder, attempt, step)
    files = {}
    for name, data in shards.items():
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        writer = HashingWriter(staging / name)
        writer.write(data[:100])
        writer.write(memoryview(data)[100:])
        files[name] = writer.close()
    return commit_checkpoint(folder, step, files, world_size=2, clean=clean, attempt=attempt)


def steps(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(folder)]


def newest_step(folder: Path) -> int | None:
    newest, _ = latest_valid(folder)
    return newest.step if newest else None


def flip_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position // 8] ^= 1 << position % 8
    path.write_bytes(data)


def test_a_committed_checkpoint_states_what_was_written_and_verifies(tmp_path: Path) -> None:
    path = save(tmp_path, 500)
    assert path == tmp_path / "step-00000500"
    (found,) = list_checkpoints(tmp_path)
    assert (found.step, found.world_size, found.clean, found.attempt, found.size_bytes) == (500, 2, True, 3, 5000)
    assert verify(found) == []
    assert latest_valid(tmp_path) == (found, [])
    assert not staging_path(tmp_path, ATTEMPT, 500).exists()


def test_a_missing_folder_has_no_checkpoints(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "nowhere") == []
    assert latest_valid(tmp_path / "nowhere") == (None, [])


def test_steps_are_ordered_as_numbers_however_many_digits_they_have(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 5):
        save(tmp_path, step)
    assert steps(tmp_path) == [5, 99_999_999, 100_000_000]


def test_a_truncated_shard_is_detected_and_the_previous_checkpoint_is_used(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with (save(tmp_path, 2) / "rank-00000.pt").open("r+b") as shard:
        shard.truncate(2999)
    newest, passed_over = latest_valid(tmp_path)
    assert newest is not None
    assert newest.step == 1
    assert passed_over == ["step-00000002/rank-00000.pt: 2999 bytes instead of 3000"]


def test_any_flipped_bit_in_a_shard_is_detected(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shard = save(tmp_path, 2) / "sub/rank-00001.pt"
    for position in random.Random(0).sample(range(2000 * 8), 25):
        flip_bit(shard, position)
        assert newest_step(tmp_path) == 1, position
        flip_bit(shard, position)
    assert newest_step(tmp_path) == 2


def test_any_flipped_bit_in_a_manifest_is_detected(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = save(tmp_path, 2) / "manifest.json"
    for position in range(0, manifest.stat().st_size * 8, 23):
        flip_bit(manifest, position)
        newest, passed_over = latest_valid(tmp_path)
        # White space is not content: a flip there may leave the same manifest, but never a wrong one.
        if newest is not None and newest.step == 2:
            assert newest.world_size == 2
            assert newest.clean
            assert newest.files.keys() == SHARDS.keys()
        else:
            assert newest is not None
            assert passed_over[0].startswith("step-00000002/manifest.json: ")
        flip_bit(manifest, position)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"step": 2}', '"x"', '{"sha256": 1}', "\0" * 100])
def test_an_invalid_manifest_is_a_damaged_checkpoint(tmp_path: Path, text: str) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / "manifest.json").write_text(text)
    assert newest_step(tmp_path) == 1


def test_without_a_valid_checkpoint_every_reason_is_returned(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step) / "rank-00000.pt").write_bytes(b"")
    newest, passed_over = latest_valid(tmp_path)
    assert newest is None
    assert [line.partition("/")[0] for line in passed_over] == ["step-00000002", "step-00000001"]


def test_uncommitted_files_are_not_a_checkpoint_and_the_next_attempt_removes_them(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (stage_checkpoint(tmp_path, ATTEMPT, 2) / "rank-00000.pt").write_bytes(b"half")
    assert latest_valid(tmp_path)[1] == []
    open_attempt(tmp_path, ATTEMPT + 1)
    assert names(tmp_path) == ["attempt-0004.tmp", "step-00000001"]


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_superseded_attempt_can_neither_write_nor_commit_nor_mark_nor_delete(tmp_path: Path) -> None:
    kept = save(tmp_path, 1, clean=False)
    staging = stage_checkpoint(tmp_path, ATTEMPT, 2)
    (staging / "rank-00000.pt").write_bytes(b"whole")
    open_attempt(tmp_path, ATTEMPT + 1)
    (checkpoint,) = list_checkpoints(tmp_path)
    for act in (
        lambda: stage_checkpoint(tmp_path, ATTEMPT, 3),
        lambda: commit_checkpoint(tmp_path, 2, {}, world_size=1, clean=True, attempt=ATTEMPT),
        lambda: mark_clean(checkpoint, ATTEMPT),
        lambda: remove_checkpoint(kept, ATTEMPT),
        lambda: set_aside_newer(tmp_path, 0, ATTEMPT),
    ):
        with pytest.raises(SupersededAttemptError, match="superseded by a later one"):
            act()
    assert list_checkpoints(tmp_path) == [checkpoint]
    assert verify(checkpoint) == []


def test_a_checkpoint_that_a_user_deletes_meanwhile_does_not_end_the_attempt_that_would_mark_or_delete_it(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1, clean=False)
    gone = only(tmp_path)
    delete_checkpoint(gone.path)
    mark_clean(gone, ATTEMPT)
    remove_checkpoint(gone.path, ATTEMPT)
    assert names(tmp_path) == ["attempt-0003.tmp"]
    save(tmp_path, 2)
    assert only(tmp_path).step == 2


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_an_error_of_the_file_system_does_not_supersede_an_attempt_whose_folder_is_there(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, target: Path) -> NoReturn:
        raise OSError(number, os.strerror(number), str(path))

    open_attempt(tmp_path, ATTEMPT)
    with monkeypatch.context() as failing:
        failing.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match=re.escape(os.strerror(number))):
            save_in_open_attempt(tmp_path, 1)
    save_in_open_attempt(tmp_path, 1)
    assert steps(tmp_path) == [1]


def test_an_attempt_older_than_the_current_one_cannot_open(tmp_path: Path) -> None:
    save(tmp_path, 1, attempt=5)
    with pytest.raises(SupersededAttemptError, match="attempt 4 begins after attempt 5"):
        open_attempt(tmp_path, 4)
    assert names(tmp_path) == ["attempt-0005.tmp", "step-00000001"]
    save_in_open_attempt(tmp_path, 2, attempt=5)


def test_a_checkpoint_marked_clean_still_verifies(tmp_path: Path) -> None:
    save(tmp_path, 1, clean=False)
    mark_clean(only(tmp_path), ATTEMPT)
    assert only(tmp_path).clean
    assert verify(only(tmp_path)) == []


def only(folder: Path) -> Checkpoint:
    (found,) = list_checkpoints(folder)
    return found


def test_committing_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 1, shards={"other.pt": b"c" * 500})
    (found,) = list_checkpoints(tmp_path)
    assert list(found.files) == ["other.pt"]
    assert verify(found) == []
    close_attempt(tmp_path, ATTEMPT)
    assert names(tmp_path) == ["step-00000001"]


def test_retention_keeps_the_latest_checkpoints_and_the_latest_clean_one(tmp_path: Path) -> None:
    for step, clean in ((1, True), (2, True), (3, False), (4, False), (5, False)):
        save(tmp_path, step, clean)
    assert superfluous_steps(tmp_path, keep=2) == [1, 3]
    assert superfluous_steps(tmp_path, keep=2, keep_every=3) == [1]


def superfluous_steps(folder: Path, **retention: int) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints_to_prune(folder, **retention)]


def test_deletion_removes_the_manifest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1)
    monkeypatch.setattr(checkpoint_commit.shutil, "rmtree", lambda *_, **__: None)  # as if killed right after
    delete_checkpoint(path)
    assert path.exists()
    assert steps(tmp_path) == []


KILL_AT = """
import os, signal, sys
from pathlib import Path
from tests.rundir.test_checkpoints import save, save_in_open_attempt

def trap(event, arguments):
    global calls
    # Each change to the disk is preceded by one of these; the process dies at the chosen one.
    # Names are relative to an open folder, so they do not tell where; nothing else here writes.
    writes = event == "open" and arguments[2] is not None and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if writes or event in ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
        calls += 1
        if calls == deadly:
            os.kill(os.getpid(), signal.SIGKILL)

for deadly in range(1, 100):
    folder, calls = Path(sys.argv[1], str(deadly)), 0
    save(folder, 1)
    if (pid := os.fork()) == 0:
        sys.addaudithook(trap)
        save_in_open_attempt(folder, 2)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(code)
    if code == 0:
        break
"""


def test_a_kill_at_any_point_of_a_commit_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    command, search = [sys.executable, "-c", KILL_AT, str(tmp_path)], {**os.environ, "PYTHONPATH": str(PROJECT)}
    result = subprocess.run(command, cwd=PROJECT, env=search, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    codes, outcomes = list(map(int, result.stdout.split())), []
    assert set(codes[:-1]) == {-signal.SIGKILL}
    assert codes[-1] == 0
    for deadly in range(1, len(codes) + 1):
        newest, passed_over = latest_valid(tmp_path / str(deadly))
        assert newest is not None, f"killed at call {deadly}"
        assert passed_over == []
        outcomes.append(newest.step)
    assert len(outcomes) > 4  # it was killed at several points before it got through
    assert outcomes == sorted(outcomes)  # old up to some point, new from there on
    assert outcomes[0] == 1
    assert outcomes[-1] == 2


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    manifest = json.loads((save(tmp_path, 7) / "manifest.json").read_text())
    assert manifest["schema"] == "scaletrain.checkpoint/v1"
    assert manifest["files"]["rank-00000.pt"]["size"] == 3000


def test_a_damaged_checkpoint_never_displaces_a_valid_one(tmp_path: Path) -> None:
    """Resuming at 10 sets the damaged 20 aside; else keep=1 would keep it, and delete what is committed at 15."""
    save(tmp_path, 10)
    flip_bit(save(tmp_path, 20) / "rank-00000.pt", 77)
    newest, _ = latest_valid(tmp_path)
    assert newest is not None
    assert set_aside_newer(tmp_path, newest.step, ATTEMPT) == ["step-00000020"]
    save(tmp_path, 15)
    assert superfluous_steps(tmp_path, keep=1) == [10]
    assert newest_step(tmp_path) == 15
    assert (tmp_path / "damaged-step-00000020").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_damaged_checkpoint_that_nobody_may_write_to_is_set_aside_too() -> None:
    """Such as one that was restored from a copy with its modes. As another user, since root may write everywhere."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        save(folder, 10)
        flip_bit(save(folder, 20) / "rank-00000.pt", 77)
        (folder / "step-00000020").chmod(0o555)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 61_001, -1)
        os.seteuid(61_001)
        try:
            assert set_aside_newer(folder, 10, ATTEMPT) == ["step-00000020"]
        finally:
            os.seteuid(0)
        assert steps(folder) == [10]


def test_moving_newer_checkpoints_aside_keeps_the_others(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    assert set_aside_newer(tmp_path, 20, ATTEMPT) == []
    assert steps(tmp_path) == [10, 20]


def test_a_kill_between_the_two_renames_of_a_replacement_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    checkpoint_commit._move_to_attempt(path, ATTEMPT, checkpoint_commit._REPLACED)
    assert steps(tmp_path) == []
    open_attempt(tmp_path, ATTEMPT + 1)
    assert steps(tmp_path) == [1]
    assert verify(only(tmp_path)) == []


def test_an_unreadable_file_is_no_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = read_checkpoint(save(tmp_path, 1))
    assert isinstance(checkpoint, Checkpoint)

    def stale(*_: object, **__: object) -> int:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr("scaletrain_cli.rundir.checkpoints.os.open", stale)
        found = find_defects(checkpoint, ["rank-00000.pt"])
        manifest = read_checkpoint(checkpoint.path)
    assert found == {"rank-00000.pt": Defect("unreadable", "Stale file handle")}
    assert manifest == Defect("unreadable", "manifest.json: Stale file handle")
    assert find_defects(checkpoint) == {}


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop of links", "link to nowhere"])
def test_anything_but_a_file_in_place_of_one_is_damage_on_every_node(tmp_path: Path, kind: str) -> None:
    save(tmp_path, 1)
    for name in ("rank-00000.pt", "manifest.json"):
        place = save(tmp_path, 2) / name
        place.unlink()
        if kind == "folder":
            place.mkdir()
        elif kind == "pipe":
            os.mkfifo(place)
        else:
            place.symlink_to(place if kind == "loop of links" else tmp_path / "nowhere")
        found = read_checkpoint(place.parent)
        defect = next(iter(find_defects(found).values())) if isinstance(found, Checkpoint) else found
        assert defect.kind == "damaged"
        assert newest_step(tmp_path) == 1


def test_a_copy_with_the_name_of_another_step_is_not_a_checkpoint_and_is_kept(tmp_path: Path) -> None:
    for step in (12, 18, 24):
        save(tmp_path, step)
    for name in ("step-00000030", "step-00000006", "step-000000012"):
        shutil.copytree(tmp_path / "step-00000012", tmp_path / name)
    newest, passed_over = latest_valid(tmp_path)
    assert newest is not None
    assert newest.step == 24
    assert passed_over == [
        "step-00000030/manifest.json: is the manifest of step 12. Rename the folder to step-00000012 or delete it"
    ]
    assert steps(tmp_path) == [12, 18, 24]
    assert superfluous_steps(tmp_path, keep=2) == [12]
    assert set_aside_newer(tmp_path, 24, ATTEMPT) == []
    kept = {"step-00000006", "step-000000012", "step-00000012", "step-00000018", "step-00000024", "step-00000030"}
    assert kept <= set(names(tmp_path))


def test_a_commit_moves_aside_a_copy_with_its_name(tmp_path: Path) -> None:
    first = save(tmp_path, 12)
    for kept in ("misnamed-step-00000030", "misnamed-step-00000030.2"):
        shutil.copytree(first, tmp_path / "step-00000030")
        save(tmp_path, 30)
        assert steps(tmp_path) == [12, 30]
        assert (tmp_path / kept / "rank-00000.pt").exists()
        shutil.rmtree(tmp_path / "step-00000030")


def test_a_commit_replaces_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "step-00000030").symlink_to(tmp_path / "nowhere")
    save(tmp_path, 30)
    assert newest_step(tmp_path) == 30


def test_a_manifest_that_names_files_outside_its_folder_is_damaged(tmp_path: Path) -> None:
    path = save(tmp_path, 1) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    manifest["files"]["../elsewhere"] = manifest["files"].pop("rank-00000.pt")
    path.write_text(json.dumps({**manifest, "sha256": manifest_hash(manifest)}))
    assert steps(tmp_path) == []


def test_an_attempt_removes_only_the_folders_of_ended_attempts(tmp_path: Path) -> None:
    for name in ("my-notes.removed", "attempt-0001.77.removed"):
        (tmp_path / name).mkdir()
    open_attempt(tmp_path, ATTEMPT)
    assert names(tmp_path) == ["attempt-0003.tmp", "my-notes.removed"]
