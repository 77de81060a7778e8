"""Connections of this machine with itself, its name, and the ports that programs get."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Final

from distribax.cli.findings import Finding
from distribax.cluster.ray.ports import read_assigned_ports

_ENOUGH_PORTS: Final = 1000


def check_network() -> Iterator[Finding]:
    """Yields whether processes of this machine reach each other, and whether others reach it."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError as error:
        value = f"no connection to this machine itself: {error}"
        fix = "allow local TCP connections (firewall, sandbox): workers need them"
        yield Finding("network", "127.0.0.1", value, fix, is_problem=True)
    else:
        yield Finding("network", "127.0.0.1", "free ports can be opened and reached")
    yield _check_host_name()
    if (assigned := read_assigned_ports()) is not None:
        first, last = assigned
        value = (
            f"{first} to {last} are handed out; give cluster addresses others, to avoid conflicts"
        )
        are_few = last - first < _ENOUGH_PORTS
        fix = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'" if are_few else ""
        yield Finding("network", "ports", value, fix)


def _check_host_name() -> Finding:
    name = socket.gethostname()
    fix = (
        "when other machines take part, give MASTER_ADDR or --rdzv-endpoint this machine's IP "
        "address; a TF_CONFIG may have its name, as the others' addresses tell which one is meant"
    )
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Finding("network", "host name", f"{name}: {error}", fix)
    value = f"{name} is {address}"
    if address.startswith("127."):
        value += " here (as Debian sets it up), which other machines cannot reach"
        return Finding("network", "host name", value, fix)
    return Finding("network", "host name", value)
