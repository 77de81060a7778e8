"""`ClusterCoordinator`: schedules functions on the workers of a cluster."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
from typing_extensions import override

from distribax.coordinator.closure_queue import Closure
from distribax.coordinator.dispatcher import Dispatcher
from distribax.coordinator.failure_policy import FailurePolicy
from distribax.coordinator.per_worker import PerWorkerDataset, PerWorkerValues
from distribax.coordinator.pickling import FunctionCatalogue, dump_arguments, dump_code
from distribax.coordinator.printing import show_printed
from distribax.coordinator.progress import ViewChoice, make_view
from distribax.coordinator.references import Reference
from distribax.coordinator.remote_value import RemoteValue
from distribax.coordinator.round_watch import RoundWatch
from distribax.coordinator.status import CoordinatorStatus
from distribax.coordinator.worker_handle import WorkerHandle
from distribax.execution import named_objects
from distribax.parameter_server.strategy import ParameterServerStrategy


class ClusterCoordinator:
    """Schedules functions on workers, asynchronously; the death of a worker loses nothing.

    A scheduled function is run at least once. If its worker dies (which is noticed within seconds)
    or gives no sign of life for `worker_timeout` seconds, another worker runs it, and the worker is
    restarted. A strategy has one coordinator: making another one returns the first, with its
    settings.

    Workers compute with the JAX settings (`jax_enable_x64`, ...) that this process has when the
    coordinator is made.

    Args:
        strategy: A `dx.ParameterServerStrategy`.
        queue_size: How many functions may wait for a worker; `schedule` waits when it is exceeded.
        worker_timeout: How many seconds a worker may give no sign of life. A function that holds
            the interpreter lock for longer is taken for dead.
        all_workers_timeout: How many seconds work may wait while there is no worker, before
            `WorkersLostError` is raised.
        view: How long work is shown: "live" (a progress bar), "lines" (a line every ten seconds),
            "none", or "auto", which is "live" in a terminal and "lines" elsewhere.
        show_prints: Whether what functions print on workers is printed here, too, with the worker's
            name before each line ("worker 1: ...").

    Raises:
        ValueError: If the strategy has no workers, or an argument is out of range.

    Example:
        ```python
        strategy = dx.ParameterServerStrategy(num_workers=2, num_ps=1)
        coordinator = dx.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            v = dx.Variable(0.0)
        result = coordinator.schedule(lambda x: v.assign_add(x), args=(1.0,))
        coordinator.join()
        ```
    """

    def __new__(cls, strategy: ParameterServerStrategy, **settings: object) -> ClusterCoordinator:
        if not isinstance(strategy, ParameterServerStrategy):
            raise ValueError(
                f"ClusterCoordinator: strategy={strategy!r} has no workers to schedule functions "
                "on. Expected a dx.ParameterServerStrategy."
            )
        existing = strategy.cluster_coordinator
        return existing if isinstance(existing, ClusterCoordinator) else super().__new__(cls)

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        *,
        queue_size: int = 65536,
        worker_timeout: float = 20.0,
        all_workers_timeout: float = 60.0,
        view: ViewChoice = "auto",
        show_prints: bool = True,
    ) -> None:
        if strategy.cluster_coordinator is self:
            return  # `__new__` has returned the strategy's coordinator: it stays as it is.
        if isinstance(queue_size, bool) or not isinstance(queue_size, int) or queue_size < 1:
            raise ValueError(
                f"ClusterCoordinator: queue_size={queue_size!r} is not a whole number of at least "
                "1."
            )
        policy = FailurePolicy(worker_timeout, all_workers_timeout)
        view_of_work = make_view(view)
        setup, _ = dump_code(strategy.worker_setup())
        engine = strategy.engine
        workers = [
            WorkerHandle(index, engine.make_worker_options(index), setup)
            for index in range(engine.num_workers)
        ]
        # The thread must not keep the strategy, and so this coordinator, alive.
        find_strategy = weakref.ref(strategy)

        def read_servers() -> Sequence[Mapping[str, Any]]:
            alive = find_strategy()
            return alive.server_status() if alive is not None else ()

        def watch_rounds(idle: Sequence[int]) -> Sequence[Mapping[str, Any]]:
            alive = find_strategy()
            return alive.watch_rounds(idle) if alive is not None else ()

        rounds = RoundWatch(watch_rounds)

        def while_waiting() -> None:
            rounds.look(dispatcher.status(), dispatcher.queue.num_ready)

        dispatcher = Dispatcher(
            queue_size,
            workers,
            policy,
            read_servers,
            view_of_work.update,
            while_waiting,
            show_printed if show_prints else lambda worker_index, text: None,
        )
        self._strategy = strategy
        self._num_workers = len(workers)
        self._view = view_of_work
        self._dispatcher = dispatcher
        self._queue = dispatcher.queue
        self._functions = FunctionCatalogue()
        strategy.cluster_coordinator = self
        # A coordinator that is no longer used ends its workers.
        finalizer = weakref.finalize(self, dispatcher.ask_to_end, "nobody uses it any more")
        finalizer.atexit = False
        dispatcher.open()

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy whose workers run the functions."""
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., object],
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> RemoteValue:
        """Schedules a function on some worker, and returns its future result at once.

        The function is sent to a worker once, with the variables that it uses from outside as they
        are when it is first scheduled. Arguments are pickled now. Per-worker values and iterators
        among them become the worker's own; a function with a `RemoteValue` among them waits until
        the value is ready.

        Args:
            fn: The function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            The result, to be fetched later.

        Raises:
            TypeError: If an argument has the wrong type, or cannot be sent to a worker.
            ValueError: If a per-worker value does not have a value for each worker, or a remote
                value comes from another coordinator.
            Exception: The exception of a function that was scheduled before, if one has failed;
                all that had not ended then is cancelled, and nothing is running any more.
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
        with named_objects.ship_to(self._strategy):
            function = self._functions.define(fn)
            arguments, needs = dump_arguments(fn, args or (), kwargs or {})
        if needs or function.needs:
            self._check_references((*needs, *function.needs))
        queue = self._queue
        value = RemoteValue(queue)
        queue.put(Closure(function, arguments, needs, value))
        return value

    def _check_references(self, needs: Sequence[Reference]) -> None:
        for reference in needs:
            if isinstance(reference, PerWorkerValues):
                if len(reference.values) != self._num_workers:
                    raise ValueError(
                        f"schedule: {reference!r} has {len(reference.values)} values for "
                        f"{self._num_workers} workers. Expected one for each."
                    )
                self._check_references(reference.definition.needs)
            elif isinstance(reference, RemoteValue) and not reference.belongs_to(self._queue):
                raise ValueError(
                    f"schedule: {reference!r} comes from another coordinator. Fetch it and pass "
                    "the result: args=(value.fetch(),)."
                )

    def join(self) -> None:
        """Waits until all scheduled functions have been run.

        When it returns or raises, nothing is running.

        Raises:
            WorkersLostError: If all workers are lost, or a function ends all that run it.
            Exception: The exception of a function, if one has failed; what had not ended by then is
                cancelled. It is raised once.
        """
        try:
            self._queue.join()
            self._strategy.finish_rounds()
        finally:
            self._view.stop()

    def done(self) -> bool:
        """Tells whether all scheduled functions have been run.

        Returns:
            Whether nothing waits and nothing is running.

        Raises:
            WorkersLostError: As `join`.
            Exception: The exception of a function, if one has failed, as `join`.
        """
        return self._queue.done()

    def fetch(self, val: object) -> Any:
        """Waits for the `RemoteValue`s in a nest and returns it with their results.

        Args:
            val: A `RemoteValue`, or a nest of tuples, lists and dicts with some in it.

        Returns:
            The nest with the results, arrays as NumPy arrays.

        Raises:
            ClosureCancelledError: If a function was cancelled because another one had failed.
            Exception: The exception of a function that has failed.
        """
        return jax.tree.map(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val
        )

    def create_per_worker_dataset(self, dataset_fn: object) -> PerWorkerDataset:
        """Lets each worker make a data set of its own when it first needs it.

        `iter` of the result is an argument for scheduled functions, which call `next` on it. A
        restarted worker makes its data set again, and begins at the start.

        Args:
            dataset_fn: A function without arguments that returns a data set (it is called on the
                worker, in the strategy's scope), or a data set. Each worker gets a copy of it, in
                an order of its own if it is shuffled without a seed.

        Returns:
            The data set, as an argument for scheduled functions.

        Raises:
            TypeError: If `dataset_fn` is neither, or cannot be sent to a worker.
        """
        with named_objects.ship_to(self._strategy):
            return PerWorkerDataset(dataset_fn, self._find_element_spec)

    def _find_element_spec(self, dataset: PerWorkerDataset) -> Any:
        return self.schedule(_get_element_spec, args=(dataset,)).fetch()

    def status(self) -> CoordinatorStatus:
        """Returns what was scheduled and finished, and how the workers and servers are.

        Returns:
            A snapshot of the numbers.
        """
        return self._dispatcher.status()

    def close(self) -> None:
        """Ends the workers; what is scheduled is cancelled. Further calls do nothing."""
        self._dispatcher.close("it was closed")
        self._view.stop()
        if self._strategy.cluster_coordinator is self:
            self._strategy.cluster_coordinator = None

    @override
    def __reduce__(self) -> tuple[type[AbsentCoordinator], tuple[ParameterServerStrategy]]:
        # An object whose method is scheduled may hold its coordinator.
        return AbsentCoordinator, (self._strategy,)


class AbsentCoordinator:
    """Takes the coordinator's place on a worker, where nothing can be scheduled.

    Args:
        strategy: The strategy, as the worker sees it.
    """

    def __init__(self, strategy: object) -> None:
        self.strategy = strategy

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"coordinator.{name}: the coordinator is not on this worker. Functions are scheduled "
            "and fetched by the program that made the ClusterCoordinator."
        )


def _get_element_spec(dataset: PerWorkerDataset) -> object:
    """Runs on a worker, where the argument is the worker's own data set."""
    return dataset.element_spec
