"""Recognize a file system that is full or read-only, or a quota that is used up."""

import contextlib
import errno
import os
import secrets
import tempfile
from pathlib import Path
from typing import Literal

from scaletrain_cli.safe_files import create_file

FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_PROBE_BYTES = 1 << 16  # the size of several records


def is_full(error: BaseException) -> bool:
    """Return whether an error means that a file system or a quota has no space left."""
    return isinstance(error, OSError) and error.errno in FULL_DISK_ERRORS


def no_space(folder: Path) -> str:
    """Return the system's error message where ``folder`` has no space for a file of 64 KiB, else an empty text.

    Creates such a file and removes it again.
    """
    probe = folder / f".space-{secrets.token_hex(4)}"
    try:
        create_file(probe, bytes(_PROBE_BYTES))
    except OSError as error:
        return os.strerror(error.errno or 0) if is_full(error) else ""
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return ""


def why_unwritable(folder: Path) -> Literal["full", "read-only"] | None:
    """Return what keeps all users from writing to the file system of ``folder``. Leaves nothing, and sees no quotas."""
    try:
        status = os.statvfs(folder)
        if status.f_bavail * status.f_frsize < _PROBE_BYTES:
            return "full"
        # A file without a name: after an error of the disk, statvfs() does not say that nothing can be written.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return "read-only" if error.errno == errno.EROFS else None
    return None
