"""Sockets that listen and call: TCP to other machines, an abstract unix socket on the same one."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Final

from distribax.parameter_server.protocol.parameter_spec import Endpoint

_BACKLOG: Final = 128


def get_machine_id() -> str:
    """Returns a name of the running kernel and network namespace, which share abstract sockets.

    Empty where there are no abstract sockets.
    """
    if sys.platform != "linux":
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def listen_unix(name: str) -> socket.socket:
    """Returns a socket that listens on an abstract name: nothing is left of it on disk."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind("\0" + name)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def call(endpoint: Endpoint, timeout: float) -> socket.socket:
    """Connects to a server: on the same machine by its unix socket, else by TCP."""
    if endpoint.unix and endpoint.machine and endpoint.machine == get_machine_id():
        try:
            return _call_unix(endpoint.unix, timeout)
        except OSError:
            pass  # It cannot be reached from here after all; TCP can.
    connection = socket.create_connection((endpoint.host, endpoint.port), timeout=timeout)
    tune(connection)
    return connection


def tune(connection: socket.socket) -> None:
    """Has small messages sent at once, and notices when the machine of a silent peer is gone."""
    if connection.family == getattr(socket, "AF_UNIX", None):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)


def _call_unix(name: str, timeout: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout)
        connection.connect("\0" + name)
    except BaseException:
        connection.close()
        raise
    return connection
