"""The dispatcher: a thread that gives closures to workers and receives their answers."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import pickle
import queue as queues
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar, TypeVarTuple

from distribax.cluster.ray import ray_session
from distribax.coordinator.batch_sizing import BatchSizer
from distribax.coordinator.closure_queue import Closure, ClosureQueue
from distribax.coordinator.failure_policy import FailureDecision, FailurePolicy
from distribax.coordinator.messages import Greeting, Pulse, Reply
from distribax.coordinator.outcomes import ClosureFailure, Raised, is_unreachable, unpack_outcome
from distribax.coordinator.status import CoordinatorStatus, WorkerState
from distribax.coordinator.worker_handle import (
    AnswerHandler,
    ClusterEndedError,
    Future,
    WorkerHandle,
)
from distribax.errors import WorkersLostError
from distribax.parameter_server.protocol.server_status import WatchedServerStatus

_logger = logging.getLogger(__name__)

A = TypeVar("A")
Details = TypeVarTuple("Details")

_BEAT_SECONDS: Final = 0.25
_HURRIED_BEAT_SECONDS: Final = 0.05
_BATCHES_IN_FLIGHT: Final = 2
_AHEAD_SECONDS: Final = 0.3
"""A worker that has more work than this is not given another batch."""
_PATIENCE_SECONDS: Final = 0.1
"""How long closures wait behind others at a worker while another one has nothing to do."""
_RATE_WINDOW_SECONDS: Final = 5.0
_ABSENCE_SECONDS: Final = 1.0
"""The thread watches the workers more often than this, unless its process is suspended."""


class Dispatcher:
    """Moves closures from the queue to the workers and results back.

    Its methods without an underscore may be called in any thread; the others run in its own.

    Args:
        queue_size: How many closures may wait.
        workers: The workers.
        policy: Decides what is done when a worker is lost.
        read_servers: Returns what is known of each parameter server.
        on_beat: Called with the status a few times per second.
        while_waiting: Called a few times per second in threads that wait for closures.
        on_print: Called with a worker's index and what functions have printed there.

    Attributes:
        queue: The closures that wait.
    """

    def __init__(
        self,
        queue_size: int,
        workers: list[WorkerHandle],
        policy: FailurePolicy,
        read_servers: Callable[[], Sequence[WatchedServerStatus]],
        on_beat: Callable[[CoordinatorStatus], None],
        while_waiting: Callable[[], None],
        on_print: Callable[[int, str], None],
    ) -> None:
        self.queue = ClosureQueue(queue_size, self.wake, while_waiting)
        self._workers = workers
        self._policy = policy
        self._read_servers = read_servers
        self._on_beat = on_beat
        self._on_print = on_print
        self._sizer = BatchSizer()
        self._events: queues.SimpleQueue[Callable[[], None]] = queues.SimpleQueue()
        self._ending: str | None = None
        self._stranded_since: float | None = None
        self._beat_at = 0.0
        self._watched_at = time.monotonic()
        self._epoch = ray_session.get_epoch()
        self._samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self._thread = threading.Thread(target=self._run, name="distribax-coordinator", daemon=True)

    def open(self) -> None:
        """Starts the thread, which starts the workers."""
        # Registered after Ray's own exit handler, it is called before it.
        atexit.register(self.close)
        self._thread.start()

    def wake(self) -> None:
        """Tells the thread that there are closures."""
        self._events.put(lambda: None)

    def ask_to_end(self, reason: str) -> None:
        """Lets the thread end soon, and the workers with it; what is scheduled is cancelled."""
        self._events.put(functools.partial(self._end, reason))

    def close(self, reason: str = "the program has ended") -> None:
        """Ends the thread and the workers, and waits for that, unless this is the thread itself.

        What runs in it may close the coordinator: a handler of messages, or what unpickles results.
        """
        self.ask_to_end(reason)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def status(self) -> CoordinatorStatus:
        """Returns what is known now."""
        return CoordinatorStatus(
            **vars(self.queue.count()),
            rate=self._measure_rate(),
            workers=tuple(worker.report() for worker in self._workers),
            servers=tuple(self._read_servers()),
        )

    def _measure_rate(self) -> float:
        (first, before), (last, after) = self._samples[0], self._samples[-1]
        return (after - before) / (last - first) if last > first else 0.0

    # The loop.

    def _run(self) -> None:
        try:
            while self._ending is None:
                with contextlib.suppress(queues.Empty):
                    self._events.get(timeout=self._choose_pause())()
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
            self.queue.end(self._ending)
            for worker in self._workers:
                for batch in worker.lose(self._ending):
                    self.queue.give_back(batch.closures)
                worker.end()

    def _end(self, reason: str) -> None:
        self._ending = reason

    def _choose_pause(self) -> float:
        """Returns how long to wait for an event: less while workers start or have uneven work."""
        calm = all(worker.state is WorkerState.READY for worker in self._workers)
        idle = sum(not worker.batches for worker in self._workers)
        if calm and idle in (0, len(self._workers)):
            return _BEAT_SECONDS
        return _HURRIED_BEAT_SECONDS

    def _make_handler(
        self,
        worker: WorkerHandle,
        handler: Callable[[WorkerHandle, A, *Details], None],
        *details: *Details,
    ) -> AnswerHandler:
        """Returns what runs `handler` in this thread when the worker has answered."""
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
        if self.queue.has_error:
            self._recall(self._workers)
            return
        ready = [worker for worker in self._workers if worker.state is WorkerState.READY]
        while free := [worker for worker in ready if _has_room(worker)]:
            now = time.monotonic()
            # A worker that has nothing to do comes first.
            worker = min(free, key=lambda worker: (len(worker.batches), worker.estimate_rest(now)))
            others = [each for each in ready if each is not worker]
            rests = [each.estimate_rest(now) for each in (worker, *others)]
            closures = self.queue.take(functools.partial(self._choose_batch, rests))
            if not closures:
                return
            self._send(worker, closures)

    def _choose_batch(self, rests: list[float], waiting: Iterator[Closure]) -> int:
        """Returns how many of the waiting closures the worker with the first of `rests` takes."""
        first = next(waiting)
        most = self._sizer.choose_count(first, self.queue.num_ready, rests)
        return self._sizer.choose_batch(itertools.chain([first], waiting), most)

    def _send(self, worker: WorkerHandle, closures: list[Closure]) -> None:
        number = worker.take_number()
        answer = self._make_handler(worker, self._on_reply, number)
        worker.send(number, closures, self._sizer.estimate_seconds(closures), answer)

    # Answers.

    def _on_greeting(self, worker: WorkerHandle, answer: Greeting | Raised) -> None:
        if isinstance(answer, Raised) and is_unreachable(answer):
            self._set_aside(worker, answer.summary)
        elif isinstance(answer, Raised):
            worker.start_failures += 1
            if self._policy.on_start_failure(worker.start_failures) is FailureDecision.REPLACE:
                worker.replace()
            self._lose(worker, answer.summary)
        else:
            worker.become_ready(answer)

    def _on_pulse(self, worker: WorkerHandle, pulse: Pulse) -> None:
        worker.is_asked = False
        worker.has_been_heard = True
        if worker.state is WorkerState.READY and not worker.is_process(pulse.boot):
            # Ray has started the process again before the death of the last one was noticed.
            self._lose(worker, "its process has died")
            return
        if pulse.printed:
            self._on_print(worker.index, pulse.printed)

    def _on_reply(self, worker: WorkerHandle, data: bytes, number: int) -> None:
        reply: Reply = pickle.loads(data)
        if reply.refused:
            # Ray has started the process again before the death of the last one was noticed.
            self._lose(worker, "its process has died")
            return
        if reply.unreachable:
            self._set_aside(worker, reply.unreachable)
            return
        # Before anybody who waits for the functions goes on.
        if reply.printed:
            self._on_print(worker.index, reply.printed)
        batch = worker.batches.pop(number)
        worker.answered_at = time.monotonic()
        for function, timing in reply.timings.items():
            self._sizer.learn(batch.names[function], timing.calls, timing.seconds)
        ran = batch.closures[: len(reply.outcomes)]
        worker.num_finished += len(ran)
        outcomes = [
            unpack_outcome(outcome, closure.function.name, worker.index)
            for closure, outcome in zip(ran, reply.outcomes, strict=True)
        ]
        self.queue.settle(ran, outcomes)
        self.queue.give_back(batch.closures[len(ran) :])

    def _on_recalled(self, worker: WorkerHandle, pulse: Pulse) -> None:
        unused: list[Closure] = []
        for number, batch in worker.batches.items():
            if batch.is_recalled and number >= pulse.batch:
                begun = pulse.started if number == pulse.batch else 0
                unused += batch.closures[begun:]
                del batch.closures[begun:]
        self.queue.give_back(unused)

    # Watching.

    def _watch(self, now: float) -> None:
        if now - self._watched_at > _ABSENCE_SECONDS:
            # This process was suspended or short of time: the workers may have answered.
            for worker in self._workers:
                worker.pinged_at = max(worker.pinged_at, now - self._policy.ping_seconds)
            self._stranded_since = None
        self._watched_at = now
        if self._epoch != (epoch := ray_session.get_epoch()):
            self._epoch = epoch
            # Workers have their whole time from when there is Ray again.
            self._stranded_since = None
            for worker in self._workers:
                if worker.state is not WorkerState.LOST:
                    self._lose(worker, "Ray has failed on the coordinator's machine")
        for worker in self._workers:
            if worker.state is WorkerState.LOST:
                pause = self._policy.choose_start_pause(worker.start_failures)
                if now - worker.entered_at >= pause:
                    worker.start(self._make_handler(worker, self._on_greeting))
            else:
                self._watch_worker(worker, now)
        ready = [worker for worker in self._workers if worker.state is WorkerState.READY]
        if ready:
            self._stranded_since = None
            self._even_out(ready, now)
        else:
            self._watch_stranded(now)
        if now - self._beat_at >= _BEAT_SECONDS:
            self._beat_at = now
            self._beat(now)

    def _watch_worker(self, worker: WorkerHandle, now: float) -> None:
        silence = now - worker.pinged_at
        if not worker.is_asked:
            if silence >= self._policy.ping_seconds:
                worker.ping(self._make_handler(worker, self._on_pulse))
        else:
            heard = worker.has_been_heard
            if self._policy.on_silence(silence, has_been_heard=heard) is FailureDecision.REPLACE:
                worker.replace()
                self._lose(worker, f"it has given no sign of life for {silence:.1f} s")
        if worker.state is WorkerState.READY and worker.has_unused and not worker.batches:
            self._send(worker, [])

    def _watch_stranded(self, now: float) -> None:
        """Tells the user if work has waited too long and there is no worker."""
        if not self.queue.num_ready:
            self._stranded_since = None
            return
        if self._stranded_since is None:
            self._stranded_since = now
        failures = min(worker.start_failures for worker in self._workers)
        seconds = now - self._stranded_since
        aside = self._epoch is None or any(worker.is_aside for worker in self._workers)
        decision = self._policy.on_no_worker(seconds, failures, is_server_lost=aside)
        if decision is FailureDecision.RAISE:
            self._stranded_since = None
            self.queue.fail(_make_no_worker_error(self._workers, seconds, self._policy, now))

    def _even_out(self, ready: list[WorkerHandle], now: float) -> None:
        """Takes closures back that wait behind others while a worker has nothing to do."""
        if self.queue.num_ready or all(worker.batches for worker in ready):
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
                worker.recall(self._make_handler(worker, self._on_recalled))

    def _set_aside(self, worker: WorkerHandle, problem: str) -> None:
        """Gives the closures to others of a worker that cannot reach a parameter server.

        It is asked again and again whether it can. The closures are not the cause, and it is not
        counted that they were running there.
        """
        if not worker.is_aside:
            _logger.warning(
                "Worker %d is set aside, and its functions go to others: %s", worker.index, problem
            )
        worker.is_aside = True
        batches = worker.lose(problem)
        retried = [closure for batch in batches for closure in batch.closures]
        self.queue.give_back(retried, retry=True)

    def _lose(self, worker: WorkerHandle, problem: str | Exception) -> None:
        """Gives a lost worker's closures to others; the worker is started again after a pause."""
        was_ready, known = worker.state is WorkerState.READY, worker.problem
        batches = worker.lose(problem)
        # While Ray restarts a process, each attempt to reach it fails in the same way.
        if was_ready or worker.problem != known:
            _logger.warning("Worker %d is lost: %s. It is restarted.", worker.index, worker.problem)
        if not batches:
            return
        doomed: list[Closure] = []
        retried: list[Closure] = []
        # Closures of later batches had not been started.
        for closure in batches[0].closures:
            closure.losses += 1
            decision = self._policy.on_loss(closure.losses)
            (doomed if decision is FailureDecision.RAISE else retried).append(closure)
        self.queue.give_back([closure for batch in batches[1:] for closure in batch.closures])
        self.queue.give_back(retried, retry=True)
        if retried:
            _logger.warning(
                "Functions that are retried as worker %d is lost: %d.", worker.index, len(retried)
            )
        if doomed:
            errors = [ClosureFailure(_make_deadly_error(closure, worker)) for closure in doomed]
            self.queue.settle(doomed, errors)

    def _beat(self, now: float) -> None:
        status = self.status()
        self._samples.append((now, status.finished))
        while now - self._samples[0][0] > _RATE_WINDOW_SECONDS and len(self._samples) > 1:
            self._samples.popleft()
        self._on_beat(status)


def _has_room(worker: WorkerHandle) -> bool:
    return len(worker.batches) < _BATCHES_IN_FLIGHT and worker.load <= _AHEAD_SECONDS


def _make_deadly_error(closure: Closure, worker: WorkerHandle) -> WorkersLostError:
    return WorkersLostError(
        f"{closure.function.name} was running on {closure.losses} workers when they died, the last "
        f"one being worker {worker.index}: {worker.problem}. It seems to be what they die of: a "
        "crash of native code, too much memory, or code that keeps the interpreter from "
        "answering. It was not tried again."
    )


def _make_no_worker_error(
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
