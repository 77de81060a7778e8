"""Workers that watch each other without the hub, in one process."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
from typing import Any

import pytest

from distribax.cluster.peers.pair_watch import PairWatch

_WAIT_SECONDS = 60


def test_a_silent_worker_is_told_and_again_when_it_is_back() -> None:
    told: queue.Queue[dict[str, Any]] = queue.Queue()
    watch = PairWatch(0, "127.0.0.1", 0.5, told.put)
    try:
        watch.start([watch.address, ("127.0.0.1", 1)], "a key")
        assert told.get(timeout=_WAIT_SECONDS)["unreachable"] == 1
        with socket.create_connection(watch.address, timeout=_WAIT_SECONDS) as caller:
            caller.sendall(json.dumps([1, "a key"]).encode() + b"\n")
            assert told.get(timeout=_WAIT_SECONDS) == {"reachable": 1}
            assert caller.recv(1) == b"."
    finally:
        watch.close()


@pytest.mark.parametrize(
    "hello",
    [
        b'[1, "another key"]\n',
        b'[7, "a key"]\n',
        b"[1]\n",
        b"[" * 600,
        b"\xff\xfe\n",
    ],
    ids=["wrong key", "no such worker", "too short", "too long", "no text"],
)
def test_strangers_are_dismissed(hello: bytes) -> None:
    watch = PairWatch(0, "127.0.0.1", 60.0, lambda _: None)
    try:
        watch.start([watch.address, ("127.0.0.1", 1)], "a key")
        with socket.create_connection(watch.address, timeout=_WAIT_SECONDS) as stranger:
            stranger.sendall(hello)
            with contextlib.suppress(ConnectionResetError):  # Closed before all was read.
                assert stranger.recv(1) == b""
    finally:
        watch.close()


def test_two_workers_hear_each_other() -> None:
    told: queue.Queue[dict[str, Any]] = queue.Queue()
    watches = [PairWatch(own, "127.0.0.1", 2.0, told.put) for own in range(2)]
    try:
        addresses = [watch.address for watch in watches]
        for watch in watches:
            watch.start(addresses, "a key")
        watches[1].close()
        assert told.get(timeout=_WAIT_SECONDS)["unreachable"] == 1
    finally:
        for watch in watches:
            watch.close()


def test_a_stranger_that_talks_while_it_is_dismissed_ends_nothing() -> None:
    watch = PairWatch(0, "127.0.0.1", 60.0, lambda _: None)
    watch._peers, watch._key = {1: ("127.0.0.1", 1)}, "key"
    with contextlib.ExitStack() as stack:
        stack.callback(watch.close)
        strangers = [stack.enter_context(socket.create_connection(watch.address)) for _ in range(2)]
        for _ in strangers:
            watch._receive(60.0)
        # Both at once: one more than are kept calls, and the oldest says something.
        strangers[0].sendall(b"x")
        worker = stack.enter_context(socket.create_connection(watch.address))
        worker.sendall(b'[1, "key"]\n')
        while 1 not in watch._connections:
            watch._receive(60.0)
