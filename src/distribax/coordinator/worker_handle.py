"""The coordinator's side of one worker: its actor, its state and the closures it was given."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import pickle
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from distribax.cluster.ray import ray_session
from distribax.coordinator.closure_queue import Closure
from distribax.coordinator.messages import ClosureBatch, Greeting, SentDefinition
from distribax.coordinator.references import Definition
from distribax.coordinator.status import WorkerState, WorkerStatus
from distribax.coordinator.worker import Worker
from distribax.errors import DistribaxError

_logger = logging.getLogger(__name__)

Future: TypeAlias = "concurrent.futures.Future[Any]"
AnswerHandler: TypeAlias = Callable[[Future], None]
"""Called with a worker's answer, in any thread."""
_CONTROL: Final = "control"


class ClusterEndedError(DistribaxError, RuntimeError):
    """Ray has been shut down, so workers cannot be reached any more."""


@dataclass
class SentBatch:
    """Closures that a worker has been given and has not answered.

    Attributes:
        closures: Those that it still has; recalled ones are taken out.
        names: The names of their functions by number.
        seconds: An estimate of how long they take.
        sent_at: When they were sent.
        is_recalled: Whether the worker was asked not to start those that it has not started.
    """

    closures: list[Closure]
    names: dict[int, str]
    seconds: float
    sent_at: float = field(default_factory=time.monotonic)
    is_recalled: bool = False


class WorkerHandle:
    """One worker, for the dispatcher's thread.

    Args:
        index: The worker's index.
        options: The Ray options of its actor.
        setup: The strategy's pickled `WorkerSetup`.
    """

    def __init__(self, index: int, options: Mapping[str, Any], setup: bytes) -> None:
        self.index = index
        self.state = WorkerState.LOST
        # Counts how often the worker was lost: answers from before that are ignored.
        self.life = 0
        self.greeting: Greeting | None = None
        self.batches: dict[int, SentBatch] = {}
        self.answered_at = 0.0
        # When it entered its state, and when it became ready or ceased to be.
        self.entered_at = float("-inf")
        self.turned_at = time.monotonic()
        self.has_been_heard = False
        self.pinged_at = 0.0
        self.is_asked = False
        self.start_failures = 0
        # Whether it is there, but cannot reach a parameter server.
        self.is_aside = False
        self.problem: str | None = None
        self.num_finished = 0
        self.num_starts = 0
        self._options = dict(options)
        self._setup = setup
        self._actor: Any = None
        self._epoch = ray_session.get_epoch()
        self._number = 0
        self._known: dict[int, weakref.ref[Definition]] = {}
        self._unused: deque[int] = deque()

    # Questions to the worker.

    def start(self, answer: AnswerHandler) -> None:
        """Asks the process to become a worker; Ray starts it if there is none."""
        self._enter(WorkerState.STARTING)
        self.has_been_heard = False
        self.is_asked = False
        # The first ping goes with it.
        self.pinged_at = 0.0

        def ask() -> Any:
            if self._actor is None or self._epoch != ray_session.get_epoch():
                self._epoch = ray_session.get_epoch()
                # Ray may be restarting one that was taken for dead.
                self._actor = (
                    _make_actor_class().options(**self._options, get_if_exists=True).remote()
                )
            return self._actor.start.remote(self.index, self._setup)

        _ask(ask, answer)

    def ping(self, answer: AnswerHandler) -> None:
        """Asks for a sign of life."""
        self.pinged_at = time.monotonic()
        self.is_asked = True
        _ask(lambda: self._actor.ping.options(concurrency_group=_CONTROL).remote(), answer)

    def is_process(self, boot: str) -> bool:
        """Returns whether this is the process that was started last."""
        return self.greeting is not None and self.greeting.boot == boot

    def recall(self, answer: AnswerHandler) -> None:
        """Asks the worker to start no more of the closures that it has."""
        for batch in self.batches.values():
            batch.is_recalled = True
        number = self._number
        _ask(lambda: self._actor.recall.options(concurrency_group=_CONTROL).remote(number), answer)

    def take_number(self) -> int:
        """Returns the number of the next batch; numbers only grow."""
        self._number += 1
        return self._number

    def send(
        self,
        number: int,
        closures: list[Closure],
        seconds: float,
        answer: AnswerHandler,
    ) -> None:
        """Gives the worker closures to run."""
        assert self.greeting is not None
        sent: list[SentDefinition] = []
        names: dict[int, str] = {}
        for closure in closures:
            function = closure.function
            if function.number not in names:
                names[function.number] = function.name
                self._add_definitions(function, sent)
            for reference in closure.needs:
                self._add_definitions(reference.definition, sent)
        unused = tuple(self._unused.popleft() for _ in range(len(self._unused)))
        batch = ClosureBatch(
            number,
            self.greeting.boot,
            tuple(sent),
            unused,
            [closure.function.number for closure in closures],
            [closure.arguments for closure in closures],
        )
        self.batches[number] = SentBatch(closures, names, seconds)
        data = pickle.dumps(batch, 5)
        _ask(lambda: self._actor.run.remote(data), answer)

    def _add_definitions(self, definition: Definition, sent: list[SentDefinition]) -> None:
        """Adds a definition and those inside it, unless the worker has them."""
        number = definition.number
        if number in self._known:
            return
        for reference in definition.needs:
            self._add_definitions(reference.definition, sent)
        known, unused = self._known, self._unused

        def forget(_: weakref.ref[Definition]) -> None:
            if known.pop(number, None) is not None:
                unused.append(number)

        known[number] = weakref.ref(definition, forget)
        data = definition.dump_for(self.index)
        sent.append(SentDefinition(number, definition.kind, definition.name, data))

    # What the dispatcher has learnt.

    def become_ready(self, greeting: Greeting) -> None:
        """Takes in that the process is a worker now."""
        self._enter(WorkerState.READY)
        self.greeting = greeting
        self.has_been_heard = True
        self.start_failures = 0
        self.num_starts += not self.is_aside
        self.is_aside = False
        # A process that was there before keeps what it has; it is sent again all the same.
        self._known, self._unused = {}, deque()
        how = "has started" if self.num_starts == 1 else "has been restarted"
        _logger.info(
            "Worker %d %s as process %d on %s.", self.index, how, greeting.pid, greeting.host
        )

    def lose(self, problem: str | Exception) -> list[SentBatch]:
        """Takes in that the worker is gone; returns what it had been given."""
        # That it is not back yet says less than why it went.
        if self.state is WorkerState.READY or isinstance(problem, str) or self.problem is None:
            self.problem = _describe_problem(problem)
        self._enter(WorkerState.LOST)
        self.life += 1
        batches = list(self.batches.values())
        self.batches.clear()
        if isinstance(problem, Exception) and _is_final(problem):
            self._actor = None
        return batches

    def _enter(self, state: WorkerState) -> None:
        self.entered_at = time.monotonic()
        if WorkerState.READY in (state, self.state):
            self.turned_at = self.entered_at
        self.state = state

    def report(self) -> WorkerStatus:
        """Returns how the worker is; may be called in any thread."""
        greeting = self.greeting
        return WorkerStatus(
            index=self.index,
            state=self.state,
            seconds=time.monotonic() - self.turned_at,
            pid=greeting.pid if greeting else None,
            host=greeting.host if greeting else None,
            running=sum(len(batch.closures) for batch in tuple(self.batches.values())),
            finished=self.num_finished,
            restarts=max(0, self.num_starts - 1),
            problem=self.problem,
        )

    @property
    def has_unused(self) -> bool:
        """Whether the worker keeps definitions that nobody uses any more."""
        return bool(self._unused)

    @property
    def load(self) -> float:
        """An estimate of the seconds of work that the worker has been given."""
        return sum(batch.seconds for batch in self.batches.values())

    def estimate_rest(self, now: float) -> float:
        """Returns in how many seconds the worker may have nothing left to do."""
        if not self.batches:
            return 0.0
        begun = max(next(iter(self.batches.values())).sent_at, self.answered_at)
        return max(0.0, self.load - (now - begun))

    # The end of the process.

    def replace(self) -> None:
        """Ends the process; Ray starts another."""
        self._kill(no_restart=False)

    def end(self) -> None:
        """Ends the process for good."""
        self._kill(no_restart=True)

    def _kill(self, no_restart: bool) -> None:
        import ray

        if self._actor is not None:
            # It may be dead already, and Ray too.
            with contextlib.suppress(Exception), ray_session.guard_calls():
                ray.kill(self._actor, no_restart=no_restart)


def _describe_problem(problem: str | Exception) -> str:
    if isinstance(problem, str):
        return problem.strip().partition("\n")[0]
    said = str(problem).strip().partition("\n")[0]
    return f"its process has died, or cannot be reached ({type(problem).__name__}: {said})"


def _is_final(error: Exception) -> bool:
    """Tells whether Ray has given up the actor, so that another one is needed."""
    import ray

    return isinstance(error, ray.exceptions.ActorDiedError)


def _ask(question: Callable[[], Any], answer: AnswerHandler) -> None:
    import ray

    try:
        # A call would start another Ray.
        if ray_session.get_epoch() is None and ray_session.get_failure() is None:
            raise ConnectionError("Ray is being started again")
        if not ray.is_initialized():
            raise ClusterEndedError(ray_session.get_failure() or "Ray has been shut down")
        with ray_session.guard_calls():
            future: Future = question().future()
    except Exception as error:
        future = concurrent.futures.Future()
        future.set_exception(error)
    future.add_done_callback(answer)


@functools.cache
def _make_actor_class() -> Any:
    import ray

    return ray.remote(concurrency_groups={_CONTROL: 1})(Worker)
