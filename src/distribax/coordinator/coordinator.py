"""`ClusterCoordinator`: schedules functions on the workers of a cluster."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax

from distribax.coordinator.closure_queue import Closure
from distribax.coordinator.dispatcher import Dispatcher
from distribax.coordinator.failure_policy import FailurePolicy
from distribax.coordinator.interfaces import CoordinatedStrategy
from distribax.coordinator.per_worker import PerWorkerDataset, PerWorkerValues
from distribax.coordinator.pickling import FunctionCatalogue, dump_arguments, dumps_whole
from distribax.coordinator.progress import make_view
from distribax.coordinator.references import Reference
from distribax.coordinator.remote_value import RemoteValue
from distribax.coordinator.status import CoordinatorStatus
from distribax.coordinator.worker_handle import WorkerHandle
from distribax.execution import named_objects
from distribax.types import Args, Kwargs, Nest, StepFn

_ROUNDS_SECONDS: Final = 0.25


class ClusterCoordinator:
    """Schedules functions on workers, asynchronously; the death of a worker loses nothing.

    A function that is scheduled is run at least once. If its worker dies (which is noticed within
    seconds) or gives no sign of life for `worker_timeout` seconds, another worker runs it, and the
    worker is started again. There is one coordinator for a strategy: making another one returns
    the first, with the settings that it has.

    Workers compute with JAX's settings (`jax_enable_x64`, ...) as they are here when the
    coordinator is made.

    Args:
        strategy: A `dx.ParameterServerStrategy`.
        queue_size: How many functions may wait for a worker; `schedule` waits when they are more.
        worker_timeout: For how many seconds a worker may give no sign of life. A function that
            keeps Python's interpreter lock for longer is taken for dead.
        all_workers_timeout: For how many seconds there may be no worker before
            `WorkersLostError` is raised.
        view: How long work is shown: "live" (a progress bar), "lines" (a line every ten seconds),
            "none", or "auto", which is "live" in a terminal and "lines" elsewhere.
    """

    def __new__(cls, strategy: CoordinatedStrategy, **settings: Any) -> ClusterCoordinator:
        if not isinstance(strategy, CoordinatedStrategy):
            raise ValueError(
                f"ClusterCoordinator: strategy={strategy!r} has no workers to schedule functions "
                "on. Expected a dx.ParameterServerStrategy."
            )
        existing = strategy.cluster_coordinator
        return super().__new__(cls) if existing is None else existing

    def __init__(
        self,
        strategy: CoordinatedStrategy,
        *,
        queue_size: int = 65536,
        worker_timeout: float = 20.0,
        all_workers_timeout: float = 60.0,
        view: str = "auto",
    ) -> None:
        if strategy.cluster_coordinator is self:
            return  # The strategy's one: it goes on as it was made.
        if isinstance(queue_size, bool) or not isinstance(queue_size, int) or queue_size < 1:
            raise ValueError(
                f"ClusterCoordinator: queue_size={queue_size!r} is not a whole number of at least "
                "1."
            )
        policy = FailurePolicy(worker_timeout, all_workers_timeout)
        view_of_work = make_view(view)
        setup, _ = dumps_whole(strategy.worker_setup())
        engine = strategy.engine
        workers = [
            WorkerHandle(index, engine.worker_options(index), setup)
            for index in range(engine.num_workers)
        ]
        # The thread must not keep the strategy, and so this coordinator, alive.
        strategy_status = weakref.WeakMethod(strategy.server_status)

        def servers() -> Sequence[Mapping[str, Any]]:
            status = strategy_status()
            return status() if status is not None else ()

        dispatcher = Dispatcher(queue_size, workers, policy, servers, view_of_work.update)
        self._strategy = strategy
        self._num_workers = len(workers)
        self._view = view_of_work
        self._dispatcher = dispatcher
        self._queue = dispatcher.queue
        self._functions = FunctionCatalogue()
        self._rounds_at = 0.0
        strategy.cluster_coordinator = self
        # What nobody has any more ends.
        finalizer = weakref.finalize(self, dispatcher.ask_to_end, "nobody uses it any more")
        finalizer.atexit = False
        dispatcher.open()

    @property
    def strategy(self) -> CoordinatedStrategy:
        """The strategy whose workers run the functions."""
        return self._strategy

    def schedule(
        self, fn: StepFn, args: Args | None = None, kwargs: Kwargs | None = None
    ) -> RemoteValue:
        """Schedules a function on some worker, and returns at once with its future result.

        The function goes to a worker once, with the variables that it uses from outside as they
        are when it is first scheduled. Arguments are pickled now; per-worker values and iterators
        among them become the worker's own, and a function with a `RemoteValue` among them waits
        until the value is there.

        Raises the error of a function that was scheduled before, if there is one; then nothing
        runs any more, and what waited is cancelled.

        Args:
            fn: The function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        if not callable(fn):
            raise TypeError(
                f"schedule: fn={fn!r} is not callable. Pass the function itself and its arguments "
                "apart: coordinator.schedule(step, args=(x,))."
            )
        if args is not None and not isinstance(args, (tuple, list)):
            raise TypeError(
                f"schedule: args={args!r} is not a tuple. Write args=(x,), with the comma."
            )
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(f"schedule: kwargs={kwargs!r} is not a dict of arguments by name.")
        if kwargs is not None and not all(isinstance(name, str) for name in kwargs):
            raise TypeError(
                f"schedule: kwargs={kwargs!r} has a key that is not an argument's name."
            )
        with named_objects.shipping(self._strategy):
            function = self._functions.definition(fn)
            arguments, needs = dump_arguments(fn, args or (), kwargs or {})
        if needs or function.needs:
            self._check((*needs, *function.needs))
        queue = self._queue
        value = RemoteValue(queue)
        queue.put(Closure(function, arguments, needs, value))
        return value

    def _check(self, needs: Sequence[Reference]) -> None:
        for reference in needs:
            if isinstance(reference, PerWorkerValues):
                if len(reference.values) != self._num_workers:
                    raise ValueError(
                        f"schedule: {reference!r} has {len(reference.values)} values for "
                        f"{self._num_workers} workers. Expected one for each."
                    )
                self._check(reference.definition.needs)
            elif isinstance(reference, RemoteValue) and not reference.belongs_to(self._queue):
                raise ValueError(
                    f"schedule: {reference!r} comes from another coordinator. Fetch it and pass "
                    "the result: args=(value.fetch(),)."
                )

    def join(self) -> None:
        """Waits until all scheduled functions have been run.

        Raises the error of a function if there is one, and forgets it; what had not been run by
        then is cancelled. When it returns or raises, nothing is running.
        """
        try:
            self._queue.join(self._while_joining)
            self._strategy.complete_rounds()
        finally:
            self._view.stop()

    def _while_joining(self) -> None:
        """Lets workers go on that wait for others, which have nothing left to do."""
        now = time.monotonic()
        if now - self._rounds_at >= _ROUNDS_SECONDS:
            self._rounds_at = now
            status = self._dispatcher.status()
            if not status.queued and any(not worker.running for worker in status.workers):
                self._strategy.complete_rounds()

    def done(self) -> bool:
        """Tells whether all scheduled functions have been run.

        Raises the error of a function if there is one, and forgets it. When it returns True or
        raises, nothing is running.
        """
        return self._queue.done()

    def fetch(self, val: Nest) -> Nest:
        """Waits for the `RemoteValue`s in a nest and returns it with their results.

        Raises the error of a function that has failed, or `ClosureCancelledError`.
        """
        return jax.tree.map(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val
        )

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Lets each worker make a data set of its own, when it first needs it.

        `iter` of the result is an argument for scheduled functions, which call `next` on it. A
        worker that was restarted makes its data set again, and begins at its start.

        Args:
            dataset_fn: A function without arguments that returns a data set (it is called on the
                worker, in the strategy's scope), or a data set, of which each worker gets a copy
                and, if it is shuffled without a seed, an order of its own.
        """
        with named_objects.shipping(self._strategy):
            return PerWorkerDataset(dataset_fn, self._element_spec)

    def _element_spec(self, dataset: PerWorkerDataset) -> Any:
        return self.schedule(_element_spec_of, args=(dataset,)).fetch()

    def status(self) -> CoordinatorStatus:
        """Returns what was scheduled and finished, and how the workers and servers are."""
        return self._dispatcher.status()

    def close(self) -> None:
        """Ends the workers; what is scheduled is cancelled. The second time it does nothing."""
        self._dispatcher.close("it was closed")
        self._view.stop()
        if self._strategy.cluster_coordinator is self:
            self._strategy.cluster_coordinator = None

    def __reduce__(self) -> Any:
        # An object whose method is scheduled may hold its coordinator.
        return AbsentCoordinator, ()


class AbsentCoordinator:
    """Stands for the coordinator on a worker, where nothing can be scheduled."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"coordinator.{name}: the coordinator is not on this worker. Functions are scheduled "
            "and fetched by the program that made the ClusterCoordinator."
        )


def _element_spec_of(dataset: Any) -> Any:
    return dataset.element_spec
