"""Memory that a server and clients of the same machine share."""

from __future__ import annotations

import dataclasses
import gc
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from distribax.parameter_server import (
    Assign,
    AssignAdd,
    ParameterClient,
    ParameterServer,
    ParameterSpec,
)
from distribax.parameter_server.protocol import handshake, sockets, wire
from distribax.parameter_server.protocol.requests import Request
from distribax.parameter_server.protocol.wire import Message
from distribax.parameter_server.server import request_handler
from distribax.parameter_server.shared_memory import arena
from distribax.parameter_server.shared_memory.reader import SharedReader
from tests.unit.parameter_server.conftest import TOKEN, Cluster

SPEC = ParameterSpec("v", "value", (200, 100), "float32", 0)
ONES = np.ones(SPEC.shape, np.float32)

pytestmark = pytest.mark.skipif(not arena.can_share(), reason="needs memory files on x86")


def _files() -> list[str]:
    """Returns the memory files that this process has open or mapped."""
    opened = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return [text for text in [*opened, *mapped] if "memfd:distribax" in text]


def test_nothing_is_left_of_it() -> None:
    gc.collect()
    before = len(_files())
    server = ParameterServer(0, token=TOKEN)
    endpoint = server.start()
    client = ParameterClient(1, lambda _: endpoint, client_id="c", token=TOKEN)
    client.create(SPEC, ONES)
    client.push({0: [AssignAdd("v", ONES)]})
    client.pull([SPEC])
    assert len(_files()) > before
    client.close()
    server.close()
    del client, server
    gc.collect()
    assert len(_files()) == before


@pytest.fixture
def writing(cluster: Cluster) -> Iterator[Cluster]:
    """A server that has begun to write and does not finish: readers see an odd number."""
    cluster.start()
    cluster.client().create(SPEC, ONES)
    with cluster.servers[0]._store.arena:
        yield cluster


def test_a_reader_asks_the_server_when_it_keeps_on_writing(writing: Cluster) -> None:
    client = writing.client()
    np.testing.assert_array_equal(client.pull([SPEC])[0], ONES)
    np.testing.assert_array_equal(client.pull_rows([(SPEC, [3])])[0], ONES[:1])


@pytest.mark.parametrize("times", [1, 4])
def test_a_reader_tries_again_when_the_server_has_written_meanwhile(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    client, other = cluster.client(), cluster.client()
    client.create(SPEC, ONES)
    client.pull([SPEC])
    left = [times]
    original = SharedReader._copy_consistently

    def disturbed(reader: SharedReader, copy: Callable[[], Any]) -> Any:
        def copy_and_write() -> Any:
            result = copy()
            if left[0]:
                left[0] -= 1
                other.push({0: [AssignAdd("v", ONES)]})
                other.flush()
            return result

        return original(reader, copy_and_write)

    other.push({0: [AssignAdd("v", ONES)]})
    other.flush()
    with monkeypatch.context() as patch:
        patch.setattr(SharedReader, "_copy_consistently", disturbed)
        (value,) = client.pull([SPEC])
    np.testing.assert_array_equal(value, (2 + times) * ONES)


def test_what_is_held_never_changes(cluster: Cluster) -> None:
    client = cluster.client()
    client.create(SPEC, 0 * ONES)
    held = []
    for _ in range(4):
        held.append(jax.device_put(client.pull([SPEC])[0]))
        client.push({0: [AssignAdd("v", ONES)]})
    for number, value in enumerate(held):
        assert np.all(np.asarray(value) == number)


def test_numbers_that_numpy_does_not_know_are_shared(cluster: Cluster) -> None:
    spec = ParameterSpec("b", "b", (1 << 16,), "bfloat16", 0)
    client = cluster.client()
    client.create(spec, np.zeros(spec.shape, ml_dtypes.bfloat16))
    client.push({0: [Assign("b", np.full(spec.shape, 3, ml_dtypes.bfloat16))]})
    (value,) = client.pull([spec])
    assert value.dtype == ml_dtypes.bfloat16 and np.all(value == 3)


def test_readers_and_writers_at_the_same_time(cluster: Cluster) -> None:
    """Each push adds 1 to both; a reader that sees them apart, or moving, has found a fault."""
    specs = [SPEC, dataclasses.replace(SPEC, uid="w")]
    for spec in specs:
        cluster.client().create(spec, ONES)
    end = time.monotonic() + 2.0
    faults: list[str] = []

    def write(name: str) -> None:
        client = cluster.client(name)
        while time.monotonic() < end and not faults:
            client.push({0: [AssignAdd(spec.uid, ONES) for spec in specs]})

    def read(name: str) -> None:
        client = cluster.client(name)
        last = 0.0
        while time.monotonic() < end and not faults:
            one, two = client.pull(specs)
            number = float(one[0, 0])
            if np.any(one != number) or np.any(two != number) or number < last:
                faults.append(f"{name} has read {number} after {last}, and other numbers")
            last = number

    threads = [
        threading.Thread(target=what, args=(f"{what.__name__}-{number}",))
        for what, count in ((write, 2), (read, 3))
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_clients_cannot_write_into_a_servers_memory(cluster: Cluster) -> None:
    cluster.start()
    cluster.client().create(SPEC, ONES)
    with sockets.call(cluster.endpoints[0], 5) as connection:
        handshake.introduce(connection, TOKEN)
        wire.send(connection, Message({"do": "map", "uids": ["v"]}))
        answer = wire.receive(connection)
    for descriptor in answer.descriptors:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(descriptor)
    assert len(answer.descriptors) == 2


def _push(size: int, offset: int = 0) -> dict[str, object]:
    placed = [["float32", SPEC.shape, offset]]
    operations = [{"do": "assign", "uid": "v", "value": 0}]
    box = {"placed": placed, "size": size}
    return {"do": "push", "operations": operations, "mailbox": box}


@pytest.mark.parametrize(
    ("header", "sealed", "size", "message"),
    [
        (_push(80_000), True, None, "a mailbox that was not sent"),
        (_push(80_000), False, 80_000, "not a sealed memory file of 80000 bytes"),
        (_push(80_000), True, 4096, "not a sealed memory file of 80000 bytes"),
        (_push(80_000, 64), True, 80_000, "outside of its mailbox"),
        (_push(80_000, -64), True, 80_000, "outside of its mailbox"),
        (_push(90_000, 4), True, 90_000, "outside of its mailbox"),
    ],
)
def test_a_mailbox_is_checked(
    cluster: Cluster, header: dict[str, object], sealed: bool, size: int | None, message: str
) -> None:
    cluster.start()
    cluster.client().create(SPEC, ONES)
    descriptors = []
    if size is not None:
        create = arena.create_file if sealed else _unsealed
        descriptors.append(create("test", size))
    with sockets.call(cluster.endpoints[0], 5) as connection:
        handshake.introduce(connection, TOKEN)
        wire.send(connection, Message(header, (), descriptors))
        kind, text = wire.receive(connection).header["error"]
    for descriptor in descriptors:
        os.close(descriptor)
    assert kind == "ValueError" and message in text


def _unsealed(name: str, size: int) -> int:
    descriptor = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    return descriptor


def test_a_file_that_cannot_be_made_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def full(descriptor: int, size: int) -> None:
        raise OSError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", full)
        with pytest.raises(OSError, match="no memory"):
            arena.create_file("test", 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_pushes_of_growing_size_share_a_mailbox(cluster: Cluster) -> None:
    client = cluster.client()
    for exponent in range(4, 22, 3):
        spec = ParameterSpec(f"p{exponent}", "p", (1 << exponent,), "uint8", 0)
        client.create(spec, np.zeros(spec.shape, np.uint8))
        client.push({0: [Assign(spec.uid, np.full(spec.shape, exponent, np.uint8))]})
        assert np.all(client.pull([spec])[0] == exponent)


def test_pushes_of_the_same_form_and_of_others_take_turns(cluster: Cluster) -> None:
    """They share a mailbox, which has to be sent again after a reconnection."""
    client = cluster.client()
    other = dataclasses.replace(SPEC, uid="w", shape=(100, 200))
    client.create(SPEC, 0 * ONES)
    client.create(other, 0 * ONES.reshape(other.shape))
    for number in range(1, 13):
        uid, shape = ("v", SPEC.shape) if number % 5 else ("w", other.shape)
        client.push({0: [AssignAdd(uid, np.full(shape, number, np.float32))]})
        if number == 8:
            client.flush()
            cluster.servers[0]._connections.copy().popitem()[0].shutdown(socket.SHUT_RDWR)
    one, two = client.pull([SPEC, other])
    assert np.all(one == sum(range(1, 13)) - 15) and np.all(two == 15)


def test_a_client_can_do_without(cluster: Cluster) -> None:
    client = cluster.client(shared_memory=False)
    client.create(SPEC, ONES)
    client.push({0: [AssignAdd("v", ONES)]})
    assert np.all(client.pull([SPEC])[0] == 2)


def test_memory_in_many_pieces_is_shared_bit_by_bit(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_handler, "_MAX_DESCRIPTORS", 2)
    monkeypatch.setattr(arena, "_CHUNK", 1 << 16)  # Each value has a file of its own.
    client = cluster.client()
    specs = [dataclasses.replace(SPEC, uid=f"v{number}") for number in range(5)]
    for number, spec in enumerate(specs):
        client.create(spec, number * ONES)
    assert [value[0, 0] for value in client.pull(specs)] == [0, 1, 2, 3, 4]
    reader = client._connections[0].get_reader(specs)
    assert reader is not None and len(reader._segments) == 1 + len(specs)


def test_a_client_maps_again_after_its_connection_broke(cluster: Cluster) -> None:
    client = cluster.client()
    client.create(SPEC, ONES)
    client.pull([SPEC])
    cluster.restart()
    cluster.client().create(SPEC, 2 * ONES)
    other = dataclasses.replace(SPEC, uid="w")
    client.create(other, 3 * ONES)
    assert [value[0, 0] for value in client.pull([SPEC, other])] == [2, 3]


def test_a_server_that_comes_back_on_another_machine_is_sent_the_values(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start(snapshot_dir=tmp_path)
    client = cluster.client()
    client.create(SPEC, ONES)
    client.push({0: [AssignAdd("v", ONES)]})
    assert client.pull([SPEC])[0][0, 0] == 2
    cluster.servers[0].snapshot()
    cluster.transport = "tcp"
    cluster.restart(snapshot_dir=tmp_path, shared_memory=True)
    client.push({0: [AssignAdd("v", ONES)]})
    assert client.pull([SPEC])[0][0, 0] == 3
    # A question about shared memory may be under way when the server moves: it has no answer there.
    answer = client._connections[0].request(Message({"do": Request.MAP, "uids": ["v"]}))
    assert answer.header["places"] == [] and not answer.descriptors
    assert client._connections[0].get_reader([SPEC]) is None


def test_other_platforms_use_sockets(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert not arena.can_share()
    client = cluster.client()
    client.create(SPEC, ONES)
    assert np.all(client.pull([SPEC])[0] == 1)


def test_without_abstract_sockets_tcp_is_used(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(path: str) -> str:
        raise FileNotFoundError(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "readlink", missing)
        assert sockets.get_machine_id() == ""
    monkeypatch.setattr("sys.platform", "darwin")
    cluster.start()
    assert cluster.endpoints[0].unix == "" and cluster.endpoints[0].machine == ""
    assert cluster.client().get_note("key") is None


def test_unix_sockets_carry_it(cluster: Cluster) -> None:
    cluster.start()
    with sockets.call(cluster.endpoints[0], 5) as connection:
        assert connection.family == socket.AF_UNIX
