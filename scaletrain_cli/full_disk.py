"""A full file system, or a used-up quota, under the run directory: recognized, and survived by who must report it."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

from scaletrain_cli.safe_files import create_file

_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
_PROBE_BYTES = 1 << 16  # what a handful of records takes


def is_full(error: BaseException) -> bool:
    """Return whether an error means that a file system or a quota has no space left."""
    return isinstance(error, OSError) and error.errno in _NUMBERS


def no_space(folder: Path) -> str:
    """Return the kernel's words where no file of 64 KiB can be made in ``folder`` for want of space, else ''.

    Makes such a file and removes it again.
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


def has_no_space(folder: Path) -> bool:
    """Return whether the file system of ``folder`` has no space left for its users. Writes nothing, sees no quota."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < _PROBE_BYTES


def say(text: str) -> None:
    """Write a line to stderr, whatever becomes of it: the log may be on the disk that is full.

    Past Python's buffers: what these cannot write at exit would replace the exit code by 120.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
