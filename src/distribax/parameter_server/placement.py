"""Variables that live on parameter servers: where each is, how it is read and written."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.typing import ArrayLike
from typing_extensions import override

from distribax import contracts, jax_private
from distribax.errors import ParametersLostError
from distribax.execution import named_objects
from distribax.execution.state.remote_writes import Write, WriteRows
from distribax.parameter_server import (
    Assign,
    AssignAdd,
    Op,
    ParameterClient,
    ParameterSpec,
    Scatter,
)
from distribax.topology.host_memory import make_aligned
from distribax.types import WriteKind
from distribax.variables import ShardedVariable, Variable
from distribax.variables.placement import Placement
from distribax.variables.sharded.division import check_ids, check_places

ServerOp: TypeAlias = tuple[int, Op]
"""An operation, and the server that it is for."""


class PushedUpdate(abc.ABC):
    """Something that a compiled step has servers do beside writes, noted while it is traced."""

    @abc.abstractmethod
    def make_operations(self, arrays: Any) -> Iterable[ServerOp]:
        """Returns what each server is to do with the arrays that were noted, now on the host."""


class _CachedValue(NamedTuple):
    """The version of a value that was read last, and its array if it was read again since."""

    version: int
    array: jax.Array | None = None


class ParameterSource:
    """A process's access to the servers: it fetches values and sends writes, many at once.

    Args:
        client: The connections to the servers.
        num_servers: How many servers there are.
        is_coordinator: Whether variables may be created here; the coordinator also waits until a
            write has arrived, so that functions which it schedules afterwards see it.
    """

    def __init__(self, client: ParameterClient, num_servers: int, is_coordinator: bool) -> None:
        self.client = client
        self.num_servers = num_servers
        self.is_coordinator = is_coordinator
        self._bytes = [0] * num_servers
        # The servers that shards of the variable being created are on already.
        self._is_apart = False
        self._taken: list[int] = []
        self._cached: dict[str, _CachedValue] = {}
        # Registers optimizers again, on a server that has lost them.
        self.registrations: list[Callable[[], None]] = []

    def choose_server(self) -> int:
        """Returns the server that has the fewest bytes so far."""
        chosen = min(
            range(self.num_servers),
            key=lambda index: (self._taken.count(index), self._bytes[index], index),
        )
        if self._is_apart:
            self._taken.append(chosen)
        return chosen

    @contextlib.contextmanager
    def spread(self) -> Iterator[None]:
        """Puts what is created inside on different servers, as long as there are enough."""
        self._is_apart, self._taken = True, []
        try:
            yield
        finally:
            self._is_apart, self._taken = False, []

    def create(self, spec: ParameterSpec, value: np.ndarray) -> None:
        """Makes a parameter on its server."""
        self.client.create(spec, value)
        self._bytes[spec.server] += value.nbytes

    def pull(self, variables: Sequence[contracts.State]) -> list[Any]:
        """Returns the variables' values as a compiled program takes them.

        What has not changed is not sent again. A new value is returned as the NumPy array that was
        received: the CPU backend uses a large one without a copy (the memory is aligned and never
        changes), which costs less than making a JAX array. A value that is read again unchanged is
        returned as a JAX array.
        """
        known = self._cached
        values: list[Any] = []
        specs = [get_spec(variable) for variable in variables]
        for spec, (version, array) in zip(specs, self.client.pull_versions(specs), strict=True):
            cached = known.get(spec.uid)
            if cached is None or cached.version != version:
                known[spec.uid] = _CachedValue(version)
                values.append(array)
            else:
                values.append(self._get_cached_array(spec, version, array))
        return values

    def pull_specs(self, specs: Sequence[ParameterSpec]) -> list[jax.Array]:
        """Returns the parameters' values as arrays, on the default device."""
        found = self.client.pull_versions(specs)
        return [
            self._get_cached_array(spec, version, array)
            for spec, (version, array) in zip(specs, found, strict=True)
        ]

    def _get_cached_array(self, spec: ParameterSpec, version: int, array: np.ndarray) -> jax.Array:
        cached = self._cached.get(spec.uid)
        if cached is not None and cached.version == version and cached.array is not None:
            return cached.array
        placed = _place_on_device(array)
        self._cached[spec.uid] = _CachedValue(version, placed)
        return placed

    def pull_rows(self, requests: Sequence[tuple[contracts.Table, np.ndarray]]) -> list[jax.Array]:
        """Returns some rows of some tables; only these rows are sent."""
        asked: list[tuple[ParameterSpec, np.ndarray]] = []
        plans = []
        for table, ids in requests:
            check_ids("embedding_lookup", table.shape, table.described, ids)
            plan = []
            for variable, places, own in _split_ids(table, ids.reshape(-1)):
                asked.append((get_spec(variable), own))
                plan.append(places)
            plans.append(plan)
        found = iter(self.client.pull_rows(asked))
        return [
            _place_on_device(_join_rows(table, ids, [(places, next(found)) for places in plan]))
            for (table, ids), plan in zip(requests, plans, strict=True)
        ]

    def write_rows(
        self, table: contracts.Table, kind: WriteKind, indices: np.ndarray, rows: np.ndarray
    ) -> None:
        """Sends a write to some rows of a table; only these rows are sent."""
        self.push(make_row_operations(table, kind, indices, rows))

    def push(self, operations: Iterable[ServerOp]) -> None:
        """Sends operations; those of one server are applied together."""
        by_server: dict[int, list[Op]] = {}
        for server, operation in operations:
            by_server.setdefault(server, []).append(operation)
        self.client.push(by_server)
        if self.is_coordinator:
            self.client.flush()

    def commit(self, kinds: Sequence[object], arrays: Sequence[Any]) -> None:
        """Sends what a compiled step has computed for the servers."""
        given = _move_to_host(arrays)
        self.push(
            operation
            for what, own in zip(kinds, given, strict=True)
            for operation in _make_operations(what, own)
        )

    def write(self, variable: contracts.Variable, kind: WriteKind, value: ArrayLike) -> None:
        """Sends a write to a variable now."""
        if kind is WriteKind.ASSIGN:
            self.assign(_get_specs(variable), np.asarray(value))
        else:
            self.push(make_operations(variable, kind, np.asarray(value)))

    def assign(self, specs: Sequence[ParameterSpec], value: np.ndarray) -> None:
        """Sets parameters to a value; the coordinator recreates those that a server has lost."""
        try:
            self.push((spec.server, Assign(spec.uid, value)) for spec in specs)
        except ParametersLostError:
            if not self.is_coordinator:
                raise
            for spec in specs:
                self.client.create(spec, value)
            for register in self.registrations:
                # It fails until the last of its variables has been recreated.
                with contextlib.suppress(ParametersLostError):
                    register()


def _get_specs(variable: contracts.State) -> tuple[ParameterSpec, ...]:
    """Returns what a variable's copies are on their servers."""
    assert isinstance(variable, Variable) and isinstance(variable.placement, Served)
    return variable.placement.specs


def get_spec(variable: contracts.State) -> ParameterSpec:
    """Returns what a variable is on its server: the copy that is read."""
    return _get_specs(variable)[0]


def _split_ids(
    table: contracts.Table, ids: np.ndarray
) -> Iterator[tuple[contracts.Variable, slice | np.ndarray, np.ndarray]]:
    """Yields each shard that has some of the rows, their places among `ids`, and its own ids."""
    assert isinstance(table, (Variable, ShardedVariable))
    for shard, places, own in table.division.split(ids):
        yield table.row_shards[shard][1], places, own


def _make_operations(what: object, given: Any) -> Iterable[ServerOp]:
    if isinstance(what, Write):
        return make_operations(what.variable, what.kind, given)
    if isinstance(what, WriteRows):
        return make_row_operations(what.table, what.kind, *given)
    assert isinstance(what, PushedUpdate)
    return what.make_operations(given)


def make_operations(
    variable: contracts.Variable, kind: WriteKind, value: np.ndarray
) -> list[ServerOp]:
    """Returns the operations of a write, one for each copy."""
    operation = Assign if kind is WriteKind.ASSIGN else AssignAdd
    if kind is WriteKind.ASSIGN_SUB:
        value = -value
    value = np.asarray(value)
    if value.shape != variable.shape:
        value = np.broadcast_to(value, variable.shape)
    return [(spec.server, operation(spec.uid, value)) for spec in _get_specs(variable)]


def make_row_operations(
    table: contracts.Table, kind: WriteKind, indices: np.ndarray, rows: np.ndarray
) -> list[ServerOp]:
    """Returns the operations of a write to some rows, one for each shard that has some of them."""
    check_places("scatter", table.shape, table.described, indices)
    ids = indices if indices.ndim == 1 else indices[:, 0]
    operations: list[ServerOp] = []
    for variable, places, own in _split_ids(table, ids):
        inside = own if indices.ndim == 1 else np.column_stack([own, indices[places, 1:]])
        operations += [
            (spec.server, Scatter(spec.uid, kind, inside, rows[places]))
            for spec in _get_specs(variable)
        ]
    return operations


def _join_rows(
    table: contracts.Table, ids: np.ndarray, parts: list[tuple[slice | np.ndarray, np.ndarray]]
) -> np.ndarray:
    """Puts rows that came from several shards into the order in which they were asked for."""
    shape = (*ids.shape, *table.shape[1:])
    if len(parts) == 1 and parts[0][1].shape[0] == ids.size:
        return parts[0][1].reshape(shape)
    rows = make_aligned((ids.size, *table.shape[1:]), table.dtype)
    for places, part in parts:
        rows[places] = part
    return rows.reshape(shape)


class Served(Placement):
    """One value on a parameter server.

    A step count that every server of an optimizer keeps has a copy on each; they are always the
    same, and the first one is read.

    Args:
        source: This process's access to the servers.
        server: The server's index; None chooses the one with the fewest bytes at creation.
        specs: What the copies are on their servers, if they exist already.
        name: The variable's name.
    """

    label = "ServedVariable"
    source: ParameterSource
    specs: tuple[ParameterSpec, ...]

    def __init__(
        self,
        source: ParameterSource,
        server: int | None = None,
        specs: tuple[ParameterSpec, ...] = (),
        name: str = "Variable",
    ) -> None:
        self.source = source
        self.specs = specs
        self._server = server
        self._name = name

    @property
    @override
    def devices(self) -> tuple[jax.Device, ...]:
        return (jax.local_devices()[0],)

    @property
    @override
    def device_names(self) -> tuple[str, ...]:
        return tuple(f"/job:ps/replica:0/task:{spec.server}/device:CPU:0" for spec in self.specs)

    @override
    def place_beside(self) -> Placement:
        return Served(self.source, self.specs[0].server, name=self._name)

    @override
    def store_initial(self, value: ArrayLike) -> jax.Array:
        if not self.source.is_coordinator:
            raise RuntimeError(
                f"dx.Variable: {self._name!r} is created in a function that runs on a worker. "
                "Functions may run several times and on any worker, so variables are created by "
                "the coordinator: make it before coordinator.schedule(), inside "
                "`with strategy.scope():`, and refer to it in the function."
            )
        array = np.asarray(value, order="C")
        server = self.source.choose_server() if self._server is None else self._server
        uid = named_objects.make_uid()
        spec = ParameterSpec(uid, self._name, array.shape, array.dtype.name, server)
        self.source.create(spec, array)
        self.specs = (spec,)
        # The value is elsewhere; no program reads this.
        return jax_private.run_outside_trace(lambda: jax.numpy.zeros(()))

    @override
    def store(self, value: ArrayLike) -> jax.Array:
        raise NotImplementedError(
            "ParameterServerStrategy: the state of a flax.nnx module cannot live on parameter "
            "servers. Make a dx.Variable of each parameter inside `with strategy.scope():`, and "
            "in the function put their values into the module: nnx.merge(graphdef, state)."
        )

    @override
    def refresh(self, buffer: jax.Array) -> jax.Array:
        return self.source.pull_specs([self.specs[0]])[0]

    @override
    def split(self, buffer: jax.Array) -> list[jax.Array]:
        return [jax_private.uncommit(self.refresh(buffer))]

    @override
    def to_program(self, buffer: jax.Array) -> jax.Array:
        return self.refresh(buffer)


def _place_on_device(array: np.ndarray) -> jax.Array:
    return jax_private.run_outside_trace(lambda: jax.device_put(array))


@functools.cache
def _is_on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _move_to_host(nest: Any) -> Any:
    if not _is_on_cpu():
        return jax.device_get(nest)
    # Much cheaper here than device_get, which starts a copy of every array before it waits.
    return jax.tree.map(np.asarray, nest)
