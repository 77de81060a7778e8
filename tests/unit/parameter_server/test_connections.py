"""Meeting, tokens, broken connections, and peers that are not what they seem."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from distribax.parameter_server import (
    Assign,
    AssignAdd,
    Endpoint,
    ParameterClient,
    ParameterServerError,
    ParameterServerUnreachableError,
    ParametersLostError,
    ParameterSpec,
)
from distribax.parameter_server.client import connection
from distribax.parameter_server.protocol import handshake, sockets
from tests.unit.parameter_server.conftest import TOKEN, Cluster
from tests.unit.parameter_server.proxy import Proxy

COUNT = ParameterSpec("c", "count", (), "int32", 0)
ONE = {0: [AssignAdd("c", np.int32(1))]}


@contextlib.contextmanager
def _other_server(talk: Callable[[socket.socket], Any]) -> Iterator[Endpoint]:
    """Something that listens but is no parameter server; `talk` answers each call."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = listener.accept()
                with accepted, contextlib.suppress(OSError):
                    talk(accepted)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield Endpoint("127.0.0.1", listener.getsockname()[1], "", "boot")
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def _client(endpoint: Endpoint, **settings: Any) -> ParameterClient:
    settings = {"token": TOKEN, "timeout": 0.3} | settings
    return ParameterClient(1, lambda index: endpoint, client_id="c", **settings)


def test_another_token_is_refused(any_cluster: Cluster) -> None:
    any_cluster.start()
    client = any_cluster.client(token=b"wrong")
    with pytest.raises(PermissionError, match=r"server 0 .* do not have the same token"):
        client.pull([COUNT])
    # One that does not care whether the server has the token.
    with sockets.call(any_cluster.locate(0), 60.0) as stranger:
        assert stranger.recv(55, socket.MSG_WAITALL).startswith(b"distribax-parameters-2\n")
        stranger.sendall(bytes(64))
        assert stranger.recv(33, socket.MSG_WAITALL) == b"-" + bytes(32)
        assert stranger.recv(1) == b""
    assert any_cluster.client().get_note("key") is None


@pytest.mark.parametrize("is_echoed", [False, True])
def test_a_server_has_to_know_the_token_too(is_echoed: bool) -> None:
    def pretend(peer: socket.socket) -> None:
        peer.sendall(b"distribax-parameters-2\n" + bytes(32))
        proof = peer.recv(64, socket.MSG_WAITALL)[32:]
        # The client's own proof must not pass for the server's.
        peer.sendall(b"+" + (proof if is_echoed else bytes(32)))

    message = "what answers there does not have the token"
    with _other_server(pretend) as endpoint, pytest.raises(PermissionError, match=message):
        _client(endpoint).get_note("key")


@pytest.mark.parametrize(
    ("talk", "reason"),
    [
        (
            lambda c: c.sendall(b"HTTP/1.1 400 Bad Request\r\n" + bytes(64)),
            "not a parameter server",
        ),
        (lambda c: None, "has closed the connection while meeting"),
    ],
)
def test_something_else_that_listens_is_told_apart(
    talk: Callable[[socket.socket], Any], reason: str
) -> None:
    unreachable = pytest.raises(ParameterServerUnreachableError, match=reason)
    with _other_server(talk) as endpoint, unreachable:
        _client(endpoint).get_note("key")


def test_an_unreachable_server_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    client = _client(Endpoint("127.0.0.1", port, "gone", "boot", sockets.get_machine_id()))
    with pytest.raises(ParameterServerUnreachableError, match="timeout") as raised:
        client.push(ONE)
    assert (raised.value.server, raised.value.endpoint) == (0, f"127.0.0.1:{port}")
    assert "refused" in raised.value.reason.lower()


def test_a_server_that_cannot_be_located_is_named() -> None:
    def locate(index: int) -> Endpoint:
        raise ConnectionError("nobody knows")

    client = ParameterClient(1, locate, client_id="c", token=TOKEN, timeout=0.1)
    client.flush()  # There is nothing to wait for.
    with pytest.raises(ParameterServerUnreachableError, match=r"unknown address.*nobody knows"):
        client.get_note("key")


def test_a_server_that_does_not_answer_is_given_up(cluster: Cluster) -> None:
    cluster.start()
    client, other = cluster.client(timeout=1.5), cluster.client(timeout=1.5)
    client.create(COUNT, np.int32(0))
    assert other.get_note("key") is None
    store = cluster.servers[0]._store
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with store.lock:
            held.set()
            done.wait(300)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(300)
    try:
        client.push(ONE)
        with pytest.raises(ParameterServerUnreachableError, match="no answer"):
            client.flush()
        with pytest.raises(ParameterServerUnreachableError, match="no answer"):
            other.set_note("key", b"")
    finally:
        done.set()
        holder.join()
    assert client.pull([COUNT]) == [1]


def test_two_servers_that_have_changed_places_are_noticed(cluster: Cluster) -> None:
    cluster.start()
    cluster.start()
    cluster.endpoints.reverse()
    with pytest.raises(ParameterServerError, match="this is parameter server 1, not 0"):
        cluster.client().get_note("key")


def test_a_push_whose_answer_is_lost_is_applied_once(cluster: Cluster) -> None:
    cluster.start()
    proxy = Proxy(cluster.endpoints[0])
    client = _client(proxy.endpoint, timeout=60.0)
    try:
        client.create(COUNT, np.int32(0))
        for _ in range(5):
            proxy.cut_answers()
            client.push(ONE)
            client.flush()
        assert client.pull([COUNT]) == [5]
        assert cluster.servers[0].status()["counts"] == {"assign_add": 5}
        assert proxy.num_calls == 6
    finally:
        client.close()
        proxy.close()


def test_requests_are_repeated_when_the_connection_breaks(cluster: Cluster) -> None:
    cluster.start()
    proxy = Proxy(cluster.endpoints[0])
    client = _client(proxy.endpoint, timeout=60.0)
    try:
        client.create(COUNT, np.int32(0))
        for request in (
            lambda: client.pull([COUNT]),
            lambda: client.pull_rows([(ParameterSpec("r", "r", (2,), "int32", 0), [0])]),
            lambda: client.set_note("key", b""),
        ):
            proxy.cut_answers()
            with contextlib.suppress(ParametersLostError):
                request()
        assert proxy.num_calls == 4
    finally:
        client.close()
        proxy.close()


def test_a_failed_push_that_is_sent_again_fails_again(cluster: Cluster) -> None:
    cluster.start()
    proxy = Proxy(cluster.endpoints[0])
    client = _client(proxy.endpoint, timeout=60.0)
    try:
        client.create(COUNT, np.int32(0))
        proxy.cut_answers()
        client.push({0: [Assign("c", np.zeros(3, np.int32))]})
        with pytest.raises(ParameterServerError, match="'count'"):
            client.flush()
        assert client.pull([COUNT]) == [0]
    finally:
        client.close()
        proxy.close()


def test_an_interrupted_pull_does_not_confuse_the_next(
    any_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    any_cluster.start(shared_memory=False)
    any_cluster.start(shared_memory=False)
    client = any_cluster.client()
    specs = [ParameterSpec(f"p{i}", f"p{i}", (), "int32", i % 2) for i in range(4)]
    for i, spec in enumerate(specs):
        client.create(spec, np.int32(i))

    def interrupted(waiting: connection.Connection, seconds: float) -> bool:
        if seconds:
            raise KeyboardInterrupt
        return False

    with monkeypatch.context() as patch:
        patch.setattr(connection.Connection, "_is_readable", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.pull(specs[:2])
    assert client.pull(specs[2:]) == [2, 3]
    assert client.pull(specs) == [0, 1, 2, 3]


def test_a_server_that_has_moved_is_followed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The old one does not answer, and its connection does not break either.
    monkeypatch.setattr(connection, "_LOOK_SECONDS", 0.05)
    cluster.start()
    silent = threading.Event()
    client = cluster.client()
    client.create(COUNT, np.int32(0))
    lock = cluster.servers[0]._store.lock

    def hold() -> None:
        with lock:
            silent.wait(300)

    holder = threading.Thread(target=hold)
    holder.start()
    client.push(ONE)
    old = cluster.servers[0]
    cluster.servers[0], cluster.endpoints[0] = cluster._started(0, {})
    try:
        with pytest.raises(ParametersLostError):
            client.flush()
    finally:
        silent.set()
        holder.join()
        old.close()


STRANGERS = """
import resource, socket, sys
count, port = int(sys.argv[1]), int(sys.argv[2])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
sys.stdin.readline()
calls = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
for call in calls[::2]:
    try:
        call.sendall(b"not a proof")
    except OSError:
        pass  # The server has cut it.
print("here", flush=True)
sys.stdin.read()
"""


def test_strangers_do_not_keep_out_a_client_with_the_token(cluster: Cluster) -> None:
    cluster.transport = "tcp"
    server = cluster.start()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    command = [sys.executable, "-ISc", STRANGERS, "1000", str(cluster.endpoints[0].port)]
    pipe = subprocess.PIPE
    strangers = subprocess.Popen(command, stdin=pipe, stdout=pipe)
    # If the server kept them all, this process could not open any more.
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 300, hard))
    try:
        assert strangers.stdin is not None and strangers.stdout is not None
        strangers.stdin.write(b"call\n")
        strangers.stdin.flush()
        assert strangers.stdout.readline() == b"here\n"
        assert cluster.client().get_note("key") is None
        assert server.status()["connections"] < 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        strangers.communicate()


def test_a_server_listens_again_when_it_can_start_threads_again(cluster: Cluster) -> None:
    server = cluster.start()
    size = threading.stack_size(1 << 46)  # More than any process can have.
    try:
        with sockets.call(cluster.locate(0), 60.0) as refused, contextlib.suppress(OSError):
            assert refused.recv(1) == b""
    finally:
        threading.stack_size(size)
    assert cluster.client().get_note("key") is None
    assert server.status()["connections"] == 1


@pytest.mark.parametrize("side", [handshake.welcome, handshake.introduce])
def test_a_handshake_has_one_time_limit_however_its_bytes_come(
    pair: tuple[socket.socket, socket.socket], side: Callable[..., None]
) -> None:
    ours, theirs = pair
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(0.05):
            theirs.sendall(b"d")

    slow = threading.Thread(target=trickle)
    slow.start()
    try:
        with pytest.raises(TimeoutError):
            side(ours, TOKEN, 0.5)
    finally:
        ended.set()
        slow.join()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_gets_no_greeting(cluster: Cluster) -> None:
    cluster.start()
    program = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(60); "
        "s.connect(chr(0) + sys.argv[1]); print(s.recv(22).decode())"
    )
    command = ["/usr/bin/env", "python3", "-ISc", program, cluster.endpoints[0].unix]
    for user, said in ((65534, ""), (os.geteuid(), "distribax-parameters-2")):
        done = subprocess.run(command, user=user, capture_output=True, text=True, check=False)
        if done.returncode and user:
            pytest.skip(f"another user cannot run Python here: {done.stderr[-200:]}")
        assert done.stdout.strip() == said


def test_sockets_of_other_users_are_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, pair: tuple[socket.socket, socket.socket]
) -> None:
    cluster.start()
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(PermissionError, match="expected 4242"):
        handshake.check_peer(pair[0])


def test_a_server_listens_on_its_address_only(cluster: Cluster) -> None:
    cluster.start(host="127.0.0.2")
    assert cluster.endpoints[0].host == "127.0.0.2"
    assert cluster.client().get_note("key") is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", cluster.endpoints[0].port), timeout=5)


def test_ipv6_works(cluster: Cluster) -> None:
    cluster.transport = "tcp"
    cluster.start(host="::1")
    assert cluster.client().get_note("key") is None


def test_a_name_that_is_taken_is_an_error() -> None:
    with sockets.listen_unix("distribax-test-taken"), pytest.raises(OSError, match="in use"):
        sockets.listen_unix("distribax-test-taken")


@pytest.mark.parametrize(
    "error",
    [
        ParameterServerError(1, "ValueError", "text"),
        ParameterServerUnreachableError(1, "host:1", 2.0, "reason"),
        ParametersLostError(1, "reason"),
    ],
)
def test_errors_survive_pickling(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and vars(copy) == vars(error)


def test_endpoints_are_data() -> None:
    endpoint = Endpoint("::1", 5, "name", "boot")
    assert dataclasses.asdict(endpoint)["machine"] == "" and str(endpoint) == "::1:5"
