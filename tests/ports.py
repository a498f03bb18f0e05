"""TCP ports for programs that are told their port before they bind it; whoever can, binds port 0 instead."""

from __future__ import annotations

import socket

# Below the kernel's ephemeral ports, those of a launcher (launch/node/ranks.py) and those of the Slurm clusters here.
_PORTS = iter(range(10_000, 17_000))
# Of the pods of a gang: of the ranks' rendezvous, the agents' rendezvous, and the run directory of pod 0.
OF_A_GANG = 3


def reserved_port(count: int = 1) -> int:
    """Return a port of this machine at which nothing listens, and which no other test gets while this process lives.

    ``count``: the number of consecutive ports that are reserved, of which the first is returned. A name among the
    kernel's abstract sockets reserves each: unlike a bound port, it is in nobody's way.
    """
    for port in _PORTS:
        claims = [socket.socket(socket.AF_UNIX) for _ in range(count)]
        try:
            for each, claim in enumerate(claims, port):
                claim.bind(f"\0scaletrain-tests-port-{each}")
                socket.create_server(("", each)).close()
        except OSError:
            for claim in claims:
                claim.close()
        else:
            for claim in claims:
                claim.detach()  # open until this process ends
            return port
    raise AssertionError("no port is left")
