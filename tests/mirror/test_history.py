"""The history of a run in a mirror keeps what is private to its user private."""

from pathlib import Path

from scaletrain_cli.mirror.history import HistoryWriter, newest_index, restore_history
from scaletrain_cli.mirror.stores import FolderStore, Throttle
from scaletrain_cli.rundir.paths import RunDir


def test_files_that_only_their_owner_may_read_are_private_in_the_mirror_and_where_they_come_back(
    tmp_path: Path,
) -> None:
    run, store = RunDir(tmp_path / "run"), FolderStore(tmp_path / "mirror")
    modes = {"run.json": 0o640, "code/0123.tar.gz": 0o600, "code/0123.sha256": 0o640}
    for name, mode in modes.items():
        path = run.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        path.chmod(mode)
    HistoryWriter(store, run, 1, Throttle(1e12)).write()
    blobs = {path.read_text(): path.stat().st_mode & 0o777 for path in (tmp_path / "mirror" / "blobs").iterdir()}
    index = newest_index(store, [])
    assert index is not None
    restore_history(store, index, tmp_path / "back")
    restored = {name: (tmp_path / "back" / name).stat().st_mode & 0o777 for name in modes}
    assert blobs == restored == modes
