"""Messages on a socket: whole, in pieces, and damaged."""

from __future__ import annotations

import os
import socket
import struct
import threading
from typing import Any

import msgpack
import numpy as np
import pytest

from distribax.parameter_server.protocol import handshake, sockets, wire
from distribax.parameter_server.protocol.wire import FrameError, Message
from tests.unit.parameter_server.conftest import TOKEN, Cluster


def _frame(header: Any, payload: int = 0, magic: bytes = b"dxp3") -> bytes:
    text = header if isinstance(header, bytes) else msgpack.packb(header)
    return struct.pack("<4sIQQ", magic, len(text), payload, 0) + text


DAMAGED = {
    "a frame begins with b'HTTP'": _frame({}, magic=b"HTTP"),
    "claims a header of 4294967295 bytes": struct.pack("<4sIQQ", b"dxp3", 2**32 - 1, 0, 0),
    "and a payload of 2199023255552": struct.pack("<4sIQQ", b"dxp3", 2, 2**41, 0),
    "cannot be read": _frame(b"not a header"),
    "header cannot be read: Unpack failed: incomplete input": _frame(b"\x92\x01"),
    "header cannot be read: 'list' object has no attribute 'get'": _frame(["do", "note"]),
    "3 bytes follow a frame": _frame({"do": "note", "key": "k"}) + b"dxp",
    "cannot be stored": _frame({"arrays": [["object", [1]]]}),
    "is not a NumPy or JAX type": _frame({"arrays": [["nonsense", [1]]]}),
    "announces 5 bytes and arrays of 4": _frame({"arrays": [["int32", [1]]]}, 5),
    "header cannot be read: StackError": _frame(b"\x91" * 60_000),
    "cannot convert float infinity": _frame({"arrays": [["int32", [float("inf")]]]}, 4),
    "arrays cannot be allocated": _frame({"arrays": [["int32", [-1, -1]]]}, 4),
    "announces 0 bytes and arrays of 0": _frame({"arrays": [["int32", [1]], ["int32", [-1]]]}),
}


@pytest.mark.parametrize(("message", "frame"), DAMAGED.items(), ids=range(len(DAMAGED)))
def test_damaged_frames_are_refused_and_the_server_lives(
    cluster: Cluster, message: str, frame: bytes
) -> None:
    cluster.start()
    with sockets.call(cluster.endpoints[0], 5) as connection:
        handshake.introduce(connection, TOKEN)
        connection.sendall(frame)
        kind, text = wire.receive(connection).header["error"]
        assert kind == "FrameError" and message in text
        with pytest.raises((EOFError, ConnectionError)):
            wire.receive(connection)
    assert cluster.client().get_note("key") is None


def test_a_request_that_makes_no_sense_is_answered(cluster: Cluster) -> None:
    cluster.start()
    with sockets.call(cluster.endpoints[0], 5) as connection:
        handshake.introduce(connection, TOKEN)
        wire.send(connection, Message({"do": "dance"}))
        assert wire.receive(connection).header["error"] == ["KeyError", "'dance'"]


@pytest.mark.parametrize("sent", [3, 20, None])
def test_a_frame_that_ends_in_the_middle_is_an_error(
    pair: tuple[socket.socket, socket.socket], sent: int | None
) -> None:
    ours, theirs = pair
    theirs.sendall(_frame({"arrays": [["int32", [1]]]}, 4)[:sent])
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(FrameError, match="in the middle of a frame"):
        wire.receive(ours)


def test_files_of_a_damaged_frame_are_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    before = len(os.listdir("/proc/self/fd"))
    descriptor = os.memfd_create("test")
    socket.send_fds(theirs, [_frame({}, magic=b"none")], [descriptor])
    os.close(descriptor)
    with pytest.raises(FrameError):
        wire.receive(ours)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_message_may_arrive_in_pieces(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    arrays = [np.arange(5, dtype=np.int16), np.zeros((0, 3)), np.float32(2)]

    def trickle() -> None:
        recorder, player = socket.socketpair()
        with recorder, player:
            wire.send(recorder, Message({"a": "é" * 3000}, arrays))
            recorder.shutdown(socket.SHUT_WR)
            while data := player.recv(997):
                theirs.sendall(data)

    sender = threading.Thread(target=trickle)
    sender.start()
    message = wire.receive(ours)
    sender.join()
    assert message.header == {"a": "é" * 3000}
    for sent, received in zip(arrays, message.arrays, strict=True):
        np.testing.assert_array_equal(sent, received)


def test_messages_of_many_arrays_arrive(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    arrays = [np.full((i % 7, 100), i, np.int32) for i in range(1500)]
    sender = threading.Thread(target=wire.send, args=(theirs, Message({"a": 1}, arrays)))
    sender.start()
    message = wire.receive(ours)
    sender.join()
    assert message.header == {"a": 1}
    for sent, received in zip(arrays, message.arrays, strict=True):
        np.testing.assert_array_equal(sent, received)
