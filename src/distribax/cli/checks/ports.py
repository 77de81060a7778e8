"""The ports that programs get when they ask for any."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from distribax.cli.findings import Finding, Verdict

_RANGE_FILE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ENOUGH_PORTS: Final = 1000


def check_ports() -> Iterator[Finding]:
    """Yields which ports the system hands out, where it says so."""
    if not _RANGE_FILE.is_file():
        return
    first, last = map(int, _RANGE_FILE.read_text().split())
    value = f"{first} to {last} are handed out; give cluster addresses others, to avoid conflicts"
    if last - first < _ENOUGH_PORTS:
        fix = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
        yield Finding("network", "ports", value, Verdict.WARNING, fix)
    else:
        yield Finding("network", "ports", value)
