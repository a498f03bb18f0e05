"""The program of a process that reads batches for the rank that started it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Sent to the process group of the rank, which finishes its step and then ends this process.
_OF_THE_RANK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Read batches until the rank, whose process id is the first argument, ends."""
    rank, descriptor, *slots = map(int, sys.argv[1:])
    for number in _OF_THE_RANK:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != rank:  # it ended before the call above
        return
    from scaletrain_cli.engine.data.reader_processes import serve  # imports torch

    serve(descriptor, slots)


if __name__ == "__main__":
    main()
