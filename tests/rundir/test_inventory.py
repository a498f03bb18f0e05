"""Every entry of a checkpoint folder is reported with its problem."""

from pathlib import Path

from scaletrain_cli.rundir.checkpoints import list_checkpoints, take_inventory, verify_files
from scaletrain_cli.worker.checkpoint_commit import stage_checkpoint
from tests.rundir.test_checkpoints import ATTEMPT, flip_bit, save


def test_every_folder_is_listed_with_its_problem(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    (tmp_path / "step-00000020" / "manifest.json").unlink()
    (tmp_path / "step-00000030" / "rank-00000.pt").unlink()
    stage_checkpoint(tmp_path, ATTEMPT, 50)
    (tmp_path / "damaged-step-00000005").mkdir()
    (tmp_path / "notes").mkdir()
    assert {entry.step: entry.problem for entry in take_inventory(tmp_path)} == {
        5: "moved aside as damaged; you can delete it",
        10: "",
        20: "manifest.json: missing (the deletion was interrupted, or the file was lost)",
        30: "rank-00000.pt: No such file or directory",
        40: "",
        50: "incomplete, in attempt-0003.tmp",
    }
    assert take_inventory(tmp_path / "nowhere") == []


def test_files_are_verified_concurrently_and_each_is_reported(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    (checkpoint,) = list_checkpoints(tmp_path)
    reported: dict[str, int] = {}
    assert verify_files(checkpoint, reported.__setitem__) == []
    assert reported == {"rank-00000.pt": 3000, "sub/rank-00001.pt": 2000}
    flip_bit(path / "sub/rank-00001.pt", 77)
    (path / "rank-00000.pt").unlink()
    assert verify_files(checkpoint) == [
        "rank-00000.pt: No such file or directory",
        "sub/rank-00001.pt: content does not match the recorded hash",
    ]
