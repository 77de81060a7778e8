"""The hub among strangers: who may join, who is refused, and what nobody can break."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distribax.cli import main
from distribax.cli.launch import Launch
from distribax.cluster.peers import cluster_secret
from distribax.cluster.peers import meeting as meetings
from distribax.cluster.peers.cluster_secret import ClusterSecretError, find_secret
from distribax.cluster.peers.gate import (
    GREETING_SIZE,
    HELLO_SIZE,
    Gate,
    Introduction,
    is_own_socket,
)
from distribax.cluster.peers.meeting import ClusterTimeoutError, Member
from distribax.cluster.peers.pair_watch import PairWatch
from distribax.cluster.ray.ports import find_quiet_ports
from tests.unit.cluster.test_watch import Crew

SECRET = "a secret that nobody can guess"
_WAIT_SECONDS = 60
_BOTH = ("a cluster", "a cluster")


@pytest.fixture
def make_crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Crew]]:
    """Gives a function that makes a crew whose workers have the secret."""
    monkeypatch.setenv(cluster_secret.SECRET_VARIABLE, SECRET)
    monkeypatch.setattr(meetings, "_start_hub", lambda *args: None)
    with contextlib.ExitStack() as stack:

        def make(*args: Any, **kwargs: Any) -> Crew:
            crew = Crew(*args, **({"secret": SECRET} | kwargs))
            stack.callback(crew.close)
            return crew

        yield make


def call(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=_WAIT_SECONDS)


def read_all(link: socket.socket) -> bytes:
    """Returns what comes until the other end closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := link.recv(4096):
            data += part
    return data


# Strangers.


def test_strangers_that_stay_do_not_keep_workers_out(make_crew: Callable[..., Crew]) -> None:
    crew = make_crew(2, proof_seconds=3600.0)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(call(crew.port)) for _ in range(400)]
        # Those that came first have to go: only some are kept.
        assert all(len(read_all(stranger)) <= GREETING_SIZE for stranger in strangers[:270])
        assert [answer.exception() for answer in crew.join(*_BOTH)] == [None, None]
        # Now the meeting is over.
        assert all(len(read_all(stranger)) <= GREETING_SIZE for stranger in strangers)


def test_silent_stranger_is_ended_after_a_while(make_crew: Callable[..., Crew]) -> None:
    crew = make_crew(2, proof_seconds=0.2)
    with call(crew.port) as stranger:
        stranger.sendall(b"one byte, and then no more"[:1])
        assert len(read_all(stranger)) == GREETING_SIZE
    crew.hub._gate.proof_seconds = 30.0
    assert [answer.exception() for answer in crew.join(*_BOTH)] == [None, None]


@pytest.mark.parametrize("cluster", ["a cluster", "a false text"])
@pytest.mark.parametrize("secret", ["", "another secret, as long"])
def test_imposter_takes_no_place_and_ends_nobody(
    make_crew: Callable[..., Crew], cluster: str, secret: str
) -> None:
    crew = make_crew(2)
    for number in (0, 1):
        with call(crew.port) as imposter, pytest.raises(ClusterSecretError, match="same secret"):
            meetings._prove(imposter, number, cluster, secret)
    assert [answer.exception() for answer in crew.join(*_BOTH)] == [None, None]


def test_number_that_no_worker_has_is_refused(make_crew: Callable[..., Crew]) -> None:
    crew = make_crew(2)
    with call(crew.port) as link, pytest.raises(ClusterSecretError):
        meetings._prove(link, 2, "a cluster", SECRET)
    assert [answer.exception() for answer in crew.join(*_BOTH)] == [None, None]


def test_second_process_of_a_worker_is_refused_and_named(make_crew: Callable[..., Crew]) -> None:
    crew = make_crew(2)
    with call(crew.port) as first:
        assert meetings._prove(first, 1, "a cluster", SECRET)
        with pytest.raises(
            ValueError, match=r"worker 1 \(host1:2001\) has joined already"
        ) as error:
            meetings.meet(crew.members, 1, 30.0, "a cluster", 1.0)
        assert "from 127.0.0.1 and now from 127.0.0.1" in str(error.value)
        # The first one has kept its place.
        assert [answer.exception() for answer in crew.join("a cluster")] == [None]
        deadline = time.monotonic() + _WAIT_SECONDS
        answer = meetings._receive_answer(first, deadline, lambda missing: None)
        assert answer["address"] == "there:1"


def test_what_was_overheard_proves_nothing_later() -> None:
    gate = Gate(SECRET, "a cluster", 2)
    greeting = gate.greet()
    hello = Introduction(SECRET, greeting, 1, "a cluster").hello
    assert gate.check(greeting, hello)[1:] == (1, True)
    assert gate.check(gate.greet(), hello).number is None
    # Nor can another number be put in its place.
    assert gate.check(greeting, b"\0" + hello[1:]).number is None


@contextlib.contextmanager
def false_hub(said: bytes, replied: bytes) -> Iterator[Member]:
    """Something that listens where the first worker should."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = listener.accept()
                with link:
                    link.sendall(said)
                    if replied:
                        link.recv(HELLO_SIZE)
                        link.sendall(replied)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield Member("worker 0", "127.0.0.1", listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_false_hub_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cluster_secret.SECRET_VARIABLE, SECRET)
    other = Member("worker 1", "127.0.0.1", 1)
    greeting = Gate("", "", 2).greet()
    with (
        false_hub(greeting, b"+" + bytes(32)) as hub,
        pytest.raises(ClusterSecretError, match="do not have the same secret"),
    ):
        meetings.meet([hub, other], 1, 30.0, "a cluster", 1.0)
    # The worker's own proof does not pass for the hub's.
    worker = Introduction(SECRET, greeting, 1, "a cluster")
    assert not worker.is_proved_by(b"+" + worker.hello[-32:])
    # Something else may listen there until the hub does.
    for said in (b"HTTP/1.1 400 Bad Request\r\n" * 9, b""):
        with false_hub(said, b"") as hub, pytest.raises(ClusterTimeoutError, match="worker 0"):
            meetings.meet([hub, other], 1, 0.5, "a cluster", 1.0)


# Workers that say nonsense.


@pytest.mark.parametrize(
    "said",
    [
        b"[" * 60_000 + b"\n",
        b'{"at": {"number": "x"}}\n',
        b'{"at": 3}\n',
        b'{"at": {"number": 1, "seconds": "x", "marks": [], "here": ""}}\n',
        b'{"at": {"number": 1, "marks": [["x", 1], [1, 1]], "here": ""}}\n',
        b"x" * 70_000,
    ],
)
def test_nonsense_costs_the_worker_that_says_it_its_place(
    make_crew: Callable[..., Crew], said: bytes
) -> None:
    crew = make_crew(3)
    first, second = crew.watches(without=2)
    third = crew._open[2]
    assert isinstance(third, socket.socket)
    third.sendall(said)
    for watch in (first, second):
        loss = watch.wait_for_loss(_WAIT_SECONDS)
        assert loss is not None and loss.peer == crew.name(2) and "died" in loss.reason


@pytest.mark.parametrize("said", [b"[" * 60_000 + b"\n", b'{"lost": 7}\n', b"3\n"])
def test_nonsense_of_the_hub_is_its_end(make_crew: Callable[..., Crew], said: bytes) -> None:
    crew = make_crew(2)
    first, _ = crew.watches()
    crew.hub._find_present()[0].connection.setblocking(True)
    crew.hub._find_present()[0].send_bytes(said)
    loss = first.wait_for_loss(_WAIT_SECONDS)
    assert loss is not None and loss.peer == crew.name(0) and "died" in loss.reason


# The real hub.


def test_hub_has_the_secret_and_shows_it_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cluster_secret.SECRET_VARIABLE, SECRET)
    (port,) = find_quiet_ports(1, "127.0.0.1")
    members = [Member("worker 0", "127.0.0.1", port), Member("worker 1", "127.0.0.1", 1)]
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(meetings.meet, members, i, 300.0, "a cluster", 60.0) for i in (0, 1)]
        links = [each.result().connection for each in calls]
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            commands.append(path.read_bytes())
    for link in links:
        link.close()
    assert any(b"hub_main.py" in command for command in commands)
    assert not any(SECRET.encode() in command for command in commands)


def test_launcher_makes_a_secret_for_the_workers_of_one_machine() -> None:
    variable = cluster_secret.SECRET_VARIABLE
    one, other = Launch(__file__, workers=2).make_environments({}, 0).values()
    assert one[variable] == other[variable] and len(one[variable]) == 64
    for told in ({variable: SECRET}, {cluster_secret.SECRET_FILE_VARIABLE: "/a/file"}):
        for environment in Launch(__file__, workers=2).make_environments(told, 0).values():
            assert told.items() <= environment.items()
            assert (variable in environment) == (variable in told)
    several = Launch(__file__, nnodes=2, rdzv_endpoint="host:1").make_environments({}, 0)
    assert variable not in several[0]


# The secret.


def test_secret_is_found_in_a_variable_or_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(cluster_secret.SECRET_VARIABLE, raising=False)
    assert find_secret() == ""
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    monkeypatch.setenv(cluster_secret.SECRET_FILE_VARIABLE, str(path))
    assert find_secret() == SECRET
    monkeypatch.setenv(cluster_secret.SECRET_VARIABLE, f" {SECRET[::-1]} ")
    assert find_secret() == SECRET[::-1]


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (SECRET.encode(), 0o640, r"can be read or changed by others.*-rw-r-----.*chmod 600"),
        (b"short", 0o600, "has 5 characters"),
        (b"x" * 5000, 0o600, "has 4097 characters"),
        (b"\xff" * 20, 0o600, "is not text"),
        (None, 0o600, "not an ordinary file"),
    ],
)
def test_file_that_cannot_hold_a_secret_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None, mode: int, message: str
) -> None:
    path = tmp_path / "secret"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
        path.chmod(mode)
    monkeypatch.setenv(cluster_secret.SECRET_FILE_VARIABLE, str(path))
    with pytest.raises(ValueError, match=message):
        find_secret()


def test_file_of_a_secret_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cluster_secret.SECRET_FILE_VARIABLE, "/no/such/file")
    with pytest.raises(ValueError, match=r"cannot be read: .*No such file"):
        find_secret()


@pytest.mark.parametrize(
    ("secret", "host", "warns"),
    [
        (None, "10.0.0.1", True),
        (None, "a-host", True),
        (SECRET, "10.0.0.1", False),
        (None, "127.0.0.2", False),
        (None, "::1", False),
        (None, "localhost", False),
    ],
)
def test_meeting_others_without_a_secret_is_warned_of(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    secret: str | None,
    host: str,
    warns: bool,
) -> None:
    if secret is not None:
        monkeypatch.setenv(cluster_secret.SECRET_VARIABLE, secret)
    monkeypatch.setattr(meetings, "_start_hub", lambda *args: None)
    with caplog.at_level("WARNING", "distribax.cluster"), pytest.raises(ClusterTimeoutError):
        meetings.meet([Member("worker 0", host, 1)], 0, 0.0, "a cluster", 1.0)
    assert (f"meet at {host} without a secret" in caplog.text) == warns
    assert (cluster_secret.SECRET_FILE_VARIABLE in caplog.text) == warns


# Anything at all.


@given(st.binary(max_size=2 * HELLO_SIZE) | st.binary(min_size=HELLO_SIZE, max_size=HELLO_SIZE))
def test_no_hello_without_the_secret_is_taken(hello: bytes) -> None:
    gate = Gate(SECRET, "a cluster", 2**32)
    assert gate.check(gate.greet(), hello).number is None


@given(st.binary(max_size=300))
def test_answers_of_any_content_are_answers_or_none(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        assert isinstance(meetings._receive_answer(ours, 0.0, lambda missing: None), dict)


@given(st.binary(max_size=60) | st.text(max_size=20).map(lambda key: json.dumps([1, key]).encode()))
@example(b'[1, "\\ud800"]')
@example(b"[" * 500)
def test_nobody_without_the_key_is_another_worker(line: bytes) -> None:
    watch = PairWatch(0, "127.0.0.1", 60.0, print)
    watch._peers, watch._key = {1: ("127.0.0.1", 1)}, "a key"
    assert watch._parse_hello(line) is None
    watch.close()


def test_launcher_of_several_machines_says_how_to_make_a_secret(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    options = ["run", "--nnodes", "2", "--rdzv-endpoint"]
    assert main([*options, "host.invalid:1", str(script)]) == 0
    said = capfd.readouterr().err
    assert "there is no secret: whoever reaches host.invalid:1 can join" in said
    assert "openssl rand -hex 32 > ~/cluster-secret; chmod 600 ~/cluster-secret\n" in said
    assert "export DISTRIBAX_CLUSTER_SECRET_FILE=~/cluster-secret\n" in said
    assert main([*options, "127.0.0.1:1", str(script)]) == 0
    monkeypatch.setenv(cluster_secret.SECRET_VARIABLE, SECRET)
    assert main([*options, "host.invalid:1", str(script)]) == 0
    assert capfd.readouterr().err == ""
    monkeypatch.setenv(cluster_secret.SECRET_VARIABLE, "short")
    assert main([*options, "host.invalid:1", str(script)]) == 2
    assert "has 5 characters" in capfd.readouterr().err


# Other users of this machine, where there is no secret.

_CALL = """
import socket, sys
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60)
try:
    print(len(link.recv(1000)))
except ConnectionResetError:
    print(0)
"""
_LISTEN = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()
"""


def _start_as(user: int, program: str, *arguments: str) -> subprocess.Popen[str]:
    command = ["/usr/bin/env", "python3", "-ISc", program, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, user=user, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_of_this_machine_is_no_worker(
    make_crew: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cluster_secret.SECRET_VARIABLE)
    crew = make_crew(2, secret="")
    for user, said in ((65534, 0), (0, GREETING_SIZE)):
        out, err = _start_as(user, _CALL, str(crew.port)).communicate()
        if err:
            pytest.skip(f"another user cannot run Python here: {err[-200:]}")
        assert int(out) == said
    assert [answer.exception() for answer in crew.join(*_BOTH)] == [None, None]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_of_this_machine_is_no_hub() -> None:
    for user, is_own in ((65534, False), (0, True)):
        with _start_as(user, _LISTEN) as listening:
            assert listening.stdout is not None
            port = listening.stdout.readline()
            if not port:
                pytest.skip("another user cannot run Python here")
            assert is_own_socket(("127.0.0.1", int(port))) is is_own
            listening.communicate()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_own_sockets_are_known(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]) as caller,
        listener.accept()[0] as accepted,
    ):
        assert is_own_socket(listener.getsockname())
        assert is_own_socket(accepted.getpeername(), accepted.getsockname())
        caller.close()
        # Linux shows it as root's now.
        assert sys.platform != "linux" or not is_own_socket(
            accepted.getpeername(), accepted.getsockname()
        )
    assert is_own_socket(("10.0.0.1", 80)), "of other machines nothing is known"
