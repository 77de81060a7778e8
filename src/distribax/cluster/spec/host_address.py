"""The IP addresses of hosts: which one a name means, and by which one others reach this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable


def find_ip_address(host: str) -> str | None:
    """Returns the host's IP address; None if the name is not known (yet)."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    hosts = [str(info[4][0]) for info in found]
    # Ray works best with IPv4.
    return next((host for host in hosts if ":" not in host), hosts[0])


def is_loopback(host: str | None) -> bool:
    """Tells whether only processes of this machine reach a host: a loopback address or localhost.

    Names are not looked up; None is an unknown address.
    """
    if host is None:
        return False
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int, backlog: int = 128) -> socket.socket:
    """Returns a TCP socket that listens at an address of this machine, and at no other.

    Args:
        host: An IP address of either kind, or a name.
        port: The port; 0 for any that is free.
        backlog: How many connections may wait until they are accepted.

    Returns:
        The socket.

    Raises:
        OSError: The address is not this machine's, or the port is taken.
    """
    family, *_, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return socket.create_server(address, family=family, backlog=backlog)


def find_own_address(host: str, others: Iterable[str]) -> str | None:
    """Returns the IP address by which other machines reach this one.

    Many machines resolve their own name to a loopback address (Debian writes 127.0.1.1 into
    /etc/hosts), which others cannot use. If any of the others is on another machine, the address
    from which this machine reaches that one is returned instead.

    Args:
        host: This machine's host name or address, as the cluster names it.
        others: Those of the other tasks.

    Returns:
        The address; None if the name is not known, or means an address that is translated on the
        way to this machine.
    """
    own = find_ip_address(host)
    if own is not None and not is_loopback(own):
        return own if _is_here(own) else None
    for other in map(find_ip_address, others):
        if other is not None and not is_loopback(other):
            return _find_source_address(other)
    return own


def _is_here(address: str) -> bool:
    """Returns whether this machine has an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(socket.socket(family)) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _find_source_address(other: str) -> str:
    """Returns the address from which this machine reaches another one."""
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        probe.connect((other, 9))  # Sends nothing.
        return str(probe.getsockname()[0])
