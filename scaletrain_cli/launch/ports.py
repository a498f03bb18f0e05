"""A TCP port for the ranks to meet at."""

from __future__ import annotations

import contextlib
import random
import socket

from scaletrain_cli.errors import SchedulerError

_PORTS = range(20_000, 32_000)  # below the kernel's ephemeral ports, where outgoing connections come and go


def free_port(address: str) -> int:
    """A port that nobody listens on at ``address`` ("" for all). Raises SchedulerError when there is none.

    Another process may take it before the ranks do: the attempt fails then, once.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise SchedulerError(f"no free TCP port between {_PORTS.start} and {_PORTS.stop - 1} on this machine.")
