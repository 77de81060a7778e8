"""Network addresses of tasks: parsed, checked and formatted."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from typing_extensions import override

MAX_PORT: Final = 65535


@dataclass(frozen=True)
class Address:
    """A host and a port; the port may be unknown.

    >>> str(Address("::1", 2222))
    '[::1]:2222'
    """

    host: str
    port: int | None = None

    @override
    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"


def parse_address(text: str, field: str) -> Address:
    """Returns the address that 'host:port' or 'host' describes.

    Args:
        text: The address.
        field: Where the text comes from, for error messages.

    Raises:
        ValueError: The text is not an address.

    >>> parse_address("worker0.example.com:2222", "cluster.worker[0]")
    Address(host='worker0.example.com', port=2222)
    """
    where = f"{field}={text!r}"
    if "://" in text:
        raise ValueError(
            f"{where}: an address has no protocol. Write 'host:port'; the protocol is the "
            "resolver's argument rpc_layer."
        )
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not _is_ipv6(host):
            raise ValueError(f"{where}: {host!r} is not an IPv6 address. Expected '[::1]:2222'.")
        if rest and not rest.startswith(":"):
            raise ValueError(f"{where}: {rest!r} follows the host. Expected ':' and a port.")
        port = rest[1:] if rest else None
    elif text.count(":") > 1:
        raise ValueError(
            f"{where}: has more than one ':'. Expected 'host:port'; write an IPv6 address in "
            "brackets: '[::1]:2222'."
        )
    else:
        host, colon, rest = text.partition(":")
        port = rest if colon else None
        if not host or any(c.isspace() or c in "/[]@,;'\"" or not c.isprintable() for c in host):
            raise ValueError(
                f"{where}: {host!r} is not a host. Expected a host name or an IP address, and a "
                "port: 'worker0.example.com:2222'."
            )
    return Address(host, None if port is None else parse_port(port, where))


def parse_full_address(text: str, field: str) -> Address:
    """Returns the address that 'host:port' describes.

    Args:
        text: The address.
        field: Where the text comes from, for error messages.

    Raises:
        ValueError: The text is not an address, or has no port.
    """
    address = parse_address(text, field)
    if address.port is None:
        raise ValueError(f"{field}={text!r}: the port is missing. Write 'host:port'.")
    return address


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def parse_port(port: str | int, where: str) -> int:
    """Returns the port as a number.

    Args:
        port: The port, as a number or as text.
        where: The field that it comes from, with its value, for error messages.

    Raises:
        ValueError: It is not a number from 1 to 65535.
    """
    text = str(port)
    is_number = not isinstance(port, bool) and text.isascii() and text.isdigit()
    # The length is checked first: Python refuses to convert very long numbers.
    if not is_number or len(text) > 5 or not 1 <= int(text) <= MAX_PORT:
        shown = text if is_number else repr(port)
        raise ValueError(f"{where}: port {shown} is not a port (1-{MAX_PORT})")
    return int(text)


def make_natural_key(name: str) -> tuple[list[str | int], str]:
    """Returns a key that sorts names by the numbers in them.

    >>> sorted(["c10", "c9", "b11"], key=make_natural_key)
    ['b11', 'c9', 'c10']
    """
    parts = re.split(r"([0-9]+)", name)
    # Every second part is a number, so parts at the same position have the same type.
    return [int(p) if i % 2 else p for i, p in enumerate(parts)], name
