"""Whether the tasks of a cluster reach each other, for `distribax doctor`."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from distribax.cli.findings import Finding
from distribax.cluster.spec.address import Address
from distribax.cluster.spec.host_address import listen

_CONNECT_SECONDS: Final = 3.0
_PAUSE_SECONDS: Final = 0.3
_LONGEST_NAME: Final = 200
_UNKNOWN_HOST: Final = ".invalid"
_ANSWER: Final = b"distribax doctor\n"


class _Ears:
    """Listens at this task's address, and notes which tasks have called."""

    def __init__(self, host: str, port: int) -> None:
        self.heard: set[str] = set()
        self._listener = listen(host, port)
        self._thread = threading.Thread(target=self._listen, name="distribax-doctor", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            with caller, contextlib.suppress(OSError):
                caller.settimeout(_CONNECT_SECONDS)
                name = caller.recv(_LONGEST_NAME).decode(errors="replace").strip()
                caller.sendall(_ANSWER)
                self.heard.add(name)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def check_peers(
    own: str, own_host: str | None, port: int, peers: Mapping[str, Address], seconds: float
) -> Iterator[Finding]:
    """Yields whether each of the other tasks can be reached, and has reached this one.

    Args:
        own: The name of this task, "worker 0" for example.
        own_host: The address by which the others reach this machine, if it is known.
        port: The port of this task.
        peers: The addresses of the other tasks by name.
        seconds: How long to wait until they have called; 0 does not wait for them.
    """
    known = {name: at for name, at in peers.items() if not at.host.endswith(_UNKNOWN_HOST)}
    if not known:
        return
    ears: _Ears | None = None
    if seconds and own_host is not None:
        # If the address is not free, another finding says so.
        with contextlib.suppress(OSError):
            ears = _Ears(own_host, port)
    try:
        deadline = time.monotonic() + seconds
        with ThreadPoolExecutor(len(known)) as pool:
            calls = {name: pool.submit(_call, own, at, deadline) for name, at in known.items()}
            reached = {name: call.result() for name, call in calls.items()}
        while ears is not None and time.monotonic() < deadline and not known.keys() <= ears.heard:
            time.sleep(_PAUSE_SECONDS)
    finally:
        if ears is not None:
            ears.close()
    heard = set() if ears is None else ears.heard
    for name, address in known.items():
        yield _judge(f"{name} ({address})", reached[name], name in heard, seconds)


def _call(own: str, address: Address, deadline: float) -> str:
    """Returns "" if a doctor answers there, "silent" if only its machine does, or the error."""
    while True:
        try:
            where = (address.host, address.port or 0)
            with socket.create_connection(where, timeout=_CONNECT_SECONDS) as connection:
                found = _ask(connection, own)
        except ConnectionRefusedError:
            found = "silent"
        except OSError as error:
            found = str(error) or type(error).__name__
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(_PAUSE_SECONDS)


def _ask(connection: socket.socket, own: str) -> str:
    """Returns "" if a doctor answers, "silent" if something else listens there."""
    with contextlib.suppress(OSError):
        connection.sendall(own.encode() + b"\n")
        if connection.recv(len(_ANSWER)) == _ANSWER:
            return ""
    return "silent"


def _judge(peer: str, trouble: str, is_heard: bool, seconds: float) -> Finding:
    fix = "check its address, and the firewalls and routes between the machines"
    run_all = "run `distribax doctor --wait 60` on all machines at the same time"
    if trouble not in ("", "silent"):
        return Finding("peers", peer, f"out of reach from here: {trouble}", fix, is_problem=True)
    if not seconds:
        return Finding("peers", peer, f"its machine answers; to check both ways, {run_all}")
    if trouble:
        return Finding("peers", peer, "its machine answers, but no doctor does", run_all)
    if not is_heard:
        value = "reached from here, but has not reached this machine"
        return Finding("peers", peer, value, fix, is_problem=True)
    return Finding("peers", peer, "reached from here, and has reached this machine")
