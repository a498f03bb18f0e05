"""TCP ports for programs that are told their port before they bind it; whoever can, binds port 0 instead."""

from __future__ import annotations

import socket

# Below the kernel's ephemeral ports, those of a launcher (launch/node/ranks.py) and those of the Slurm clusters here.
_PORTS = iter(range(10_000, 17_000))


def reserved_port() -> int:
    """Return a port of this machine at which nothing listens, and which no other test gets while this process lives.

    A name among the kernel's abstract sockets reserves it: unlike a bound port, it is in nobody's way.
    """
    for port in _PORTS:
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0scaletrain-tests-port-{port}")
            socket.create_server(("", port)).close()
        except OSError:
            claim.close()
        else:
            claim.detach()  # open until this process ends
            return port
    raise AssertionError("no port is left")
