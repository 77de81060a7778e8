"""The clock of this machine, and how far it is from those of others.

A doctor that listens answers each line it gets with one JSON object: its time, its versions and its
name. The doctor that asks takes the middle between question and answer for the time of the answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import platform
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Final

from distribax.cli.checks.versions import find_version
from distribax.cli.findings import Finding
from distribax.cluster.spec.address import Address
from distribax.cluster.spec.host_address import listen

_MOST_SECONDS: Final = 1.0
"""A larger difference makes times in logs and checkpoints of several machines misleading."""
_ASK_SECONDS: Final = 10.0
_QUESTIONS: Final = 5
_LONGEST_ANSWER: Final = 65536
_ERROR_STATE: Final = 5
"""What adjtimex returns if the clock is not synchronized."""
_COMPARED: Final = ("distribax", "jax", "jaxlib", "ray")
_SYNCHRONIZE: Final = "synchronize the clocks: timedatectl set-ntp true, or run chronyd"


def check_clocks(peers: Sequence[Address]) -> Iterator[Finding]:
    """Yields whether the clock is synchronized, and how it differs from the clocks of others."""
    with contextlib.suppress(OSError, AttributeError):  # Not on Linux.
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
        if state == _ERROR_STATE:
            # Containers often cannot tell, so this alone is no warning.
            yield Finding("clock", "synchronized", "not known to the kernel of this machine")
        elif state >= 0:
            yield Finding("clock", "synchronized", "yes")
    for peer in peers:
        yield from _compare(peer)


def _compare(peer: Address) -> Iterator[Finding]:
    try:
        difference, round_trip, answer = _ask(peer)
    except (OSError, ValueError, KeyError, TypeError) as error:
        value = f"no answer: {error}"
        fix = (
            f"run `distribax doctor --listen {peer.port}` there, and let firewalls pass TCP "
            f"connections to port {peer.port}"
        )
        yield Finding("peer", str(peer), value, fix, is_problem=True)
        return
    yield Finding("peer", str(peer), f"{answer['host']}, round trip {round_trip * 1e3:.2f} ms")
    value = f"{difference:+.3f} s, to within {round_trip / 2:.3f} s"
    is_apart = abs(difference) > _MOST_SECONDS + round_trip
    yield Finding("clock", str(peer), value, _SYNCHRONIZE if is_apart else "")
    own, theirs = _read_versions(), answer["versions"]
    different = [
        f"{name} {own.get(name, 'missing')} here, {theirs.get(name, 'missing')} there"
        for name in ("python", *_COMPARED)
        if own.get(name) != theirs.get(name)
    ]
    if different:
        fix = "install the same versions on all machines"
        yield Finding("versions", str(peer), "; ".join(different), fix)
    else:
        yield Finding("versions", str(peer), "the same as here")


def _ask(peer: Address) -> tuple[float, float, dict[str, dict[str, str]]]:
    """Returns how much later the other clock is, the shortest round trip, and the answer."""
    best: tuple[float, float, dict[str, dict[str, str]]] | None = None
    with socket.create_connection((peer.host, peer.port or 0), timeout=_ASK_SECONDS) as link:
        stream = link.makefile("rwb")
        for _ in range(_QUESTIONS):
            started = time.time()
            stream.write(b"time\n")
            stream.flush()
            line = stream.readline(_LONGEST_ANSWER)
            ended = time.time()
            if not line:
                raise ValueError("it has closed the connection; is it a doctor?")
            answer = json.loads(line)
            difference = float(answer["time"]) - (started + ended) / 2
            if best is None or ended - started < best[1]:
                best = (difference, ended - started, answer)
    assert best is not None
    return best


def answer_peers(text: str) -> None:
    """Answers the doctors of other machines until Ctrl-C.

    Args:
        text: The port to listen on, or host and port.

    Raises:
        ValueError: It is not possible to listen there.
    """
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) < 65536:
        raise ValueError(f"--listen={text!r}: expected a port from 0 to 65535, or host:port.")
    try:
        server = listen(host.strip("[]") or "0.0.0.0", int(port))
    except OSError as error:
        raise ValueError(
            f"--listen={text!r}: {error}. End the program that uses the port, or choose another."
        ) from None
    with server, contextlib.suppress(KeyboardInterrupt):
        own = server.getsockname()[1]
        print(f"listening on port {own}; elsewhere: distribax doctor --peer HOST:{own}", flush=True)
        while True:
            link, _ = server.accept()
            with link, contextlib.suppress(OSError):
                link.settimeout(_ASK_SECONDS)
                stream = link.makefile("rwb")
                while stream.readline(_LONGEST_ANSWER):
                    answer = {
                        "time": time.time(),
                        "host": socket.gethostname(),
                        "versions": _read_versions(),
                    }
                    stream.write(json.dumps(answer).encode() + b"\n")
                    stream.flush()


def _read_versions() -> dict[str, str]:
    installed = {name: version for name in _COMPARED if (version := find_version(name))}
    return {"python": platform.python_version()} | installed
