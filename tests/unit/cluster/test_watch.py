"""The hub, where workers meet and are watched, and their watches; without JAX, in one process."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from distribax.cluster.peers import meeting as meetings
from distribax.cluster.peers.gate import Gate
from distribax.cluster.peers.hub_main import Hub
from distribax.cluster.peers.meeting import ClusterTimeoutError, Meeting, Member
from distribax.cluster.peers.watch import Loss, Watch
from distribax.errors import CollectiveMismatchError, CollectiveTimeoutError
from distribax.jax_private.joint_calls import JointCalls

_WAIT_SECONDS = 60


class Crew:
    """A hub and the workers that know of it."""

    def __init__(
        self,
        count: int = 3,
        seconds: float = 30.0,
        peer_timeout: float = 30.0,
        trouble: Exception | None = None,
        is_service_stuck: bool = False,
        secret: str = "",
        proof_seconds: float = 30.0,
    ) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.members = [Member("worker 0", "127.0.0.1", self.port)]
        self.members += [Member(f"worker {i}", f"host{i}", 2000 + i) for i in range(1, count)]
        self.seconds = seconds
        self.losses: dict[int, list[Loss]] = {number: [] for number in range(count)}
        self.endings: dict[int, list[Exception]] = {number: [] for number in range(count)}
        self._service: Future[object] = Future()
        if trouble is None and not is_service_stuck:
            self._service.set_result(None)
        elif trouble is not None:
            self._service.set_exception(trouble)
        named = [(member.name, str(member.address)) for member in self.members]
        gate = Gate(secret, "a cluster", count)
        gate.proof_seconds = proof_seconds
        self.hub = Hub(listener, named, gate, seconds, peer_timeout)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self._open: list[Watch | socket.socket] = []

    def _serve(self) -> None:
        if self.hub.meet("there:1", self._service):
            self.hub.watch()
        self.hub.close()

    def join(self, *cluster: str) -> list[Future[Meeting]]:
        """Lets workers call the hub, each with what it believes the cluster to be."""
        pool = ThreadPoolExecutor()
        answers = [
            pool.submit(meetings.meet, self.members, number, self.seconds, text, 1.0)
            for number, text in enumerate(cluster)
        ]
        pool.shutdown()
        self._open += [each.result().connection for each in answers if each.exception() is None]
        return answers

    def watches(self, without: int | None = None) -> list[Watch]:
        """Returns the watches of all workers; `without` has met the others, but has none."""
        met = [each.result() for each in self.join(*["a cluster"] * len(self.members))]
        made = [
            Watch(each, self.losses[each.own].append, self.endings[each.own].append)
            for each in met
            if each.own != without
        ]
        self._open += made
        return made

    def name(self, number: int) -> str:
        return str(self.members[number])

    def close(self) -> None:
        for each in reversed(self._open):
            each.close()
        self._thread.join(_WAIT_SECONDS)
        assert not self._thread.is_alive()


@pytest.fixture
def make_crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Crew]]:
    """Gives a function that makes a crew, whose first worker starts no hub of its own."""
    monkeypatch.setattr(meetings, "_start_hub", lambda *args: None)
    with contextlib.ExitStack() as stack:

        def make(*args: Any, **kwargs: Any) -> Crew:
            crew = Crew(*args, **kwargs)
            stack.callback(crew.close)
            return crew

        yield make


@pytest.fixture
def crew(make_crew: Callable[..., Crew]) -> Crew:
    return make_crew()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Meeting.


def test_all_workers_learn_the_same(make_crew: Callable[..., Crew]) -> None:
    crew = make_crew(2, peer_timeout=7.0)
    for number, answer in enumerate(crew.join("a cluster", "a cluster")):
        met = answer.result()
        assert (met.address, met.peer_timeout, met.own) == ("there:1", 7.0, number)
        assert met.members == [crew.name(0), crew.name(1)]


def test_worker_whose_address_nobody_has_told_is_known_by_where_it_calls_from(
    make_crew: Callable[..., Crew],
) -> None:
    crew = make_crew(2)
    crew.hub._members[1] = ("worker 1", "1.invalid:1")
    assert crew.join("a cluster", "a cluster")[0].result().members[1] == "worker 1 (127.0.0.1)"


def test_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        own = Member("worker 0", "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(RuntimeError, match=f"worker 0 .127.*{own.port}. cannot listen on its"):
            meetings.meet([own, own], 0, 1.0, "a cluster", 1.0)


def test_missing_workers_are_named(make_crew: Callable[..., Crew]) -> None:
    crew = make_crew(3, seconds=0.5)
    for answer in crew.join("a cluster", "a cluster"):
        error = answer.exception()
        assert isinstance(error, ClusterTimeoutError)
        assert (error.missing, error.joined) == ((crew.name(2),), ("worker 0", "worker 1"))


def test_different_clusters_are_an_error_in_both(make_crew: Callable[..., Crew]) -> None:
    for answer in make_crew(2).join("a cluster", "another cluster"):
        assert isinstance(answer.exception(), ValueError)
        assert "different cluster specs" in str(answer.exception())


def test_service_that_does_not_start_is_an_error_in_all(make_crew: Callable[..., Crew]) -> None:
    crew = make_crew(2, trouble=OSError("no port"))
    for answer in crew.join("a cluster", "a cluster"):
        assert isinstance(answer.exception(), RuntimeError)
        assert "did not start on there:1: no port" in str(answer.exception())


def test_service_that_takes_too_long_is_an_error_in_all(make_crew: Callable[..., Crew]) -> None:
    crew = make_crew(2, seconds=2.0, is_service_stuck=True)
    for answer in crew.join("a cluster", "a cluster"):
        assert isinstance(answer.exception(), RuntimeError)
        assert "did not start on there:1: it took more than 3 s" in str(answer.exception())


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\n" * 10, b"[" * 60_000, b""])
def test_strangers_are_sent_away(make_crew: Callable[..., Crew], said: bytes) -> None:
    crew = make_crew(2)
    with socket.create_connection(("127.0.0.1", crew.port)) as stranger:
        stranger.sendall(said)
        if not said:
            stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(_WAIT_SECONDS)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    assert [answer.exception() for answer in crew.join("a cluster", "a cluster")] == [None, None]


def test_worker_that_leaves_before_the_others_have_come_may_call_again(
    make_crew: Callable[..., Crew],
) -> None:
    crew = make_crew(2)
    with socket.create_connection(("127.0.0.1", crew.port)) as early:
        assert meetings._prove(early, 1, "a cluster", "")
    assert [answer.exception() for answer in crew.join("a cluster", "a cluster")] == [None, None]


def test_first_worker_that_leaves_before_the_others_have_come_frees_its_port(
    make_crew: Callable[..., Crew],
) -> None:
    crew = make_crew(2, seconds=600.0)
    with socket.create_connection(("127.0.0.1", crew.port)) as early:
        assert meetings._prove(early, 0, "a cluster", "")
    crew.close()
    socket.create_server(("127.0.0.1", crew.port)).close()


# Watching.


@pytest.mark.parametrize("number", [0, 1])
def test_connection_that_closes_is_a_death_and_told_to_all(crew: Crew, number: int) -> None:
    watches = crew.watches()
    before = time.time()
    watches[number].close()
    for other in {0, 1, 2} - {number}:
        loss = watches[other].wait_for_loss(_WAIT_SECONDS)
        assert loss is not None
        assert loss.peer == crew.name(number) and "died" in loss.reason
        assert before - 1 < loss.since < time.time() + 1
        assert str(loss.make_error()) == f"{loss.peer} {loss.reason}."
        wait_until(lambda other=other: len(crew.losses[other]) == 1)


def test_silence_counts_as_loss(make_crew: Callable[..., Crew]) -> None:
    crew = make_crew(peer_timeout=1.0)
    for watch in crew.watches(without=2):
        loss = watch.wait_for_loss(_WAIT_SECONDS)
        assert loss is not None
        assert loss.peer == crew.name(2) and "no sign of life for 1 s" in loss.reason
        assert loss.since < time.time() - 0.5


def test_worker_that_was_given_up_learns_it(crew: Crew) -> None:
    watches = crew.watches()
    peer = crew.hub._find_present()[1]

    def is_given_up() -> bool:
        # Until the hub's thread, which may hear it now, looks at it.
        peer.heard = time.monotonic() - 100
        return watches[1].wait_for_loss(0.05) is not None

    wait_until(is_given_up)
    loss = watches[1].wait_for_loss(0)
    assert loss is not None
    assert loss.peer == crew.name(1) and "is this worker itself" in loss.reason


@pytest.mark.parametrize("number", [0, 1])
def test_error_is_told_to_the_others_and_only_the_first_loss_counts(
    crew: Crew, number: int
) -> None:
    watches = crew.watches()
    watches[number].say_failed("ValueError: no\nmore")
    for other in {0, 1, 2} - {number}:
        loss = watches[other].wait_for_loss(_WAIT_SECONDS)
        assert loss is not None
        assert loss.peer == crew.name(number)
        assert loss.reason == "left with an error: ValueError: no more"
    watches[number].close()
    wait_until(lambda: [len(crew.losses[i]) for i in {0, 1, 2} - {number}] == [1, 1])
    assert crew.losses[number] == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_goodbyes_in_any_order_are_no_losses(crew: Crew, order: tuple[int, ...]) -> None:
    watches = crew.watches()
    for number in order:
        watches[number].say_done()
        if number == 0:
            wait_until(lambda: watches[1].ended is not None and watches[2].ended is not None)
            watches[number].close()
    for number in (1, 2):
        watches[number].wait_for_ends(_WAIT_SECONDS)
        assert watches[number].ended is not None
    assert crew.losses == {0: [], 1: [], 2: []}


def test_signs_of_life_last_longer_than_the_timeout(make_crew: Callable[..., Crew]) -> None:
    crew = make_crew(peer_timeout=2.0)
    watches = crew.watches()
    assert watches[1].wait_for_loss(3.0) is None
    assert crew.losses == {0: [], 1: [], 2: []}
    assert watches[1].longest_silence == pytest.approx(2.0 + 2 * 0.4)


@pytest.fixture
def alone() -> Iterator[tuple[Watch, socket.socket]]:
    """Gives a watch and the hub's end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = socket.create_connection(listener.getsockname(), timeout=_WAIT_SECONDS)
        hub, _ = listener.accept()
    hub.settimeout(_WAIT_SECONDS)
    members = ["worker 0 (a:1)", "worker 1 (b:1)"]
    watch = Watch(Meeting("", 1.0, members, 1, link, "127.0.0.1"), print, print)
    yield watch, hub
    watch.close()
    hub.close()


def test_hub_that_is_gone_stands_for_the_first_worker(alone: tuple[Watch, socket.socket]) -> None:
    watch, hub = alone
    hub.close()
    loss = watch.wait_for_loss(_WAIT_SECONDS)
    assert loss is not None
    assert loss.peer == "worker 0 (a:1)" and "died" in loss.reason


def test_hub_that_is_silent_stands_for_the_first_worker(alone: tuple[Watch, socket.socket]) -> None:
    loss = alone[0].wait_for_loss(_WAIT_SECONDS)
    assert loss is not None
    assert loss.peer == "worker 0 (a:1)" and "stopped answering" in loss.reason


def test_forked_process_lets_go_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    # A forked process has a copy of the watch, but not its thread.
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = socket.create_connection(listener.getsockname(), timeout=_WAIT_SECONDS)
        hub, _ = listener.accept()
    members = ["worker 0 (a:1)", "worker 1 (b:1)"]
    watch = Watch(Meeting("", 1.0, members, 1, link, "127.0.0.1"), print, print)
    watch.drop()
    with hub:
        hub.settimeout(_WAIT_SECONDS)
        assert hub.recv(100) == b""


# Calls that all make together.


def position(number: int, name: str, seconds: float | None = None, **more: Any) -> dict[str, Any]:
    """What a worker says of its newest call, which is one of many with the same name."""
    return {
        "number": number,
        "name": name,
        "line": "train.py:1",
        "seconds": seconds,
        "limit": 100.0,
        "marks": [(0, 0)],
        "here": "train.py:9",
    } | more


def test_places_can_be_asked_for(crew: Crew) -> None:
    first, second, _ = crew.watches()
    second._send({"at": position(7, "a step", 3.0)})
    wait_until(lambda: any("a step" in place for place in first.ask_places(_WAIT_SECONDS)))
    own, other = first.ask_places(_WAIT_SECONDS)
    assert own.startswith(f"{crew.name(0)} is at File") and "no common call yet" in own
    assert other == (f"{crew.name(1)} has waited for 3 s in a step (common call 7) at train.py:1")


@pytest.mark.parametrize("seconds", [40.0, 200.0], ids=["named", "ended"])
def test_worker_that_is_late_is_named_and_then_given_up(
    make_crew: Callable[..., Crew], caplog: pytest.LogCaptureFixture, seconds: float
) -> None:
    crew = make_crew(2, peer_timeout=2.0)
    first, second = crew.watches()
    with caplog.at_level("WARNING", "distribax.cluster"):
        second._send({"at": position(6, "a step")})
        first._send({"at": position(7, "a metric", seconds)})
        if seconds < 100.0:
            wait_until(lambda: caplog.text.count("Workers have waited for others for 40 s") == 2)
            assert (
                f"{crew.name(1)} is at train.py:9; its last common call was a step" in caplog.text
            )
            assert crew.endings == {0: [], 1: []}
        else:
            wait_until(lambda: all(crew.endings.values()))
            (error,) = crew.endings[1]
            assert isinstance(error, CollectiveTimeoutError) and error.seconds == 200.0
            assert "a metric" in error.places[0] and "a step" in error.places[1]
            again = pickle.loads(pickle.dumps(error))
            assert (str(again), again.places) == (str(error), error.places)


@pytest.mark.parametrize(
    ("own", "other", "is_ended"),
    [
        # One is compiling or computing what the other one waits for.
        (position(7, "a step", 500.0), position(6, "a step", 500.0), False),
        (position(7, "a step", 500.0), position(7, "a step", 1.0), False),
        # Nobody will come.
        (position(7, "a step", 40.0), position(7, "a metric", 40.0), True),
        # The transport has not minded.
        (position(9, "s", marks=[(4, 1), (8, 2)]), position(8, "s", marks=[(4, 1), (8, 3)]), True),
        (position(9, "s", marks=[(4, 1), (8, 2)]), position(5, "s", marks=[(4, 1)]), False),
    ],
)
def test_workers_in_different_calls_are_ended(
    make_crew: Callable[..., Crew], own: Any, other: Any, is_ended: bool
) -> None:
    crew = make_crew(2, peer_timeout=2.0)
    first, second = crew.watches()
    first._send({"at": own})
    second._send({"at": other})
    if is_ended:
        wait_until(lambda: all(crew.endings.values()))
        (error,) = crew.endings[0]
        assert isinstance(error, (CollectiveMismatchError, CollectiveTimeoutError))
        if isinstance(error, CollectiveMismatchError):
            assert "this worker's common calls after number 4:" in error.places[-1]
            assert pickle.loads(pickle.dumps(error)).places == error.places
    else:
        time.sleep(1.0)
        assert crew.endings == {0: [], 1: []}


def test_processes_at_different_calls_have_a_mark_in_common() -> None:
    behind, ahead = JointCalls(), JointCalls()
    behind.is_watched = ahead.is_watched = True
    for number in range(1, 300):
        with ahead.record("a call") as call:
            assert ahead.is_in_call and call.is_pending
        assert not call.is_pending and ahead.newest is call
        if number > 117:
            with behind.record("a call"):
                pass
        common = behind.marks.keys() & ahead.marks.keys()
        assert all(behind.marks[each] == ahead.marks[each] for each in common)
        # At the latest a multiple of the next power of 2 is known to both.
        assert behind.number < 128 or max(common) >= behind.number - 128
    with contextlib.suppress(ZeroDivisionError), ahead.record("fails"):
        raise ZeroDivisionError
    assert ahead.number == 299 and ahead.count_since(290).total() == 9
    with behind.record("another call"):
        pass
    assert behind.marks[behind.number] != ahead.marks.get(behind.number)


def test_a_call_among_thousands_of_others_is_remembered() -> None:
    """Quick workers make thousands of steps until it is found that one has made another call."""
    calls = JointCalls()
    calls.is_watched = True
    for name in ("step", "result", *["step"] * 10_000):
        with calls.record(name):
            pass
    counts = {name.partition(" at ")[0]: count for name, count in calls.count_since(0).items()}
    assert counts == {"step": 10_001, "result": 1}
    with calls.record("gather"):
        counts = {
            name.partition(" at ")[0]: count for name, count in calls.count_since(9_999).items()
        }
    assert counts == {"step": 3, "gather": 1}


def test_a_call_that_makes_others_first_is_not_taken_for_the_next() -> None:
    slow, quick = JointCalls(), JointCalls()
    slow.is_watched = quick.is_watched = True
    with quick.record("program", is_prepared=False) as call, quick.record("agreement"):
        pass
    with slow.record("program", is_prepared=False) as call:
        call.began -= 60
        assert slow.marks.keys().isdisjoint(quick.marks)
        with slow.record("agreement"):
            assert slow.newest is not None
            slow.newest.began -= 60
            assert slow.marks[1] == quick.marks[1]
        call.end_preparation()
        # Now it can only wait for others.
        assert slow.marks[2] == quick.marks[2]


def test_values_of_this_process_are_no_joint_call() -> None:
    calls = JointCalls()
    with calls.record("nobody looks"):
        pass
    calls.is_watched = True
    with calls.record_for(lambda: "local", np.zeros(3)) as call:
        call.set_results([np.zeros(3)])
    assert calls.number == 0 and calls.newest is None
