"""What the parts of the library expect of each other: protocols that every layer is typed against.

A lower layer that works with a variable, a strategy or a source never imports the class of a higher
layer. It names the protocol here, which says what it needs. Use it qualified:
`def read(variable: contracts.Variable) -> jax.Array`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
from typing_extensions import override

from distribax.types import (
    CommunicationOptions,
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
    WriteKind,
)

if TYPE_CHECKING:
    from jax.sharding import Mesh, Sharding
    from jax.typing import ArrayLike

_T = TypeVar("_T")


class State(Hashable, Protocol):
    """What a compiled step needs of the state that it reads or writes.

    A `dx.Variable` is one, and so is the handle of another library's variable.
    """

    @property
    def per_replica(self) -> bool:
        """Whether each replica has a value of its own."""

    @property
    def program_sharding(self) -> Sharding | None:
        """Where the value lives inside a compiled program, or None if that does not matter."""

    @property
    def source(self) -> Source | None:
        """Where the value is fetched from if it lives in another process, or None."""

    @property
    def described(self) -> str:
        """The state as error messages name it."""

    def program_type(self) -> Any:
        """Returns the type of `program_value()`, in the same nest."""

    def program_value(self) -> Any:
        """Returns the array (or the nest of arrays) that a compiled program reads."""

    def take_program_value(self) -> Any:
        """Returns arrays that a compiled program may overwrite."""

    def store_program_value(self, value: Any) -> None:
        """Keeps what a compiled program has returned."""


@runtime_checkable
class OnDevices(Protocol):
    """Something that is on some devices: a variable, for example."""

    @property
    def devices(self) -> Sequence[str | jax.Device]:
        """The devices of this process that have it."""


class Table(Hashable, Protocol):
    """Something with rows that can be looked up: a variable, or a sharded one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole value."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The data type of the value."""

    @property
    def source(self) -> Source | None:
        """Where the rows are fetched from if they live in another process, or None."""

    @property
    def described(self) -> str:
        """The table as error messages name it."""

    @property
    def row_shards(self) -> Sequence[tuple[int, Variable]]:
        """The variables that have the rows, each with the index of its first row."""

    def read_value(self) -> jax.Array:
        """Returns the value as an array, by the rules of the current context."""


class Variable(State, Table, Protocol):
    """What the rules of reading and writing need of a `dx.Variable`."""

    @property
    def name(self) -> str:
        """The variable's name."""

    @property
    def aggregation(self) -> VariableAggregation:
        """How the replicas' values are combined."""

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies are brought together."""

    @property
    def distribute_strategy(self) -> Strategy:
        """The strategy that the variable was created under."""

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices of this process that have a copy."""

    def share(self) -> jax.Array:
        """Returns the buffer itself, and remembers that somebody may hold it."""

    def store(self, buffer: jax.Array) -> None:
        """Replaces the buffer by one that somebody else may hold too."""


class StoredSpec(Hashable, Protocol):
    """What a variable's copy is called where it lives in another process."""

    @property
    def uid(self) -> str:
        """The name that nothing else has."""

    @property
    def server(self) -> int:
        """The index of the parameter server that has it."""


class Placement(Protocol):
    """Where a variable's values are kept.

    A buffer is what the placement stores: one `jax.Array`, maybe over several devices.
    """

    per_replica: bool
    """Whether each replica has a value of its own, which need not be the same."""
    has_copies: bool
    """Whether every replica has a copy on its device."""
    is_program_form: bool
    """Whether programs take and return buffers as they are, without `to_program`."""
    label: str
    """How `repr` calls a variable with this placement."""
    source: Source | None
    """Where the value is fetched from, and writes are sent to, if it lives in another process."""
    specs: tuple[StoredSpec, ...]
    """What it is called there: one description for each copy, the first of which is read."""
    mesh: Mesh | None
    """The mesh that the copies are spread over, if there is one."""
    sharding: Sharding | None
    """The sharding of the buffer inside a compiled program, if that matters."""

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices of this process that have a copy."""

    @property
    def device_names(self) -> tuple[str, ...]:
        """The names of the devices that have a copy."""

    def place_beside(self) -> Placement:
        """Returns the placement of another variable that is to live beside this one."""

    def refresh(self, buffer: jax.Array) -> jax.Array:
        """Returns the buffer with the value of now."""

    def store(self, value: ArrayLike) -> jax.Array:
        """Returns a buffer that holds `value` in every copy."""

    def store_initial(self, value: ArrayLike) -> jax.Array:
        """Returns the first buffer; all processes start with the value of the first one."""

    def split(self, buffer: jax.Array) -> list[jax.Array]:
        """Returns the local copies' values."""

    def join(self, pieces: Sequence[jax.Array], like: jax.Array) -> jax.Array:
        """Returns a buffer made of the local copies' values."""

    def to_program(self, buffer: jax.Array) -> jax.Array:
        """Returns the buffer as a compiled program takes it."""

    def from_program(self, value: jax.Array) -> jax.Array:
        """Returns the buffer for a value that a compiled program has returned."""

    @property
    def num_copies(self) -> int:
        """The number of copies over all processes."""

    @property
    def spans_processes(self) -> bool:
        """Whether other processes have copies too."""


class Sink(Hashable, Protocol):
    """Another process that compiled steps send something to after they have run."""

    def commit(self, kinds: Sequence[object], arrays: Sequence[Any]) -> None:
        """Does some things in order, given what each is and its arrays (a nest)."""


class Source(Sink, Protocol):
    """Another process that holds variables: where they are read from and written to."""

    def pull(self, variables: Sequence[State]) -> list[Any]:
        """Returns the values of some variables, fetched together."""

    def pull_rows(self, requests: Sequence[tuple[Table, np.ndarray]]) -> list[jax.Array]:
        """Returns some rows of some tables, fetched together."""

    def write(self, variable: Variable, kind: WriteKind, value: jax.Array) -> None:
        """Writes a variable now."""

    def write_rows(
        self, table: Table, kind: WriteKind, indices: np.ndarray, rows: np.ndarray
    ) -> None:
        """Writes some rows of a table now."""


class Runner(Protocol):
    """The way the replicas are run: inline, in threads, or as one SPMD program."""

    compiles: bool
    """Whether a `dx.function` that is called in the replica compiles by itself."""

    @property
    def replica_id(self) -> int | jax.Array:
        """The replica's index: an int, or a traced scalar in an SPMD program."""

    @property
    def copy_id(self) -> int:
        """Which of this process's copies of a variable is the replica's."""

    @property
    def is_idle(self) -> bool:
        """Whether the replica's piece of the batch is empty, and those of others are not."""

    def create_variable(self, create: Callable[[], _T], place: str) -> _T:
        """Returns the variable of a line of code, which one replica creates for all of them."""
        return create()

    def merge(
        self, fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Any:
        """Runs `fn(strategy, *args)` once for all replicas; each gets its part of the result."""

    def call_together(
        self,
        fn: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        alone: Callable[..., object],
    ) -> Any:
        """Like `merge` if all replicas call it; `alone(*args)` in those that call it otherwise.

        By default each is alone: there is one replica, or all are one program already.
        """
        return alone(*args, **kwargs)

    def all_reduce(
        self, op: ReduceOp, leaves: list[jax.Array], options: CommunicationOptions | None
    ) -> list[jax.Array]:
        """Combines arrays over all replicas."""

    def all_gather(
        self, leaves: list[jax.Array], axis: int, options: CommunicationOptions | None
    ) -> list[jax.Array]:
        """Concatenates arrays over all replicas."""


class InputTarget(Protocol):
    """What an input pipeline must know about its strategy."""

    @property
    def devices(self) -> tuple[jax.Device | None, ...]:
        """The devices of the local replicas; None for a replica without one."""

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of all replicas, if there is one."""

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are on all workers."""

    @property
    def num_workers(self) -> int:
        """How many workers there are."""

    @property
    def worker_id(self) -> int:
        """The number of this worker."""

    @property
    def num_local_replicas(self) -> int:
        """How many replicas this process feeds."""


class Extended(Protocol):
    """What lower layers ask a strategy's extended interface."""

    single: bool
    """Whether there is one replica by construction, so that nothing is ever wrapped."""
    mesh: Mesh | None
    """The mesh that the replicas live on, or None for one replica."""
    source: Source | None
    """Where variables are fetched from if they live in other processes, or None."""

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of the devices that run replicas."""

    @property
    def local_devices(self) -> tuple[jax.Device, ...]:
        """The devices that run this process's replicas."""

    @property
    def first_replica(self) -> int:
        """The index of this process's first replica among all replicas."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose results are combined."""

    def input_target(self) -> InputTarget:
        """Returns whom this process's input pipeline feeds."""

    def variable_placement(self, synchronization: VariableSynchronization, name: str) -> Placement:
        """Returns where a variable that is created now lives."""

    def create_variable(
        self, create: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Any:
        """Creates what `dx.Variable(*args, **kwargs)` becomes under this strategy."""

    def colocate_vars_with(self, colocate_with_variable: object) -> AbstractContextManager[None]:
        """Returns a context manager in which variables are created beside another one."""

    def reduce_to(self, reduce_op: ReduceOp | str, value: object, destinations: object) -> Any:
        """Combines a value over replicas, and copies the result to `destinations`."""

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[object, object]],
    ) -> list[Any]:
        """Combines several values at once."""

    def reduce_all(
        self,
        reduce_op: ReduceOp,
        values: Sequence[object],
        options: CommunicationOptions | None,
    ) -> list[Any]:
        """Combines values over replicas; the results go to all replicas."""

    def gather_to(
        self,
        value: object,
        destinations: object,
        axis: int,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Concatenates a value over replicas along `axis`."""

    def broadcast_to(self, tensor: ArrayLike, destinations: object = None) -> Any:
        """Copies a value to all worker devices, or to `destinations`."""

    def first_value(self, value: Any) -> Any:
        """Returns replica 0's value, copied to all."""

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        group: bool = True,
    ) -> Any:
        """Runs `fn(var, *args)` once for each copy of `var`."""


class ServingExtended(Extended, Protocol):
    """The extended interface of a strategy whose variables live on parameter servers."""

    def served_placement(self, specs: Sequence[StoredSpec], name: str) -> Placement:
        """Returns the placement of a variable that exists already."""


@runtime_checkable
class Strategy(Hashable, Protocol):
    """What lower layers ask a strategy."""

    @property
    def extended(self) -> Extended:
        """The interface for algorithms that know about distribution."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose results are combined."""

    def scope(self) -> AbstractContextManager[object]:
        """Returns a context manager that makes the strategy current."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs `fn` in every replica, and merges what the replicas return."""


class ServingStrategy(Strategy, Protocol):
    """A strategy whose variables live on parameter servers."""

    @property
    @override
    def extended(self) -> ServingExtended:
        """The interface for algorithms that know about distribution."""


class Coordinator(Protocol):
    """What a strategy needs of the coordinator that schedules functions for it."""

    def close(self) -> None:
        """Ends the workers, and cancels what is scheduled."""
