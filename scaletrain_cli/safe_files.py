"""Safe file operations in folders that other users may be able to write to.

A runs root is often shared: setgid and writable by a group. A user who can write there can create a symbolic link,
a hard link, a FIFO or a folder at a name to which another user's process will write. These functions open nothing
through a link of another user, truncate no existing file, wait on no FIFO and hold no other user's lock. All packages
write files through this module. Standard library only.
"""

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

from scaletrain_cli.errors import UsageError

FOLDER_MODE = 0o750  # the owner may change a run, the group may read it
_MOST_LINKS = 40  # the kernel's limit
_PATH_ONLY = getattr(os, "O_PATH", os.O_RDONLY)
_QUIET = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: opening a planted FIFO must not block
_LOCK_POLL_SECONDS = 0.05
_COPIED_BYTES = 1 << 20


def create_file(path: Path, data: bytes | str, *, private: bool = False, public: bool = False) -> None:
    """Create a file with ``data``, durably (fsync). Raises FileExistsError and OSError.

    Its mode is 0600 if ``private``, else 0666 if ``public`` and 0640 if not, less the umask.
    """
    with _folder(path.parent) as folder:
        descriptor = _create(folder, path, private=private, public=public)
        try:
            _write_all(descriptor, path, data)
        except BaseException:
            os.unlink(path.name, dir_fd=folder)
            raise
        finally:
            os.close(descriptor)


def can_be_replaced(file: Path) -> bool:
    """Return whether a name that a user gives is that of a file, or free, in a folder that this user can write to.

    ``replace_file`` would put a file in the place of a device or a pipe; ``-`` is a name for stdout elsewhere.
    """
    folder = file.absolute().parent
    is_usable = file.is_file() if file.exists() else folder.is_dir()
    return str(file) != "-" and is_usable and os.access(folder, os.W_OK | os.X_OK, effective_ids=True)


def replace_file(
    path: Path, data: bytes | str, *, private: bool = False, public: bool = False, shared: bool = False
) -> None:
    """Replace a file atomically: a reader sees either the old or the new content. Raises OSError and keeps the old one.

    Modes are those of create_file(). A ``shared`` file, such as one of a runs root, may be changed by all users who may
    change its folder; in a sticky folder, where only its owner can replace it, it is rewritten in place.
    """
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    with _folder(path.parent) as folder:
        descriptor = _create(folder, draft, private=private, public=public, shared=shared)
        try:
            _write_all(descriptor, draft, data)
            os.replace(draft.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(draft.name, dir_fd=folder)
            if not shared or not isinstance(error, PermissionError):
                raise
            _rewrite(path, data)
        finally:
            os.close(descriptor)


def open_new(path: Path, *, private: bool = False, replace: bool = True) -> BinaryIO:
    """Return a new file to write to. An existing file is never opened: it is removed if ``replace``.

    Raises FileExistsError without ``replace``, and OSError.
    """
    with _folder(path.parent) as folder:
        if replace:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path.name, dir_fd=folder)
        return os.fdopen(_create(folder, path, private=private), "wb")


def open_to_append(path: Path) -> int:
    """Return a descriptor to read and append; creates the file if it does not exist. Raises OSError."""
    return _open(path, os.O_RDWR | os.O_APPEND, create=True)


def open_to_change(path: Path) -> int:
    """Return a descriptor to read and write an existing file. Raises FileNotFoundError and OSError."""
    return _open(path, os.O_RDWR, create=False)


@contextlib.contextmanager
def closing_descriptor(descriptor: int) -> Iterator[int]:
    """Yield the descriptor, and close it on exit."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_to_read(path: Path) -> BinaryIO:
    """Return the file, opened for reading. Raises OSError, also for a FIFO or device, without blocking."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))


def link_or_copy(source: Path, target: Path) -> bool:
    """Give a file a second name, or copy it where that is not possible; return whether it is a second name.

    Raises FileExistsError if ``target`` exists, FileNotFoundError if ``source`` does not, and OSError.
    """
    with _folder(target.parent) as folder:
        try:
            if not source.is_symlink():  # the link would get the second name
                os.link(source, target.name, dst_dir_fd=folder)
                return True
        except (FileNotFoundError, FileExistsError):
            raise
        except OSError:  # another file system, one without hard links, or a file of another user
            pass
    copy_file(source, target)
    return False


def copy_file(source: Path, target: Path) -> None:
    """Copy a file to a new one, durably (fsync). Raises FileExistsError if ``target`` exists, and OSError.

    The copy of a file that only its owner may read is private, too.
    """
    with contextlib.ExitStack() as opened:
        read = opened.enter_context(open_to_read(source))
        written = opened.enter_context(open_new(target, private=is_private(read.fileno()), replace=False))
        while block := read.read(_COPIED_BYTES):
            written.write(block)
        written.flush()
        os.fsync(written.fileno())


def is_private(descriptor: int) -> bool:
    """Return whether only the owner of an open file may read it."""
    return not os.fstat(descriptor).st_mode & 0o044


def touch(path: Path) -> None:
    """Create an empty file unless one exists. Raises OSError."""
    with _folder(path.parent) as folder:
        try:
            os.close(_create(folder, path))
        except FileExistsError:
            if not stat.S_ISREG(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
                _refuse(path, folder)  # otherwise a dangling link would be reported as a missing file


@contextlib.contextmanager
def locked(path: Path, *, wait_seconds: float | None = None, shared: bool = False) -> Iterator[bool]:
    """Hold an exclusive lock on the file; yield whether it was acquired within ``wait_seconds`` (None: no limit).

    Only the owner can open the file of a lock that is not ``shared``, so no other user can hold it. On a file system
    without locks it counts as acquired: the protected files are replaced atomically in any case. Raises OSError if the
    file cannot be opened.
    """
    descriptor = _open(path, os.O_RDWR, create=True, private=not shared, shared=shared)
    try:
        yield _lock(descriptor, wait_seconds)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, wait_seconds: float | None) -> bool:
    deadline = None if wait_seconds is None else time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if deadline is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if deadline is None or time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_POLL_SECONDS)
        except OSError:  # a shared file system without locks
            return True


def make_folder(path: Path, *, mode: int = FOLDER_MODE, exist_ok: bool = True, parents: bool = True) -> None:
    """Create a folder, and its ``parents``, with this mode less the umask. Raises FileExistsError and OSError."""
    try:
        with _folder(path.parent) as parent:
            os.mkdir(path.name, mode, dir_fd=parent)
    except FileNotFoundError:
        if path.parent == path or not parents:
            raise
        make_folder(path.parent, mode=mode)
        make_folder(path, mode=mode, exist_ok=exist_ok, parents=False)
    except FileExistsError:
        if not exist_ok:
            raise
        with _folder(path):  # refuses links of other users, and anything that is not a folder
            pass


def make_private_folder(path: Path) -> None:
    """Create a folder with mode 0700. Raises PermissionError if an existing one is not private, and OSError.

    For trusted files below /tmp, at a name that another user could have taken.
    """
    make_folder(path, mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(
            errno.EPERM, f"not used: it is not private to {user_name(os.geteuid())}. Remove it", str(path)
        )


def make_shared_folder(path: Path) -> None:
    """Create a folder that exactly the users who may write to its parent may write to. Raises OSError."""
    with _folder(path.parent) as parent, contextlib.suppress(FileExistsError):
        os.mkdir(path.name, 0o700, dir_fd=parent)
        bits = os.fstat(parent)
        umask = process_umask()
        # The mode of the root decides who may write to it; a user's umask applies only outside group folders.
        wanted = stat.S_IMODE(bits.st_mode) if _is_team_folder(bits.st_mode) else 0o777 & ~umask
        made = os.open(path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            if _is_team_folder(bits.st_mode) and os.fstat(made).st_gid != bits.st_gid:
                with contextlib.suppress(PermissionError):  # as in /tmp, whose group is root
                    os.fchown(made, -1, bits.st_gid)
            os.fchmod(made, wanted | 0o700)
        finally:
            os.close(made)
    with _folder(path):
        pass


def _create(folder: int, path: Path, *, private: bool = False, public: bool = False, shared: bool = False) -> int:
    descriptor = os.open(path.name, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | _QUIET, 0o600, dir_fd=folder)
    if not private:
        about = os.fstat(folder).st_mode
        # At most the permissions of the folder: files in a private folder stay private.
        mode = (about & 0o666) | 0o600 if shared else 0o666 if public else 0o640 | (about & 0o020)
        with contextlib.suppress(OSError):  # a file system without modes
            os.fchmod(descriptor, mode if shared else mode & ~process_umask())
    return descriptor


def _open(path: Path, flags: int, *, create: bool, private: bool = False, shared: bool = False) -> int:
    with _folder(path.parent) as folder:
        while True:
            try:
                # First without O_CREAT: the kernel refuses that for other users' files in a sticky folder.
                descriptor = os.open(path.name, flags | _QUIET, dir_fd=folder)
            except FileNotFoundError:
                if not create:
                    raise
                with contextlib.suppress(FileExistsError):
                    return _create(folder, path, private=private, shared=shared)
                continue
            except OSError as error:
                closed = error.errno == errno.EACCES and private
                if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK) or closed:
                    _refuse(path, folder)
                if error.errno == errno.EACCES and shared and flags & os.O_ACCMODE != os.O_RDONLY:
                    flags = os.O_RDONLY  # sufficient for a lock, except on NFS
                    continue
                raise OSError(error.errno, error.strerror, str(path)) from error
            status = os.fstat(descriptor)
            linked = status.st_nlink > 1 and os.fstat(folder).st_mode & 0o022  # else only its owner can have linked it
            device = stat.S_ISCHR(status.st_mode)  # such as /dev/null; only root can create one
            # Another user could hold a lock on their own file indefinitely, also the owner of the folder.
            foreign = private and status.st_uid not in (os.geteuid(), 0) and not _owns_for_us(folder, status.st_uid)
            if not (stat.S_ISREG(status.st_mode) or device) or (linked and not device) or foreign:
                os.close(descriptor)
                _refuse(path, folder)
            os.set_blocking(descriptor, True)
            return descriptor


def _owns_for_us(folder: int, uid: int) -> bool:
    """Return whether a new file in a folder belongs to this user id, as on a server that maps all users to one.

    Root may also wait for the owner of a folder, in which it changes that user's files.
    """
    if uid != os.fstat(folder).st_uid:
        return False
    if os.geteuid() == 0:
        return True
    name = f".owner-{os.urandom(8).hex()}.tmp"
    with closing_descriptor(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _QUIET, 0o600, dir_fd=folder)) as made:
        os.unlink(name, dir_fd=folder)
        return os.fstat(made).st_uid == uid


def _refuse(path: Path, folder: int) -> NoReturn:
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no regular file"
        if stat.S_ISREG(status.st_mode):
            kind = "a hard link to a file of another name" if status.st_nlink > 1 else "another user's file"
        raise PermissionError(
            errno.EPERM, f"not written to: it is {kind}, made by {user_name(status.st_uid)}. Remove it", str(path)
        )
    raise OSError(errno.ESTALE, "changed while it was opened", str(path))


def _rewrite(path: Path, data: bytes | str) -> None:
    descriptor = _open(path, os.O_RDWR, create=False)
    try:
        os.ftruncate(descriptor, 0)
        _write_all(descriptor, path, data)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, path: Path, data: bytes | str) -> None:
    rest = memoryview(data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)  # otherwise a power loss could leave an empty file under the new name
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[int]:
    """Yield a descriptor of the parent folder; links in the path are followed as _follow() allows, without a race."""
    descriptor, links = os.open("/", _PATH_ONLY | os.O_DIRECTORY | os.O_CLOEXEC), 0
    try:
        parts = deque(path.absolute().parts[1:])
        while parts:
            part = parts.popleft()
            here = descriptor
            try:
                flags = _PATH_ONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(part, flags, dir_fd=here)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise OSError(error.errno, error.strerror, str(path)) from error
                target = _follow(here, part, path)
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error
                parts.extendleft(reversed(Path(target).parts))
                if not os.path.isabs(target):
                    continue
                parts.popleft()
                descriptor = os.open("/", _PATH_ONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.close(here)
        try:
            yield descriptor
        except OSError as error:
            raise _with_whole_path(error, path) from error
    finally:
        os.close(descriptor)


def _with_whole_path(error: OSError, folder: Path) -> OSError:
    """Return the error of a call with ``dir_fd``, which has a name alone, with its path in ``folder``."""
    name = error.filename
    if error.errno is None or not isinstance(name, str) or os.path.isabs(name):
        return error
    return OSError(error.errno, error.strerror, str(folder / name))


def _follow(folder: int, name: str, path: Path) -> str:
    """Return the target of a link in a path. Its owner must be root, this user or the owner of its folder."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if status.st_uid not in (0, os.geteuid(), os.fstat(folder).st_uid):
        raise PermissionError(
            errno.EPERM,
            f"not used: {name} in it is a symbolic link, made by {user_name(status.st_uid)}. Remove it",
            str(path),
        )
    target = os.readlink(name, dir_fd=folder)
    again = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if (again.st_ino, again.st_uid) != (status.st_ino, status.st_uid):
        raise OSError(errno.ESTALE, "changed while it was opened", str(path))
    return target


def _is_team_folder(mode: int) -> bool:
    return bool(mode & stat.S_ISGID and mode & 0o020) or bool(mode & 0o002)


def process_umask() -> int:
    """Return the umask of this process, from /proc if possible, since os.umask() has to set it to return it."""
    try:
        with open("/proc/self/status", "rb") as status:
            for line in status:
                if line.startswith(b"Umask:"):
                    return int(line.split()[1], 8)
    except OSError:
        pass
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def user_name(uid: int) -> str:
    """Return the name and number of a user for messages."""
    import pwd

    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def other_owner(path: Path) -> int | None:
    """Return the uid of the owner of the file, folder or link; None if that is this user or root."""
    owners = set()
    for look in (path.lstat, path.stat):  # a dangling link has an owner, too
        with contextlib.suppress(OSError):
            owners.add(look().st_uid)
    return next(iter(sorted(owners - {os.geteuid(), 0})), None)


def require_own(path: Path, what: str, *, trust: bool, remedy: str) -> None:
    """Raise UsageError if neither this user nor root owns ``path``, unless ``trust`` is set."""
    uid = other_owner(path)
    if uid is not None and not trust:
        raise UsageError(
            f"{what} {path} belongs to {user_name(uid)}, and you are {user_name(os.geteuid())}. {remedy}, or add "
            "--trust-owner if you trust that user with your account."
        )


def require_writable(folder: Path, purpose: str) -> None:
    """Raise UsageError, with a remedy, if this user cannot create ``folder``, or files in it."""
    existing = folder
    while not os.path.lexists(existing) and existing.parent != existing:
        existing = existing.parent
    if os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK, effective_ids=True):
        return
    missing = "" if existing == folder else f"{folder} cannot be made: "
    raise UsageError(f"{purpose}: {missing}{unwritable(existing)}")


def unwritable(folder: Path) -> str:
    """Return why this user cannot write to the folder, and a remedy."""
    remedy = "set SCALETRAIN_RUNS, or `runs` in clusters.yaml, to a folder that you can write to"
    try:
        status = folder.stat()
        read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    except OSError as error:
        return f"{folder}: {error.strerror or error}. Choose another place: {remedy}."
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is not a folder. Choose another place: {remedy}."
    if read_only:
        return f"{folder} is on a file system that is mounted read-only. Mount it writable, or {remedy}."
    group = _group_name(status.st_gid)
    member = status.st_gid in {os.getegid(), *os.getgroups()}
    cure = f"chmod g+rwxs {folder}" if member else f"chgrp GROUP {folder} && chmod g+rwxs {folder}"
    return (
        f"{folder} cannot be written to by {user_name(os.geteuid())}: it belongs to {user_name(status.st_uid)}, group "
        f"{group}, mode {stat.S_IMODE(status.st_mode):04o}. Ask its owner to run `{cure}`"
        f"{'' if member else ' with a group that you are in'}, or {remedy}."
    )


def _group_name(gid: int) -> str:
    import grp

    try:
        return f"{grp.getgrgid(gid).gr_name} (gid {gid})"
    except KeyError:
        return f"gid {gid}"


def expand_home(path: str) -> Path:
    """Return a path from user input, with a leading ``~`` or ``~user`` expanded.

    For an unknown user or a missing home folder it is unchanged, where ``Path.expanduser`` raises RuntimeError.
    """
    return Path(os.path.expanduser(path))


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk (fsync). Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
