"""The addresses of this machine as other nodes see them: host names may resolve to a loopback address, or only here."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

_ANY_PORT = 9  # nothing is sent to it


def route_address(host: str) -> str | None:
    """Return this machine's address on the route to ``host``; None if there is none but a loopback address.

    Debian writes ``127.0.1.1 HOSTNAME`` into /etc/hosts, so a name of this machine may not lead here from elsewhere.
    """
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, target in socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # chooses the route
                address = str(probe.getsockname()[0]).partition("%")[0]
                if not ipaddress.ip_address(address).is_loopback:
                    return address
    return None


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has this address; None if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return str(name)
    return None
