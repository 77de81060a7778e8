"""The watch over other workers, its tunnel and its knife, without JAX and in one process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from distribax.cluster.peers import transport
from distribax.cluster.peers.interrupt import SIGNAL, Interrupt
from distribax.cluster.peers.meeting import Meeting, Member
from distribax.cluster.peers.tunnel import Tunnel
from distribax.cluster.peers.watch import Loss, Watch

Crew = Callable[..., "list[Watch]"]
_NAMES = [f"worker {i} (host{i}:{2000 + i})" for i in range(3)]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), timeout=20)
        return near, listener.accept()[0]


@pytest.fixture
def losses() -> dict[int, list[Loss]]:
    """What each worker was told, by its number."""
    return {0: [], 1: [], 2: []}


@pytest.fixture
def crew(losses: dict[int, list[Loss]]) -> Iterator[Crew]:
    """Gives a function that makes three workers that watch each other, or all but one of them."""
    made: list[Watch] = []
    members = [Member(f"worker {i}", f"host{i}", 2000 + i) for i in range(3)]

    def make(seconds: float = 20.0, without: int | None = None) -> list[Watch]:
        ends = {i: tcp_pair() for i in (1, 2)}
        links = {0: {i: pair[0] for i, pair in ends.items()}}
        links |= {i: {0: pair[1]} for i, pair in ends.items()}
        for own in links:
            if own != without:
                meeting = Meeting("", seconds, members, own, links[own])
                made.append(Watch(meeting, losses[own].append))
        if without is not None:
            stack.callback(links[without][0].close)
        return made

    with contextlib.ExitStack() as stack:
        yield make
        for watch in made:
            watch.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_connection_that_closes_is_a_death_and_told_to_all(
    crew: Crew, losses: dict[int, list[Loss]]
) -> None:
    watches = crew()
    watches[1].close()
    for watch in (watches[0], watches[2]):
        loss = watch.wait_for_loss(20)
        assert loss is not None
        assert loss.peer == _NAMES[1] and "died" in loss.reason
        assert str(loss.error()) == f"{loss.peer} {loss.reason}."
    wait_until(lambda: len(losses[0]) == len(losses[2]) == 1)


def test_death_of_the_leader_is_seen_by_all(crew: Crew) -> None:
    watches = crew()
    watches[0].close()
    for watch in watches[1:]:
        loss = watch.wait_for_loss(20)
        assert loss is not None and loss.peer == _NAMES[0]


def test_silence_counts_as_loss_and_the_silent_one_is_told_too(crew: Crew) -> None:
    leader, other = crew(seconds=1.0, without=2)
    for watch in (leader, other):
        loss = watch.wait_for_loss(20)
        assert loss is not None
        assert loss.peer == _NAMES[2] and "no sign of life for 1 s" in loss.reason


def test_worker_that_was_given_up_learns_it(crew: Crew) -> None:
    watches = crew()
    watches[0]._lose(1, "stopped answering")
    loss = watches[1].wait_for_loss(20)
    assert loss is not None
    assert loss.peer == _NAMES[1] and "is this worker itself" in loss.reason


@pytest.mark.parametrize("number", [0, 1])
def test_error_is_told_and_only_the_first_loss_counts(
    crew: Crew, losses: dict[int, list[Loss]], number: int
) -> None:
    watches = crew()
    watches[number].say_failed("ValueError: no\nmore")
    watches[number].close()
    for other in {0, 1, 2} - {number}:
        loss = watches[other].wait_for_loss(20)
        assert loss == Loss(_NAMES[number], "left with an error: ValueError: no more")
    wait_until(lambda: [len(losses[i]) for i in {0, 1, 2} - {number}] == [1, 1])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_goodbyes_in_any_order_are_no_losses(
    crew: Crew, losses: dict[int, list[Loss]], order: tuple[int, ...]
) -> None:
    watches = crew()
    for number in order:
        watches[number].say_done()
        if number == 2:
            wait_until(lambda: watches[0].ended is not None)
            watches[number].close()
    for number in (0, 1):
        watches[number].wait_for_ends(20)
        assert watches[number].ended in _NAMES
    assert losses == {0: [], 1: [], 2: []}


def test_signs_of_life_last_longer_than_the_timeout(
    crew: Crew, losses: dict[int, list[Loss]]
) -> None:
    watches = crew(seconds=2.0)
    assert watches[1].wait_for_loss(3.0) is None
    assert losses == {0: [], 1: [], 2: []}


def test_endpoints_reach_everybody(crew: Crew) -> None:
    watches = crew()
    for number, watch in enumerate(watches):
        watch.say_where([("host", number)])
    everywhere = {("host", 0), ("host", 1), ("host", 2)}
    wait_until(lambda: all(watch.endpoints == everywhere for watch in watches))
    assert watches[0].longest_silence == 20.0 + 2 * 2.0


def test_forked_process_lets_go_of_the_connections() -> None:
    here, there = tcp_pair()
    watch = Watch(Meeting("", 20.0, [Member("worker", "a", 1)] * 2, 0, {1: here}), print)
    watch.drop()
    there.settimeout(20)
    assert there.recv(1) == b""
    there.close()
    watch.close()


# The knife.


def test_only_connections_of_the_endpoints_are_cut() -> None:
    before = transport.listening()
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        names = [listener.getsockname() for listener in listeners]
        assert transport.listening() - before == set(names)
        near = [stack.enter_context(socket.create_connection(name)) for name in names]
        far = [stack.enter_context(listener.accept()[0]) for listener in listeners]
        assert transport.cut([names[0]]) == 2
        for end in (near[0], far[0]):
            end.settimeout(20)
            assert end.recv(1) == b""
        near[1].sendall(b"x")
        far[1].settimeout(20)
        assert far[1].recv(1) == b"x"
        assert transport.cut([("127.0.0.1", 1)]) == 0


def test_where_descriptors_cannot_be_listed_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> list[str]:
        raise OSError(path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert transport.listening() == frozenset()


# Calling the main thread back.


@pytest.fixture
def interrupt() -> Iterator[Interrupt]:
    yield Interrupt()
    signal.signal(SIGNAL, signal.SIG_DFL)


def wait_long(_: object) -> None:
    wait_until(lambda: False)


def test_wait_of_the_main_thread_is_ended(interrupt: Interrupt) -> None:
    over = threading.Event()

    def call_back() -> None:
        while not over.wait(0.05):
            interrupt.end_waits(0.1, lambda: KeyError("enough"))

    thread = threading.Thread(target=call_back)
    thread.start()
    with pytest.raises(KeyError, match="enough"):
        interrupt.wait(wait_long, None)
    time.sleep(0.2)  # Not while it waits for nothing.
    over.set()
    thread.join()


def test_other_threads_and_short_waits_are_left_alone(interrupt: Interrupt) -> None:
    assert interrupt.wait(str, 1) == "1"
    waits = threading.Event()
    results: list[object] = []

    def wait(_: object) -> str:
        waits.set()
        time.sleep(0.3)
        return "done"

    thread = threading.Thread(target=lambda: results.append(interrupt.wait(wait, None)))
    thread.start()
    assert waits.wait(20)
    interrupt.end_waits(0.0, lambda: KeyError("enough"))
    thread.join()
    assert results == ["done"]


def test_signal_that_is_in_use_is_not_taken() -> None:
    def own(*_: object) -> None: ...

    signal.signal(SIGNAL, own)
    Interrupt()
    assert signal.signal(SIGNAL, signal.SIG_DFL) is own


# The tunnel.


@pytest.fixture
def tunnel() -> Iterator[tuple[Tunnel, socket.socket]]:
    """Gives a tunnel and the listening socket that it leads to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        made = Tunnel(*listener.getsockname())
        yield made, listener
        made.close()


def connected(tunnel: Tunnel, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    host, _, port = tunnel.address.rpartition(":")
    near = socket.create_connection((host, int(port)), timeout=20)
    far, _ = listener.accept()
    far.settimeout(20)
    return near, far


def test_tunnel_leads_both_ways(tunnel: tuple[Tunnel, socket.socket]) -> None:
    near, far = connected(*tunnel)
    with near, far:
        near.sendall(b"there")
        assert far.recv(5) == b"there"
        far.sendall(b"back")
        assert near.recv(4) == b"back"
        near.close()
        assert far.recv(1) == b""


def test_near_end_stays_open_when_the_far_one_breaks(tunnel: tuple[Tunnel, socket.socket]) -> None:
    near, far = connected(*tunnel)
    with near:
        far.close()
        # A second connection shows that the tunnel has seen the first one's end.
        again, other = connected(*tunnel)
        with again, other:
            again.sendall(b"x")
            assert other.recv(1) == b"x"
        near.settimeout(0.2)
        with pytest.raises(TimeoutError):
            near.recv(1)
        tunnel[0].close()
        near.settimeout(20)
        assert near.recv(1) == b""


def test_nobody_at_the_far_end(tunnel: tuple[Tunnel, socket.socket]) -> None:
    way, listener = tunnel
    listener.close()
    host, _, port = way.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as near:
        assert near.recv(1) == b""


def test_tunnel_ends_when_a_fork_drops_it(tunnel: tuple[Tunnel, socket.socket]) -> None:
    near, far = connected(*tunnel)
    with near, far:
        tunnel[0].drop()
        assert near.recv(1) == b"" and far.recv(1) == b""


def test_tunnel_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Tunnel("127.0.0.1", 1)
    wait = subprocess.Popen.wait
    calls: list[float | None] = []

    def late(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        calls.append(timeout)
        if timeout is not None:
            raise subprocess.TimeoutExpired("tunnel", timeout)
        return wait(process)

    monkeypatch.setattr(subprocess.Popen, "wait", late)
    way.close()
    assert calls[0] is not None and calls[-1] is None
