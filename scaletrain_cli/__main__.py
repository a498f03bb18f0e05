"""The process border of the `scaletrain` command: what goes wrong inside becomes a message and an exit code here.

Knows no verb. An exception that is not ours is a bug and keeps its traceback (exit 1).
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from scaletrain_cli.cli import invoke, show_error
from scaletrain_cli.errors import ExitCode, ScaletrainError

_INTERRUPTED = 130  # 128 + SIGINT, as shells count


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command line (``sys.argv`` unless given) and leave the process."""
    # Most of what a verb loads stays to its end, so looking for garbage in it takes time and finds none: a seventh of
    # the time of `plan`, two thirds of it in one last look before the memory goes with the process.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode must not end in a traceback
    code: int | str | None = ExitCode.DONE
    try:
        invoke(arguments)
    except SystemExit as end:
        code = end.code
    except ScaletrainError as error:
        show_error(error)
        code = error.exit_code
    except OSError as error:  # a full disk, a folder that is not ours: the world's doing, and nobody's bug
        where = error.filename or "the output could not be written" if error.errno == errno.ENOSPC else error.filename
        show_error(ScaletrainError(f"{error.strerror or error}: {where}" if where else str(error)))
        code = ExitCode.CRASHED
    except KeyboardInterrupt:
        code = _INTERRUPTED
    sys.exit(_flushed(code))


def _flushed(code: int | str | None) -> int | str | None:
    """The exit code once all is written; Python says nothing more when it closes the stream.

    Whoever read our output may have gone (``| head``), which is no error; a full disk is one.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            if code != ExitCode.CRASHED:
                show_error(ScaletrainError(f"the answer could not be written: {error.strerror or error}"))
            return ExitCode.CRASHED
    return code


if __name__ == "__main__":
    main()
