"""The dispatcher: one thread that gives closures to workers and takes their answers."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import pickle
import queue as queues
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from distribax.coordinator.batch_sizing import Pace
from distribax.coordinator.closure_queue import Closure, ClosureQueue, Failure
from distribax.coordinator.failure_policy import Decision, FailurePolicy
from distribax.coordinator.messages import Packed, Pulse, Raised, Reply
from distribax.coordinator.outcomes import unpack, unpack_error
from distribax.coordinator.status import CoordinatorStatus, WorkerStatus
from distribax.coordinator.worker_handle import ClusterEndedError, Future, WorkerHandle, WorkerState
from distribax.errors import WorkersLostError

_BEAT_SECONDS: Final = 0.25
_HURRIED_BEAT_SECONDS: Final = 0.05
_BATCHES_IN_FLIGHT: Final = 2
_AHEAD_SECONDS: Final = 0.3
"""A worker with more work than this is not given another batch behind it."""
_PATIENCE_SECONDS: Final = 0.1
"""How long closures wait behind others at a worker while another one has nothing to do."""
_RATE_WINDOW_SECONDS: Final = 5.0
_ABSENCE_SECONDS: Final = 1.0
"""The thread looks after the workers more often than this, unless its process is held up."""


class Dispatcher:
    """Moves closures from the queue to the workers and results back.

    Its methods without an underscore may be called in any thread; the others run in its own.
    """

    def __init__(
        self,
        queue_size: int,
        workers: list[WorkerHandle],
        policy: FailurePolicy,
        servers: Callable[[], Sequence[Mapping[str, Any]]],
        on_beat: Callable[[CoordinatorStatus], None],
    ) -> None:
        self._queue = ClosureQueue(queue_size, self.wake)
        self._workers = workers
        self._policy = policy
        self._servers = servers
        self._on_beat = on_beat
        self._pace = Pace()
        self._events: queues.SimpleQueue[Callable[[], None]] = queues.SimpleQueue()
        self._ending: str | None = None
        self._stranded_since: float | None = None
        self._beat_at = 0.0
        self._watched_at = time.monotonic()
        self._samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self._thread = threading.Thread(target=self._run, name="distribax-coordinator", daemon=True)

    @property
    def queue(self) -> ClosureQueue:
        """The closures that wait."""
        return self._queue

    def open(self) -> None:
        """Starts the thread, which starts the workers."""
        # Registered later than Ray's own end, it comes before it.
        atexit.register(self.close)
        self._thread.start()

    def wake(self) -> None:
        """Tells the thread that there are closures."""
        self._events.put(_nothing)

    def ask_to_end(self, reason: str) -> None:
        """Lets the thread end soon, and the workers with it; what is scheduled is cancelled."""
        self._events.put(functools.partial(self._end, reason))

    def close(self, reason: str = "the program has ended") -> None:
        """Ends the thread and the workers, and waits for that."""
        self.ask_to_end(reason)
        self._thread.join()

    def status(self) -> CoordinatorStatus:
        """Returns what is known now."""
        counts = self._queue.counts()
        return CoordinatorStatus(
            **vars(counts),
            rate=self._rate(),
            workers=tuple(map(_status, self._workers)),
            servers=tuple(self._servers()),
        )

    def _rate(self) -> float:
        (first, before), (last, after) = self._samples[0], self._samples[-1]
        return (after - before) / (last - first) if last > first else 0.0

    # The loop.

    def _run(self) -> None:
        try:
            while self._ending is None:
                with contextlib.suppress(queues.Empty):
                    self._events.get(timeout=self._pause())()
                    while True:
                        self._events.get_nowait()()
                if self._ending is None:
                    self._watch(time.monotonic())
                    self._dispatch()
        except BaseException as error:
            self._ending = f"its thread has ended by a mistake of distribax, {error!r}"
            raise
        finally:
            atexit.unregister(self.close)
            assert self._ending is not None
            self._queue.end(self._ending)
            for worker in self._workers:
                for batch in worker.lose(self._ending):
                    self._queue.give_back(batch.closures)
                worker.end()

    def _end(self, reason: str) -> None:
        self._ending = reason

    def _pause(self) -> float:
        """Returns how long to wait for an event: less while a worker may have to be helped."""
        calm = all(worker.state is WorkerState.READY for worker in self._workers)
        idle = sum(not worker.batches for worker in self._workers)
        if calm and idle in (0, len(self._workers)):
            return _BEAT_SECONDS
        return _HURRIED_BEAT_SECONDS

    def _answer(
        self, handler: Callable[..., None], worker: WorkerHandle, *details: Any
    ) -> Callable[[Future], None]:
        """Returns what lets `handler` run in this thread when a worker has answered."""
        life, events = worker.life, self._events

        def handle(future: Future) -> None:
            if worker.life == life:
                try:
                    answer = future.result()
                except ClusterEndedError as error:
                    self._end(str(error))
                except Exception as error:
                    self._lose(worker, error)
                else:
                    handler(worker, answer, *details)

        return lambda future: events.put(functools.partial(handle, future))

    # Giving out.

    def _dispatch(self) -> None:
        if self._queue.has_error:
            self._recall(self._workers)
            return
        ready = [worker for worker in self._workers if worker.state is WorkerState.READY]
        while free := [worker for worker in ready if _has_room(worker)]:
            now = time.monotonic()
            # One that has nothing to do comes before all others.
            worker = min(free, key=lambda worker: (len(worker.batches), worker.rest(now)))
            rests = [each.rest(now) for each in (worker, *(w for w in ready if w is not worker))]
            closures = self._queue.take(functools.partial(self._choose, rests))
            if not closures:
                return
            self._send(worker, closures)

    def _choose(self, rests: list[float], waiting: Iterator[Closure]) -> int:
        """Returns how many of the waiting closures the worker with the first of `rests` takes."""
        first = next(waiting)
        share = self._pace.share(first, self._queue.num_ready, rests)
        return self._pace.batch(itertools.chain([first], waiting), share)

    def _send(self, worker: WorkerHandle, closures: list[Closure]) -> None:
        number = worker.next_number()
        answer = self._answer(self._on_reply, worker, number)
        worker.send(number, closures, self._pace.seconds(closures), answer)

    # Answers.

    def _on_greeting(self, worker: WorkerHandle, answer: Any) -> None:
        if isinstance(answer, Raised):
            worker.start_failures += 1
            if self._policy.on_start_failure(worker.start_failures) is Decision.REPLACE:
                worker.replace()
            self._lose(worker, answer.summary)
        else:
            worker.greeted(answer)

    def _on_pulse(self, worker: WorkerHandle, pulse: Pulse) -> None:
        worker.is_asked = False
        worker.has_been_heard = True

    def _on_reply(self, worker: WorkerHandle, data: bytes, number: int) -> None:
        reply: Reply = pickle.loads(data)
        if reply.refused:
            # Ray has started the process again before the death of the last one was noticed.
            self._lose(worker, "its process has died")
            return
        batch = worker.batches.pop(number)
        worker.answered_at = time.monotonic()
        for function, (count, seconds) in reply.seconds.items():
            self._pace.learn(batch.names[function], count, seconds)
        closures, outcomes = batch.closures, reply.outcomes
        for index, outcome in enumerate(outcomes):
            if type(outcome) in _WRAPPED:
                outcomes[index] = _opened(outcome, closures[index], worker.index)
        ran = len(outcomes)
        worker.num_finished += ran
        self._queue.settle(closures[:ran], outcomes)
        self._queue.give_back(closures[ran:])

    def _on_recalled(self, worker: WorkerHandle, pulse: Pulse) -> None:
        at, started = pulse.at
        unused: list[Closure] = []
        for number, batch in worker.batches.items():
            if batch.is_recalled and number >= at:
                begun = started if number == at else 0
                unused += batch.closures[begun:]
                del batch.closures[begun:]
        self._queue.give_back(unused)

    # Watching.

    def _watch(self, now: float) -> None:
        if now - self._watched_at > _ABSENCE_SECONDS:
            # It is this process that did nothing meanwhile: it was stopped, or had no time.
            for worker in self._workers:
                worker.pinged_at = max(worker.pinged_at, now - self._policy.ping_seconds)
            self._stranded_since = None
        self._watched_at = now
        for worker in self._workers:
            if worker.state is WorkerState.LOST:
                if now - worker.entered_at >= self._policy.start_pause(worker.start_failures):
                    worker.start(self._answer(self._on_greeting, worker))
            else:
                self._watch_worker(worker, now)
        ready = [worker for worker in self._workers if worker.state is WorkerState.READY]
        if ready:
            self._stranded_since = None
            self._share_out(ready, now)
        else:
            self._watch_stranded(now)
        if now - self._beat_at >= _BEAT_SECONDS:
            self._beat_at = now
            self._beat(now)

    def _watch_worker(self, worker: WorkerHandle, now: float) -> None:
        silence = now - worker.pinged_at
        if not worker.is_asked:
            if silence >= self._policy.ping_seconds:
                worker.ping(self._answer(self._on_pulse, worker))
        else:
            heard = worker.has_been_heard
            if self._policy.on_silence(silence, has_been_heard=heard) is Decision.REPLACE:
                worker.replace()
                self._lose(worker, f"it has given no sign of life for {silence:.1f} s")
        if worker.state is WorkerState.READY and worker.has_unused and not worker.batches:
            self._send(worker, [])

    def _watch_stranded(self, now: float) -> None:
        """Tells the user when there has been work and no worker for too long."""
        if not self._queue.num_ready:
            self._stranded_since = None
            return
        if self._stranded_since is None:
            self._stranded_since = now
        failures = min(worker.start_failures for worker in self._workers)
        seconds = now - self._stranded_since
        if self._policy.on_no_worker(seconds, failures) is Decision.RAISE:
            self._stranded_since = None
            self._queue.fail(_no_worker(self._workers, seconds, self._policy, now))

    def _share_out(self, ready: list[WorkerHandle], now: float) -> None:
        """Takes closures back that wait behind others while a worker has nothing to do."""
        if self._queue.num_ready or all(worker.batches for worker in ready):
            return
        for worker in ready:
            batches = list(worker.batches.values())
            if (
                batches
                and now - batches[0].sent_at > _PATIENCE_SECONDS
                and sum(len(batch.closures) for batch in batches) > 1
            ):
                self._recall([worker])

    def _recall(self, workers: list[WorkerHandle]) -> None:
        for worker in workers:
            if not all(batch.is_recalled for batch in worker.batches.values()):
                worker.recall(self._answer(self._on_recalled, worker))

    def _lose(self, worker: WorkerHandle, problem: str | Exception) -> None:
        """Gives what a worker had to others, and the worker some time to come back."""
        batches = worker.lose(problem)
        if not batches:
            return
        doomed: list[Closure] = []
        retried: list[Closure] = []
        # The others were not begun.
        for closure in batches[0].closures:
            closure.losses += 1
            decision = self._policy.on_loss(closure.losses)
            (doomed if decision is Decision.RAISE else retried).append(closure)
        self._queue.give_back([closure for batch in batches[1:] for closure in batch.closures])
        self._queue.give_back(retried, retry=True)
        if doomed:
            self._queue.settle(doomed, [Failure(_deadly(closure, worker)) for closure in doomed])

    def _beat(self, now: float) -> None:
        status = self.status()
        self._samples.append((now, status.finished))
        while now - self._samples[0][0] > _RATE_WINDOW_SECONDS and len(self._samples) > 1:
            self._samples.popleft()
        self._on_beat(status)


def _has_room(worker: WorkerHandle) -> bool:
    return len(worker.batches) < _BATCHES_IN_FLIGHT and worker.load <= _AHEAD_SECONDS


def _nothing() -> None:
    """The event of a dispatcher that is woken up."""


_WRAPPED: Final = frozenset({Packed, Raised, tuple, list, dict})
"""The outcomes that are not the value itself."""


def _opened(outcome: Any, closure: Closure, worker_index: int) -> Any:
    if type(outcome) is Raised:
        return Failure(unpack_error(outcome, closure.function.name, worker_index))
    try:
        return unpack(outcome)
    except Exception as error:
        error.add_note(
            f"{closure.function.name} has returned a value on worker {worker_index} that cannot "
            "be unpickled here. Return arrays, numbers and nests of them."
        )
        return Failure(error)


def _status(worker: WorkerHandle) -> WorkerStatus:
    greeting = worker.greeting
    return WorkerStatus(
        index=worker.index,
        state=worker.state.value,
        seconds=time.monotonic() - worker.turned_at,
        pid=greeting.pid if greeting else None,
        host=greeting.host if greeting else None,
        running=sum(len(batch.closures) for batch in tuple(worker.batches.values())),
        finished=worker.num_finished,
        restarts=max(0, worker.num_starts - 1),
        problem=worker.problem,
    )


def _deadly(closure: Closure, worker: WorkerHandle) -> WorkersLostError:
    return WorkersLostError(
        f"{closure.function.name} was running on {closure.losses} workers when they died, the last "
        f"one being worker {worker.index}: {worker.problem}. It seems to be what they die of: a "
        "crash of native code, too much memory, or code that keeps the interpreter from "
        "answering. It was not tried again."
    )


def _no_worker(
    workers: list[WorkerHandle], seconds: float, policy: FailurePolicy, now: float
) -> WorkersLostError:
    lines = "".join(
        f"\n  worker {worker.index}: {worker.state.value} for {now - worker.turned_at:.1f} s"
        + (f"; {worker.problem}" if worker.problem else "")
        for worker in workers
    )
    return WorkersLostError(
        f"ClusterCoordinator: there has been no worker for {seconds:.1f} s, and "
        f"{len(workers)} should be there:{lines}\nIf they only need more time, make the "
        f"coordinator with all_workers_timeout=... (it is {policy.all_workers_timeout:g} s)."
    )
