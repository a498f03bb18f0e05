"""Writing to shared folders: planted links, FIFOs and folders are rejected, and no file is truncated."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from scaletrain_cli import safe_files
from scaletrain_cli.errors import UsageError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
PRECIOUS = "alias ll='ls -l'\n"


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "home" / ".bashrc"
    path.parent.mkdir()
    path.write_text(PRECIOUS)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "runs"
    path.mkdir()
    path.chmod(0o2775)
    return path


def hold_lock(path: Path) -> None:
    with safe_files.locked(path, wait_seconds=0):
        pass


def hold_shared_lock(path: Path) -> None:
    with safe_files.locked(path, wait_seconds=0, shared=True):
        pass


def append(path: Path) -> None:
    descriptor = safe_files.open_to_append(path)
    os.write(descriptor, b"line\n")
    os.close(descriptor)


def write_new(path: Path) -> None:
    with safe_files.open_new(path) as file:
        file.write(b"new\n")


OPENERS: list[Callable[[Path], None]] = [hold_lock, hold_shared_lock, append, safe_files.touch]
REPLACERS: list[Callable[[Path], None]] = [lambda path: safe_files.replace_file(path, "new\n"), write_new]


@pytest.mark.parametrize("write", [*OPENERS, *REPLACERS])
def test_a_planted_symbolic_link_does_not_change_its_target(
    root: Path, victim: Path, write: Callable[[Path], None]
) -> None:
    name = root / "events.jsonl"
    name.symlink_to(victim)
    if write in REPLACERS:
        write(name)
        assert not name.is_symlink()
        assert name.read_text() == "new\n"
    else:
        with pytest.raises(PermissionError, match="is a symbolic link, made by "):
            write(name)
    assert victim.read_text() == PRECIOUS


@pytest.mark.parametrize("write", [*OPENERS, *REPLACERS])
def test_a_dangling_link_does_not_create_its_target(root: Path, victim: Path, write: Callable[[Path], None]) -> None:
    elsewhere = victim.with_name("authorized_keys")
    (root / "lock").symlink_to(elsewhere)
    if write in REPLACERS:
        write(root / "lock")
    else:
        with pytest.raises(PermissionError, match="symbolic link"):
            write(root / "lock")
    assert not elsewhere.exists()


@pytest.mark.parametrize("write", [hold_lock, append])
def test_a_hard_link_that_another_user_may_have_made_is_rejected(
    root: Path, victim: Path, write: Callable[[Path], None]
) -> None:
    os.link(victim, root / "lock")
    with pytest.raises(PermissionError, match="hard link"):
        write(root / "lock")
    assert victim.read_text() == PRECIOUS


def test_a_hard_link_in_a_private_folder_is_accepted(root: Path) -> None:
    root.chmod(0o750)
    append(root / "events.jsonl")
    os.link(root / "events.jsonl", root / "kept")
    append(root / "events.jsonl")
    assert (root / "events.jsonl").read_text() == "line\nline\n"


@pytest.mark.parametrize("write", [*OPENERS, *REPLACERS])
def test_a_planted_fifo_does_not_block(root: Path, write: Callable[[Path], None]) -> None:
    os.mkfifo(root / "log")
    ended: list[str] = []

    def attempt() -> None:
        try:
            write(root / "log")
            ended.append("written")
        except PermissionError as error:
            ended.append(str(error))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join()  # for ever if it waits for a reader of the FIFO
    assert ended == ["written"] if write in REPLACERS else "no regular file" in ended[0]


@needs_root
@pytest.mark.parametrize("write", [hold_lock, append, write_new, lambda path: safe_files.replace_file(path, "new\n")])
def test_a_folder_link_of_another_user_is_not_followed(root: Path, victim: Path, write: Callable[[Path], None]) -> None:
    run = root / "run-1"
    run.mkdir()
    (run / "attempts").symlink_to(victim.parent)
    os.chown(run / "attempts", 65534, 65534, follow_symlinks=False)
    with pytest.raises(PermissionError, match=r"attempts in it is a symbolic link, made by .*65534"):
        write(run / "attempts" / ".bashrc")
    assert victim.read_text() == PRECIOUS


@needs_root
def test_links_of_this_user_and_of_the_folder_owner_are_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "big-disk").mkdir()
    (root / "mine").symlink_to(tmp_path / "big-disk")
    append(root / "mine" / "events.jsonl")
    os.chown(root, 65534, 65534)
    (root / "theirs").symlink_to("../big-disk")
    os.chown(root / "theirs", 65534, 65534, follow_symlinks=False)
    append(root / "theirs" / "events.jsonl")
    assert (tmp_path / "big-disk" / "events.jsonl").read_text() == "line\nline\n"


def test_circular_links_are_an_error(root: Path) -> None:
    (root / "a").symlink_to(root / "b")
    (root / "b").symlink_to(root / "a")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        append(root / "a" / "events.jsonl")


def test_files_of_a_run_are_writable_by_the_owner_and_readable_by_the_group(root: Path) -> None:
    for umask, folder_mode, file_mode in ((0o022, 0o750, 0o640), (0o002, 0o750, 0o640), (0o077, 0o700, 0o600)):
        os.umask(umask)
        run = root / f"run-{umask}"
        safe_files.make_folder(run)
        safe_files.create_file(run / "run.json", "{}")
        safe_files.create_file(run / "secrets.json", "{}", private=True)
        append(run / "events.jsonl")
        hold_lock(run / "submit.lock")
        assert mode(run) == folder_mode | 0o2000
        assert run.stat().st_gid == root.stat().st_gid
        assert mode(run / "run.json") == mode(run / "events.jsonl") == file_mode
        assert mode(run / "secrets.json") == mode(run / "submit.lock") == 0o600


def test_shared_files_have_the_permissions_of_the_root_with_any_umask(root: Path) -> None:
    os.umask(0o077)
    safe_files.make_shared_folder(root / "datasets")
    hold_shared_lock(root / ".bad-nodes.lock")
    safe_files.replace_file(root / "bad-nodes.json", "{}", shared=True)
    assert mode(root / "datasets") == 0o2775
    assert mode(root / ".bad-nodes.lock") == mode(root / "bad-nodes.json") == 0o664


@needs_root
def test_a_sticky_root_is_shared_by_users_outside_its_group() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        root = Path(folder)
        root.chmod(0o1777)
        assert make_shared_folder_as_nobody(root) == 0
        assert mode(root / "datasets") & 0o777 == 0o777


def make_shared_folder_as_nobody(root: Path) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            safe_files.make_shared_folder(root / "datasets")
            code = 0
        os._exit(code)
    return os.waitpid(pid, 0)[1]


def test_a_private_root_stays_private(root: Path) -> None:
    root.chmod(0o755)
    safe_files.make_shared_folder(root / "datasets")
    safe_files.replace_file(root / "bad-nodes.json", "{}", shared=True)
    assert mode(root / "datasets") == 0o755
    assert mode(root / "bad-nodes.json") == 0o644


def test_a_failed_replacement_keeps_the_old_content_and_leaves_no_temporary_file(root: Path) -> None:
    safe_files.replace_file(root / "plan.json", "old")
    (root / "folder").mkdir()
    with pytest.raises(OSError):
        safe_files.replace_file(root / "folder", "new")
    assert sorted(path.name for path in root.iterdir()) == ["folder", "plan.json"]


def test_waiting_for_a_held_lock_times_out_and_one_that_is_released_meanwhile_is_taken(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, released_at = 0.0, 1e9
    first = contextlib.ExitStack()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now >= released_at:
            first.close()

    monkeypatch.setattr(safe_files, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert first.enter_context(safe_files.locked(root / "lock"))
    with safe_files.locked(root / "lock", wait_seconds=5) as second:
        assert not second
    assert 5 <= now < 6
    released_at = 8.0
    with safe_files.locked(root / "lock", wait_seconds=5) as second:
        assert second
    assert 8 <= now < 9


def test_a_folder_that_cannot_be_created_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        safe_files.make_folder(Path("/proc/none/such"))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: safe_files.make_folder(path, exist_ok=False),
        lambda path: safe_files.create_file(path, "text"),
        lambda path: safe_files.replace_file(path, "text"),
        lambda path: safe_files.open_new(path, replace=False),
    ],
)
def test_an_error_names_the_whole_path(root: Path, write: Callable[[Path], object]) -> None:
    taken = root / "taken"
    taken.mkdir()
    (taken / "file").touch()
    with pytest.raises(OSError) as caught:
        write(taken)
    assert str(taken.parent) in str(caught.value.filename)
    assert os.path.isabs(caught.value.filename)


def test_an_existing_file_is_never_overwritten_by_create(root: Path) -> None:
    safe_files.create_file(root / "run.json", "first")
    with pytest.raises(FileExistsError):
        safe_files.create_file(root / "run.json", "second")
    assert (root / "run.json").read_text() == "first"


@needs_root
def test_an_error_about_a_folder_of_another_user_names_the_owner(root: Path) -> None:
    safe_files.require_own(root, "the run", trust=False, remedy="Use another run id")
    os.chown(root, 65534, 65534)
    with pytest.raises(UsageError, match=r"belongs to .*65534.* --trust-owner"):
        safe_files.require_own(root, "the run", trust=False, remedy="Use another run id")
    safe_files.require_own(root, "the run", trust=True, remedy="Use another run id")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@needs_root
def test_a_lock_file_of_another_user_is_rejected(root: Path) -> None:
    (root / "lock").touch()
    os.chown(root / "lock", 65534, 65534)
    with pytest.raises(PermissionError, match=r"another user's file, made by .*65534"):
        hold_lock(root / "lock")


@needs_root
def test_a_lock_file_of_the_owner_of_its_folder_is_rejected() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "lock").touch()
        (folder / "lock").chmod(0o666)
        for path in (folder, folder / "lock"):
            os.chown(path, 65534, 65534)
        os.seteuid(61_001)
        try:
            with pytest.raises(PermissionError, match=r"another user's file, made by .*65534"):
                hold_lock(folder / "lock")
            assert [path.name for path in folder.iterdir()] == ["lock"]
        finally:
            os.seteuid(0)


@needs_root
def test_a_private_folder_of_or_readable_by_another_user_is_not_used(root: Path) -> None:
    safe_files.make_private_folder(root / "mine")
    safe_files.make_private_folder(root / "mine")
    assert mode(root / "mine") & 0o777 == 0o700
    for name in ("theirs", "open", "link"):
        (root / name).mkdir(mode=0o700) if name != "link" else (root / name).symlink_to(root / "mine")
    os.chown(root / "theirs", 65534, 65534)
    (root / "open").chmod(0o750)
    for name in ("theirs", "open", "link"):
        with pytest.raises(PermissionError, match="not private to"):
            safe_files.make_private_folder(root / name)
