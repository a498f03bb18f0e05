"""Convert unexpected exceptions to errors with a remedy, at the top level of each process.

Errors of the operating system and missing packages get a remedy. Anything else is a bug: its traceback is written to a
file of the user, or to stderr if SCALETRAIN_TRACEBACK is set.
"""

import contextlib
import errno
import os
import sys

from scaletrain_cli.errors import MissingPackageError, ScaletrainError
from scaletrain_cli.extras import extra_of, install_command
from scaletrain_cli.plugins import package_that_raised

_LONGEST_MESSAGE = 500
_SHARED_MEMORY = "/dev/shm"
_REMEDIES = {
    errno.ENOSPC: "Free some space on that disk, or set $SCALETRAIN_RUNS (runs) or $TMPDIR to a folder on another one.",
    errno.EDQUOT: "Your quota is used up: delete files, or set $SCALETRAIN_RUNS (runs) to a folder on another disk.",
    errno.EFBIG: "A limit on the size of files is set (ulimit -f): raise it.",
    errno.EACCES: "Check its owner and permissions, or set $SCALETRAIN_RUNS (runs) to a folder that you can write.",
    errno.EPERM: "Check its owner and permissions, or set $SCALETRAIN_RUNS (runs) to a folder that you can write.",
    errno.EROFS: "Set $SCALETRAIN_RUNS (runs) or $TMPDIR to a folder on a file system that can be written.",
    errno.ENOENT: "It does not exist or was removed in the meantime: check the path and run the command again.",
    errno.ENOTDIR: "A part of the path is a file, not a folder: check the path, $SCALETRAIN_RUNS (runs) and $TMPDIR.",
    errno.EISDIR: "The path is a folder, but a file is expected: rename or remove the folder.",
    errno.EMFILE: "Raise the limit on open files (ulimit -n).",
    errno.ENFILE: "The machine has reached its limit on open files: try again later.",
    errno.EIO: "I/O error of the disk or the network file system: contact its administrator.",
    errno.ESTALE: "Stale file handle of a network file system: run the command again.",
    errno.ENAMETOOLONG: "Give a shorter name.",
    errno.ENOMEM: "The machine is out of memory: free memory, or use another machine.",
    errno.EAGAIN: "A limit on processes or memory was reached (ulimit -u): raise it, or try again.",
}


def known_error(error: Exception, doing: str) -> ScaletrainError:
    """Return an exception as an error of ours; ``doing`` says what failed, as in ``data prepare``."""
    if isinstance(error, ScaletrainError):
        return error
    if isinstance(error, OSError):
        return error_of_system(error, doing)
    import_error = _error_of_import(error) if isinstance(error, ImportError) else None
    return import_error or error_of_bug(error)


def error_of_system(error: OSError, doing: str) -> ScaletrainError:
    """Return an error of the operating system with a remedy."""
    file = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else None
    reason = error.strerror or str(error) or type(error).__name__
    place, remedy = f"{file}: {reason}" if file else reason, _REMEDIES.get(error.errno or 0)
    if file is None and error.errno in (errno.ENOENT, errno.EROFS, errno.EACCES):
        place, remedy = _unnamed(place, remedy)
    elif error.errno == errno.ENOSPC and _has_no_inodes(file or os.curdir):
        remedy = "That file system has space, but no inodes left for new files: delete many small files."
    system_error = ScaletrainError(f"{doing}: {place}." if doing else f"{place}.", remedy=remedy)
    system_error.code, system_error.file = "io", file
    return system_error


def _unnamed(place: str, remedy: str | None) -> tuple[str, str | None]:
    """Return what is missing or read-only and a remedy, for an error of a call that has no file name."""
    try:
        os.getcwd()
    except OSError:
        return "the current folder was deleted", "Change to a folder that exists."
    if not os.access(_SHARED_MEMORY, os.W_OK):  # where the semaphores of Python's processes are
        state = "cannot be written" if os.path.isdir(_SHARED_MEMORY) else "is missing"
        return f"{_SHARED_MEMORY} {state}", f"Mount it: `mount -t tmpfs tmpfs {_SHARED_MEMORY}`."
    return place, remedy


def _has_no_inodes(path: str) -> bool:
    with contextlib.suppress(OSError):
        system = os.statvfs(path if os.path.exists(path) else os.path.dirname(path) or os.curdir)
        return system.f_files > 0 and system.f_favail == 0
    return False


def _error_of_import(error: ImportError) -> ScaletrainError | None:
    """Return an error that names the extra of a missing package; None if no extra has the package."""
    package = (error.name or "").partition(".")[0]
    if (extra := extra_of(package)) is None:
        return None
    return MissingPackageError(f"{package} is not installed.", install_command(extra))


def error_of_bug(error: Exception) -> ScaletrainError:
    """Return a one-line error about a bug. The traceback goes to stderr or to a file, which the message names."""
    import traceback

    text = "".join(traceback.format_exception(error))
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    what = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_MESSAGE].rstrip(": ")
    remedy = _traceback_kept(text)
    package = package_that_raised(error)
    owner = "ScaleTrain" if package is None else f"the package {package}"
    bug = ScaletrainError(f"internal error: {what}{place}. This is a bug in {owner}.", remedy=remedy)
    bug.code = "internal"
    return bug


def _traceback_kept(text: str) -> str:
    """Print a traceback or write it to a file; return the sentence that names the place."""
    if not os.environ.get("SCALETRAIN_TRACEBACK"):
        import tempfile

        try:
            number, path = tempfile.mkstemp(prefix="scaletrain-traceback-", suffix=".txt")  # mode 0600, no link
            with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return f"Report it with the traceback in {path}, or set SCALETRAIN_TRACEBACK=1 to print it."
        except OSError:  # no file can be written: print it instead
            pass
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
    return "Report it with the traceback above."
