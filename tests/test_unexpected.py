"""An error of the system that names nothing is explained by what is missing here."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from scaletrain_cli import unexpected
from scaletrain_cli.unexpected import error_of_system

NOTHING_NAMED = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def test_a_deleted_working_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert str(error_of_system(NOTHING_NAMED, "plan")).startswith("plan: the current folder was deleted. Change")


def test_a_machine_without_shared_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unexpected, "_SHARED_MEMORY", str(tmp_path / "shm"))
    assert "shm is missing. Mount it: `mount -t tmpfs" in str(error_of_system(NOTHING_NAMED, "data prepare"))
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "shm cannot be written. Mount" in str(error_of_system(OSError(errno.EROFS, "Read-only"), "data prepare"))
    named = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "x.txt")
    assert "x.txt: No such file" in str(error_of_system(named, "data prepare"))


def test_a_file_system_without_inodes_is_told_from_a_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "new"))
    assert "Free some space" in str(error_of_system(full, "train"))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_files=100, f_favail=0))
    assert "no inodes left" in str(error_of_system(full, "train"))
