"""Values that clients of the same machine read where the server has them."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from distribax.parameter_server import (
    AddRows,
    Assign,
    AssignAdd,
    AssignRows,
    ParameterClient,
    ParameterSpec,
)
from distribax.parameter_server.protocol import handshake, sockets, wire
from distribax.parameter_server.protocol.wire import Message
from distribax.parameter_server.shared_memory import arena
from distribax.parameter_server.shared_memory.leases import NUM_SLOTS, LeaseBook, Tenants
from tests.unit.parameter_server.conftest import TOKEN, Cluster

pytestmark = pytest.mark.skipif(not arena.can_share(), reason="needs memory files on x86")

SPEC = ParameterSpec("v", "value", (200, 100), "float32", 0)
OTHER = ParameterSpec("w", "other", (300, 100), "float32", 0)
ONES = np.ones(SPEC.shape, np.float32)


def _add(client: ParameterClient, *uids: str) -> None:
    """Adds 1 to parameters, all in one push."""
    shapes = {"v": SPEC.shape, "w": OTHER.shape}
    client.push({0: [AssignAdd(uid, np.ones(shapes[uid], np.float32)) for uid in uids]})
    client.flush()


def _created(cluster: Cluster) -> ParameterClient:
    """Returns a client of a server whose parameter has been written once: it is 1 everywhere."""
    client = cluster.client()
    client.create(SPEC, 0 * ONES)
    client.create(OTHER, np.zeros(OTHER.shape, np.float32))
    _add(client, "v", "w")
    return client


def _num_rooms(cluster: Cluster, uid: str = "v") -> int:
    """Returns how many blocks the server has for a parameter."""
    return 1 + len(cluster.servers[0]._store.entries[uid]._others)


def _is_in_place(array: Any) -> bool:
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return not isinstance(array, np.ndarray)


def test_large_values_are_read_in_place(cluster: Cluster) -> None:
    client = _created(cluster)
    (value,) = client.pull([SPEC])
    assert _is_in_place(value) and np.all(value == 1)
    with pytest.raises(ValueError, match="read-only"):
        value[0] = 1
    # JAX uses it as it is, too.
    placed = jax.device_put(value)
    assert placed.unsafe_buffer_pointer() == value.ctypes.data


def test_small_and_unwritten_values_are_copied(cluster: Cluster) -> None:
    client = cluster.client()
    small = ParameterSpec("s", "small", (3,), "float32", 0)
    client.create(small, np.zeros(3, np.float32))
    client.create(SPEC, ONES)
    client.push({0: [AssignAdd("s", np.ones(3, np.float32))]})
    assert not any(map(_is_in_place, client.pull([small, SPEC])))


def test_all_types_of_numbers_are_read_in_place(cluster: Cluster) -> None:
    spec = ParameterSpec("b", "b", (1 << 16,), "bfloat16", 0)
    client = cluster.client()
    client.create(spec, np.zeros(spec.shape, ml_dtypes.bfloat16))
    client.push({0: [Assign("b", np.full(spec.shape, 3, ml_dtypes.bfloat16))]})
    (value,) = client.pull([spec])
    assert _is_in_place(value) and value.dtype == ml_dtypes.bfloat16 and np.all(value == 3)


def test_what_is_held_never_changes(cluster: Cluster) -> None:
    """With more values than there are slots: the rest is copied."""
    client = _created(cluster)
    held = []
    for _ in range(NUM_SLOTS + 4):
        held.append(client.pull([SPEC])[0])
        _add(client, "v")
    assert [_is_in_place(value) for value in held] == [True] * NUM_SLOTS + [False] * 4
    for number, value in enumerate(held):
        assert np.all(value == number + 1)


def test_arrays_of_jax_hold_it_as_well(cluster: Cluster) -> None:
    client = _created(cluster)
    held = []
    for _ in range(4):
        held.append(jax.device_put(client.pull([SPEC])[0]))
        _add(client, "v")
    client.pull([SPEC])
    gc.collect()
    for _ in range(4):
        _add(client, "v")
    for number, value in enumerate(held):
        assert np.all(np.asarray(value) == number + 1)


def test_views_hold_it_as_well(cluster: Cluster) -> None:
    client = _created(cluster)
    held = [client.pull([SPEC])[0][:, ::2].T.reshape(-1).view(np.int32)]
    part = client.pull([SPEC])[0][3:5, 7]
    for _ in range(6):
        _add(client, "v")
        client.pull([SPEC])
    assert np.all(held[0].view(np.float32) == 1) and np.all(part == 1)


def test_memory_is_used_again(cluster: Cluster) -> None:
    client, other = _created(cluster), cluster.client()
    for number in range(1, 50):
        for each in (client, other):
            assert np.all(each.pull([SPEC])[0] == number)
        _add(client, "v")
    assert 2 <= _num_rooms(cluster) <= 4


def test_without_readers_there_is_one_block(cluster: Cluster) -> None:
    client = _created(cluster)
    for _ in range(5):
        _add(client, "v")
    assert _num_rooms(cluster) == 1


@pytest.mark.parametrize("operation", [AddRows, AssignRows])
def test_rows_are_written_beside_what_is_read(cluster: Cluster, operation: Any) -> None:
    client = _created(cluster)
    (before,) = client.pull([SPEC])
    client.push({0: [operation("v", np.array([3]), np.full((1, 100), 4, np.float32))]})
    (after,) = client.pull([SPEC])
    expected = ONES.copy()
    expected[3] = 5 if operation is AddRows else 4
    np.testing.assert_array_equal(after, expected)
    np.testing.assert_array_equal(before, ONES)
    # From now on it is a table, whose rows are written where they are.
    assert not _is_in_place(after)
    assert _num_rooms(cluster) == 2
    for _ in range(3):
        client.push({0: [AddRows("v", np.array([4]), np.ones((1, 100), np.float32))]})
        client.pull([SPEC])
    _add(client, "v")
    expected[4] += 3
    np.testing.assert_array_equal(client.pull([SPEC])[0], expected + 1)
    assert _num_rooms(cluster) == 2


def test_a_table_is_not_copied_for_who_reads_something_else(cluster: Cluster) -> None:
    client = cluster.client()
    client.create(SPEC, ONES)
    client.create(OTHER, np.zeros(OTHER.shape, np.float32))
    _add(client, "w")
    (held,) = client.pull([OTHER])
    assert _is_in_place(held)
    client.push({0: [AddRows("v", np.array([4]), np.ones((1, 100), np.float32))]})
    assert client.rows(SPEC, [4])[0, 0] == 2
    assert _num_rooms(cluster) == 1


def test_a_value_may_move_to_memory_that_the_client_does_not_know(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "_CHUNK", 1 << 16)  # Each block has a file of its own.
    client, other = _created(cluster), cluster.client()
    held = []
    for number in range(1, 6):
        held.append(other.pull([SPEC])[0])
        assert np.all(held[-1] == number)
        assert np.all(other.rows(SPEC, [1, 2]) == number)
        _add(client, "v")
    # The first pull of a new file goes through the socket, the next one knows it.
    assert {_is_in_place(value) for value in held} == {True, False}
    _add(client, "v")
    for number, value in enumerate(held):
        assert np.all(value == number + 1)


def test_what_is_deleted_can_be_read_on(cluster: Cluster) -> None:
    client = _created(cluster)
    (value,) = client.pull([SPEC])
    client.delete(["v"])
    client.create(SPEC, 7 * ONES)
    assert np.all(client.pull([SPEC])[0] == 7)
    assert np.all(value == 1)


def test_what_is_held_survives_the_connection_and_the_server(cluster: Cluster) -> None:
    client = _created(cluster)
    (value,) = client.pull([SPEC])
    cluster.servers[0]._connections.copy().popitem()[0].shutdown(2)
    for number in range(2, 8):
        _add(client, "v")
        assert np.all(client.pull([SPEC])[0] == number)
    assert np.all(value == 1)
    cluster.servers[0].close()
    client.close()
    gc.collect()
    assert np.all(value == 1)


def test_a_client_that_is_closed_still_holds_what_it_has_given_out(cluster: Cluster) -> None:
    client, other = _created(cluster), cluster.client()
    (value,) = other.pull([SPEC])
    other.close()
    del other
    gc.collect()
    for _ in range(5):
        _add(client, "v")
        client.pull([SPEC])
    assert np.all(value == 1)


_READER = """
import sys, time
from distribax.parameter_server import Endpoint, ParameterClient, ParameterSpec
endpoint = Endpoint(*sys.argv[1:])
client = ParameterClient(1, lambda _: endpoint, client_id="r", token=b"the cluster's secret")
(value,) = client.pull([ParameterSpec("v", "value", (200, 100), "float32", 0)])
assert not value.flags.owndata
print(value[0, 0], flush=True)
time.sleep(100)
"""


def test_the_dead_hold_nothing(cluster: Cluster) -> None:
    client = _created(cluster)
    where = cluster.endpoints[0]
    given = [where.host, str(where.port), where.unix, where.boot, where.machine]
    readers = [
        subprocess.Popen([sys.executable, "-c", _READER, *given], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None and reader.stdout.readline() == b"1.0\n"
        # One is stopped while it reads, and holds nobody up.
        readers[1].send_signal(signal.SIGSTOP)
        for _ in range(4):
            _add(client, "v")
        tenants = cluster.servers[0]._store.tenants
        assert len(tenants.numbers()) == 2
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate(timeout=20)
    deadline = time.monotonic() + 20
    while tenants.numbers():
        assert time.monotonic() < deadline
        tenants.sweep()
    # The one that they read, and two for the values since, in turn.
    assert _num_rooms(cluster) == 3
    _add(client, "v")
    assert np.all(client.pull([SPEC])[0] == 6)
    assert _num_rooms(cluster) == 3


def test_a_forked_child_does_not_end_its_parents_lease() -> None:
    book, tenants = LeaseBook(), Tenants()
    tenants.add(book.descriptor)
    lease = book.take(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # There are threads, but the child does not need them.
        child = os.fork()
    if not child:
        del lease
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert tenants.numbers() == [4]
    del lease
    assert tenants.numbers() == []
    tenants.sweep()
    assert len(tenants._words) == 1
    del book
    tenants.sweep()
    assert not tenants._words


@pytest.mark.parametrize("size", [None, 64])
def test_notes_that_cannot_be_read_are_refused(cluster: Cluster, size: int | None) -> None:
    cluster.start()
    descriptor = os.memfd_create("test") if size is None else arena.create_file("test", size)
    with sockets.call(cluster.endpoints[0], 5) as connection:
        handshake.introduce(connection, TOKEN)
        wire.send(connection, Message({"do": "lease"}, (), (descriptor,)))
        kind, text = wire.receive(connection).header["error"]
    os.close(descriptor)
    assert kind == "ValueError" and "not a sealed memory file" in text
    assert cluster.client().note("key") is None


@pytest.mark.parametrize("seed", range(3))
def test_readers_and_writers_at_the_same_time(cluster: Cluster, seed: int) -> None:
    """Each push adds 1 to both; a reader that sees them apart, or moving, has found a fault."""
    _created(cluster)
    end = time.monotonic() + 2.0
    faults: list[str] = []

    def write(name: str) -> None:
        client = cluster.client(name)
        while time.monotonic() < end and not faults:
            _add(client, "v", "w")

    def read(name: str) -> None:
        generator = random.Random(f"{seed}{name}")
        client = cluster.client(name)
        held: list[tuple[float, Any, Any]] = []
        last = 0.0
        while time.monotonic() < end and not faults:
            one, two = client.pull([SPEC, OTHER])
            number = float(one[0, 0])
            if number < last:
                faults.append(f"{name} went from {last} back to {number}")
            last = number
            held.append((number, one, two))
            if len(held) > generator.randrange(12):
                held.pop(generator.randrange(len(held)))
            for expected, *values in held:
                if any(np.any(value != expected) for value in values):
                    faults.append(f"{name} held {expected}, which is no longer that")

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
