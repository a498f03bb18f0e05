"""The process border of the `scaletrain` command: Ctrl-C at any moment, closed streams, and the exit code.

Imports nothing that takes time before it can be interrupted without a traceback.
"""

import os
import sys

from scaletrain_cli.own_processes import leave_current_folder

leave_current_folder(started_as_module=__name__ == "__main__")  # before anything is imported that Python has not

from collections.abc import Sequence
from typing import NoReturn

_INTERRUPTED = 130  # 128 + SIGINT, as shells count


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command line (``sys.argv`` unless given) and leave the process."""
    try:
        code = _run(arguments)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    sys.exit(code)


def _run(arguments: Sequence[str] | None) -> int:
    """Return the exit code of a command line."""
    import atexit
    import gc

    # Most of what a verb loads stays to its end, so looking for garbage in it takes time and finds none: a seventh of
    # the time of `plan`, two thirds of it in one last look before the memory goes with the process.
    gc.set_threshold(500_000)
    atexit.register(gc.freeze)
    _open_streams()
    try:
        from scaletrain_cli.cli import run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("scaletrain_cli"):
            raise
        sys.stderr.write(f"error: {error.name} is not installed. Run pip install . in the checkout of ScaleTrain.\n")
        return 2
    code = run(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said: nothing is left to interrupt
    return code


def _open_streams() -> None:
    """Make the streams usable: open where the caller closed them, and able to write any character."""
    while None in (sys.stdin, sys.stdout, sys.stderr):
        number = os.open(os.devnull, os.O_RDWR)  # the lowest free number, or a run's file would get it
        if number > 2:
            os.close(number)
            sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
            sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
            sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode must not end in a traceback


if __name__ == "__main__":
    main()
